"""Views asked for by a host: two vendor-specific admin commands.

Both sides must agree on this.  Rules:
1. CREATE_VIEW (0xC1, data from the host) names the namespace of a volume and carries a request:
   VIEW_REQUEST, JSON (ViewRequest), zeros to a multiple of 4 bytes, then the weights that the JSON
   gives shapes of: float32, row by row, one matrix after the other.
2. A request that exceeds MDTS goes in parts, each one command, sent when the one before has been
   answered: CDW10 has the dwords of the part, CDW11 its offset in dwords, CDW12 the dwords in all.
   A part at offset 0 begins anew.  The answer to the last part comes when the view can be read,
   which may take as long as reading all tiles; its result is the namespace id.
3. The view is seen by the controller that was asked, and by no other.  DELETE_VIEW (0xC0, no data)
   names it and ends it; so does the end of the controller, and its reset.
4. Status: INVALID_OPCODE (no views here), OPERATION_DENIED (not for this host), INVALID_FIELD (a
   request that cannot be met; the target's log says why), NAMESPACE_NO_IDENTIFIER (too many views),
   NAMESPACE_NO_CAPACITY (memory), READ_ERROR (the volume is damaged, or none).
Parsing raises DataError for whatever is wrong, and nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hyades.common.checksum import crc32c
from hyades.common.encodings import Encoding
from hyades.common.errors import DataError, PeerError, UsageError
from hyades.common.layout import FORMAT_VERSION
from hyades.common.nvme.commands import Command, build
from hyades.common.nvme.layout import ALL_NAMESPACES, VIEW_REQUEST, Vendor
from hyades.common.pages import DEFAULT_PAGE, MAX_PAGE, MIN_PAGE
from hyades.common.units import round_up
from hyades.common.viewspec import SampleSpec, Small, ViewSpec

Floats = NDArray[np.float32]
MAX_WEIGHTS = 64
_MAGIC = b"HYVIEWRQ"
_HEAD = VIEW_REQUEST.size


class ViewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a view shall be of: a `rows` object of a volume.

    weights: [out, in] of each projection, in the order in which their results lie.
    """

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    encoding: Encoding = "float32"
    page_size: Annotated[int, msgspec.Meta(ge=MIN_PAGE, le=MAX_PAGE)] = DEFAULT_PAGE
    sample: SampleSpec | None = None
    weights: Annotated[
        tuple[tuple[Small, Small], ...], msgspec.Meta(max_length=MAX_WEIGHTS)
    ] = ()  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a request that come with one command."""

    offset: int
    nbytes: int
    total: int


def build_request(what: ViewRequest, weights: Sequence[Floats] = ()) -> bytes:
    """Return *what* with these *weights* [out, in], whose shapes go into it; UsageError."""
    if any(weight.ndim != 2 for weight in weights):
        raise UsageError("weights are matrices [out, in]")
    shapes = tuple((int(w.shape[0]), int(w.shape[1])) for w in weights)
    text = msgspec.json.encode(msgspec.structs.replace(what, weights=shapes))
    body = text.ljust(round_up(len(text), 4), b"\0")
    body += b"".join(np.ascontiguousarray(weight, "<f4").tobytes() for weight in weights)
    sizes = len(text), sum(4 * rows * columns for rows, columns in shapes)
    crc = crc32c(body, crc32c(VIEW_REQUEST.pack(_MAGIC, FORMAT_VERSION, *sizes, 0)))
    data = VIEW_REQUEST.pack(_MAGIC, FORMAT_VERSION, *sizes, crc) + body
    try:
        parse_request(data)
    except DataError as error:
        raise UsageError(str(error)) from error
    return data


def parse_request(data: Any) -> tuple[ViewRequest, list[Floats]]:
    """Return what is asked for and the weights [out, in], not copied; DataError."""
    data = memoryview(data).cast("B")
    if len(data) < _HEAD:
        raise DataError(f"view request: {len(data)} bytes, at least {_HEAD}")
    magic, version, text_bytes, weight_bytes, crc = VIEW_REQUEST.unpack_from(data)
    if magic != _MAGIC or version != FORMAT_VERSION:
        raise DataError(f"view request: magic {magic!r}, version {version}")
    at = _HEAD + round_up(text_bytes, 4)
    if len(data) != at + weight_bytes:
        raise DataError(f"view request: {len(data)} bytes, it says {at + weight_bytes}")
    head = VIEW_REQUEST.pack(magic, version, text_bytes, weight_bytes, 0)
    found = crc32c(data[_HEAD:], crc32c(head))
    if found != crc:
        raise DataError(f"view request: CRC32C is {found:#010x}, it says {crc:#010x}")
    try:
        what = msgspec.json.decode(data[_HEAD : _HEAD + text_bytes], type=ViewRequest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DataError(f"view request: {error}") from error
    expected = sum(4 * rows * columns for rows, columns in what.weights)
    if expected != weight_bytes:
        raise DataError(f"view request: {weight_bytes} bytes of weights, {what.weights} need more")
    weights: list[Floats] = []
    for rows, columns in what.weights:
        flat = np.frombuffer(data, "<f4", rows * columns, at)
        weights.append(flat.reshape(rows, columns))
        at += flat.nbytes
    return what, weights


def create_view(nsid: int, data: bytes, most: int) -> Iterator[tuple[bytearray, memoryview]]:
    """Give the commands for a request *data* on namespace *nsid*, and the data of each.

    *most*: bytes of one command (MDTS), a multiple of 4.
    """
    if len(data) % 4 or most % 4 or most < 4:
        raise UsageError(f"a request of {len(data)} bytes in parts of {most}: multiples of 4")
    view = memoryview(data)
    for offset in range(0, len(data), most):
        part = view[offset : offset + most]
        sizes = (len(part) // 4, offset // 4, len(data) // 4)
        yield build(Vendor.CREATE_VIEW, nsid, *sizes), part


def delete_view(nsid: int) -> bytearray:
    """Return the command that ends view *nsid*."""
    return build(Vendor.DELETE_VIEW, nsid)


def parse_part(command: Command) -> Part:
    """Return what part of a request *command* brings; DataError where it cannot be one."""
    dwords, offset, total = command.dwords[:3]
    if not dwords or offset + dwords > total:
        raise DataError(f"view request: {dwords} dwords at {offset} of {total}")
    if 4 * dwords != command.sgl_bytes:
        raise DataError(f"view request: {4 * dwords} bytes with an SGL of {command.sgl_bytes}")
    return Part(4 * offset, 4 * dwords, 4 * total)


def parse_answer(result: int) -> int:
    """Return the namespace id of a view from the result of the last part; PeerError."""
    if not 0 < result < ALL_NAMESPACES - 1:
        raise PeerError(f"a view with namespace id {result:#x}")
    return result


def check_answered(spec: ViewSpec, request: bytes) -> None:
    """Raise PeerError where a view of *spec* is not the one that *request* asks for."""
    what, weights = parse_request(request)
    crcs = tuple((len(w), crc32c(np.ascontiguousarray(w, "<f4"))) for w in weights)
    asked = (what.source, what.encoding, what.page_size, what.sample, crcs)
    got = (spec.source, spec.encoding, spec.page_size, spec.sample, spec.projections)
    if asked != got:
        raise PeerError(f"a view was asked for with {asked}, the target made one with {got}")
