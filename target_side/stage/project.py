"""project: rows x W in float32, with the bits that landing on a compute host's CPU gives.

A product's bits depend on the library and on the shape of its block. So it is torch's, on one
thread, in the form that gpu_side.scan uses (`mm(x, W.t(), out=columns)`), and on the blocks of
`viewspec.landing_rows`: rows that are not wanted are zeros in theirs. A GPU, or a host with another
CPU or BLAS, may round otherwise in the last bit, as two compute hosts may.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.quantize import decode_rows
from hyades.target_side.stage.blocks import Block
from hyades.target_side.stage.meter import Meter, OperatorCounts

Floats = NDArray[np.float32]


@contextmanager
def one_torch_thread() -> Iterator[Any]:
    """Import torch and let it use one thread inside the block."""
    import torch

    before = torch.get_num_threads()
    if before != 1:
        torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield torch
    finally:
        if before != 1:
            torch.set_num_threads(before)


class Project:
    """Multiplies by one weight or several, whose results lie side by side."""

    name = "project"

    def __init__(
        self, weights: Sequence[Floats], rows: int, range_rows: int, block_rows: int, meter: Meter
    ) -> None:
        """Multiply a matrix of *rows* rows in ranges by *weights* [out, in]."""
        widths = {weight.shape[1] for weight in weights if weight.ndim == 2}
        if len(widths) != 1 or any(weight.ndim != 2 for weight in weights):
            raise UsageError("weights are matrices [out, in] of one input width")
        self.weights = tuple(_copy(weight) for weight in weights)
        self.width_in = widths.pop()
        self.width_out = sum(len(weight) for weight in self.weights)
        self._all, self._range, self._rows, self._meter = rows, range_rows, block_rows, meter

    def run(self, index: int, blocks: Iterator[Block]) -> Iterator[Block]:
        """Return one block of float32 for each landing block that has a row."""
        size = min(self._range, self._all - index * self._range)
        values = aligned(min(self._rows, size), self.width_in)
        parts: list[Block] = []
        for block in blocks:
            if block.width != self.width_in:
                raise UsageError(f"weights of {self.width_in} columns for rows of {block.width}")
            if parts and block.start // self._rows != parts[0].start // self._rows:
                yield self._multiply(parts, values, size)
                parts = []
            with self._meter.span("decode"):
                if not parts and block.ids is not None:
                    values.fill(0)
                self._place(block, values)
            parts.append(block)
        if parts:
            yield self._multiply(parts, values, size)

    def _place(self, block: Block, values: Floats) -> None:
        """Put the rows of *block* where they belong in their landing block."""
        at = block.start % self._rows
        into = values[at : at + block.stop - block.start]
        if block.ids is None:
            decode_rows(block.data, block.encoding, block.width, into)
        else:
            into[block.places] = decode_rows(block.data, block.encoding, block.width)

    def _multiply(self, parts: list[Block], values: Floats, size: int) -> Block:
        first = parts[0].start // self._rows * self._rows
        count = min(self._rows, size - first)
        out = aligned(count, self.width_out)
        with self._meter.span(self.name), one_torch_thread() as torch:
            x, product, at = torch.from_numpy(values[:count]), torch.from_numpy(out), 0
            for weight in self.weights:
                columns = product[:, at : at + len(weight)]
                torch.mm(x, torch.from_numpy(weight).t(), out=columns)
                at += len(weight)
        ids = None
        if parts[0].ids is not None:
            ids = np.concatenate([part.ids for part in parts if part.ids is not None])
            out = out[ids.astype(np.int64) - first]
        taken, size_in = sum(len(part.data) for part in parts), sum(p.data.size for p in parts)
        self._meter.add(self.name, OperatorCounts(taken, len(out), size_in, out.nbytes))
        return Block(first, first + count, ids, out.view(np.uint8), "float32", self.width_out)


def aligned(rows: int, columns: int) -> Floats:
    """Return a float32 matrix of any content at a multiple of 64 bytes, as an arena has it."""
    raw = np.empty(rows * columns * 4 + 64, np.uint8)
    at = -raw.ctypes.data % 64
    matrix: Floats = raw[at : at + rows * columns * 4].view(np.float32).reshape(rows, columns)
    return matrix


def _copy(weight: Floats) -> Floats:
    copy = aligned(*weight.shape)
    copy[...] = weight
    return copy
