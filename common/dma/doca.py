"""The DMA engine of a BlueField (or of a ConnectX that has one), through DOCA.

Rules:
1. The first device that can do memcpy tasks is taken, unless a PCI address says which.  How long a
   copy may be is what the device says; how many may be out, too.
2. A memory map (doca_mmap) is made for each registered range, and is used by all engines.
3. An engine has a DMA context, a progress engine and an inventory of buffers.  A task takes two
   buffers, a source with its data and an empty destination (DOCA appends), which go back to the
   inventory when the task has ended, well or not.
4. The number of the task, not a pointer, travels as DOCA's user data.
5. `close` progresses until nothing is out: DOCA touches memory until then.
Both sides' memory must be local to the device's machine (or to the DPU): memory across PCIe needs
exported maps, which this module does not make.
"""

import contextlib
import ctypes as c
import threading
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyades.common.dma import library
from hyades.common.dma.engine import Records
from hyades.common.errors import BackendMissing, DeviceLost, UsageError

_READ_WRITE = 1  # DOCA_ACCESS_FLAG_LOCAL_READ_WRITE
_AGAIN, _NO_MEMORY, _IN_PROGRESS = 5, 7, 26  # doca_error_t
_PCI_BYTES = 13  # DOCA_DEVINFO_PCI_ADDR_SIZE
_PATIENCE = 10.0  # seconds that copies under way have to end


@dataclass(frozen=True, slots=True)
class _Map:
    """A registered range and its doca_mmap."""

    address: int
    nbytes: int
    handle: int


class DocaDevice:
    """One open device."""

    name = "doca"

    def __init__(self, pci: str = "", functions: library.Functions | None = None) -> None:
        """Open the device at *pci*, or the first that can copy; BackendMissing, UsageError."""
        self.functions = functions or library.load()
        self._lock = threading.Lock()
        self._maps: dict[int, _Map] = {}
        self._starts: list[int] = []
        self.handle, self.pci, self.max_copy = self._open(pci)

    def register(self, address: int, nbytes: int) -> None:
        """Make memory known; UsageError where DOCA refuses."""
        f, handle = self.functions, c.c_void_p()
        check(f, "doca_mmap_create", c.byref(handle))
        try:
            check(f, "doca_mmap_add_dev", handle, self.handle)
            check(f, "doca_mmap_set_permissions", handle, _READ_WRITE)
            check(f, "doca_mmap_set_memrange", handle, address, nbytes)
            check(f, "doca_mmap_start", handle)
        except UsageError:
            f.doca_mmap_destroy(handle)
            raise
        assert handle.value
        with self._lock:
            self._maps[address] = _Map(address, nbytes, handle.value)
            self._starts = sorted(self._maps)

    def forget(self, address: int) -> None:
        """Make memory unknown again; no copy of it is out."""
        with self._lock:
            found = self._maps.pop(address)
            self._starts = sorted(self._maps)
        self.functions.doca_mmap_stop(found.handle)
        self.functions.doca_mmap_destroy(found.handle)

    def knows(self, address: int, nbytes: int) -> bool:
        """Return whether a copy may name these bytes."""
        return self.find(address, nbytes) is not None

    def find(self, address: int, nbytes: int) -> int | None:
        """Return the doca_mmap that has these bytes."""
        with self._lock:
            index = bisect_right(self._starts, address) - 1
            found = self._maps[self._starts[index]] if index >= 0 else None
        if found is None or address + nbytes > found.address + found.nbytes:
            return None
        return found.handle

    def engine(self, depth: int) -> "DocaEngine":
        """Return an engine for *depth* copies at a time."""
        return DocaEngine(self, depth)

    def close(self) -> None:
        """Free it, after its engines."""
        for address in tuple(self._maps):
            self.forget(address)
        if self.handle:
            self.functions.doca_dev_close(self.handle)
            self.handle = 0

    def _open(self, pci: str) -> tuple[int, str, int]:
        f, entries, count = self.functions, c.POINTER(c.c_void_p)(), c.c_uint32()
        check(f, "doca_devinfo_create_list", c.byref(entries), c.byref(count))
        seen = []
        try:
            for index in range(count.value):
                info = entries[index]
                address = _address(f, info)
                status = f.doca_dma_cap_task_memcpy_is_supported(info)
                seen.append(f"{address}: {f.describe(status) if status else 'can copy'}")
                if status or (pci and not address.endswith(pci)):
                    continue
                most, device = c.c_uint64(), c.c_void_p()
                check(f, "doca_dma_cap_task_memcpy_get_max_buf_size", info, c.byref(most))
                check(f, "doca_dev_open", info, c.byref(device))
                assert device.value
                return device.value, address, most.value
        finally:
            f.doca_devinfo_destroy_list(entries)
        what = f"DOCA device {pci} does not exist or cannot copy" if pci else "no DOCA device can"
        raise BackendMissing(
            f"{what}{'' if pci else ' copy (DMA memcpy tasks)'}; devices:"
            f" {'; '.join(seen) or 'none'}: a BlueField in DPU mode is needed, or --dma-engine"
            " memcpy"
        )


