"""A running SPDK application, told through its JSON-RPC socket by SPDK's own Python client.

Rules:
1. Floor: SPDK 24.01.  Files become bdevs through io_uring where the application was built with it
   (rpc_get_methods says so), else through libaio; a bdev of a file has blocks of 4096 bytes, one
   of a device the device's own.
2. Order: transport, bdevs, subsystem, namespaces, hosts, listeners: hosts get in at the end.
3. SPDK has no call that removes a transport; it stays, idle.
4. What the application answers is a plain tree of JSON; what is missing in it is a PeerError.
"""

import dataclasses
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hyades.common.errors import BackendMissing, PeerError, UsageError
from hyades.common.layout import BLOCK
from hyades.target_side.provision.steps import Export, Record, Step, family_of, identifier

SOCKET = Path("/var/tmp/spdk.sock")
FLOOR = (24, 1)
_TIMEOUT = 30.0
_FIX = (
    "start SPDK's target (build/bin/nvmf_tgt -r SOCKET) and name its socket with --spdk-socket,"
    " or use --backend embedded"
)
_REFUSED = "Got JSON-RPC error response"  # in the client's message; else the connection broke
_ENGINES = ("uring", "aio")  # in order of preference


class Rpc(Protocol):
    """Calls methods of the application; UsageError for what it refuses."""

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any: ...
    def close(self) -> None: ...


class Client:
    """The client of the PyPI package ``spdk``, with this project's errors."""

    def __init__(self, socket: Path = SOCKET) -> None:
        self.socket = socket
        try:
            from spdk.rpc.client import JSONRPCClient, JSONRPCException
        except ImportError as error:
            raise BackendMissing(
                f"the Python package spdk is not installed ({error}): pip install -c"
                " constraints.txt -e '.[fabrics]'"
            ) from error
        self._refused: type[Exception] = JSONRPCException
        try:
            self._client: Any = JSONRPCClient(str(socket), timeout=_TIMEOUT)
        except JSONRPCException as error:
            why = str(error.message).splitlines()[-1]
            raise BackendMissing(
                f"no SPDK application answers at {socket} ({why}): {_FIX}"
            ) from error

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """Return the result of *method*; UsageError names it and what SPDK says."""
        if self._client is None:
            raise self._gone("the connection is closed")
        try:
            return self._client.call(method, dict(params or {}))
        except self._refused as error:
            if _REFUSED in str(error):
                raise UsageError(f"SPDK refuses {method}: {_reason(str(error))}") from error
            raise self._gone(f"{method}: {_reason(str(error))}") from error
        except (OSError, ValueError) as error:
            raise self._gone(f"{method}: {error}") from error

    def _gone(self, why: str) -> BackendMissing:
        # Not used again even after a mere timeout: the late answer would be taken for the next.
        self.close()
        return BackendMissing(f"the SPDK application at {self.socket} is gone ({why}): {_FIX}")

    def close(self) -> None:
        """Close the socket."""
        if self._client is not None:
            client, self._client = self._client, None
            try:
                client.close()
            except OSError:  # the application closed it first
                client.sock.close()


@dataclass(frozen=True)
class _SpdkStep:
    rpc: Rpc = field(compare=False, repr=False)
    kind: ClassVar[str]

    @property
    def alters(self) -> Step | None:
        """Nothing: SPDK's objects are made whole."""
        return None

    def record(self) -> Record:
        """Return the fields, without the client."""
        fields = (f.name for f in dataclasses.fields(self) if f.name != "rpc")
        return {"kind": self.kind, **{name: getattr(self, name) for name in fields}}


@dataclass(frozen=True)
class Transport(_SpdkStep):
    """NVMe/TCP; it stays at the end."""

    kind = "transport"

    def describe(self) -> str:
        """Return the call."""
        return "nvmf_create_transport TCP"

    def done(self) -> bool:
        """Return whether the application has the transport."""
        found = self.rpc.call("nvmf_get_transports")
        return any(str(_get(item, "trtype")).upper() == "TCP" for item in found)

    def apply(self) -> None:
        """Make it."""
        self.rpc.call("nvmf_create_transport", {"trtype": "TCP"})

    def undo(self) -> None:
        """Nothing: see above."""


