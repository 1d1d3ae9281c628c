"""What executor.py needs of the two ends of a connection, whatever it runs over.

NVMe/TCP: hyades.common.nvme.target and output.py; NVMe/RDMA: hyades.common.nvme.rdma_target and
rdma_output.py; shared memory: hyades.common.nvme.dma_target and dma_output.py.
"""

from collections.abc import Iterable
from typing import Any, Protocol

from hyades.common.nvme.commands import Command
from hyades.common.nvme.target import Payload
from hyades.target_side.namespaces import FileRange
from hyades.target_side.pool import Buffer


class CommandQueue(Protocol):
    """Commands in, answers out: see hyades.common.nvme.target."""

    commands: list[tuple[Command, memoryview | None, bool]]
    arrived: list[tuple[int, bool]]
    superseded: list[int]
    depth: int
    digests: int

    @property
    def outstanding(self) -> int: ...

    def configure(self, qid: int, depth: int, *, flow_control: bool) -> None: ...
    def request_data(self, cid: int, into: memoryview) -> None: ...
    def send_data(
        self, cid: int, payload: Payload | memoryview, *, success: bool, answer: bool = True
    ) -> None: ...
    def complete(self, cid: int, status: int = 0, result: int = 0) -> None: ...
    def take_output(self) -> list[Any]: ...


class Sender(Protocol):
    """Takes what a CommandQueue has to send: see output.py."""

    nbytes: int

    @property
    def memory_only(self) -> bool: ...

    def push(self, segments: Iterable[Any]) -> None: ...
    def hold(self, buffer: Buffer) -> None: ...
    def sent(self) -> list[FileRange]: ...
    def send(self) -> bool: ...