class DocaEngine:
    """Copies of one thread; see the module."""

    def __init__(self, device: DocaDevice, depth: int) -> None:
        f = device.functions
        self.max_copy = device.max_copy
        self._device, self._f = device, f
        self._out: dict[int, tuple[int, int, int]] = {}  # cookie by number; source, destination
        self._done: list[tuple[int, int]] = []
        self._next = 0
        self._frees = contextlib.ExitStack()
        # Kept as long as the context: DOCA calls them.
        self._callbacks = (library.CALLBACK(self._ended), library.CALLBACK(self._ended))
        try:
            self.depth = self._make(depth)
        except BaseException:
            self._frees.close()
            raise

    @property
    def outstanding(self) -> int:
        """Copies that are not reported yet."""
        return len(self._out) + len(self._done)

    def submit(self, copies: Records) -> int:
        """Take a prefix; what DOCA refuses is reported like a copy that has failed."""
        count = 0
        for source, destination, nbytes, cookie in copies.tolist():
            if len(self._out) >= self.depth:
                break
            status = self._submit(source, destination, nbytes, cookie)
            if status in (_AGAIN, _NO_MEMORY) and self._out:
                break  # when others have ended
            if status:
                self._done.append((cookie, status))
            count += 1
        return count

    def poll(self, done: Records) -> int:
        """Let DOCA call `_ended`; report what has ended."""
        while self._out and self._f.doca_pe_progress(self._pe):
            pass
        count = min(len(done), len(self._done))
        for index, (cookie, status) in enumerate(self._done[:count]):
            done[index] = (cookie, status)
        del self._done[:count]
        return count

    def explain(self, status: int) -> str:
        """Return DOCA's words for *status*."""
        return self._f.describe(status)

    def close(self) -> None:
        """Wait for what is under way and free everything; DeviceLost where it does not end."""
        deadline = time.monotonic() + _PATIENCE
        while self._out:
            if not self._f.doca_pe_progress(self._pe) and time.monotonic() > deadline:
                raise DeviceLost(f"DOCA DMA: {len(self._out)} copies do not end: reset the DPU")
        self._frees.close()

    def _make(self, depth: int) -> int:
        f, free = self._f, self._frees
        pe, dma, inventory = c.c_void_p(), c.c_void_p(), c.c_void_p()
        check(f, "doca_pe_create", c.byref(pe))
        free.callback(f.doca_pe_destroy, pe)
        check(f, "doca_dma_create", self._device.handle, c.byref(dma))
        free.callback(f.doca_dma_destroy, dma)
        most = c.c_uint32()
        check(f, "doca_dma_cap_get_max_num_tasks", dma, c.byref(most))
        depth = min(depth, most.value)
        context = f.doca_dma_as_ctx(dma)
        check(f, "doca_pe_connect_ctx", pe, context)
        check(f, "doca_dma_task_memcpy_set_conf", dma, *self._callbacks, depth)
        check(f, "doca_buf_inventory_create", 2 * depth, c.byref(inventory))
        free.callback(f.doca_buf_inventory_destroy, inventory)
        check(f, "doca_buf_inventory_start", inventory)
        free.callback(f.doca_buf_inventory_stop, inventory)
        check(f, "doca_ctx_start", context)
        self._pe, self._dma, self._inventory = pe, dma, inventory
        free.callback(self._stop, context)
        return depth

    def _stop(self, context: int) -> None:
        if self._f.doca_ctx_stop(context) == _IN_PROGRESS:
            while self._f.doca_pe_progress(self._pe):
                pass

    def _submit(self, source: int, destination: int, nbytes: int, cookie: int) -> int:
        f = self._f
        status, first = self._buffer(source, nbytes, nbytes)
        if status:
            return status
        status, second = self._buffer(destination, nbytes, 0)
        if status:
            f.doca_buf_dec_refcount(first, None)
            return status
        task, number = c.c_void_p(), self._next
        status = f.doca_dma_task_memcpy_alloc_init(
            self._dma, first, second, number, c.byref(task)
        )  # fmt: skip
        if not status:
            self._out[number] = (cookie, first, second)
            self._next = number + 1
            handle = f.doca_dma_task_memcpy_as_task(task)
            status = f.doca_task_submit(handle)
            if not status:
                return 0
            del self._out[number]
            f.doca_task_free(handle)
        f.doca_buf_dec_refcount(first, None)
        f.doca_buf_dec_refcount(second, None)
        return int(status)

    def _buffer(self, address: int, nbytes: int, filled: int) -> tuple[int, int]:
        handle = self._device.find(address, nbytes)
        if handle is None:
            raise UsageError(f"{nbytes} bytes at {address:#x} are not registered for DMA")
        found = c.c_void_p()
        status = self._f.doca_buf_inventory_buf_get_by_args(
            self._inventory, handle, address, nbytes, address, filled, c.byref(found)
        )
        return int(status), found.value or 0

    def _ended(self, task: int, number: int, _context: int) -> None:
        """Take a task that has ended, well or not; DOCA calls it from doca_pe_progress."""
        f = self._f
        handle = f.doca_dma_task_memcpy_as_task(task)
        status = int(f.doca_task_get_status(handle))
        cookie, first, second = self._out.pop(number)
        f.doca_task_free(handle)
        f.doca_buf_dec_refcount(first, None)
        f.doca_buf_dec_refcount(second, None)
        self._done.append((cookie, status))


def check(functions: library.Functions, name: str, *arguments: Any) -> None:
    """Call a function of DOCA; UsageError with its name and DOCA's words where it fails."""
    status = getattr(functions, name)(*arguments)
    if status:
        raise UsageError(f"{name}: {functions.describe(status)}")


def probe(environment: Mapping[str, str] | None = None) -> str | None:
    """Return why DOCA's engine cannot run here and what to do, or None."""
    try:
        DocaDevice(functions=library.load(environment)).close()
    except (BackendMissing, UsageError) as error:
        return str(error)
    return None


def detail(environment: Mapping[str, str] | None = None) -> str:
    """Return which device copies, and how much at a time; `probe` has returned None."""
    device = DocaDevice(functions=library.load(environment))
    try:
        return f"device {device.pci}, at most {device.max_copy} bytes a copy"
    finally:
        device.close()


def _address(functions: library.Functions, info: int) -> str:
    text = c.create_string_buffer(_PCI_BYTES)
    check(functions, "doca_devinfo_get_pci_addr_str", info, text)
    return text.value.decode()
