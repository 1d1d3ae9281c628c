"""The URL of a remote namespace and what it says:

``nvme+tcp://host:port[+host2:port2...]/subnqn?ns=1&queues=2&digest=header,data``.

Options: ns (1), queues (2) a path of depth (32) commands each, digest (none; header, data or
both), max_transfer (1MiB, and never more than the controller takes), tls=FILE (a pre-shared key),
tls_identity (1; 0 for SPDK and other targets of older rules), hostnqn, hostid; in seconds: kato
(10, keep-alive), timeout (30, without an answer), reconnect_delay (0.1, doubled up to 5),
ctrl_loss_timeout (60, without any path), connect_timeout (0, for a target that
is not there yet when it is opened); trust_cache (0; see nvme_flushes.py).
nvme+rdma:// has all but digest, tls and tls_identity.
"""

import re
import socket
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.nvme.commands import check_nqn
from hyades.common.nvme.layout import ALL_NAMESPACES
from hyades.common.nvme.psk import Psk, load_psk
from hyades.common.units import MIB
from hyades.proxy.urls import Url

SCHEME = "nvme+tcp"
SCHEMES = (SCHEME, "nvme+rdma", "dma")
CTRL_LOSS_TIMEOUT = 60.0
DEFAULT_PORT = 4420
MAX_QUEUES, MAX_DEPTH = 64, 1023
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%a-z]+\]|[^\[\]:/+\s]+)(?::(\d+))?")
_NVME = Path("/etc/nvme")
_MACHINE_ID = Path("/etc/machine-id")
_NAMESPACE = uuid.UUID("3f0f7a53-7a5e-5d1b-9c75-6f6be6bb43a9")  # of the host ids made here


