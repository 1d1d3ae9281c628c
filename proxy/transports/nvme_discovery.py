"""What a target offers: the log of its discovery controller."""

import dataclasses

from hyades.common.errors import HyadesError
from hyades.common.nvme import bringup
from hyades.common.nvme.identify import DiscoveryEntry
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.proxy.transports.nvme_session import MakeSession, Session
from hyades.proxy.transports.nvme_talk import Waker
from hyades.proxy.transports.nvme_url import Address, Options

_NVM_SUBSYSTEM = 2
_TYPES = {"tcp": 3, "rdma": 1, "dma": 254}


def discover(
    options: Options, address: Address, make: MakeSession = Session
) -> list[DiscoveryEntry]:
    """Return what the discovery controller at *address* tells the host of *options*.

    UsageError or PeerError where there is none, or where it refuses.
    """
    waker = Waker()
    try:
        asking = dataclasses.replace(options, subnqn=DISCOVERY_NQN)
        session = make(asking, address, waker, lambda: False)
        return session.converse(bringup.read_discovery_log())
    finally:
        waker.close()


def offers(options: Options, address: Address, make: MakeSession = Session) -> str:
    """Return which subsystems *address* offers over the same transport, for messages."""
    try:
        found = discover(options, address, make)
    except HyadesError as error:
        return f"what {address} offers is not known ({error})"
    wanted = (_TYPES[options.transport], _NVM_SUBSYSTEM)
    names = sorted({e.subnqn for e in found if (e.transport, e.subtype) == wanted})
    return f"{address} offers {', '.join(names) or 'nothing'} to {options.hostnqn}"
