"""Targets for hosts of this machine over shared memory, for tests."""

import itertools
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from tests.reference import nvme

from hyades.common.nvme.dma import Shape
from hyades.common.nvme.dma_host import DmaHostQueue
from hyades.common.nvme.dma_memory import QueueMemory
from hyades.common.nvme.dma_target import Answer, DmaTargetQueue, Pull
from hyades.common.rdma.device import address_of
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import Namespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem

_numbers = itertools.count()


def socket_path() -> str:
    """Return a short path that nothing has: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.gettempdir())
    return str(folder / f"hyades-{os.getpid()}-{next(_numbers)}.sock")


def start(
    namespaces: dict[int, Namespace], *, path: str = "", engine: str = "memcpy",
    epoch: bytes = bytes(16), **limits: Any,
) -> Server:  # fmt: skip
    """Return a started server of *namespaces*."""
    server = Server(
        [Subsystem(nvme.NQN, namespaces, epoch=epoch)], [], dma=[path or socket_path()],
        dma_engine=engine, limits=Limits(**limits),
    )  # fmt: skip
    server.start()
    return server


def url(server: Server, **options: Any) -> str:
    """Return the URL of namespace 1."""
    return path_url(server.dma_paths[0], **options)


def path_url(path: str, **options: Any) -> str:
    """Return the URL of namespace 1 of the target at *path*."""
    options = {"hostnqn": nvme.HOST, **options}
    return f"dma://{path}/{nvme.NQN}?" + "&".join(f"{k}={v}" for k, v in options.items())


class TargetProcess(nvme.TargetProcess):
    """``hyades serve --listen dma:...`` of one file in a process that a test kills."""

    def __init__(self, file: Path, *flags: str) -> None:
        super().__init__(file, *flags, host="dma")
        self.socket = socket_path()
        self.address = ("dma", self.socket)  # type: ignore[assignment]

    def _came_up(self, where: str) -> None:
        assert where == f"dma:{self.socket}"

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        Path(self.socket).unlink(missing_ok=True)


class Pair:
    """Both ends of a queue on plain memory, and a worker that copies for the target."""

    def __init__(self, *, depth: int = 4, buffers: int = 2, buffer: int = 4096) -> None:
        self.shape = Shape(depth + 1, buffers, buffer)
        self.memory = QueueMemory(memoryview(bytearray(self.shape.nbytes)), self.shape)
        self.arena = memoryview(bytearray(1 << 16))
        self.host = DmaHostQueue(depth, self.memory, buffer, self.locate)
        self.target = DmaTargetQueue(self.memory, buffer, depth=depth)
        self.target.configure(1, depth + 1, flow_control=True)
        self.work: deque[Any] = deque()
        self.pushed: dict[int, tuple[int, int]] = {}  # packet: bytes, chunks

    def locate(self, memory: memoryview) -> int | None:
        """Return where *memory* lies in the arena."""
        at = address_of(memory) - address_of(self.arena)
        return at if 0 <= at < len(self.arena) else None

    def turn(self) -> None:
        """Let the target take what is there, and do its work as far as there are buffers."""
        self.target.advance(1.0)
        while (chunk := self.target.next_chunk()) is not None:
            chunk.into[:] = chunk.source
            self.target.moved(chunk)
        self.work.extend(self.target.take_output())
        while self.work and self._do(self.work[0]):
            self.work.popleft()

    def _do(self, work: Any) -> bool:
        if isinstance(work, Answer):
            self.target.post(work)
        elif isinstance(work, Pull):
            work.into[:] = self.arena[work.at : work.at + work.into.nbytes]
            self.target.pulled(work.cid)
        elif work.at is not None:
            self.arena[work.at : work.at + work.payload.nbytes] = work.payload
        else:
            return self._push(work)
        return True

    def _push(self, work: Any) -> bool:
        whole = work.payload.nbytes
        done, chunk = self.pushed.get(work.packet, (0, 0))
        while done < whole:
            nbytes = min(self.target.chunk_bytes, whole - done)
            into = self.target.reserve(nbytes)
            if into is None:
                self.pushed[work.packet] = (done, chunk)
                return False
            into[:] = work.payload[done : done + nbytes]
            self.target.fill(work.packet, whole, chunk, nbytes)
            done, chunk = done + nbytes, chunk + 1
        return True
