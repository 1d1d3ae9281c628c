"""The SPDK process: ``python -m hyades.proxy.transports.spdk_process SOCKET MEMORY BELL BELL PID``.

The caller (spdk_child.py) starts it with ld.so's path set and with the descriptors open: socket,
memory, the bell that wakes the process, the caller's bell.  It opens the device, maps the arena,
and runs the pump until STOP.  Rules:
1. It dies with its caller.  A pidfd says so, on a thread that only waits; PR_SET_PDEATHSIG would
   fire when the caller's *thread* that started it ends.
2. Between two calls of the pump it polls admin completions (keep-alives), looks for commands that
   nobody answers, and reconnects.  That takes the time it takes; requests wait in the ring.
3. A path that is lost is tried again with growing pauses until `ctrl_loss_timeout`.  What was
   under way is given again (reads, and writes of whole pages, which may be done twice).  Then
   everything, now and later, is answered with Status.LOST.  A new connection may lead to a target
   that lost its volatile cache: where writes were not flushed and nothing rules that out, the next
   flush is LOST, so that nobody takes them for durable.
4. At STOP what runs may finish, for a while; what did not run is answered with CANCELLED.  SPDK
   lets go of the buffers before the process ends.
"""

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np

from hyades.common.atomics import fence_sys
from hyades.common.errors import BackendMissing, HyadesError
from hyades.common.jit import jit
from hyades.common.layout import BLOCK, Status
from hyades.common.ring import STOP, has_next, load_word, store_word
from hyades.proxy.transports import spdk_library
from hyades.proxy.transports import spdk_memory as shared
from hyades.proxy.transports import spdk_tables as t
from hyades.proxy.transports.spdk_device import Namespace, SpdkDevice, arena_room, start_environment

_ADMIN = 0.5  # seconds between two looks at the admin queue
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 5.0  # seconds between two attempts to connect
_GRACE = 5.0  # seconds that commands may take to finish at STOP
_SLEEP = 200  # milliseconds: an idle process looks at the admin queue that often
_LOG_LIMIT = 1 << 20
_PROT, _FLAGS = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
_MAP_FIXED, _HUGE = 0x10, 2 << 20


def main(arguments: list[str]) -> int:
    """Serve one caller; see the module's text for *arguments*."""
    link_fd, memory_fd, bell, other_bell, parent = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C means
    _die_with(parent)
    link = socket.socket(fileno=link_fd)
    memory = shared.SharedMemory.attach(memory_fd)
    device = None
    try:
        settings = msgspec.json.decode(link.recv(shared.MESSAGE), type=shared.Settings)
        found = spdk_library.find()
        if isinstance(found, str):
            raise BackendMissing(found)
        functions = spdk_library.load(found)
        start_environment(functions, settings)
        worker = _Worker(memory, settings, bell, other_bell)  # compiles, before a keep-alive is due
        device = SpdkDevice(functions, settings)
        link.send(msgspec.json.encode(_opened(found.release, device)))
        arena = _take_arena(link, device)
        if arena is not None:
            link.send(msgspec.json.encode(shared.Ready()))
            worker.run(device, arena)
    except HyadesError as error:
        refusal = shared.Refused(kind=type(error).__name__, text=str(error))
        with contextlib.suppress(OSError):  # the caller may be gone
            link.send(msgspec.json.encode(refusal))
        return 1
    finally:
        if device is not None:
            device.drop()
    return 0


def _die_with(parent: int) -> None:
    handle = os.pidfd_open(parent)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        select.select([handle], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="hyades-spdk-parent", daemon=True).start()


def _opened(release: str, device: SpdkDevice) -> shared.Opened:
    space = device.namespace
    return shared.Opened(
        release=release,
        namespace=space.number,
        nblocks=space.nblocks,
        sector=space.sector,
        max_transfer=space.max_transfer,
    )


def _take_arena(link: socket.socket, device: SpdkDevice) -> tuple[int, int] | None:
    """Return address and length of the caller's arena; None where the caller closes instead."""
    while not select.select([link], [], [], _ADMIN)[0]:
        device.poll_admin()  # a loss is noticed, and repaired, once there is something to do
    message, fds, _, _ = socket.recv_fds(link, shared.MESSAGE, 1)
    if not message:
        return None
    register = msgspec.json.decode(message, type=shared.Register)
    address = _map_arena(fds[0], register.offset, register.nbytes)
    os.close(fds[0])
    device.register(address, arena_room(register.nbytes))
    return address, register.nbytes


