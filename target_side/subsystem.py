"""A subsystem: namespaces under one name, and the hosts that may use them."""

from collections.abc import Mapping
from hashlib import sha256
from uuid import NAMESPACE_OID, UUID, uuid5

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import check_nqn
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.target_side.namespaces import Namespace


class Subsystem:
    """Namespaces under one name; *hosts* may connect, any where it is None."""

    def __init__(
        self, nqn: str, namespaces: Mapping[int, Namespace], hosts: frozenset[str] | None = None,
        *, epoch: bytes = bytes(16),
    ) -> None:  # fmt: skip
        """Serve *namespaces* by id; *epoch* changes when completed writes may have been lost."""
        if check_nqn(nqn) == DISCOVERY_NQN:
            raise UsageError(f"{nqn} is the name of discovery itself: choose another --nqn")
        self.nqn, self.hosts, self.epoch = nqn, hosts, epoch
        self.namespaces = dict(sorted(namespaces.items()))
        # The same after a restart and on every target that serves this name: hosts join paths by it
        self.serial = sha256(nqn.encode()).hexdigest()[:20]

    def admits(self, hostnqn: str) -> bool:
        """Return whether this host may connect."""
        return self.hosts is None or hostnqn in self.hosts

    def uuid(self, nsid: int, identity: str = "") -> UUID:
        """Return the identity of a namespace, the same after a restart; see Namespace.identity."""
        return uuid5(NAMESPACE_OID, f"{self.nqn}/{nsid}" + (f"/{identity}" if identity else ""))