@dataclass(frozen=True, slots=True)
class Address:
    """Where a target listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Options:
    """What a URL asks for; times in seconds, sizes in bytes."""

    addresses: tuple[Address, ...]
    subnqn: str
    hostnqn: str
    hostid: bytes
    nsid: int = 1
    queues: int = 2
    depth: int = 32
    header_digest: bool = False
    data_digest: bool = False
    max_transfer: int = MIB
    kato: float = 10.0
    timeout: float = 30.0
    reconnect_delay: float = 0.1
    ctrl_loss_timeout: float = CTRL_LOSS_TIMEOUT
    connect_timeout: float = 0.0
    psk: Psk | None = None
    psk_identity: int = 1  # version
    trust_cache: bool = False
    transport: str = "tcp"
    view: bytes = field(default=b"", repr=False)  # a request for one of nsid's volume; no URL's

    @property
    def scheme(self) -> str:
        """Return nvme+tcp or nvme+rdma."""
        return f"nvme+{self.transport}"

    def place(self, address: Address) -> str:
        """Return the name of the namespace on one path, for messages."""
        what = "view of ns" if self.view else "ns"
        return f"{self.scheme}://{address}/{self.subnqn} {what} {self.nsid}"


def with_ctrl_loss_timeout(text: str, seconds: float) -> str:
    """Return the URL *text*, with this ctrl_loss_timeout unless it says one or is not of here."""
    return _with(text, "ctrl_loss_timeout", seconds)


def with_patience(text: str) -> str:
    """Return the URL *text* for a namespace that was in reach a moment ago.

    Opening it waits for a target that comes back as long as a lost one is waited for.
    """
    url = Url(text)
    seconds = url.text("ctrl_loss_timeout", str(CTRL_LOSS_TIMEOUT)) if _is_here(url) else 0
    return _with(text, "connect_timeout", seconds)


def _with(text: str, key: str, value: object) -> str:
    url = Url(text)
    if not _is_here(url) or url.take_all(key):
        return text
    return f"{text}{'&' if '?' in text else '?'}{key}={value}"


def _is_here(url: Url) -> bool:
    return url.scheme.removeprefix("faulty+") in SCHEMES


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Return the addresses of ``host:port+host2:port2``; UsageError."""
    found = []
    for part in text.split("+"):
        match = _ADDRESS.fullmatch(part)
        port = int(match[2] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 1 << 16:
            raise UsageError(
                f"{part!r} is no address: write host:port, 192.0.2.1:4420 or [2001:db8::1]:4420"
            )
        found.append(Address(match[1].strip("[]"), port))
    if len(set(found)) < len(found):
        raise UsageError(f"{text}: the same address twice")
    return tuple(found)


def parse(url: Url, transport: str = "tcp") -> Options:
    """Return what *url* says; UsageError where it cannot be meant.

    Digests and TLS belong to TCP.
    """
    where, slash, subnqn = url.path.partition("/")
    if not where or not slash or not subnqn:
        raise UsageError(f"{url}: write nvme+{transport}://host:port/subsystem-nqn?ns=1")
    return read_options(url, transport, parse_addresses(where), subnqn)


def read_options(url: Url, transport: str, addresses: tuple[Address, ...], subnqn: str) -> Options:
    """Return what the options of *url* say, of which none may be left then."""
    tcp = transport == "tcp"
    digests = _digests(url) if tcp else set()
    max_transfer = url.size("max_transfer", MIB)
    if max_transfer < BLOCK:
        raise UsageError(f"{url}: max_transfer is at least {BLOCK}")
    tls = url.text("tls", "") if tcp else ""
    hostnqn, hostid = _host(url)
    options = Options(
        addresses=addresses,
        subnqn=check_nqn(subnqn),
        hostnqn=hostnqn,
        hostid=hostid,
        nsid=_bounded(url, "ns", 1, ALL_NAMESPACES - 1),
        queues=_bounded(url, "queues", 2, MAX_QUEUES),
        depth=_bounded(url, "depth", 32, MAX_DEPTH),
        header_digest="header" in digests,
        data_digest="data" in digests,
        max_transfer=max_transfer // BLOCK * BLOCK,
        kato=url.seconds("kato", 10.0, least=0.1),
        timeout=url.seconds("timeout", 30.0, least=0.01),
        reconnect_delay=url.seconds("reconnect_delay", 0.1, least=0.001),
        ctrl_loss_timeout=url.seconds("ctrl_loss_timeout", CTRL_LOSS_TIMEOUT),
        connect_timeout=url.seconds("connect_timeout", 0.0),
        psk=load_psk(tls) if tls else None,
        psk_identity=_bounded(url, "tls_identity", 1, 1, least=0),
        trust_cache=url.flag("trust_cache", False),
        transport=transport,
    )
    url.refuse_unused()
    return options


def _digests(url: Url) -> set[str]:
    text = url.text("digest", "none")
    found = set(text.split(",")) - {"none", ""}
    if found - {"header", "data"}:
        raise UsageError(f"{url}: digest is header, data, header,data or none, not {text!r}")
    return found


def _bounded(url: Url, key: str, default: int, most: int, *, least: int = 1) -> int:
    value = url.integer(key, default, least=least)
    if value > most:
        raise UsageError(f"{url}: {key} is at most {most}")
    return value


def own_name() -> str:
    """Return the NQN by which targets know this machine where a URL says no other."""
    return _line(_NVME / "hostnqn") or f"nqn.2014-08.org.nvmexpress:uuid:{_machine()}"


def _host(url: Url) -> tuple[str, bytes]:
    hostnqn, hostid = url.text("hostnqn", ""), url.text("hostid", "")
    name = hostnqn or own_name()
    number = hostid or _line(_NVME / "hostid") or str(_machine())
    try:
        return check_nqn(name), uuid.UUID(number).bytes
    except ValueError:
        raise UsageError(f"{url}: the host id is a UUID, not {number!r}") from None


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _machine() -> uuid.UUID:
    """Return a UUID of this machine, the same each time."""
    text = _line(_MACHINE_ID) or f"{socket.gethostname()}/{uuid.getnode():x}"
    return uuid.uuid5(_NAMESPACE, text)
