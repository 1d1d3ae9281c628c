"""Tile pages back to edges, one field at a time as the format's text says: slow and plain.

It reads with struct, not with the dtypes or kernels that wrote the pages, and asserts every promise
the format makes to its readers.
"""

import struct
from typing import NamedTuple

import numpy as np

from hyades.common.volume import Volume


class Edge(NamedTuple):
    """One edge of the volume, in new indices."""

    source: int
    destination: int
    rank: int
    weight: float | None


class Piece(NamedTuple):
    """One entry of a tile page."""

    page: int
    chunk: int
    lane: int
    sequence: int
    segments: int
    edges: int
    self_flag: bool


def decode_tiles(volume: Volume) -> tuple[list[Edge], list[Piece]]:
    """Return all edges in page order and all pieces in page order."""
    graph = volume.catalog.graph
    assert graph is not None
    tiles, ranks = volume.object("tiles"), volume.object("ranks")
    assert (tiles.pages, tiles.page_bytes) == (ranks.pages, ranks.page_bytes)
    edges: list[Edge] = []
    pieces: list[Piece] = []
    for page in range(tiles.pages):
        data = volume.read_page(tiles, page).tobytes()
        rank = volume.read_page(ranks, page).view("<u4")
        weight = None
        if graph.weighted:
            weight = volume.read_page(volume.object("weights"), page).view("<f4")
        _decode_page(data, page, graph.range_rows, rank, weight, edges, pieces)
    _check_pieces(pieces, graph.chunks, volume)
    return edges, pieces


def _decode_page(data, page, rows, rank, weight, edges, pieces):
    magic, version, chunk, number, tiles, segments, count, dst_at, ends_at, src_at = (
        struct.unpack_from("<10I", data)
    )
    assert (magic, version, number) == (0x50595448, 1, page)
    assert count <= len(data) // 4
    assert 64 + 24 * tiles <= dst_at
    assert dst_at + 2 * segments <= ends_at
    assert ends_at + 2 * segments <= src_at
    assert src_at + 2 * count <= len(data)
    assert not any(at % 64 for at in (dst_at, ends_at, src_at))
    destinations = struct.unpack_from(f"<{segments}H", data, dst_at)
    ends = struct.unpack_from(f"<{segments}H", data, ends_at)
    sources = struct.unpack_from(f"<{count}H", data, src_at)
    assert not any(rank[count:])
    next_segment = next_edge = 0
    before = -1
    for index in range(tiles):
        lane, sequence, first_segment, first_edge, n_segments, flags, n_edges = struct.unpack_from(
            "<IIIIHHI", data, 64 + 24 * index
        )
        assert (first_segment, first_edge) == (next_segment, next_edge)
        assert lane >= before, "lanes of a chunk ascend"
        assert n_edges <= 65_535
        assert flags in (0, 1)
        pieces.append(Piece(page, chunk, lane, sequence, n_segments, n_edges, flags == 1))
        before = lane
        start = 0
        for segment in range(first_segment, first_segment + n_segments):
            assert ends[segment] > start, "a segment has an edge"
            assert segment == first_segment or destinations[segment] > destinations[segment - 1]
            own = sources[first_edge + start : first_edge + ends[segment]]
            assert list(own) == sorted(own)
            for at in range(first_edge + start, first_edge + ends[segment]):
                edges.append(
                    Edge(
                        chunk * rows + sources[at],
                        lane * rows + destinations[segment],
                        int(rank[at]),
                        None if weight is None else float(weight[at]),
                    )
                )
            start = ends[segment]
        assert start == n_edges
        next_segment += n_segments
        next_edge += n_edges
    assert (next_segment, next_edge) == (segments, count)


def _check_pieces(pieces: list[Piece], chunks: int, volume: Volume) -> None:
    """Assert what holds across pages: order, sequences, the diagonal, directory, chunk_pages."""
    assert [(p.chunk, p.lane) for p in pieces] == sorted((p.chunk, p.lane) for p in pieces)
    sequences = [0] * chunks
    seen: set[tuple[int, int]] = set()
    for piece in pieces:
        assert piece.sequence == sequences[piece.lane]
        sequences[piece.lane] += 1
        first = (piece.chunk, piece.lane) not in seen
        seen.add((piece.chunk, piece.lane))
        assert piece.self_flag == (first and piece.chunk == piece.lane)
        assert piece.edges > 0 or piece.self_flag
    assert all((chunk, chunk) in seen for chunk in range(chunks))
    directory = volume.read_table("directory")
    assert directory.tolist() == [(p.chunk, p.lane, p.segments, p.edges) for p in pieces]
    first_pages = volume.read_table("chunk_pages")
    assert len(first_pages) == chunks + 1
    for chunk in range(chunks):
        own = {p.page for p in pieces if p.chunk == chunk}
        assert own == set(range(first_pages[chunk], first_pages[chunk + 1]))
    assert first_pages[0] == 0
    assert first_pages[-1] == volume.object("tiles").pages


def expected_edges(
    source: list[int], destination: list[int], weight: list[float] | None = None
) -> list[Edge]:
    """Return what a volume must hold of these edges: ranks by input order, loops left out."""
    degree: dict[int, int] = {}
    edges = []
    for at, (s, d) in enumerate(zip(source, destination, strict=True)):
        if s == d:
            continue
        value = None if weight is None else float(np.float32(weight[at]))
        edges.append(Edge(s, d, degree.get(d, 0), value))
        degree[d] = degree.get(d, 0) + 1
    return edges
