"""What `hyades serve` was told, by flags and a file, and the target that follows from it.

Settings of the TOML file have the names of the flags; flags win.  Whatever is wrong is a UsageError
that names the flag or key.
"""

import ipaddress
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from hyades import __version__
from hyades.common.addresses import resolve
from hyades.common.errors import UsageError
from hyades.common.nvme.commands import check_nqn
from hyades.common.nvme.identify import ADDRESS_BYTES
from hyades.common.nvme.psk import Keyring, load_psk
from hyades.common.units import parse_size
from hyades.deploy.serving_views import build_views, open_views
from hyades.target_side.events import Sink
from hyades.target_side.faulty import Faults, parse_fault
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace, Namespace
from hyades.target_side.server import Address, Server, cache_epoch
from hyades.target_side.subsystem import Subsystem

DEFAULT_PORT = 4420
_MOST_CONFIG = 1 << 20  # characters
_RDMA, _DMA = "rdma:", "dma:"  # before an address, before the path of a socket
_EMBEDDED_ONLY = (
    "create", "read_only", "block_size", "tls_psk", "advertise", "metrics", "fault", "log",
    "max_transfer", "in_capsule", "max_data_pdu", "buffers", "connections", "queues", "depth",
    "handshake", "stall", "grace", "view", "views", "view_host", "stage_memory", "stage_threads",
    "stage_cores", "dma_engine", "dma_buffer",
)  # fmt: skip
Backend = Literal["embedded", "spdk", "kernel"]


class Settings(msgspec.Struct, rename="kebab", forbid_unknown_fields=True):
    """Flags of `hyades serve`; sizes as text."""

    namespace: list[str] = []
    nqn: str = ""
    listen: list[str] = msgspec.field(default_factory=lambda: ["127.0.0.1:4420"])
    create: str = ""
    read_only: bool = False
    block_size: Literal[512, 4096] = 4096
    ready_file: str = ""
    allow_host: list[str] = []
    allow_any_host: bool = False
    tls_psk: list[str] = []
    advertise: str = ""
    metrics: str = ""
    fault: list[str] = []
    view: list[str] = []
    views: int = 8
    view_host: list[str] = []
    stage_memory: str = "1GiB"
    stage_threads: int = 1
    stage_cores: str = ""
    log: Literal["text", "json"] = "text"
    backend: Backend = "embedded"
    spdk_socket: str = ""
    max_transfer: str = "1MiB"
    in_capsule: str = "8KiB"
    max_data_pdu: str = "1MiB"
    buffers: str = "256MiB"
    dma_engine: str = "memcpy"
    dma_buffer: str = "1MiB"
    connections: int = 1024
    queues: int = 16
    depth: int = 128
    handshake: float = 10.0
    stall: float = 30.0
    grace: float = 10.0


def read_settings(path: Path | None, flags: Mapping[str, Any]) -> Settings:
    """Return the settings of the file at *path*, if any, with *flags* that were given on top."""
    known = {name.replace("-", "_"): name for name in Settings.__struct_encode_fields__}
    found: dict[str, Any] = {}
    if path is not None:
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(_MOST_CONFIG + 1)
            if len(text) > _MOST_CONFIG:
                raise UsageError(f"{path} is too long for a file of settings")
            found = tomllib.loads(text)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path}: {error}") from error
        _convert(found, str(path))
    given = {known[name]: value for name, value in flags.items() if value not in (None, ())}
    given = {key: list(v) if isinstance(v, tuple) else v for key, v in given.items()}
    settings = _convert({**found, **given}, "hyades serve")
    if not settings.namespace:
        raise UsageError("nothing to serve: --namespace FILE (or DEVICE, or mem:64MiB)")
    if not settings.listen:
        raise UsageError("nowhere to listen: --listen HOST:PORT, or leave the key out")
    if len(settings.advertise) > ADDRESS_BYTES or not settings.advertise.isascii():
        raise UsageError(
            f"--advertise: an address has at most {ADDRESS_BYTES} ASCII characters, not"
            f" {settings.advertise!r}"
        )
    if not settings.nqn:
        raise UsageError("a subsystem has a name: --nqn nqn.2026-01.org.example:features")
    check_nqn(settings.nqn)
    for host in settings.allow_host:
        check_nqn(host)
    return settings


def _convert(found: Mapping[str, Any], where: str) -> Settings:
    try:
        return msgspec.convert(found, Settings)
    except msgspec.ValidationError as error:
        unknown = set(found) - set(Settings.__struct_encode_fields__)
        if unknown:
            names = ", ".join(Settings.__struct_encode_fields__)
            raise UsageError(
                f"{where}: no setting {sorted(unknown)[0]!r}; there are {names}"
            ) from None
        text = str(error).replace(" - at `$.", ": key `").replace("`$.", "`")
        raise UsageError(f"{where}: {text}") from error


