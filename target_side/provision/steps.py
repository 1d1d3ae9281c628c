"""What an export through another target consists of, and how it is made and undone.

Rules:
1. A backend turns an `Export` into `Step`s in order.  A step is one object of the target: a folder,
   a value, a bdev.  `done` says whether the target has it; steps that are done are not applied.
2. The journal, a file, lists a step before it is applied and until it is undone.  So it always
   covers what this run made, also after a kill; a lock on it keeps a second run for the same NQN
   out.  What is there and not in the journal belongs to somebody else: it stays, and a value in it
   is never changed (`alters` names the object that a step would change).
3. A run that finds a killed run's journal goes on with what is there if that is exactly the export;
   else it undoes all of it and starts afresh.
4. Undoing goes backwards, tolerates what is gone, and goes on after an error; what could not be
   undone stays in the journal and is named at the end.
"""

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hyades.common.errors import HyadesError, UsageError
from hyades.common.layout import BLOCK

Record = dict[str, Any]
_NQN = re.compile(r"nqn\.\d{4}-\d{2}\.[a-z0-9-]+(\.[a-z0-9-]+)*(:[^\s/]+)?")
_MAX_NQN = 223


@dataclass(frozen=True, slots=True)
class Export:
    """One subsystem: its namespaces (1, 2, ...), addresses and hosts."""

    nqn: str
    namespaces: tuple[Path, ...]  # regular files or block devices
    listen: tuple[tuple[str, int], ...]  # addresses of this machine, and ports
    allow_hosts: tuple[str, ...] = ()  # host NQNs; none: any host

    def check(self) -> None:
        """Raise UsageError for what no target would take."""
        if not _NQN.fullmatch(self.nqn) or len(self.nqn) > _MAX_NQN:
            raise UsageError(
                f"{self.nqn!r} is no NQN: write nqn.2024-01.org.example:volume (year-month of a"
                f" domain, reversed), at most {_MAX_NQN} characters"
            )
        for host in self.allow_hosts:
            if not host.startswith("nqn.") or len(host) > _MAX_NQN or set(host) & set(" /\n\0"):
                raise UsageError(f"{host!r} is no host NQN: see /etc/nvme/hostnqn on that host")
        if not self.namespaces or not self.listen:
            raise UsageError("an export has a namespace and an address: --namespace, --listen")
        for twice in (_repeated(self.listen), _repeated(p.resolve() for p in self.namespaces)):
            if twice is not None:
                raise UsageError(f"{twice} is given twice")
        for host, port in self.listen:
            family_of(host)
            if not 0 < port < 65536:
                raise UsageError(f"{host}:{port}: another target needs a port from 1 to 65535")
        for path in self.namespaces:
            check_backing(path)


class Step(Protocol):
    """One object of a target; equal steps make the same object."""

    @property
    def alters(self) -> "Step | None":
        """The step whose object this one changes, where it changes one."""
        ...

    def describe(self) -> str:
        """Return one line for people."""
        ...

    def record(self) -> Record:
        """Return what `Backend.restore` makes the step from."""
        ...

    def done(self) -> bool: ...
    def apply(self) -> None: ...
    def undo(self) -> None:
        """Remove the object; nothing where it is gone."""
        ...


class Backend(Protocol):
    """A target that is told what to export."""

    name: str

    def plan(self, export: Export) -> list[Step]: ...
    def restore(self, record: Record) -> Step: ...


