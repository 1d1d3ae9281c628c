"""A TCP relay of a test's own that cuts, stalls, delays, shortens and damages what passes."""

import contextlib
import random
import socket
import struct
import threading
import time

_RESET = struct.pack("ii", 1, 0)
_PIECE = 1 << 16


class Relay:
    """Forwards connections to *target*; every knob may be turned while it runs.

    `damage`: (host to target, target to host) chance of one wrong byte in each piece of up to
    64 KiB.  `shorten`: chance that a piece is cut off at a random place, and its connection with
    it.  `delay`: seconds that each piece is late.  `stalled`: nothing is forwarded.
    """

    def __init__(self, target: tuple[str, int], seed: int = 0) -> None:
        self.target = target
        self.damage = (0.0, 0.0)
        self.shorten = 0.0
        self.delay = 0.0
        self.stalled = False
        self.silent = False  # new connections are taken, but lead nowhere
        self.damaged = 0
        self.passed = 0  # bytes towards the host
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._ended = False
        self._listener: socket.socket | None = None
        self.address = ("127.0.0.1", 0)
        self.restore()

    def restore(self) -> None:
        """Take connections (again), at the same address."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self.address)
        listener.listen(64)
        self.address = listener.getsockname()
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Reset every connection, and refuse new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.reset()

    def reset(self) -> None:
        """Reset every connection."""
        with self._lock:
            doomed, self._open = self._open, set()
        for sock in doomed:
            _end(sock)

    def close(self) -> None:
        """End everything."""
        self._ended = True
        self.stalled = False
        self.cut()

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                host, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(host)
            if self.silent:
                continue
            try:
                target = socket.create_connection(self.target)
            except OSError:
                _end(host)
                continue
            for sock in (host, target):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {host, target}
            for way, (source, sink) in enumerate(((host, target), (target, host))):
                threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        buffer = bytearray(_PIECE)
        try:
            while nbytes := source.recv_into(buffer):
                while self.stalled:
                    time.sleep(0.01)
                if self.delay:
                    time.sleep(self.delay)
                if self.shorten and self._random.random() < self.shorten:
                    sink.sendall(memoryview(buffer)[: self._random.randrange(nbytes)])
                    break
                if self.damage[way] and self._random.random() < self.damage[way]:
                    buffer[self._random.randrange(nbytes)] ^= 1 << self._random.randrange(8)
                    self.damaged += 1
                sink.sendall(memoryview(buffer)[:nbytes])
                if way:
                    self.passed += nbytes
        except OSError:
            pass
        finally:
            for sock in (source, sink):
                with self._lock:
                    self._open.discard(sock)
                _end(sock)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
