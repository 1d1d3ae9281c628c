"""One command that is out, and the connection that it came by."""

from typing import Protocol

from hyades.common.nvme.commands import Command
from hyades.target_side.controller import Controller, Link
from hyades.target_side.execution import Extent
from hyades.target_side.pool import Buffer
from hyades.target_side.ports import CommandQueue, Sender
from hyades.target_side.service import Service


class Owner(Link, Protocol):
    """The connection whose commands these are; what its methods do, connection.py says."""

    peer: str
    tls: bool
    draining: bool
    service: Service

    @property
    def queue(self) -> CommandQueue: ...
    @property
    def output(self) -> Sender: ...

    def wake(self) -> None: ...
    def speaks_for(self, hostnqn: str, subnqn: str) -> bool: ...
    def joined(self, controller: Controller) -> None: ...
    def refused(self, reason: str) -> None: ...


class Work:
    """One command that is out."""

    __slots__ = ("begin", "buffer", "command", "data", "extent", "intact")

    def __init__(
        self, command: Command, data: memoryview | None, intact: bool, begin: float
    ) -> None:
        self.command, self.data, self.intact, self.begin = command, data, intact, begin
        self.extent: Extent | None = None
        self.buffer: Buffer | None = None