def _map_arena(fd: int, offset: int, nbytes: int) -> int:
    """Map part of *fd* at an address that is a multiple of 2 MiB, for spdk_mem_register."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    )  # fmt: skip
    room = arena_room(nbytes)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    failed = ctypes.c_void_p(-1).value
    # the rest of the last huge page stays private memory, so that registering it is no mistake
    space = libc.mmap(None, room + _HUGE, _PROT, private, -1, 0)
    placed: int | None = failed
    if space != failed:
        place = space + -space % _HUGE
        placed = libc.mmap(place, nbytes, _PROT, _FLAGS | _MAP_FIXED, fd, offset)
    if placed is None or placed == failed:
        code = ctypes.get_errno()
        raise BackendMissing(f"cannot map an arena of {nbytes} bytes: {os.strerror(code)}")
    return placed


class _Worker:
    """Runs the pump and repairs the path."""

    def __init__(
        self,
        memory: shared.SharedMemory,
        settings: shared.Settings,
        bell: int,
        other_bell: int,
    ) -> None:
        # only now: its functions are linked against SPDK's libraries by name
        from hyades.proxy.transports import spdk_pump

        self._code: Any = spdk_pump
        self._memory, self._settings = memory, settings
        self._bell, depth = bell, settings.depth
        count = 4 * depth
        code = self._code
        self._slots = np.zeros((depth, t.S_COLUMNS), np.int64)
        self._line = np.zeros(depth, np.int64)
        self._tickets = np.zeros((count, t.K_COLUMNS), np.int64)
        self._unused = np.arange(count)
        self._done = np.zeros(1 + count, np.int64)
        self._queues = np.zeros((settings.queues, t.Q_COLUMNS), np.int64)
        self._batch = np.zeros((64, 8), np.int64)
        self._state = np.zeros(t.W_WORDS, np.int64)
        self._one = np.ones(1, np.int64)
        self._tickets[:, t.K_INDEX] = np.arange(count)
        self._tickets[:, t.K_DONE] = self._done.ctypes.data
        self._tickets[:, t.K_STATUS] = t.UNUSED
        state = self._state
        state[t.W_CALLBACK] = code.on_completion.address
        state[t.W_BELL] = other_bell
        state[t.W_FREE_TICKETS] = count
        self._requests = (memory.requests.words.reshape(-1), memory.requests.control)
        self._answers = (memory.answers.words.reshape(-1), memory.answers.control)
        self._completed, self._progress = 0, time.monotonic()
        self._trouble = 0.0  # since when commands are parked with their path up
        self._warm()

    def _warm(self) -> None:
        """Compile, or load, everything by running it with nothing to do."""
        self._pump()
        self._settle(closing=False)
        self._requeue(running=True)
        self._code.poll_queues(self._queues, self._state)
        self._cancel()
        self._abandon(Status.CANCELLED)
        _waiting(*self._requests)

    def run(self, device: SpdkDevice, arena: tuple[int, int]) -> None:
        """Serve until STOP."""
        state = self._state
        self._device = device
        state[t.W_ARENA], state[t.W_ARENA_BYTES] = arena
        self._adopt()
        admin = time.monotonic()
        while not self._stopped():
            found = self._pump()
            if found == t.BROKEN:
                raise RuntimeError("a request is no request: the rings are damaged")
            if found == t.FAULT:
                self._repair()
            elif found == t.IDLE and not self._stopped():
                self._sleep()
            now = time.monotonic()
            if now - admin >= _ADMIN or state[t.W_PARKED]:
                admin = now
                self._look(now)
        self._finish()

    def _pump(self) -> int:
        return int(
            self._code.pump(
                *self._requests, *self._answers, self._memory.words, self._slots, self._line,
                self._tickets, self._unused, self._done, self._queues, self._batch, self._state,
                self._one,
            )
        )  # fmt: skip

    def _stopped(self) -> bool:
        return bool(load_word(self._memory.requests.control, STOP))

    def _adopt(self) -> None:
        """Take over the device's present queues and namespace."""
        state, device = self._state, self._device
        self._queues[:, t.Q_PAIR] = device.pairs
        state[t.W_NAMESPACE] = device.space
        state[t.W_SECTORS_PER_BLOCK] = BLOCK // device.namespace.sector
        state[t.W_FLUSHES] = device.namespace.flushes

    def _sleep(self) -> None:
        words, (ring, control) = self._memory.words, self._requests
        store_word(words, shared.PROCESS_SLEEPS, 1)
        if not _waiting(ring, control):
            select.select([self._bell], [], [], _SLEEP / 1000)
        store_word(words, shared.PROCESS_SLEEPS, 0)
        with contextlib.suppress(BlockingIOError):  # it was not rung
            os.eventfd_read(self._bell)

    def _look(self, now: float) -> None:
        """Do what is due now and then: keep-alives, commands in trouble, the log's size."""
        state = self._state
        if os.fstat(2).st_size > _LOG_LIMIT:
            os.ftruncate(2, 0)
        if state[t.W_LOST]:
            return
        if state[t.W_COMPLETED] != self._completed or not self._under_way():
            self._completed, self._progress = int(state[t.W_COMPLETED]), now
            self._trouble = self._trouble if state[t.W_PARKED] else 0.0
        if not self._device.poll_admin() or now - self._progress > self._settings.timeout:
            self._restore()
        elif state[t.W_PARKED]:
            self._trouble = self._trouble or now
            if now - self._trouble > self._settings.ctrl_loss_timeout:
                self._give_up("the target refuses commands")
                return
            time.sleep(_FIRST_PAUSE)
            self._requeue(running=False)

    def _under_way(self) -> bool:
        state = self._state
        return bool(state[t.W_RUNNING] + state[t.W_WAITING])

    def _repair(self) -> None:
        """Bring a broken queue back, alone if its controller lives."""
        if self._device.reconnect_queue(int(self._state[t.W_FAULTY])):
            self._memory.words[shared.RECONNECTS] += 1
            self._requeue(running=False)
        else:
            self._restore()

    def _restore(self) -> None:
        """Connect anew until it works or the device counts as lost."""
        started, pause, before = time.monotonic(), _FIRST_PAUSE, self._device.namespace
        self._drop()
        while not self._stopped():
            try:
                back = self._device.reconnect()
            except HyadesError as error:
                self._give_up(str(error))
                return
            if back:
                break
            if time.monotonic() + pause - started > self._settings.ctrl_loss_timeout:
                self._give_up(f"no answer for {self._settings.ctrl_loss_timeout:g} s")
                return
            select.select([], [], [], pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            return
        self._memory.words[shared.RECONNECTS] += 1
        self._adopt()
        self._doubt(before)
        self._progress = time.monotonic()
        if self._state[t.W_FREE_TICKETS] < self._settings.depth:
            self._give_up("SPDK does not give back the commands of queues that were freed")

    def _doubt(self, before: Namespace) -> None:
        """Let the next flush fail where writes since the last one may be gone with a cache."""
        state = self._state
        unflushed = state[t.W_FLUSHES] and state[t.W_WRITES] > state[t.W_FLUSHED]
        kept = self._settings.trust_cache or self._device.namespace.keeps_writes_of(before)
        if unflushed and not kept:
            state[t.W_IN_DOUBT] = 1

    def _drop(self) -> None:
        """Take the queues away; what was under way waits."""
        self._queues[:, t.Q_PAIR] = 0
        self._device.drop(lost=True)
        self._settle(closing=False)  # what was aborted is parked
        self._requeue(running=True)

    def _requeue(self, *, running: bool) -> None:
        self._code.requeue(
            self._memory.words, self._slots, self._line, self._queues, self._state, running
        )

    def _give_up(self, why: str) -> None:
        """Answer everything, from now on, with Status.LOST."""
        os.write(2, f"hyades: {self._settings.trid()} is lost: {why}\n".encode())
        self._drop()
        self._state[t.W_LOST] = 1
        store_word(self._memory.words, shared.LOST, 1)
        self._abandon(Status.LOST)

    def _abandon(self, status: Status) -> None:
        self._code.abandon(
            *self._answers, self._memory.words, self._slots, self._queues, self._state,
            int(status), self._one,
        )  # fmt: skip

    def _settle(self, *, closing: bool) -> None:
        self._code.settle(
            *self._answers, self._memory.words, self._slots, self._tickets, self._unused,
            self._done, self._queues, self._state, closing,
        )  # fmt: skip

    def _cancel(self) -> None:
        self._code.cancel(
            *self._requests, *self._answers, self._slots, self._line, self._batch, self._state
        )

    def _finish(self) -> None:
        """Let commands end, then take the queues away and cancel what is left."""
        state = self._state
        self._cancel()
        deadline = time.monotonic() + _GRACE
        while state[t.W_RUNNING] and time.monotonic() < deadline:
            failed = self._code.poll_queues(self._queues, state) < 0
            self._settle(closing=True)
            if failed:
                break
        self._queues[:, t.Q_PAIR] = 0
        self._device.drop()
        self._settle(closing=True)
        self._abandon(Status.CANCELLED)


@jit
def _waiting(words: Any, control: Any) -> Any:
    """Look once more before sleeping: is there a request, or STOP?"""
    fence_sys()
    return has_next(words, control) or load_word(control, STOP) != 0


if __name__ == "__main__":
    try:
        CODE = main(sys.argv[1:])
    except BaseException:
        import traceback

        traceback.print_exc()
        CODE = 70
    sys.stderr.flush()
    os._exit(CODE)  # SPDK's destructors are of no use now