@dataclass(frozen=True)
class Bdev(_SpdkStep):
    """A file or device that SPDK does I/O on; *block_size* 0 is the device's own."""

    engine: str  # uring or aio
    name: str
    filename: str
    block_size: int
    kind = "bdev"

    def describe(self) -> str:
        """Return the call."""
        return f"bdev_{self.engine}_create {self.name} {self.filename}"

    def done(self) -> bool:
        """Return whether there is a bdev of this name; UsageError where it is of another file."""
        found = _bdev(self.rpc, self.name)
        if found is None:
            return False
        specific = found.get("driver_specific", {})
        names = {part.get("filename") for part in specific.values() if isinstance(part, dict)}
        if names - {None, self.filename}:
            raise UsageError(
                f"SPDK's bdev {self.name} is of {names}, not of {self.filename}: delete it or"
                " choose another --nqn"
            )
        return True

    def apply(self) -> None:
        """Make it."""
        params: dict[str, Any] = {"name": self.name, "filename": self.filename}
        if self.block_size:
            params["block_size"] = self.block_size
        self.rpc.call(f"bdev_{self.engine}_create", params)

    def undo(self) -> None:
        """Delete it."""
        if _bdev(self.rpc, self.name) is not None:
            self.rpc.call(f"bdev_{self.engine}_delete", {"name": self.name})


@dataclass(frozen=True)
class Subsystem(_SpdkStep):
    """An NVM subsystem without namespaces."""

    nqn: str
    any_host: bool
    count: int  # namespaces that it will have
    kind = "subsystem"

    def describe(self) -> str:
        """Return the call."""
        who = "any host" if self.any_host else "named hosts"
        return f"nvmf_create_subsystem {self.nqn} for {who}"

    def done(self) -> bool:
        """Return whether the subsystem is there; UsageError where it lets in others."""
        found = _subsystem(self.rpc, self.nqn)
        if found is not None and bool(_get(found, "allow_any_host")) != self.any_host:
            raise UsageError(
                f"SPDK has a subsystem {self.nqn} that lets in"
                f" {'named hosts only' if self.any_host else 'any host'}: choose another --nqn"
            )
        return found is not None

    def apply(self) -> None:
        """Make it."""
        self.rpc.call(
            "nvmf_create_subsystem",
            {
                "nqn": self.nqn,
                "allow_any_host": self.any_host,
                "serial_number": f"HYADES{identifier(self.nqn, 0).hex()[:14]}",
                "model_number": "Hyades volume",
                "max_namespaces": max(self.count, 32),
            },
        )

    def undo(self) -> None:
        """Delete it with all that is in it."""
        if _subsystem(self.rpc, self.nqn) is not None:
            self.rpc.call("nvmf_delete_subsystem", {"nqn": self.nqn})


@dataclass(frozen=True)
class Namespace(_SpdkStep):
    """A bdev under a namespace id."""

    nqn: str
    nsid: int
    bdev: str
    kind = "namespace"

    def describe(self) -> str:
        """Return the call."""
        return f"nvmf_subsystem_add_ns {self.nqn} {self.nsid} {self.bdev}"

    def done(self) -> bool:
        """Return whether the id is this bdev; UsageError where it is another."""
        found = self._bdev()
        if found not in (None, self.bdev):
            raise UsageError(
                f"namespace {self.nsid} of SPDK's {self.nqn} is {found}: choose another --nqn"
            )
        return found is not None

    def apply(self) -> None:
        """Add it."""
        name = uuid.UUID(bytes=identifier(self.nqn, self.nsid), version=4)
        namespace = {"nsid": self.nsid, "bdev_name": self.bdev, "uuid": str(name)}
        self.rpc.call("nvmf_subsystem_add_ns", {"nqn": self.nqn, "namespace": namespace})

    def undo(self) -> None:
        """Remove it."""
        if self._bdev() == self.bdev:
            self.rpc.call("nvmf_subsystem_remove_ns", {"nqn": self.nqn, "nsid": self.nsid})

    def _bdev(self) -> str | None:
        for item in (_subsystem(self.rpc, self.nqn) or {}).get("namespaces", []):
            if _get(item, "nsid") == self.nsid:
                return str(item.get("bdev_name", ""))
        return None


@dataclass(frozen=True)
class Host(_SpdkStep):
    """A host that may connect."""

    nqn: str
    host: str
    kind = "host"

    def describe(self) -> str:
        """Return the call."""
        return f"nvmf_subsystem_add_host {self.nqn} {self.host}"

    def done(self) -> bool:
        """Return whether the host may connect."""
        hosts = (_subsystem(self.rpc, self.nqn) or {}).get("hosts", [])
        return any(_get(item, "nqn") == self.host for item in hosts)

    def apply(self) -> None:
        """Let it in."""
        self.rpc.call("nvmf_subsystem_add_host", {"nqn": self.nqn, "host": self.host})

    def undo(self) -> None:
        """Let it in no more."""
        if self.done():
            self.rpc.call("nvmf_subsystem_remove_host", {"nqn": self.nqn, "host": self.host})


