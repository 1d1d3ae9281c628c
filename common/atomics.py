"""All acquire and release code, and what else differs between a CPU thread and a CUDA warp.

Every name is a core numba intrinsic that branches inside code generation, so one source compiles
for both.  Rules:
1. Words are int64 (or int32 where a kernel ABI says so) and naturally aligned.
2. Across PCIe there are no atomics: only single-writer words, `st_release_sys`, `ld_acquire_sys`.
   `atomic_*` and plain acquire and release are for words that one device's workers share.
3. On CUDA a worker is one warp whose lanes run the same path.  Every word operation here happens
   once a worker: lane 0 acts, after the other lanes' accesses (bar.warp.sync), and all lanes get
   its result.  Rows are shared out by `for j in range(lane(), n, lanes())`; on a CPU a worker is a
   thread, `lane()` folds to 0 and `lanes()` to 1, and that loop vectorises.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from hyades.common.jit import intrinsic

_I64, _I32, _VOID = ir.IntType(64), ir.IntType(32), ir.VoidType()


def is_cuda(context: Any) -> bool:
    """Say whether code is being generated for a GPU."""
    return type(context).__name__ == "CUDATargetContext"


def element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the address of ``array[index]`` without wraparound of negative indices."""
    view = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, view, [index], wraparound=False)


def _asm(builder: Any, result: Any, text: str, constraints: str, args: list[Any]) -> Any:
    signature = ir.FunctionType(result, [a.type for a in args])
    asm = ir.InlineAsm(signature, text, constraints, side_effect=True)
    return builder.call(asm, args, attrs=("convergent",))  # no path of its own for some lanes


_ELECT = (
    "{{ .reg .pred p; .reg .u32 l; .reg .b32 lo, hi; .reg .b64 v; mov.u32 l, %laneid; "
    "setp.eq.u32 p, l, 0; mov.b64 v, 0; bar.warp.sync 0xffffffff; @p {0} "
)
_SHARE = (
    "mov.b64 {lo,hi}, v; shfl.sync.idx.b32 lo, lo, 0, 31, 0xffffffff; "
    "shfl.sync.idx.b32 hi, hi, 0, 31, 0xffffffff; mov.b64 $0, {lo,hi}; "
    "bar.warp.sync 0xffffffff; }"  # shfl orders no memory: what lane 0 acquired is for all lanes
)


def _by_lane_0(builder: Any, instruction: str, pointer: Any, values: list[Any]) -> Any:
    """Emit *instruction* (result in v, address $1, values $2...) for lane 0; share the result."""
    text = _ELECT.format(instruction) + _SHARE
    constraints = "=l,l" + ",l" * len(values) + ",~{memory}"
    return _asm(builder, _I64, text, constraints, [builder.ptrtoint(pointer, _I64), *values])


def _require_int64(word: Any) -> None:
    if word.bitwidth != 64:
        raise TypeError(f"words that a GPU shares are int64, not {word}")


