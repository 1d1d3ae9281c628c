"""Compile kernels for a GPU, on machines that may have none: source to PTX to cubin.

numba-cuda makes PTX through NVVM, and nvJitLink makes a cubin of it; neither needs a driver.  But
numba-cuda asks the current device for its compute capability whenever a kernel calls a function,
although the caller named one, and without a driver that raises: `_target` answers in its place.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import msgspec

from hyades.common.errors import BackendMissing
from hyades.common.jit import cache_directory

Target = tuple[int, int]  # compute capability: (9, 0) is Hopper
_FIX = "pip install -c constraints.txt -e '.[ptx]'"
_USED = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


class Linked(msgspec.Struct, frozen=True):
    """A cubin and what ptxas says of its kernel; sizes are bytes a thread."""

    code: bytes
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def why_not() -> str | None:
    """Return why nothing can be compiled for a GPU and the fix, or None."""
    for package, module in (
        ("numba-cuda", "numba_cuda"), ("cuda-core", "cuda.core"),
        ("nvidia-nvjitlink", "cuda.bindings.nvjitlink"),
    ):  # fmt: skip
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent
            found = None
        if found is None:
            return f"{package} is not installed: {_FIX}"
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for library in ("nvvm", "nvJitLink"):
        try:
            load_nvidia_dynamic_lib(library)
        except DynamicLibNotFoundError:
            return f"lib{library} was not found: {_FIX}"
    return None


def _require() -> None:
    reason = why_not()
    if reason is not None:
        raise BackendMissing(f"cannot compile for a GPU: {reason}")


@contextmanager
def _target(target: Target) -> Iterator[None]:
    """Let numba-cuda believe, inside the block, that the current device is *target*."""
    # By name: no stubs describe these modules, and they are there only with the `ptx` extra.
    compiler: Any = import_module("numba.cuda.compiler")
    dispatcher: Any = import_module("numba.cuda.dispatcher")
    before = compiler.get_current_device, dispatcher.get_current_device
    device = SimpleNamespace(compute_capability=target)
    compiler.get_current_device = dispatcher.get_current_device = lambda: device
    try:
        yield
    finally:
        compiler.get_current_device, dispatcher.get_current_device = before


def compile_ptx(function: Callable[..., None], signature: Any, target: Target) -> str:
    """Return the PTX of a kernel; numba's errors for what CUDA cannot run."""
    _require()
    cuda: Any = import_module("numba.cuda")
    with _target(target):
        ptx, _ = cuda.compile_ptx(function, signature, cc=target)
    return str(ptx)


def link(ptx: str, target: Target) -> Linked:
    """Return the cubin of *ptx* for *target*."""
    _require()
    core: Any = import_module("cuda.core")
    options = core.LinkerOptions(arch=name_of(target), verbose=True, ptxas_options=["-v"])
    linker = core.Linker(core.ObjectCode.from_ptx(ptx.encode()), options=options)
    code = bytes(linker.link("cubin").code)
    text = str(linker.get_info_log())
    return read_usage(code, text)


def read_usage(code: bytes, text: str) -> Linked:
    """Return a cubin with the worst that *text*, ptxas's own, says of any of its functions."""
    used, stacks = _USED.findall(text), _STACK.findall(text)
    if not used or not stacks:
        raise BackendMissing(f"nvJitLink reports no registers or no stack: {text!r}; {_FIX}")
    stack, stores, loads = (max(int(entry[i]) for entry in stacks) for i in range(3))
    return Linked(code, max(map(int, used)), stack, stores, loads)


def name_of(target: Target) -> str:
    """Return "sm_90" for (9, 0)."""
    return f"sm_{target[0]}{target[1]}"


# --- the resident kernel


def resident_signature() -> Any:
    """Return the argument types of `resident.kernel`."""
    from numba import types

    words, floats = types.int64[::1], types.float32[::1]
    return types.void(
        words, words, words, words, floats, types.uint16[::1], types.int32[::1], floats, words,
        types.uint32[::1], words, words, types.float32,
    )  # fmt: skip


def resident_ptx(target: Target) -> str:
    """Return the PTX of the resident kernel; kept with the other compiled kernels."""
    from hyades.gpu_side.resident import kernel

    def make() -> bytes:
        return compile_ptx(kernel, resident_signature(), target).encode()

    return _kept(f"resident-{name_of(target)}.ptx", make).decode()


def resident_cubin(target: Target) -> Linked:
    """Return the cubin of the resident kernel; kept likewise."""

    def make() -> bytes:
        return msgspec.msgpack.encode(link(resident_ptx(target), target))

    return msgspec.msgpack.decode(_kept(f"resident-{name_of(target)}.cubin", make), type=Linked)


def _kept(name: str, make: Callable[[], bytes]) -> bytes:
    """Return a file of the kernel cache, which is keyed by all sources, after making it once."""
    folder = cache_directory()
    if folder is None:
        return make()
    path = folder / f"{_versions()}-{name}"
    if not path.exists():
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(make())
        part.replace(path)
    return path.read_bytes()


def _versions() -> str:
    versions = []
    for package in ("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink"):
        try:
            versions.append(version(package))
        except PackageNotFoundError:  # from a CUDA toolkit, say
            versions.append("local")
    return "-".join(versions)
