"""RDMA devices that are open, and the memory that they may touch.

Rules:
1. One protection domain a device; all queue pairs and memory regions of one owner lie in it, so a
   region is registered once however many connections there are.
2. Memory is found by its address: whoever posts work has a memoryview, not a key.
3. A region is closed before its memory is freed; `Devices.close` closes what is left.
Any thread may call.
"""

import ctypes
import os
import threading
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.rdma import gpu
from hyades.common.rdma.library import failures, verbs

_MAX_READS = 16  # RDMA READs that a connection has out
_MEM_MGT_EXTENSIONS = 1 << 21  # IBV_DEVICE_MEM_MGT_EXTENSIONS: SEND that invalidates a key


@dataclass(slots=True)
class Region:
    """Registered bytes from address *start* on; a device calls the first one *base*."""

    start: int
    nbytes: int
    base: int
    lkey: int
    rkey: int
    handle: Any = field(repr=False)

    def translate(self, address: int) -> int:
        """Return what the device calls *address*."""
        return self.base + (address - self.start)

    def close(self) -> None:
        """Make the memory unknown to the device."""
        self.handle.close()


class Device:
    """One open device."""

    def __init__(self, name: str) -> None:
        """Open it; UsageError where it cannot be."""
        library = verbs()
        self.name = name
        try:
            self.context = library.device.Context(name=name)
        except failures() as error:
            raise UsageError(f"RDMA device {name} cannot be opened: {error}") from error
        found = self.context.query_device()
        self.reads = min(found.max_qp_rd_atom, found.max_qp_init_rd_atom, _MAX_READS)
        self.max_work = found.max_qp_wr
        self.invalidates = bool(found.device_cap_flags & _MEM_MGT_EXTENSIONS)
        self.domain = library.pd.PD(self.context)
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._lock = threading.Lock()

    def register(self, memory: memoryview, *, remote: bool) -> Region:
        """Register *memory*, for the peer too where *remote*; UsageError where that is refused."""
        start, nbytes = address_of(memory), memory.nbytes
        return self._keep(start, self._plain(start, nbytes, remote=remote), start, nbytes)

    def register_gpu(self, pointer: int, nbytes: int) -> Region:
        """Register GPU memory, for the peer too: by its dma-buf, else by its address.

        The second way needs the nvidia-peermem module; UsageError has both reasons.
        """
        library = verbs()
        try:
            fd, offset = gpu.export(pointer, nbytes)
        except BackendMissing as missing:
            reason = str(missing)
        else:
            try:
                flags = _access(library.enums, remote=True)
                handle = library.mr.DmaBufMR(self.domain, nbytes, flags, dmabuf=fd, offset=offset)
                return self._keep(pointer, handle, offset, nbytes)
            except failures() as error:
                reason = f"its dma-buf cannot be registered ({error})"
            finally:
                os.close(fd)
        try:
            handle = self._plain(pointer, nbytes, remote=True)
        except UsageError as error:
            raise UsageError(
                f"GPU memory: {reason}; and by its address, for which modprobe nvidia-peermem,"
                f" {error}"
            ) from error
        return self._keep(pointer, handle, pointer, nbytes)

    def forget(self, region: Region) -> None:
        """Close a region."""
        with self._lock:
            at = self._regions.index(region)
            del self._starts[at], self._regions[at]
        region.close()

    def find(self, address: int, nbytes: int) -> Region | None:
        """Return the region of these bytes, None where they are not registered."""
        with self._lock:
            at = bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            found = self._regions[at]
        return found if address + nbytes <= found.start + found.nbytes else None

    def close(self) -> None:
        """Close it, after the endpoints on it."""
        with self._lock:
            regions, self._regions, self._starts = self._regions, [], []
        for region in regions:
            region.close()
        self.domain.close()
        self.context.close()

    def _plain(self, start: int, nbytes: int, *, remote: bool) -> Any:
        library = verbs()
        try:
            flags = _access(library.enums, remote=remote)
            return library.mr.MR(self.domain, nbytes, flags, address=start)
        except failures() as error:
            raise UsageError(
                f"{nbytes} bytes cannot be registered with RDMA device {self.name} ({error}): a"
                " limit on locked memory is raised by ulimit -l unlimited"
            ) from error

    def _keep(self, start: int, handle: Any, base: int, nbytes: int) -> Region:
        region = Region(start, nbytes, base, handle.lkey, handle.rkey, handle)
        with self._lock:
            at = bisect_right(self._starts, start)
            self._starts.insert(at, start)
            self._regions.insert(at, region)
        return region


class Devices:
    """The devices of one owner, each opened when it is first asked for."""

    def __init__(self) -> None:
        self._open: dict[str, Device] = {}
        self._shared: list[memoryview] = []  # registered with every device
        self._lock = threading.Lock()

    def open(self, name: str) -> Device:
        """Return the device of that name."""
        with self._lock:
            device = self._open.get(name)
            if device is None:
                device = Device(name)
                for memory in self._shared:
                    device.register(memory, remote=True)
                self._open[name] = device
            return device

    def share(self, memory: memoryview) -> None:
        """Register *memory*, for peers too, with each device, those that come later included."""
        with self._lock:
            self._shared.append(memory)
            for device in self._open.values():
                device.register(memory, remote=True)

    def close(self) -> None:
        """Close all, after the endpoints on them."""
        with self._lock:
            self._shared.clear()
            while self._open:
                self._open.popitem()[1].close()


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte of writable *memory*."""
    if memory.readonly:
        return int(np.frombuffer(memory, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _access(enums: Any, *, remote: bool) -> int:
    flags = int(enums.IBV_ACCESS_LOCAL_WRITE)
    if remote:
        flags |= int(enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ)
    return flags
