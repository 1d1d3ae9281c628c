"""Row arithmetic of the tile kernels: float32 vectors on a CPU, columns shared by lanes on CUDA.

Written as intrinsics because numba cannot keep a row in registers across a loop over edges: the
destination's sum lives in up to eight 16-float registers (four floats of a lane), and its state is
touched once a segment.  Widths are multiples of 16 floats; nothing is reassociated, so the bits
depend only on edge order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from hyades.common.atomics import is_cuda
from hyades.common.jit import intrinsic

WIDTH = 16  # floats in a vector
_LANES = 32  # of a warp
_F32, _I64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, WIDTH)
_SPLAT = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)


def _address(builder: Any, data: Any, index: Any, element: Any, target: Any) -> Any:
    pointer = builder.gep(data, [index], source_etype=element)
    return builder.bitcast(pointer, target.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(
        ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(first, ir.Constant(_VECTOR, ir.Undefined), _SPLAT)


def _maximum(builder: Any, left: Any, right: Any) -> Any:
    # Keeps a NaN that is already there and lets one in, as torch.amax does.
    greater = builder.fcmp_unordered("ugt", right, left)
    keep_nan = builder.fcmp_unordered("uno", left, left)
    return builder.select(keep_nan, left, builder.select(greater, right, left))


def _const(value: int) -> Any:
    return ir.Constant(_I64, value)


class _Body:
    """Generates the loop over a segment's edges for *count* accumulators, *apart* floats apart."""

    def __init__(
        self, builder: Any, kind: str, element: Any, count: int, apart: int, data: Any
    ) -> None:
        self.builder = builder
        self.kind = kind
        self.element = element
        self.offsets = [_const(index * apart) for index in range(count)]
        self.data = data

    def load(self, index: Any) -> Any:
        at = _address(self.builder, self.data, index, _F32, self.element)
        return self.builder.load(at, align=4)

    def store(self, value: Any, index: Any) -> None:
        at = _address(self.builder, self.data, index, _F32, self.element)
        self.builder.store(value, at, align=4)

    def spread(self, scalar: Any) -> Any:
        return scalar if self.element is _F32 else _splat(self.builder, scalar)

    def start(self) -> list[Any]:
        neutral = float("-inf") if self.kind == "max" else 0.0
        slots = []
        for _ in self.offsets:
            slot = cgutils.alloca_once(self.builder, self.element)
            self.builder.store(self.spread(ir.Constant(_F32, neutral)), slot)
            slots.append(slot)
        return slots

    def add_edge(self, slots: list[Any], places: list[Any], weight: Any) -> None:
        builder = self.builder
        spread = None if weight is None else self.spread(weight)
        for slot, place in zip(slots, places, strict=True):
            value = self.load(place)
            if spread is not None:
                value = builder.fmul(value, spread)
            held = builder.load(slot)
            joined = (
                _maximum(builder, held, value) if self.kind == "max" else builder.fadd(held, value)
            )
            builder.store(joined, slot)

    def finish(self, slot: Any, at: Any, factor: Any) -> None:
        builder = self.builder
        state, value = self.load(at), builder.load(slot)
        if self.kind == "max":
            joined = _maximum(builder, state, value)
        else:
            joined = builder.fadd(state, builder.fmul(value, self.spread(factor)))
        self.store(joined, at)


