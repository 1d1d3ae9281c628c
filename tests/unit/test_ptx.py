"""The resident kernel compiles for a GPU: no spill, nothing that one warp a block cannot run."""

import math

import numpy as np
import pytest
from tests.reference.ptx import Instruction, findings, instructions

from hyades.common.atomics import lane, sync_lanes
from hyades.common.errors import BackendMissing
from hyades.gpu_side.devices import compile as gpu

HOPPER, BLACKWELL = (9, 0), (10, 0)
# 65,536 registers a multiprocessor leave room for ten workers, enough to hide memory's latency.
MOST_REGISTERS = 200

pytestmark = pytest.mark.skipif(gpu.why_not() is not None, reason=str(gpu.why_not()))


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=gpu.name_of)
def test_resident_kernel(target, record_property):
    ptx = gpu.resident_ptx(target)
    assert f".target {gpu.name_of(target)}" in ptx
    assert findings(ptx) == []
    kernel = gpu.resident_cubin(target)
    record_property("registers", kernel.registers)
    assert (kernel.spill_stores, kernel.spill_loads, kernel.stack) == (0, 0, 0)
    assert kernel.registers <= MOST_REGISTERS
    assert kernel.code.startswith(b"\x7fELF")


def test_resident_kernel_holds_the_protocol():
    """The check above would pass on an empty kernel: every kind of access must be there."""
    opcodes = {entry.opcode for entry in instructions(gpu.resident_ptx(HOPPER))}
    assert {
        "ld.acquire.sys.b64", "st.release.sys.b64", "ld.acquire.gpu.b64", "st.release.gpu.b64",
        "atom.acq_rel.gpu.cas.b64", "atom.acq_rel.gpu.add.u64", "bar.warp.sync", "nanosleep.u32",
    } <= opcodes  # fmt: skip
    # Attention's exponentials and the rows' sums stay in single precision.
    assert {"ex2.approx.ftz.f32", "add.f32", "ld.global.u16"} <= opcodes


def test_numba_cuda_asks_for_the_device_again_afterwards():
    from numba.cuda import compiler, dispatcher

    before = compiler.get_current_device, dispatcher.get_current_device
    gpu.compile_ptx(lambda out: None, floats(), HOPPER)
    assert (compiler.get_current_device, dispatcher.get_current_device) == before


def floats():
    from numba import types

    return types.void(types.float32[::1])


def compiled(function):
    return gpu.compile_ptx(function, floats(), HOPPER)


# --- planted faults: the checks must see them


def holding(count):
    """Return a kernel that keeps *count* floats a lane alive across a barrier."""
    names = [f"v{i}" for i in range(count)]
    lines = ["def kernel(a):", "    me = lane()"]
    lines += [f"    {name} = a[me + {32 * i}]" for i, name in enumerate(names)]
    lines += ["    sync_lanes()"]
    lines += [f"    a[me + {32 * i}] = {name} * {names[i - 7]}" for i, name in enumerate(names)]
    scope = {"lane": lane, "sync_lanes": sync_lanes}
    exec("\n".join(lines), scope)
    return scope["kernel"]


def test_spill_is_reported():
    kernel = gpu.link(compiled(holding(300)), HOPPER)
    assert kernel.registers == 255
    assert kernel.spill_stores > 0
    assert kernel.spill_loads > 0


def test_registers_are_counted():
    few, many = (gpu.link(compiled(holding(count)), HOPPER) for count in (8, 160))
    assert few.registers < 64
    assert 160 < many.registers < 255
    assert (many.spill_stores, many.spill_loads) == (0, 0)


def test_usage_is_the_worst_of_all_functions():
    text = """
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas         .     0 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 99 registers, used 0 barriers
"""
    assert gpu.read_usage(b"", text) == gpu.Linked(b"", 99, 8, 12, 4)
    with pytest.raises(BackendMissing, match="no registers"):
        gpu.read_usage(b"", "ptxas info: a new wording")


def test_double_precision_is_reported():
    def kernel(a):
        a[0] = math.exp(np.float64(a[1]))

    assert any("double precision" in line for line in findings(compiled(kernel)))


def test_barrier_of_a_block_is_reported():
    from numba import cuda

    def kernel(a):
        a[0] = a[1]
        cuda.syncthreads()
        a[2] = a[0]

    assert any("a block's barrier" in line for line in findings(compiled(kernel)))


