"""One reliable queue pair: work in, completions out, through pyverbs.

Rules:
1. States: made -connect-> usable -fail or close-> over.  One thread at a time uses an endpoint.
2. Sends are posted in order, many by one call; which are signalled is SendRing's matter.  What is
   attached to a send comes back from `take` when that send is retired, and not before.
3. Receives are slots of `receive_bytes` each; `take` gives the slot of a message, and
   `post_receive` gives it back.  A message that finds no slot is sent again by the peer (RNR).
4. Any completion with an error is the end of the connection: `take` raises Broken, which says what
   the status means.  What was posted and not retired is what
   `close` returns.
5. Waiting: `arm`, then look once more with `take`, then wait for `fd`.
pyverbs frees neither an SGE nor a work request by itself, and cannot unlink work requests.  So
there is one fixed chain of them: a batch of k takes the last k, and posting copies them.
"""

import ctypes
import mmap
import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme.rdma_sends import SendRing
from hyades.common.rdma.cm import Attributes, Identifier
from hyades.common.rdma.device import Device, Region
from hyades.common.rdma.library import failures, verbs

_CHAIN = 16  # work requests that one call posts
_SIGNAL_EVERY = 8
_POLL = 32
_RECEIVE = 1 << 40  # of a work request id: a receive
_RNR_TIMER = 12  # 0.64 ms before the peer sends again what found no receive
_RNR_RETRIES = 6  # 7 would be for ever
_DESCRIPTORS = Path("/proc/self/fd")
_COMPLETIONS = "anon_inode:[infinibandevent]"
_making = threading.Lock()


class Status(IntEnum):
    """Statuses of work completions that say whose fault it was (enum ibv_wc_status)."""

    SUCCESS = 0
    LOCAL_LENGTH = 1
    LOCAL_OPERATION = 2
    LOCAL_PROTECTION = 4
    FLUSHED = 5
    REMOTE_INVALID_REQUEST = 9
    REMOTE_ACCESS = 10
    REMOTE_OPERATION = 11
    RETRIES_EXCEEDED = 12
    RNR_RETRIES_EXCEEDED = 13


_MEANINGS = {
    Status.LOCAL_LENGTH: "a message was longer than its receive",
    Status.LOCAL_OPERATION: "this queue pair could not do what it was to do",
    Status.LOCAL_PROTECTION: "memory of this side is not registered",
    Status.FLUSHED: "the connection ended",
    Status.REMOTE_INVALID_REQUEST: "the peer did not accept the request",
    Status.REMOTE_ACCESS: "the peer's memory may not be accessed with that key, address and length",
    Status.REMOTE_OPERATION: "the peer failed",
    Status.RETRIES_EXCEEDED: "the peer does not answer",
    Status.RNR_RETRIES_EXCEEDED: "the peer had no receive for a message",
}


class Broken(PeerError):  # noqa: N818 - the name states the fact
    """The connection is over; *status* of the completion that said so, -1: none did."""

    def __init__(self, text: str, status: int = -1) -> None:
        super().__init__(text)
        self.status = status


class Verb(IntEnum):
    """What a send does."""

    SEND = 0
    SEND_AND_INVALIDATE = 1
    WRITE = 2
    READ = 3


@dataclass(slots=True)
class Send:
    """One work request: local bytes, and where they go; *attached* comes back when it is done."""

    verb: Verb
    local: int  # as the device calls it
    nbytes: int
    lkey: int
    remote: int = 0
    key: int = 0  # the peer's: of its memory, or to be invalidated
    attached: Any = None
    signal: bool = False