@dataclass(slots=True)
class _Segment:
    """The arguments of a row function, as values of the code being generated."""

    builder: Any
    kind: str
    weighted: bool
    data: Any
    ids: Any
    first: Any
    last: Any
    base: Any
    stride: Any
    out: Any
    width: Any
    factor: Any
    weights: Any

    def _each_edge(self, visit: Callable[[Any, Any], None]) -> None:
        builder = self.builder
        with cgutils.for_range(builder, builder.sub(self.last, self.first)) as loop:
            edge = builder.add(self.first, loop.index)
            source = builder.load(builder.gep(self.ids, [edge], source_etype=ir.IntType(16)))
            row = builder.add(self.base, builder.mul(builder.zext(source, _I64), self.stride))
            weight = None
            if self.weighted:
                at = builder.add(self.weights, loop.index)
                weight = builder.load(builder.gep(self.data, [at], source_etype=_F32))
            visit(row, weight)

    def on_cpu(self) -> None:
        """128 columns at a time, then what is left in at most three steps."""
        builder = self.builder
        whole = builder.and_(self.width, _const(-8 * WIDTH))
        with cgutils.for_range_slice(builder, _const(0), whole, _const(8 * WIDTH)) as (at, _):
            self._vectors(8, at)
        for vectors in (4, 2, 1):
            part = builder.and_(self.width, _const(vectors * WIDTH))
            with builder.if_then(builder.icmp_signed("!=", part, _const(0))):
                self._vectors(vectors, whole)
            whole = builder.add(whole, part)

    def _vectors(self, vectors: int, column: Any) -> None:
        builder = self.builder
        body = _Body(builder, self.kind, _VECTOR, vectors, WIDTH, self.data)
        slots = body.start()

        def visit(row: Any, weight: Any) -> None:
            row = builder.add(row, column)
            body.add_edge(slots, [builder.add(row, offset) for offset in body.offsets], weight)

        self._each_edge(visit)
        out = builder.add(self.out, column)
        for slot, offset in zip(slots, body.offsets, strict=True):
            body.finish(slot, builder.add(out, offset), self.factor)

    def on_cuda(self, lane: Any) -> None:
        """Four columns a lane and 128 a warp at a time; a lane without a column reads the first."""
        builder = self.builder
        body = _Body(builder, self.kind, _F32, 4, _LANES, self.data)
        step = _const(4 * _LANES)
        with cgutils.for_range_slice(builder, _const(0), self.width, step) as (at, _):
            own = [builder.add(builder.add(at, lane), offset) for offset in body.offsets]
            live = [builder.icmp_signed("<", column, self.width) for column in own]
            columns = [
                builder.select(is_live, column, at)
                for is_live, column in zip(live, own, strict=True)
            ]
            slots = body.start()

            def visit(row: Any, weight: Any) -> None:
                body.add_edge(slots, [builder.add(row, column) for column in columns], weight)

            self._each_edge(visit)
            for slot, column, is_live in zip(slots, columns, live, strict=True):
                with builder.if_then(is_live):
                    body.finish(slot, builder.add(self.out, column), self.factor)


def _cuda_lane(builder: Any) -> Any:
    kind = ir.FunctionType(ir.IntType(32), [])
    asm = ir.InlineAsm(kind, "mov.u32 $0, %laneid;", "=r", side_effect=True)
    return builder.zext(builder.call(asm, []), _I64)


def _row_function(kind: str, weighted: bool) -> Callable[..., Any]:
    """Make ``f(floats, shorts, first, last, base, stride, out, width, factor, weights)``.

    state[out:out+width] joins factor * sum (or max) over e in [first, last) of
    floats[base + shorts[e] * stride ...] (times floats[weights + e - first]).
    All positions are element indices into the arena's float32 and uint16 views.
    """

    def typing(
        _context: Any, floats: Any, shorts: Any, first: Any, last: Any, base: Any,
        stride: Any, out: Any, width: Any, factor: Any, weights: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            ids = context.make_array(signature.args[1])(context, builder, args[1]).data
            segment = _Segment(builder, kind, weighted, data, ids, *args[2:])
            if is_cuda(context):
                segment.on_cuda(_cuda_lane(builder))
            else:
                segment.on_cpu()
            return context.get_dummy_value()

        index = types.int64
        return (
            types.void(
                floats, shorts, index, index, index, index, index, index, types.float32, index
            ),
            generate,
        )

    typing.__name__ = f"{kind}_row{'_weighted' if weighted else ''}"
    return intrinsic(typing)  # type: ignore[no-any-return]


sum_row = _row_function("sum", False)
weighted_row = _row_function("sum", True)
max_row = _row_function("max", False)


@intrinsic
def prefetch_row(_context: Any, floats: Any, at: Any, width: Any) -> Any:
    """Ask for the cache lines of floats[at:at+width] for writing; nothing on CUDA."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if is_cuda(context):
            return context.get_dummy_value()
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        i32 = ir.IntType(32)
        pointer = ir.PointerType(ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range_slice(builder, _const(0), args[2], _const(WIDTH)) as (column, _):
            line = _address(builder, data, builder.add(args[1], column), _F32, ir.IntType(8))
            builder.call(call, [line, i32(1), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(floats, types.int64, types.int64), generate
