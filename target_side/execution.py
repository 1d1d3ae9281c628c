"""What an I/O command means: which bytes of which namespace, or why it is refused.

Source: NVM Express NVM Command Set Specification 1.0, section 3.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hyades.common.nvme.commands import Command
from hyades.common.nvme.layout import Opcode, Sgl
from hyades.common.nvme.status import DNR, StatusCode
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import Namespace

_FORCE_UNIT_ACCESS = 1 << 30  # CDW12
_SEGMENTS = (0x2, 0x3)  # SGL types that have descriptors elsewhere


@dataclass(slots=True)
class Extent:
    """Bytes of a namespace."""

    namespace: Namespace
    offset: int
    nbytes: int


def locate(command: Command, namespaces: Mapping[int, Namespace], limits: Limits) -> Extent | int:
    """Return the extent of a read, write or write zeroes, or the status code of its refusal."""
    namespace = namespaces.get(command.nsid)
    if namespace is None:
        return StatusCode.INVALID_NAMESPACE | DNR
    if command.opcode != Opcode.READ and namespace.read_only:
        return StatusCode.WRITE_PROTECTED | DNR
    if command.slba + command.blocks > namespace.blocks:
        return StatusCode.LBA_OUT_OF_RANGE | DNR
    nbytes = command.blocks * namespace.block_bytes
    if command.opcode != Opcode.WRITE_ZEROES:
        if nbytes > limits.max_transfer:
            return StatusCode.INVALID_FIELD | DNR
        if problem := _check_sgl(command, nbytes):
            return problem
    return Extent(namespace, command.slba * namespace.block_bytes, nbytes)


def capsule_data(command: Command, data: memoryview | None) -> memoryview | None:
    """Return the data that came along with a write, None where its SGL points outside of it."""
    if data is None or command.sgl_at + command.sgl_bytes > len(data):
        return None
    return data[command.sgl_at : command.sgl_at + command.sgl_bytes]


def forces_unit_access(command: Command) -> bool:
    """Return whether a write is to be durable when it completes."""
    return bool(command.dwords[2] & _FORCE_UNIT_ACCESS)


def _check_sgl(command: Command, nbytes: int) -> int:
    if command.sgl >> 4 in _SEGMENTS:
        return StatusCode.INVALID_SGL_SEGMENT | DNR
    writes = command.opcode == Opcode.WRITE
    if command.sgl != Sgl.TRANSPORT and not (writes and command.sgl == Sgl.IN_CAPSULE):
        return StatusCode.SGL_TYPE_INVALID | DNR
    if command.sgl_bytes != nbytes:
        return StatusCode.SGL_LENGTH_INVALID | DNR
    return 0
