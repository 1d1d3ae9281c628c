"""Row arithmetic of the tile kernels: float32 vectors on a CPU, one column a lane on CUDA.

Written as intrinsics because numba cannot keep a row in registers across a loop over edges: the
destination's sum lives in up to eight 16-float registers, and its state is touched once a segment.
Widths are multiples of 16 floats; nothing is reassociated, so the bits depend only on edge order.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hyades.common.atomics import is_cuda

WIDTH = 16  # floats in a vector
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
    """Generates the loop over a segment's edges for one kind of aggregation."""

    def __init__(self, builder: Any, vectors: int, kind: str, cuda: bool) -> None:
        self.builder = builder
        self.kind = kind
        self.element = _F32 if cuda else _VECTOR
        self.count = 1 if cuda else vectors

    def load(self, data: Any, index: Any) -> Any:
        return self.builder.load(_address(self.builder, data, index, _F32, self.element), align=4)

    def store(self, value: Any, data: Any, index: Any) -> None:
        target = _address(self.builder, data, index, _F32, self.element)
        self.builder.store(value, target, align=4)

    def spread(self, scalar: Any) -> Any:
        return scalar if self.element is _F32 else _splat(self.builder, scalar)

    def start(self) -> list[Any]:
        neutral = float("-inf") if self.kind == "max" else 0.0
        value = ir.Constant(_F32, neutral)
        slots = []
        for _ in range(self.count):
            slot = cgutils.alloca_once(self.builder, self.element)
            self.builder.store(self.spread(value), slot)
            slots.append(slot)
        return slots

    def add_edge(self, slots: list[Any], data: Any, row: Any, weight: Any) -> None:
        builder = self.builder
        spread = None if weight is None else self.spread(weight)
        for index, slot in enumerate(slots):
            value = self.load(data, builder.add(row, _const(index * WIDTH)))
            if spread is not None:
                value = builder.fmul(value, spread)
            held = builder.load(slot)
            joined = (
                _maximum(builder, held, value) if self.kind == "max" else builder.fadd(held, value)
            )
            builder.store(joined, slot)

    def finish(self, slots: list[Any], data: Any, out: Any, factor: Any) -> None:
        builder = self.builder
        spread = self.spread(factor)
        for index, slot in enumerate(slots):
            at = builder.add(out, _const(index * WIDTH))
            state, value = self.load(data, at), builder.load(slot)
            if self.kind == "max":
                joined = _maximum(builder, state, value)
            else:
                joined = builder.fadd(state, builder.fmul(value, spread))
            self.store(joined, data, at)


def _segment(vectors: int, kind: str, weighted: bool) -> Callable[..., Any]:
    """Make ``f(floats, shorts, first, last, base, stride, out, factor, weights)``.

    state[out:out+16*vectors] joins factor * sum (or max) over e in [first, last) of
    floats[base + shorts[e] * stride ...] (times floats[weights + e - first]).
    All positions are element indices into the arena's float32 and uint16 views.
    """

    def typing(
        _context: Any, floats: Any, shorts: Any, first: Any, last: Any, base: Any,
        stride: Any, out: Any, factor: Any, weights: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            ids = context.make_array(signature.args[1])(context, builder, args[1]).data
            first_, last_, base_, stride_, out_, factor_, weights_ = args[2:]
            cuda = is_cuda(context)
            body = _Body(builder, vectors, kind, cuda)

            def edges(column: Any) -> None:
                slots = body.start()
                with cgutils.for_range(builder, builder.sub(last_, first_)) as loop:
                    edge = builder.add(first_, loop.index)
                    source = builder.load(builder.gep(ids, [edge], source_etype=ir.IntType(16)))
                    row = builder.add(base_, builder.mul(builder.zext(source, _I64), stride_))
                    weight = None
                    if weighted:
                        at = builder.add(weights_, loop.index)
                        weight = builder.load(builder.gep(data, [at], source_etype=_F32))
                    body.add_edge(slots, data, builder.add(row, column), weight)
                body.finish(slots, data, builder.add(out_, column), factor_)

            if cuda:
                asm = ir.InlineAsm(
                    ir.FunctionType(ir.IntType(32), []),
                    "mov.u32 $0, %laneid;",
                    "=r",
                    side_effect=True,
                )
                me = builder.zext(builder.call(asm, []), _I64)
                width = _const(vectors * WIDTH)
                with cgutils.for_range_slice(builder, me, width, _const(32)) as (column, _):
                    edges(column)
            else:
                edges(_const(0))
            return context.get_dummy_value()

        index = types.int64
        return (
            types.void(floats, shorts, index, index, index, index, index, types.float32, index),
            generate,
        )

    typing.__name__ = f"segment_{kind}{'_weighted' if weighted else ''}_{vectors}"
    return intrinsic(typing)  # type: ignore[no-any-return]


sum_8, sum_4, sum_2, sum_1 = (_segment(n, "sum", False) for n in (8, 4, 2, 1))
weighted_8, weighted_4, weighted_2, weighted_1 = (_segment(n, "sum", True) for n in (8, 4, 2, 1))
max_8, max_4, max_2, max_1 = (_segment(n, "max", False) for n in (8, 4, 2, 1))


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