@dataclass(frozen=True)
class Listener(_SpdkStep):
    """An address at which the subsystem is to be had."""

    nqn: str
    host: str
    port: int
    kind = "listener"

    @property
    def address(self) -> dict[str, str]:
        """The address in SPDK's words."""
        family = {"ipv4": "IPv4", "ipv6": "IPv6"}[family_of(self.host)]
        return {
            "trtype": "TCP",
            "adrfam": family,
            "traddr": self.host,
            "trsvcid": str(self.port),
        }

    def describe(self) -> str:
        """Return the call."""
        return f"nvmf_subsystem_add_listener {self.nqn} tcp {self.host} {self.port}"

    def done(self) -> bool:
        """Return whether the subsystem is to be had there."""
        found = (_subsystem(self.rpc, self.nqn) or {}).get("listen_addresses", [])
        wanted = {key: value.lower() for key, value in self.address.items()}
        return any(
            all(str(item.get(key, "")).lower() == value for key, value in wanted.items())
            for item in found
        )

    def apply(self) -> None:
        """Listen."""
        self._call("nvmf_subsystem_add_listener")

    def undo(self) -> None:
        """Listen no more."""
        if self.done():
            self._call("nvmf_subsystem_remove_listener")

    def _call(self, method: str) -> None:
        self.rpc.call(method, {"nqn": self.nqn, "listen_address": self.address})


_KINDS: dict[str, Callable[..., Step]] = {
    step.kind: step for step in (Transport, Bdev, Subsystem, Namespace, Host, Listener)
}


class Spdk:
    """The backend ``spdk``."""

    name = "spdk"

    def __init__(self, rpc: Rpc) -> None:
        """Refuse an application that is older than `FLOOR`."""
        self.rpc = rpc
        found = _get(rpc.call("spdk_get_version"), "fields")
        version = int(_get(found, "major")), int(_get(found, "minor"))
        if version < FLOOR:
            raise BackendMissing(
                f"SPDK {version[0]}.{version[1]:02d} is too old: 24.01 or newer is needed"
            )

    def restore(self, record: Record) -> Step:
        """Return the step that *record* is of."""
        fields = dict(record)
        return _KINDS[fields.pop("kind")](self.rpc, **fields)

    def plan(self, export: Export) -> list[Step]:
        """Return the steps of *export*."""
        rpc, nqn, engine = self.rpc, export.nqn, self._engine()
        bdevs = []
        for nsid, path in enumerate(export.namespaces, 1):
            size = 0 if path.is_block_device() else BLOCK
            name = f"hyades-{identifier(nqn, nsid).hex()[:12]}"
            bdevs.append(Bdev(rpc, engine, name, str(path.resolve()), size))
        subsystem = Subsystem(rpc, nqn, not export.allow_hosts, len(export.namespaces))
        namespaces = [Namespace(rpc, nqn, i, bdev.name) for i, bdev in enumerate(bdevs, 1)]
        hosts = [Host(rpc, nqn, host) for host in export.allow_hosts]
        listeners = [Listener(rpc, nqn, host, port) for host, port in export.listen]
        return [Transport(rpc), *bdevs, subsystem, *namespaces, *hosts, *listeners]

    def _engine(self) -> str:
        methods = self.rpc.call("rpc_get_methods")
        for engine in _ENGINES:
            if f"bdev_{engine}_create" in methods:
                return engine
        raise BackendMissing(
            "this SPDK application has neither bdev_uring_create nor bdev_aio_create: build it"
            " with libaio, or ./configure --with-uring"
        )


def _bdev(rpc: Rpc, name: str) -> dict[str, Any] | None:
    # Without a name: asking for one that is not there is an error, like any other refusal.
    return next((item for item in rpc.call("bdev_get_bdevs") if _get(item, "name") == name), None)


def _subsystem(rpc: Rpc, nqn: str) -> dict[str, Any] | None:
    found = rpc.call("nvmf_get_subsystems")
    return next((item for item in found if _get(item, "nqn") == nqn), None)


def _get(item: Any, key: str) -> Any:
    try:
        return item[key]
    except (KeyError, TypeError, IndexError):
        raise PeerError(f"SPDK's answer has no {key!r}: {str(item)[:200]}") from None


def _reason(text: str) -> str:
    """Return the message in what the client makes of a refusal."""
    lines = [line.strip().strip(",") for line in text.splitlines()]
    said = [line.partition(":")[2].strip(' "') for line in lines if line.startswith('"message"')]
    return said[-1] if said else " ".join(lines)[:300]