def _load(order: str, ptx: str) -> Callable[..., Any]:
    def typing(_context: Any, array: Any, index: Any) -> Any:
        word = array.dtype

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
            if is_cuda(context):
                _require_int64(word)
                return _by_lane_0(builder, f"ld.{ptx}.b64 v, [$1];", pointer, [])
            return builder.load_atomic(pointer, order, word.bitwidth // 8)

        return word(array, types.intp), generate

    typing.__name__ = f"load_{order}_{ptx.replace('.', '_')}"
    return intrinsic(typing)  # type: ignore[no-any-return]


def _store(order: str, ptx: str) -> Callable[..., Any]:
    def typing(_context: Any, array: Any, index: Any, value: Any) -> Any:
        word = array.dtype

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
            if is_cuda(context):
                _require_int64(word)
                _by_lane_0(builder, f"st.{ptx}.b64 [$1], $2;", pointer, [args[2]])
            else:
                builder.store_atomic(args[2], pointer, order, word.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(array, types.intp, word), generate

    typing.__name__ = f"store_{order}_{ptx.replace('.', '_')}"
    return intrinsic(typing)  # type: ignore[no-any-return]


ld_relaxed = _load("monotonic", "relaxed.gpu")
ld_acquire = _load("acquire", "acquire.gpu")
ld_acquire_sys = _load("acquire", "acquire.sys")
st_relaxed = _store("monotonic", "relaxed.gpu")
st_release = _store("release", "release.gpu")
st_release_sys = _store("release", "release.sys")


@intrinsic
def fence_sys(_context: Any) -> Any:
    """Order every earlier store before every later load: what two sides that watch each other need.

    Without it "I sleep; is there work?" and "there is work; does it sleep?" may both say no.
    """

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if is_cuda(context):
            _asm(builder, _VOID, "fence.sc.sys;", "~{memory}", [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def atomic_add(_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Add *value* to ``array[index]`` and return what was there (acquire and release)."""
    word = array.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
        if is_cuda(context):
            _require_int64(word)
            return _by_lane_0(builder, "atom.acq_rel.gpu.add.u64 v, [$1], $2;", pointer, [args[2]])
        return builder.atomic_rmw("add", pointer, args[2], "acq_rel")

    return word(array, types.intp, word), generate


@intrinsic
def atomic_cas(_context: Any, array: Any, index: Any, expected: Any, desired: Any) -> Any:
    """Store *desired* where *expected* stands; return what was there (acquire and release)."""
    word = array.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
        if is_cuda(context):
            _require_int64(word)
            cas = "atom.acq_rel.gpu.cas.b64 v, [$1], $2, $3;"
            return _by_lane_0(builder, cas, pointer, [args[2], args[3]])
        pair = builder.cmpxchg(pointer, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 0)

    return word(array, types.intp, word, word), generate


def _special(name: str, cpu_value: int, register: str) -> Callable[[], int]:
    def typing(_context: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            if is_cuda(context):
                value = _asm(builder, _I32, f"mov.u32 $0, %{register};", "=r", [])
                return builder.zext(value, _I64)
            return ir.Constant(_I64, cpu_value)

        return types.int64(), generate

    typing.__name__ = name
    return intrinsic(typing)  # type: ignore[no-any-return]


lane = _special("lane", 0, "laneid")
lanes = _special("lanes", 1, "ntid.x")  # a CUDA block is one warp
block = _special("block", 0, "ctaid.x")


@intrinsic
def sync_lanes(_context: Any) -> Any:
    """Order the memory accesses of a warp's lanes; nothing on a CPU."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if is_cuda(context):
            _asm(builder, _VOID, "bar.warp.sync 0xffffffff;", "~{memory}", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def broadcast(_context: Any, value: Any) -> Any:
    """Return lane 0's int64 *value* in every lane."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if not is_cuda(context):
            return args[0]
        text = (
            "{ .reg .b32 lo, hi; mov.b64 {lo,hi}, $1; "
            "shfl.sync.idx.b32 lo, lo, 0, 31, 0xffffffff; "
            "shfl.sync.idx.b32 hi, hi, 0, 31, 0xffffffff; "
            "mov.b64 $0, {lo,hi}; bar.warp.sync 0xffffffff; }"
        )
        return _asm(builder, _I64, text, "=l,l,~{memory}", [args[0]])

    return types.int64(types.int64), generate


def _wait(name: str, symbol: str, on_cpu_is_llvm: bool) -> Callable[[int], None]:
    def typing(_context: Any, nanoseconds: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            if is_cuda(context):
                short = builder.trunc(args[0], _I32)
                _asm(builder, _VOID, "nanosleep.u32 $0;", "r,~{memory}", [short])
            elif on_cpu_is_llvm:
                kind = ir.FunctionType(_VOID, [])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), [])
            elif symbol == "sched_yield":
                kind = ir.FunctionType(_I32, [])
                builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), [])
            else:  # usleep takes microseconds
                kind = ir.FunctionType(_I32, [_I32])
                call = cgutils.get_or_insert_function(builder.module, kind, symbol)
                micros = builder.udiv(args[0], ir.Constant(_I64, 1000))
                builder.call(call, [builder.trunc(micros, _I32)])
            return context.get_dummy_value()

        return types.void(types.int64), generate

    typing.__name__ = name
    return intrinsic(typing)  # type: ignore[no-any-return]


def _pause_symbol() -> str:
    import platform

    arm = platform.machine() in ("aarch64", "arm64")
    # AArch64 has no argument-free LLVM pause; sched_yield is the portable equivalent there.
    return "sched_yield" if arm else "llvm.x86.sse2.pause"


pause = _wait("pause", _pause_symbol(), _pause_symbol().startswith("llvm."))
give_way = _wait("give_way", "sched_yield", False)
doze = _wait("doze", "usleep", False)


@intrinsic
def ticks(_context: Any) -> Any:
    """Return a monotonic counter: the time stamp counter, or CUDA's global timer."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if is_cuda(context):
            return _asm(builder, _I64, "mov.u64 $0, %globaltimer;", "=l", [])
        kind = ir.FunctionType(_I64, [])
        symbol = "llvm.readcyclecounter"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), [])

    return types.int64(), generate