def build_server(settings: Settings, sink: Sink) -> Server:
    """Return the embedded target, not started; its namespaces are open and locked."""
    dma = dma_paths(settings.listen)
    tcp, rdma = split_addresses(settings.listen)
    _check_exposure(settings, tcp + rdma)
    if (rdma or dma) and settings.tls_psk:
        what = "RDMA" if rdma else "shared memory"
        raise UsageError(
            f"--tls-psk is for TCP: {what} has no TLS, and would be open to whoever has no key"
        )
    limits = _limits(settings)
    keys = Keyring([load_psk(path) for path in settings.tls_psk]) if settings.tls_psk else None
    if keys is not None:
        from hyades.common.nvme.tls import probe

        probe()
    faults = Faults([parse_fault(text) for text in settings.fault]) if settings.fault else None
    views = build_views(
        sink,
        memory=settings.stage_memory,
        threads=settings.stage_threads,
        cores=settings.stage_cores,
        count=settings.views,
        hosts=settings.view_host,
    )
    namespaces = open_namespaces(settings)
    epoch = cache_epoch(list(namespaces.values()))
    if faults is not None:
        namespaces = {nsid: faults.wrap(namespace) for nsid, namespace in namespaces.items()}
    hosts = frozenset(settings.allow_host) if settings.allow_host else None
    try:
        namespaces = open_views(views, settings.view, namespaces)
        subsystem = Subsystem(settings.nqn, namespaces, hosts, epoch=epoch)
        return Server(
            [subsystem],
            tcp,
            limits=limits,
            sink=sink,
            keys=keys,
            advertise=settings.advertise,
            firmware=__version__,
            faults=faults,
            rdma=rdma,
            dma=dma,
            dma_engine=settings.dma_engine,
            views=views,
        )
    except BaseException:
        for namespace in reversed(namespaces.values()):
            namespace.close()
        raise


def check_external(settings: Settings) -> None:
    """Raise UsageError for settings that only the embedded target has."""
    tcp, rdma = split_addresses(settings.listen)
    if rdma or dma_paths(settings.listen):
        raise UsageError(
            f"--listen {'rdma' if rdma else 'dma'}: is for --backend embedded: let the"
            f" {settings.backend} target listen there itself"
        )
    _check_exposure(settings, tcp)
    defaults, mine = Settings(), msgspec.structs.asdict(settings)
    for name in _EMBEDDED_ONLY:
        if mine[name] != getattr(defaults, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for --backend embedded: leave it out, or set it in"
                f" the {settings.backend} target itself"
            )
    for text in settings.namespace:
        mine_only = text.startswith("mem:") or text.endswith(",ro") or ",block=" in text
        if mine_only and not Path(text).exists():
            raise UsageError(
                f"--namespace {text}: memory, ro and block= are for --backend embedded; the"
                f" {settings.backend} target serves whole files and devices"
            )


def open_namespaces(settings: Settings) -> dict[int, Namespace]:
    """Open what is to be served, by namespace id from 1 on."""
    opened: dict[int, Namespace] = {}
    _create(settings)  # wrong is wrong, also where no file has to be made
    try:
        for nsid, text in enumerate(settings.namespace, 1):
            opened[nsid] = open_namespace(text, settings)
    except BaseException:
        for namespace in opened.values():
            namespace.close()
        raise
    return opened


def open_namespace(text: str, settings: Settings) -> Namespace:
    """Open ``PATH`` or ``mem:SIZE``, with options: ``,ro`` and ``,block=512``."""
    name, block, read_only = text, int(settings.block_size), settings.read_only
    while True:
        rest, comma, option = name.rpartition(",")
        if comma and option == "ro":
            name, read_only = rest, True
        elif comma and option.startswith("block="):
            if option not in ("block=512", "block=4096"):
                raise UsageError(f"--namespace {text}: block=512 or block=4096, not {option!r}")
            name, block = rest, int(option.removeprefix("block="))
        else:
            break
    if name.startswith("mem:"):
        size = parse_size(name.removeprefix("mem:"))
        return MemoryNamespace(size, block_bytes=block, read_only=read_only)
    return FileNamespace(name, block_bytes=block, read_only=read_only, create=_create(settings))


def _create(settings: Settings) -> int:
    return parse_size(settings.create) if settings.create else 0


def split_addresses(texts: Sequence[str]) -> tuple[list[Address], list[Address]]:
    """Return where to listen over TCP, and (``rdma:host:port``) over RDMA."""
    rdma = [text for text in texts if text.startswith(_RDMA)]
    tcp = [parse_address(text) for text in texts if not text.startswith((_RDMA, _DMA))]
    return tcp, [parse_address(text.removeprefix(_RDMA)) for text in rdma]


def dma_paths(texts: Sequence[str]) -> list[str]:
    """Return the sockets of hosts that share memory (``dma:/run/hyades.sock``)."""
    found = [text.removeprefix(_DMA) for text in texts if text.startswith(_DMA)]
    for path in found:
        if not path.startswith("/"):
            raise UsageError(f"--listen dma:{path}: write the whole path, dma:/run/hyades.sock")
    return found


def parse_address(text: str) -> Address:
    """Return host and port of ``host:port``, ``[v6]:port``, ``host`` or ``:port``."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address: write 127.0.0.1:4420, [::1]:4420 or host:0")
    return host, int(port)


def _check_exposure(settings: Settings, listen: list[Address]) -> None:
    if settings.allow_host or settings.tls_psk or settings.allow_any_host:
        return
    for host, port in listen:
        if not _is_loopback(host):
            raise UsageError(
                f"--listen {host}:{port} can be reached from other machines: say which hosts may"
                " connect with --allow-host NQN or --tls-psk FILE, or --allow-any-host if the"
                " network is to be trusted"
            )


def _is_loopback(host: str) -> bool:
    try:
        found = resolve(host, None)
    except OSError as error:
        raise UsageError(f"--listen {host}: {error.strerror}") from error
    return all(ipaddress.ip_address(str(info[4][0])).is_loopback for info in found)


def _limits(settings: Settings) -> Limits:
    return Limits(
        connections=settings.connections,
        queues=settings.queues,
        depth=settings.depth,
        max_transfer=parse_size(settings.max_transfer),
        in_capsule=parse_size(settings.in_capsule),
        max_data_pdu=parse_size(settings.max_data_pdu),
        buffers=parse_size(settings.buffers),
        dma_buffer=parse_size(settings.dma_buffer),
        handshake=settings.handshake,
        stall=settings.stall,
        grace=settings.grace,
    )
