"""The host's part of a conv stage: land chunks, finalise lanes, for one pass over the input.

Landing turns the pages of a chunk into message rows (float32): decode, the operations left over
from the stage before, the source's operations and factor, the projection; and the vertices' own
rows where their lane is in this pass. Finalising turns a lane's state into output pages. Both run
on the worker that was handed the action, with one torch thread, on blocks whose shape does not
depend on the plan's worker count: the same bits for any number of workers.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyades.common.port import Port
from hyades.gpu_side import outputs, scheduler
from hyades.gpu_side import words as W
from hyades.gpu_side.decode import decode_range, landing_blocks
from hyades.gpu_side.issue import issue
from hyades.gpu_side.models.ir import Conv, MeanHeads
from hyades.gpu_side.program import Stage
from hyades.gpu_side.rowops import Moments, apply_row_op, apply_row_ops
from hyades.gpu_side.scratch import scratch
from hyades.gpu_side.stores import PageStoreInfo
from hyades.gpu_side.tables import PassInputs, PassTables, build_pass

_EXACT_ROWS = 64  # rows that are float64 at once


@dataclass(slots=True)
class MomentSums:
    """Per lane: sum, sum of squares and count of what was stored (float64), combined in order."""

    sums: NDArray[np.float64]  # [lanes, 3]

    @classmethod
    def empty(cls, lanes: int) -> "MomentSums":
        """Return zeroed sums."""
        return cls(np.zeros((lanes, 3)))

    def add(self, lane: int, rows: Tensor) -> None:
        """Set the sums of *lane* from its stored rows."""
        total = squares = 0.0
        for first in range(0, len(rows), _EXACT_ROWS):
            exact = rows[first : first + _EXACT_ROWS].double()
            total += float(exact.sum())
            squares += float(exact.square_().sum())
        self.sums[lane] = (total, squares, rows.numel())

    def moments(self) -> Moments:
        """Return mean and biased standard deviation over everything."""
        total, squares, count = self.sums.sum(axis=0)
        mean = total / max(count, 1)
        return Moments(mean, max(squares / max(count, 1) - mean * mean, 0.0) ** 0.5)


def torch_dtype_view(raw: NDArray[np.uint8], dtype: np.dtype[np.generic], width: int) -> Tensor:
    """Return the rows in *raw* as a tensor [n, width] of float32, or of raw bytes (uint8).

    Float32 and bytes are not copied.
    """
    rows = torch.from_numpy(raw.view(dtype).reshape(-1, width))
    return rows if dtype in (np.uint8, np.float32) else scratch().take(*rows.shape).copy_(rows)


def fill_pages(target: PageStoreInfo, rows: Tensor, out: NDArray[np.uint8]) -> None:
    """Lay float32 *rows* of a lane out as its pages in *out*, converted and padded with zeros."""
    shape = target.shape
    pages = out.reshape(-1, shape.page_bytes)
    values = rows.numpy()
    for index, page in enumerate(pages):
        part = values[index * shape.rows_per_page : (index + 1) * shape.rows_per_page]
        used = len(part) * shape.row_bytes
        with np.errstate(over="ignore"):  # float16 overflows to infinity, as torch's half() does
            page[:used].view(target.dtype).reshape(part.shape)[...] = part
        page[used:] = 0


class PassScan:
    """One pass of a conv stage over its input."""

    def __init__(
        self, stage: Stage, inputs: PassInputs, port: Port, source_moments: Moments | None,
        sums: MomentSums | None,
    ) -> None:  # fmt: skip
        assert stage.conv is not None
        assert inputs.candidate.sizes is not None
        self.stage = stage
        self.conv: Conv = stage.conv
        self.inputs = inputs
        self.port = port
        self.tables: PassTables = build_pass(inputs, port)
        self.shape = inputs.candidate.sizes.shape
        self.range_rows = inputs.candidate.sizes.range_rows
        self.input_chunk = inputs.candidate.sizes.input_chunk
        self.output_lane = inputs.candidate.sizes.output_lane
        self.source_moments = source_moments
        self.sums = sums
        arena = port.arena
        self.floats: NDArray[np.float32] = arena.view(np.float32)
        slope = self.conv.attention.negative_slope if self.conv.attention else 0.0
        self.arguments = (
            self.tables.g, self.tables.w, self.tables.s, self.floats, arena.view(np.uint16),
            arena.view(np.int32), self.tables.factors, port.ready, port.crcs,
            port.ring.words.reshape(-1), port.ring.control, np.float32(slope),
        )  # fmt: skip
        self._slots = self.tables.s[int(self.tables.g[W.G_S_LANE_SLOT]) :]

    def advance(self, worker: int) -> int:
        """Run the scheduler until it hands out an action."""
        return int(scheduler.advance(worker, *self.arguments))

    def stopped(self) -> int:
        """Return the status word of the first failed request, 0 where none failed."""
        return int(self.tables.w[W.C_ERROR])

    # --- landing

    def land(self, position: int) -> None:
        """Make a position's rows and let its tiles run."""
        self.land_rows(position)
        scheduler.landed(self.tables.g, self.tables.w, self.tables.s, position)

    def land_rows(self, position: int) -> None:
        """Make the message rows of a position, and its own rows where they are wanted."""
        scratch().clear()
        tables, shape = self.tables, self.shape
        g = tables.g
        chunk = int(tables.chunks[position])
        first = chunk * self.range_rows
        rows = min(self.range_rows, self.inputs.vertices - first)
        slot = position % int(g[W.G_MESSAGE_SLOTS])
        base = int(g[W.G_MESSAGE_AT]) + slot * int(g[W.G_MESSAGE_FLOATS])
        message = self._matrix(base, rows, shape.message_stride)
        wants_own = shape.own_stride > 0 and self._slots[chunk] >= 0
        own = self._matrix(base + int(g[W.G_SELF_AT]), rows, max(shape.own_stride, 1))
        at = 0
        for block in self._input_blocks(position, chunk, rows):
            count = len(block)
            x = apply_row_ops(self.stage.inputs[0].before, block, self.source_moments)
            self._land_messages(x, message[at : at + count], first + at)
            if wants_own:
                self._land_own(x, own[at : at + count])
            at += count

    def _matrix(self, at: int, rows: int, stride: int) -> Tensor:
        return torch.from_numpy(self.floats[at : at + rows * stride].reshape(rows, stride))

    def _input_blocks(self, position: int, chunk: int, rows: int) -> list[Tensor]:
        """Return the chunk's rows in blocks: one where pages are contiguous, else one a page."""
        inputs, tables = self.inputs, self.tables
        slot = position % int(tables.g[W.G_CHUNK_SLOTS])
        at = tables.input_at + slot * self.input_chunk
        kept_here = inputs.source.kept
        if chunk < kept_here:
            at = inputs.source.arena_at + chunk * self.input_chunk
        elif chunk < kept_here + inputs.candidate.pinned:
            kept = tables.pinned_at + (chunk - kept_here) * self.input_chunk
            if not inputs.held[chunk]:
                self.port.arena[kept : kept + self.input_chunk] = self.port.arena[
                    at : at + self.input_chunk
                ]
            at = kept
        source = inputs.source
        if source.view is not None:
            raw = self.port.arena[at : at + self.input_chunk]
            return landing_blocks(source, decode_range(source, chunk, raw))
        row_bytes, per_page = source.shape.row_bytes, source.shape.rows_per_page
        whole = per_page * row_bytes == source.page_bytes
        blocks = []
        step = rows if whole else per_page
        for start in range(0, rows, step):
            count = min(step, rows - start)
            place = at + (start // per_page) * source.page_bytes
            raw = self.port.arena[place : place + count * row_bytes]
            blocks.append(torch_dtype_view(raw, source.dtype, source.width))
        return blocks

    def _land_messages(self, x: Tensor, out: Tensor, first: int) -> None:
        shape, conv = self.shape, self.conv
        message = apply_row_ops(conv.source, x)
        target = out[:, : shape.row_width]
        if self.inputs.columns is not None:  # it was multiplied where it came from
            target.copy_(message[:, : shape.row_width])
        elif shape.project_first and conv.neighbour is not None:
            torch.mm(message, conv.neighbour.weight.t(), out=target)
        else:
            target.copy_(message)
        factors = self.inputs.vertex_floats.source
        if factors is not None:
            factor = factors[first : first + len(x)]
            target.mul_(torch.from_numpy(factor)[:, None])
        if shape.message_stride > shape.row_width:
            out[:, shape.row_width :] = 0
        attention = conv.attention
        if attention is not None:
            heads = target.view(len(x), attention.heads, -1)
            parts = scratch().take(len(x), shape.row_width).view(heads.shape)
            scores = torch.mul(heads, attention.att_src, out=parts).sum(-1)
            out[:, shape.aggregate : shape.aggregate + attention.heads] = scores

    def _land_own(self, x: Tensor, out: Tensor) -> None:
        conv, width = self.conv, self.shape.own_width
        target = out[:, :width]
        if (columns := self.inputs.columns) is not None:
            target.copy_(x[:, columns.message : columns.message + columns.own])
        elif conv.root is not None:
            torch.mm(x, conv.root.weight.t(), out=target)
        if conv.aggregate == "max" and conv.self_scale != 0:
            own = x if conv.neighbour is None else apply_row_op(conv.neighbour, x)
            if conv.root is None:
                torch.mul(own, conv.self_scale, out=target)
            else:
                target.add_(own, alpha=conv.self_scale)
        if self.shape.own_stride > width:
            out[:, width:] = 0

    # --- finalising

    def finalise(self, lane: int, home: int | None = None) -> None:
        """Turn a complete lane's state into rows of the output and post its pages.

        *home* is the state slot of a lane that was merged; else the lane's own is used and freed.
        """
        tables = self.tables
        slot = int(outputs.hold_output(tables.g, tables.w))
        self.finalise_rows(lane, slot, home)
        publish = outputs.finalised if home is None else outputs.post_output
        publish(
            tables.g, tables.w, tables.s, self.port.ready, self.arguments[9],
            self.port.ring.control, slot, lane,
        )  # fmt: skip

    def finalise_rows(self, lane: int, slot: int, home: int | None = None) -> None:
        """Turn a complete lane's state into the pages of output slot *slot*."""
        scratch().clear()
        tables = self.tables
        rows = min(self.range_rows, self.inputs.vertices - lane * self.range_rows)
        stride = self.shape.state_stride
        place = int(self._slots[lane]) if home is None else home
        at = tables.state_at // 4 + place * self.range_rows * stride
        y = self._combine(self._matrix(at, rows, stride))
        y = apply_row_ops(self.stage.after, y, owned=True)
        if self.sums is not None:
            self.sums.add(lane, y)
        self._fill_lane(lane, slot, y)

    def _combine(self, state: Tensor) -> Tensor:
        """Return y of the model's IR from state rows, which nobody reads again: they are reused."""
        shape, conv = self.shape, self.conv
        y = state[:, : shape.row_width]
        if shape.kind == W.KIND_ATTENTION:
            y = self._weigh_heads(state, y)
        elif shape.kind == W.KIND_MAX:
            torch.nan_to_num(y, math.nan, math.inf, 0.0, out=y)  # -inf: no in-edge
        if conv.neighbour is not None and not shape.project_first:
            y = apply_row_op(conv.neighbour, y)
        if shape.own_width and shape.own_column:
            y.add_(state[:, shape.own_column : shape.own_column + shape.own_width])
        return y

    def _weigh_heads(self, state: Tensor, y: Tensor) -> Tensor:
        attention = self.conv.attention
        assert attention is not None
        heads, at = attention.heads, self.shape.aggregate + attention.heads
        total = state[:, at : at + heads, None] + 1e-16
        y.view(len(y), heads, -1).div_(total)
        return apply_row_op(MeanHeads(heads), y) if self.conv.mean_heads else y

    def _fill_lane(self, lane: int, slot: int, y: Tensor) -> None:
        tables, target = self.tables, self.inputs.target
        shape = target.shape
        first, last = shape.first_page(lane), shape.first_page(lane + 1)
        at = tables.out_at + slot * self.output_lane
        if lane < target.kept:
            at = target.arena_at + first * shape.page_bytes
        fill_pages(target, y, self.port.arena[at : at + (last - first) * shape.page_bytes])

    # --- what the coordinator asks

    def durable(self) -> NDArray[np.bool_]:
        """Return which lanes are written, bool [lanes]."""
        at = int(self.tables.g[W.G_W_DURABLE])
        durable: NDArray[np.bool_] = self.tables.w[at : at + self.inputs.topology.chunks] == 1
        return durable

    def page_crcs(self) -> NDArray[np.int64]:
        """Return the CRC32C of output pages of durable lanes, int64 [lanes, pages a lane]."""
        g = self.tables.g
        at, pages = int(g[W.G_W_OUT_CRC]), int(g[W.G_OUT_PAGES])
        lanes = self.inputs.topology.chunks
        return self.tables.w[at : at + lanes * pages].reshape(lanes, pages)

    def pages_left(self) -> int:
        """Return how many tile pages are not done."""
        return int(self.tables.w[W.C_PAGES_LEFT])

    def drained(self) -> bool:
        """Reap finished writes; say whether every posted lane is durable."""
        tables = self.tables
        issue(
            tables.g, tables.w, tables.s, self.port.ready, self.port.crcs, self.arguments[9],
            self.port.ring.control,
        )  # fmt: skip
        at = int(tables.g[W.G_W_OUT_STATE])
        slots = int(tables.g[W.G_OUT_SLOTS])
        return bool(np.all(tables.w[at : at + slots] == W.OUT_FREE))

    def stats(self) -> NDArray[np.int64]:
        """Return the workers' counters, int64 [workers, STATS_WORDS]."""
        at, workers = int(self.tables.g[W.G_W_STATS]), self.inputs.workers
        return self.tables.w[at : at + workers * W.STATS_WORDS].reshape(workers, -1)
