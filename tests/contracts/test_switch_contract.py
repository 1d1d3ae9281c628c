"""The contract suite against a device whose transport can be replaced."""

from tests.contracts.transport import TransportContract

from hyades.common.layout import BLOCK
from hyades.proxy.transports.faulty import Fault, FaultPlan, FaultyTransport
from hyades.proxy.transports.file import FileTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.proxy.transports.switch import SwitchableDevice


class TestSwitch(TransportContract):
    def make(self, folder, nblocks):
        return SwitchableDevice(MemTransport(MemoryStore(nblocks)))


class TestSwitchReplacedBefore(TransportContract):
    """By a transport that takes fewer at a time than the first."""

    def make(self, folder, nblocks):
        device = SwitchableDevice(MemTransport(MemoryStore(nblocks)))
        device.replace(MemTransport(MemoryStore(nblocks), max_inflight=3))
        return device


class TestSwitchLate(TransportContract):
    """Over a transport whose completions come late, in another order."""

    def make(self, folder, nblocks):
        plan = FaultPlan(delay=0.002, reorder=True, accept=3, seed=5)
        return SwitchableDevice(FaultyTransport(MemTransport(MemoryStore(nblocks)), plan))


class TestSwitchFile(TransportContract):
    def make(self, folder, nblocks):
        path = folder / "device"
        path.write_bytes(bytes(nblocks * BLOCK))
        return SwitchableDevice(FileTransport(path, engine="threads", depth=16))


class TestSwitchThatFallsBack(TransportContract):
    """The third request loses the transport; another one to the same blocks takes its place."""

    def make(self, folder, nblocks):
        store = MemoryStore(nblocks)
        plan = FaultPlan([Fault("lost", at=3)])
        lossy = FaultyTransport(MemTransport(store), plan)
        return SwitchableDevice(lossy, fallback=lambda _: MemTransport(store, max_inflight=20))

    # Counters have the request that was lost, too: tests/unit/test_switch.py looks at them.
    test_invalid_requests = None
    test_counters = None
    test_close_reports_what_was_accepted = None  # nothing falls back after close: it is lost