def test_barrier_of_some_lanes_is_reported():
    from numba import cuda

    def kernel(a):
        a[0] = a[1]
        cuda.syncwarp(0xFFFF)
        a[2] = a[0]

    assert any("for some lanes" in line for line in findings(compiled(kernel)))


def test_atomic_of_every_lane_is_reported():
    from numba import cuda

    def kernel(a):
        cuda.atomic.add(a, 0, np.float32(1))

    assert any("atomics.py does not have" in line for line in findings(compiled(kernel)))


def test_fence_is_reported():
    from numba import cuda

    def kernel(a):
        a[0] = a[1]
        cuda.threadfence_system()
        a[2] = a[0]

    assert any("atomics.py does not have" in line for line in findings(compiled(kernel)))


def test_memory_a_lane_is_reported():
    from numba import cuda, types

    def kernel(a):
        scratch = cuda.local.array(64, types.float32)
        for i in range(64):
            scratch[i] = a[i]
        a[0] = scratch[int(a[1])]

    ptx = compiled(kernel)
    assert any("memory a lane" in line for line in findings(ptx))
    assert gpu.link(ptx, HOPPER).stack >= 256


def test_shared_memory_is_reported():
    from numba import cuda, types

    def kernel(a):
        scratch = cuda.shared.array(32, types.float32)
        scratch[lane()] = a[lane()]
        sync_lanes()
        a[0] = scratch[31 - lane()]

    assert any("shared memory" in line for line in findings(compiled(kernel)))


def test_function_of_a_library_is_reported():
    from numba import cuda

    usleep = cuda.declare_device("usleep", "int32(uint32)")

    def kernel(a):
        usleep(np.uint32(50))

    ptx = compiled(kernel)
    assert any("not in this module" in line and "usleep" in line for line in findings(ptx))
    assert any("not inlined" in line for line in findings(ptx))
    with pytest.raises(Exception, match=r"(?i)usleep|undefined|unresolved"):
        gpu.link(ptx, HOPPER)


def test_print_is_reported():
    def kernel(a):
        print(a[0])  # noqa: T201

    assert any("vprintf" in line for line in findings(compiled(kernel)))


@pytest.mark.parametrize("body", ["{1: 2}", "open('x')", "sorted(a)", "[b for b in {a[0]}]"])
def test_construct_that_cuda_lacks_fails_to_compile(body):
    from numba.core.errors import NumbaError

    scope = {}
    exec(f"def kernel(a):\n    x = {body}\n    a[0] = len(x)", scope)
    with pytest.raises(NumbaError):
        compiled(scope["kernel"])


def test_ordered_access_that_is_not_lane_0s_is_reported():
    good = (
        "// begin inline asm\n{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0;"
        " mov.b64 v, 0; bar.warp.sync 0xffffffff; @p ld.acquire.gpu.b64 v, [%rd1];"
        " mov.b64 {lo,hi}, v; shfl.sync.idx.b32 lo, lo, 0, 31, 0xffffffff;"
        " shfl.sync.idx.b32 hi, hi, 0, 31, 0xffffffff; mov.b64 %rd2, {lo,hi};"
        " bar.warp.sync 0xffffffff; }\n// end inline asm\n"
    )
    assert findings(good) == []
    for old, new in (
        ("@p ld", "ld"),
        ("setp.eq.u32 p, l, 0", "setp.eq.u32 p, l, 1"),
        ("%laneid", "%warpid"),
        ("ld.acquire.gpu", "ld.acquire.cta"),
        ("mov.b64 v, 0; bar.warp.sync 0xffffffff;", "mov.b64 v, 0;"),
        ("lo, lo, 0, 31, 0xffffffff", "lo, lo, 0, 31, 0xffff"),
        (" bar.warp.sync 0xffffffff; }", " }"),
        ("// begin inline asm", ""),
    ):
        assert old in good
        assert findings(good.replace(old, new)) != [], (old, new)


def test_instructions_are_read():
    text = "$L_1:\n\t@%p3 bra \t$L_2;\n\t{ mov.b64 {lo,hi}, v; } // @p trap;\n\tret;\n$L_2: exit;"
    assert instructions(text) == [
        Instruction("@%p3", "bra", "$L_2"),
        Instruction("", "mov.b64", "{lo,hi}, v"),
        Instruction("", "ret", ""),
        Instruction("", "exit", ""),
    ]
