"""What a target offers: the log of its discovery controller."""

import dataclasses

from hyades.common.errors import HyadesError
from hyades.common.nvme import bringup
from hyades.common.nvme.identify import DiscoveryEntry
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.proxy.transports.nvme_session import Session, Waker
from hyades.proxy.transports.nvme_url import Address, Options

_NVM_SUBSYSTEM, _TCP = 2, 3


def discover(options: Options, address: Address) -> list[DiscoveryEntry]:
    """Return what the discovery controller at *address* tells the host of *options*.

    UsageError or PeerError where there is none, or where it refuses.
    """
    waker = Waker()
    try:
        asking = dataclasses.replace(options, subnqn=DISCOVERY_NQN)
        session = Session(asking, address, waker, lambda: False)
        return session.converse(bringup.read_discovery_log())
    finally:
        waker.close()


def offers(options: Options, address: Address) -> str:
    """Return which subsystems *address* offers over TCP, for messages."""
    try:
        found = discover(options, address)
    except HyadesError as error:
        return f"what {address} offers is not known ({error})"
    names = sorted({e.subnqn for e in found if (e.transport, e.subtype) == (_TCP, _NVM_SUBSYSTEM)})
    return f"{address} offers {', '.join(names) or 'nothing'} to {options.hostnqn}"
