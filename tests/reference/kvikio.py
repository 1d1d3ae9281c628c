"""A stand-in for kvikio: the names that the gds transport uses, on os.preadv and a thread pool.

It behaves as kvikio 26.10 was seen to: POSIX failures carry the text of errno 1 whatever happened,
reads past the end raise "pread: EOF", a done future gives its result once, and with CompatMode.OFF
a file that cuFile does not take is refused when it is opened.  `install` puts it into sys.modules.
"""

import enum
import os
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hyades.proxy.arena import allocate_arena

_POSIX = "KvikIO failure at: posix_io.hpp:89: POSIX error: Operation not permitted"
_EOF = "KvikIO failure at: posix_io.hpp:173: POSIX error on pread: EOF"


class CompatMode(enum.Enum):
    """As kvikio.CompatMode."""

    OFF = 0
    ON = 1
    AUTO = 2


class DeviceArray(np.ndarray):
    """Host memory that says it is on a GPU; slices say so too."""

    @property
    def __cuda_array_interface__(self):
        return {
            "data": (self.ctypes.data, not self.flags.writeable),
            "shape": self.shape,
            "strides": None if self.flags.c_contiguous else self.strides,
            "typestr": self.dtype.str,
            "version": 3,
        }


def device_arena(nbytes):
    """Return an aligned DeviceArray of uint8."""
    return allocate_arena(nbytes).view(DeviceArray)


class Future:
    """As kvikio.cufile.IOFuture: `get` once, and nothing after it."""

    def __init__(self, future):
        self._future = future

    def done(self):
        if self._future is None:
            raise ValueError("The future object does not refer to a valid shared state.")
        return self._future.done()

    def get(self):
        if self._future is None:
            raise RuntimeError("std::future_error: No associated state")
        future, self._future = self._future, None
        return future.result()


class Standin:
    """The state behind the module: settings, what a test makes fail, what was seen."""

    def __init__(self):
        self.settings = {
            "compat_mode": CompatMode.AUTO, "num_threads": 1, "gds_threshold": 1 << 20,
            "task_size": 4 << 20,
        }  # fmt: skip
        self.gds = True  # cuFile and its driver are there
        self.refused = ""  # why cuFile takes no file
        self.failures = []  # exceptions of the next transfers, None for one that works
        self.at_submit = False  # raise them in pread, as below the threshold
        self.short = 0  # bytes by which the next transfer is short
        self.gate = threading.Event()  # transfers wait for it
        self.gate.set()
        self.registered = []
        self.opened = []
        self.modes = []  # of each CuFile
        self.task_sizes = set()
        self.pool = ThreadPoolExecutor(4)

    def close(self):
        """End the threads."""
        self.gate.set()
        self.pool.shutdown()


class _Setting:
    def __init__(self, settings, key, value):
        self._settings, self._key, self._old = settings, key, settings[key]
        settings[key] = value

    def __enter__(self):
        return None

    def __exit__(self, *_):
        self._settings[self._key] = self._old


class CuFile:
    """As kvikio.CuFile; `install` makes a subclass with its state."""

    state: Standin

    def __init__(self, file, flags="r"):
        state = self.state
        mode = state.settings["compat_mode"]
        state.modes.append(mode)
        if mode is CompatMode.OFF and state.refused:
            raise RuntimeError(f"cuFile error at: file_handle.cpp:80: {state.refused}")
        access = {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags]
        self._fd = os.open(file, access | os.O_CLOEXEC)
        self.closed = False
        state.opened.append(self)

    def pread(self, buf, size=None, file_offset=0, task_size=None):
        return self._start(os.preadv, buf, size, file_offset, task_size)

    def pwrite(self, buf, size=None, file_offset=0, task_size=None):
        return self._start(os.pwritev, buf, size, file_offset, task_size)

    def _start(self, call, buf, size, place, task_size):
        state = self.state
        state.task_sizes.add((size, task_size))
        failure = state.failures.pop(0) if state.failures else None
        if failure is not None and state.at_submit:
            raise failure
        return Future(state.pool.submit(self._move, call, buf, size, place, failure))

    def _move(self, call, buf, size, place, failure):
        state = self.state
        state.gate.wait()
        assert not self.closed, "a transfer after close"
        if failure is not None:
            raise failure
        if state.short:
            size, state.short = size - state.short, 0
        done, memory = 0, memoryview(np.asarray(buf))
        while done < size:
            try:
                moved = call(self._fd, [memory[done:size]], place + done)
            except OSError as error:
                raise RuntimeError(_POSIX) from error
            if not moved:
                raise RuntimeError(_EOF)
            done += moved
        return done

    def close(self):
        if not self.closed:
            self.closed = True
            os.close(self._fd)


def install(monkeypatch):
    """Make ``import kvikio`` find the stand-in; return its Standin."""
    state = Standin()
    module = types.ModuleType("kvikio")
    defaults = types.ModuleType("kvikio.defaults")
    driver = types.ModuleType("kvikio.cufile_driver")
    defaults.get = state.settings.__getitem__
    defaults.set = lambda key, value: _Setting(state.settings, key, value)
    driver.get = lambda key: {"is_gds_available": state.gds}[key]
    driver.libcufile_version = lambda: (1, 14)
    module.__version__ = "26.10-standin"
    module.__path__ = []
    module.CompatMode = CompatMode
    module.CuFile = type("CuFile", (CuFile,), {"state": state})
    module.defaults, module.cufile_driver = defaults, driver
    module.memory_register = state.registered.append
    module.memory_deregister = lambda buf: state.registered.pop()
    for each in (module, defaults, driver):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return state