class Endpoint:
    """See the module."""

    def __init__(self, device: Device, *, sends: int, receives: int, receive_bytes: int) -> None:
        """Make a queue pair with room for *sends* and *receives*; UsageError where it has none."""
        self.device = device
        self.ring = SendRing(sends, min(_SIGNAL_EVERY, sends))
        self.receive_bytes = receive_bytes
        self.closed = False
        self._attached: list[Any] = [None] * sends
        self._ready: list[Any] = []
        self._armed = False
        self._messages = memoryview(mmap.mmap(-1, max(receives * receive_bytes, 4096)))
        self._region: Region = device.register(self._messages, remote=False)
        enums = verbs().enums
        self._opcodes = (
            int(enums.IBV_WR_SEND), int(enums.IBV_WR_SEND_WITH_INV), int(enums.IBV_WR_RDMA_WRITE),
            int(enums.IBV_WR_RDMA_READ),
        )  # fmt: skip
        self._signaled = int(enums.IBV_SEND_SIGNALED)
        self._parts: list[Any] = []  # of pyverbs, in the order in which they are made
        try:
            self._make(sends, receives)
        except BaseException as error:
            self._free()
            if isinstance(error, failures()):
                raise UsageError(
                    f"RDMA device {device.name}: no queue pair with {sends} sends and {receives}"
                    f" receives ({error}): use fewer queues or a smaller depth"
                ) from error
            raise
        self._receives = [self._receive_request(slot) for slot in range(receives)]
        self._chain = _make_chain(min(_CHAIN, sends))

    def _make(self, sends: int, receives: int) -> None:
        library, device = verbs(), self.device
        self._channel, self.fd = _make_channel(device)
        self._parts.append(self._channel)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._queue = library.cq.CQ(device.context, sends + receives, None, self._channel, 0)
        self._parts.append(self._queue)
        room = library.qp.QPCap(max_send_wr=sends, max_recv_wr=receives)
        self._pair = library.qp.QP(
            device.domain,
            library.qp.QPInitAttr(
                qp_type=library.enums.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=room,
                sq_sig_all=0,
            ),
        )  # fmt: skip
        self._parts.append(self._pair)

    def _free(self) -> None:
        while self._parts:  # the queue pair first: from then on the device touches no memory for it
            self._parts.pop().close()
        self.device.forget(self._region)

    @property
    def number(self) -> int:
        """What the peer calls this queue pair."""
        return int(self._pair.qp_num)

    def connect(self, identifier: Identifier, *, serve: int, have: int) -> None:
        """Go through the states to where it can send; every receive is posted on the way.

        The peer may have *serve* reads out at once, this side *have*.
        """
        enums = verbs().enums
        access = int(
            enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE
            | enums.IBV_ACCESS_REMOTE_READ
        )  # fmt: skip
        for state in (enums.IBV_QPS_INIT, enums.IBV_QPS_RTR, enums.IBV_QPS_RTS):
            raw, mask = identifier.attributes(int(state))
            raw.min_rnr_timer, raw.rnr_retry = _RNR_TIMER, _RNR_RETRIES
            raw.max_dest_rd_atomic, raw.max_rd_atomic = serve, have
            if state == enums.IBV_QPS_INIT:
                raw.qp_access_flags = access
                mask |= int(enums.IBV_QP_ACCESS_FLAGS)
            try:
                self._pair.modify(_translate(raw, mask), mask)
            except failures() as error:
                raise Broken(f"the queue pair cannot be connected: {error}") from error
            if state == enums.IBV_QPS_INIT:
                for slot in range(len(self._receives)):
                    self.post_receive(slot)

    def post(self, sends: Sequence[Send]) -> None:
        """Post *sends*, at most `ring.room`; Broken where the queue pair takes none any more."""
        if self.closed:
            raise Broken("the connection is closed")
        length = len(self._chain)
        for at in range(0, len(sends), length):
            batch = sends[at : at + length]
            first = length - len(batch)
            for (element, request), send in zip(self._chain[first:], batch, strict=True):
                self._fill(element, request, send)
            try:
                self._pair.post_send(self._chain[first][1])
            except failures() as error:
                raise Broken(f"nothing can be sent: {error}") from error

    def post_receive(self, slot: int) -> None:
        """Let a message come into *slot*."""
        try:
            self._pair.post_recv(self._receives[slot])
        except failures() as error:
            raise Broken(f"no receive can be posted: {error}") from error

    def message(self, slot: int, nbytes: int) -> memoryview:
        """Return the message in *slot*."""
        at = slot * self.receive_bytes
        return self._messages[at : at + nbytes]

    def arm(self) -> bool:
        """Ask for `fd` to become readable; return whether something is there already."""
        if not self._armed:
            self._queue.req_notify()
            self._armed = True
        self._look()
        return bool(self._ready)

    def take(self, on_message: Callable[[int, int], None], on_done: Callable[[Any], None]) -> bool:
        """Call back for each message (slot, bytes) and each retired attachment; Broken.

        Return whether there was something.
        """
        if self.closed:
            raise Broken("the connection is closed")
        if self._armed and self._poll.poll(0):
            self._channel.get_cq_event(self._queue)
            self._queue.ack_events(1)
            self._armed = False
        self._look()
        found, self._ready = self._ready, []
        for work in found:
            identity, status = work.wr_id, work.status
            if status:
                raise Broken(_describe(status), status)
            if identity & _RECEIVE:
                on_message(identity & ~_RECEIVE, work.byte_len)
                continue
            for serial in self.ring.retire(identity):
                slot = self.ring.slot(serial)
                attached, self._attached[slot] = self._attached[slot], None
                if attached is not None:
                    on_done(attached)
        return bool(found)

    def fail(self) -> None:
        """End it: what the peer still does with this queue pair fails."""
        if not self.closed:
            with suppress(*failures()):  # it may have failed already
                library = verbs()
                attributes = library.qp.QPAttr(qp_state=library.enums.IBV_QPS_ERR)
                self._pair.modify(attributes, int(library.enums.IBV_QP_STATE))

    def close(self) -> list[Any]:
        """Free it; return what was attached to sends that were not retired."""
        if self.closed:
            return []
        self.closed = True
        self._free()
        for element, _ in self._chain:
            element.close()
        for request in self._receives:
            request.close()
        left = [attached for attached in self._attached if attached is not None]
        self._attached, self._ready = [], []
        return left

    # -- the parts

    def _look(self) -> None:
        while True:
            count, found = self._queue.poll(_POLL)
            self._ready += found
            if count < _POLL:
                return

    def _fill(self, element: Any, request: Any, send: Send) -> None:
        serial, signal = self.ring.post(signal=send.signal)
        self._attached[self.ring.slot(serial)] = send.attached
        element.addr, element.length, element.lkey = send.local, send.nbytes, send.lkey
        request.wr_id = serial
        request.opcode = self._opcodes[send.verb]
        request.send_flags = self._signaled if signal else 0
        if send.verb == Verb.SEND_AND_INVALIDATE:
            request.imm_data = send.key  # a union with invalidate_rkey
        elif send.verb != Verb.SEND:
            request.set_wr_rdma(send.key, send.remote)

    def _receive_request(self, slot: int) -> Any:
        library = verbs()
        at = self._region.base + slot * self.receive_bytes
        element = library.wr.SGE(at, self.receive_bytes, self._region.lkey)
        request = library.wr.RecvWR(wr_id=_RECEIVE | slot, num_sge=1, sg=[element])
        element.close()
        return request