class Journal:
    """The steps of one export that this run, or a killed one before it, has made."""

    def __init__(self, path: Path) -> None:
        """Lock the journal at *path*; UsageError while another run holds it."""
        self.path = path
        _make_private(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise UsageError(
                f"another hyades serve exports this NQN (it holds {path}): stop it first"
            ) from error
        self.records: list[Record] = []
        self._end = self._replay()

    def add(self, record: Record) -> None:
        """List *record*."""
        self._append(b"+", record)
        self.records.append(record)

    def remove(self, record: Record) -> None:
        """Take *record* off the list."""
        self._append(b"-", record)
        self.records.remove(record)

    def close(self) -> None:
        """Release the lock; the file stays, empty where nothing is listed."""
        if self._fd >= 0:
            if not self.records:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1

    def _replay(self) -> int:
        """Read what was added and removed; return where the next line goes."""
        raw = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        end = raw.rfind(b"\n") + 1  # what follows was cut by a kill
        try:
            for line in raw[:end].splitlines():
                record = msgspec.json.decode(line[1:], type=Record)
                (self.records.append if line[:1] == b"+" else self.records.remove)(record)
        except (msgspec.DecodeError, ValueError) as error:
            self.close()
            raise UsageError(
                f"{self.path} is damaged ({error}): see what is still exported, then remove it"
            ) from error
        return end

    def _append(self, sign: bytes, record: Record) -> None:
        line = sign + msgspec.json.encode(record) + b"\n"
        self._end += os.pwrite(self._fd, line, self._end)


class Provision:
    """One export through one backend."""

    def __init__(self, backend: Backend, export: Export, journal: Journal) -> None:
        export.check()
        self._backend, self._export, self._journal = backend, export, journal

    def start(self) -> list[str]:
        """Make what is missing; return a line for each step that was applied.

        Where a step fails, all that was made is undone before the error is raised.
        """
        left = [self._backend.restore(record) for record in self._journal.records]
        steps = self._backend.plan(self._export)
        if left and not (set(left) <= set(steps) and all(step.done() for step in steps)):
            self._undo(left)
            steps = self._backend.plan(self._export)
        applied = []
        try:
            for step in steps:
                if not step.done():
                    self._refuse_foreign(step)
                    if step.record() not in self._journal.records:
                        self._journal.add(step.record())
                    step.apply()
                    applied.append(step.describe())
        except BaseException as error:
            try:  # nothing half-made stays
                self.stop()
            except HyadesError as second:
                error.add_note(str(second))
                if isinstance(error, HyadesError):
                    raise type(error)(f"{error}; {second}") from error
            raise
        return applied

    def stop(self) -> None:
        """Undo what this run and the killed ones before it made; UsageError names what stays."""
        self._undo([self._backend.restore(record) for record in self._journal.records])

    def _undo(self, steps: list[Step]) -> None:
        problems = []
        for step in reversed(steps):
            try:
                step.undo()
            except HyadesError as error:
                problems.append(str(error))
                continue
            self._journal.remove(step.record())
        if problems:
            raise UsageError(
                f"not all of the export could be undone: {'; '.join(dict.fromkeys(problems))}."
                f" hyades serve with the same --nqn tries again ({self._journal.path})"
            )

    def _refuse_foreign(self, step: Step) -> None:
        owner = step.alters
        if owner is not None and owner.record() not in self._journal.records:
            raise UsageError(
                f"cannot {step.describe()}: hyades did not make that object, and it differs from"
                " what is asked for; choose another --nqn or --listen, or remove it"
            )


def describe_steps(backend: Backend, export: Export) -> list[str]:
    """Return what `Provision.start` would do, in order; nothing is changed."""
    export.check()
    lines = []
    for step in backend.plan(export):
        lines.append(f"{step.describe()}{' (is there already)' if step.done() else ''}")
    return lines


def journal_path(backend: str, nqn: str, folder: Path | None = None) -> Path:
    """Return where the journal of *nqn* lies: a folder that does not outlive the next boot."""
    if folder is None:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        if os.geteuid() == 0 and Path("/run").is_dir():
            folder = Path("/run/hyades")
        elif runtime:
            folder = Path(runtime) / "hyades"
        else:
            folder = Path(tempfile.gettempdir()) / f"hyades-{os.geteuid()}"
    return folder / f"{backend}-{hashlib.sha256(nqn.encode()).hexdigest()[:16]}.steps"


def family_of(host: str) -> str:
    """Return ``ipv4`` or ``ipv6``; UsageError unless *host* is an IP address."""
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        raise UsageError(f"{host}: another target listens on an IP address, not a name") from None


def check_backing(path: Path) -> None:
    """Raise UsageError unless *path* is a file or block device of at least a block."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise UsageError(f"cannot export {path}: it is neither a file nor a block device")
        size = _size_of(path)
    except OSError as error:
        raise UsageError(f"cannot export {path}: {error.strerror}") from error
    if size < BLOCK:
        raise UsageError(f"cannot export {path}: it has {size} bytes, not even one block")


def identifier(nqn: str, nsid: int) -> bytes:
    """Return 16 bytes that name namespace *nsid* of *nqn*, the same in every run."""
    return hashlib.sha256(f"{nqn}\n{nsid}".encode()).digest()[:16]


@contextlib.contextmanager
def translated(doing: str, hints: Callable[[OSError], str] = lambda _: "") -> Iterator[None]:
    """Turn an OSError of *doing* into a UsageError with the fix that *hints* returns."""
    try:
        yield
    except OSError as error:
        hint = hints(error)
        raise UsageError(
            f"cannot {doing}: {error.strerror or error}{f' ({hint})' if hint else ''}"
        ) from error


def _size_of(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def _make_private(folder: Path) -> None:
    with translated(f"make {folder}"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{folder} belongs to somebody else: remove it")


def _repeated(items: Iterable[Any]) -> Any:
    seen: set[Any] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None