def _make_chain(length: int) -> list[tuple[Any, Any]]:
    library = verbs()
    chain: list[tuple[Any, Any]] = []
    for _ in range(length):
        element = library.wr.SGE(0, 0, 0)
        request = library.wr.SendWR(num_sge=1, sg=[element])
        request.close()  # its copy of the element
        request.sg_list = element
        if chain:
            chain[-1][1].next_wr = request
        chain.append((element, request))
    return chain


def _make_channel(device: Device) -> tuple[Any, int]:
    """Return a completion channel and its descriptor, which pyverbs does not tell.

    It is the descriptor that is new: nothing else of this process makes such ones (pyverbs is used
    here only, and a device makes one when it is opened, under its owner's lock).
    """
    with _making:
        before = _completion_descriptors()
        channel = verbs().cq.CompChannel(device.context)
        new = _completion_descriptors() - before
    if len(new) != 1:
        raise PeerError(f"RDMA device {device.name}: {len(new)} descriptors for one channel")
    fd = new.pop()
    os.set_blocking(fd, False)
    return channel, fd


def _completion_descriptors() -> set[int]:
    found = set()
    for path in _DESCRIPTORS.iterdir():
        with suppress(OSError):  # closed meanwhile
            if str(path.readlink()) == _COMPLETIONS:
                found.add(int(path.name))
    return found


def _translate(raw: Attributes, mask: int) -> Any:
    """Return *raw* as pyverbs has it."""
    library = verbs()
    enums = library.enums
    found = library.qp.QPAttr(qp_state=raw.qp_state, port_num=raw.port_num)
    found.pkey_index = raw.pkey_index
    found.qp_access_flags = raw.qp_access_flags
    found.path_mtu, found.dest_qp_num = raw.path_mtu, raw.dest_qp_num
    found.rq_psn, found.sq_psn = raw.rq_psn, raw.sq_psn
    found.max_rd_atomic, found.max_dest_rd_atomic = raw.max_rd_atomic, raw.max_dest_rd_atomic
    found.min_rnr_timer, found.timeout = raw.min_rnr_timer, raw.timeout
    found.retry_cnt, found.rnr_retry = raw.retry_cnt, raw.rnr_retry
    if mask & int(enums.IBV_QP_AV):
        handle, route = raw.ah_attr, raw.ah_attr.grh
        words = bytes(route.dgid).hex()
        gid = ":".join(words[i : i + 4] for i in range(0, 32, 4))
        way = library.addr.GlobalRoute(
            dgid=library.addr.GID(gid), sgid_index=route.sgid_index, hop_limit=route.hop_limit,
            flow_label=route.flow_label, traffic_class=route.traffic_class,
        )  # fmt: skip
        found.ah_attr = library.addr.AHAttr(
            dlid=handle.dlid, sl=handle.sl, src_path_bits=handle.src_path_bits,
            static_rate=handle.static_rate, is_global=handle.is_global, port_num=handle.port_num,
            gr=way,
        )  # fmt: skip
    return found


def _describe(status: int) -> str:
    known = status in Status._value2member_map_
    name = Status(status).name.lower().replace("_", " ") if known else "work completion"
    meaning = _MEANINGS.get(Status(status), "") if known else ""
    return f"RDMA {name} (status {status}){f': {meaning}' if meaning else ''}"


assert ctypes.sizeof(ctypes.c_void_p) == 8
