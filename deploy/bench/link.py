"""Two network namespaces joined by a cable of a chosen speed, so that a link can be compared.

The target's side and the host's side are namespaces of this process's making; programs enter them
through `ip netns exec`.  Each end sends through a queueing discipline that shapes (tbf), or just
counts (pfifo).  Rules:
1. What is counted is what the disciplines sent: Ethernet frames with their headers, also where the
   kernel passes several frames on as one; frames that are sent again count again.
2. Everything is removed when the block ends, however it ends.  A run that was killed leaves its
   namespaces; their names hold its process id, and the next run removes them.
3. Needs root, ip and tc; a delay needs the kernel's netem, and where that is not, `note` says so.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.units import KIB

TARGET, HOST = "10.78.0.1", "10.78.0.2"
_PREFIX = "hyades-link-"
_ENDS = ("cable0", "cable1")
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_LEAST_BURST = 128 * KIB  # two of the largest that TCP hands to a device at once


@dataclass(frozen=True, slots=True)
class Speed:
    """What a link is limited to, each way; rate None: nothing, delay in milliseconds."""

    rate: float | None = None  # bits a second
    delay_ms: float = 0.0
    text: str = "unshaped"

    @property
    def burst(self) -> int:
        """Bytes that may leave at once: what a millisecond carries."""
        return max(_LEAST_BURST, int((self.rate or 0.0) / 8e3))


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes on the wire, by direction."""

    to_host: int
    to_target: int

    def __sub__(self, other: "Carried") -> "Carried":
        return Carried(self.to_host - other.to_host, self.to_target - other.to_target)


def parse_speed(text: str | None, delay_ms: float = 0.0) -> Speed:
    """Return the speed that "10gbit", "500mbit" or None means; UsageError."""
    if delay_ms < 0:
        raise UsageError(f"a delay of {delay_ms} ms: 0 or more")
    if text is None:
        return Speed(None, delay_ms, f"unshaped, {delay_ms:g} ms" if delay_ms else "unshaped")
    match = _RATE.fullmatch(text)
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1e5 <= rate <= 1e12:
        raise UsageError(f"--link {text}: a rate such as 100mbit or 10gbit")
    return Speed(rate, delay_ms, f"{text}, {delay_ms:g} ms" if delay_ms else text)


def probe() -> str | None:
    """Return why no link can be made here and what helps, or None."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root: run as root"
    return None


class Link:
    """A made link; `note` says what of the speed could not be had."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.target, self.host = (f"{_PREFIX}{side}-{os.getpid()}" for side in ("t", "h"))
        self.note = ""

    def at_target(self, command: Sequence[str]) -> list[str]:
        """Return *command* as it runs on the target's side."""
        return ["ip", "netns", "exec", self.target, *command]

    def at_host(self, command: Sequence[str]) -> list[str]:
        """Return *command* as it runs on the compute host's side."""
        return ["ip", "netns", "exec", self.host, *command]

    def carried(self) -> Carried:
        """Return what each way has carried so far."""
        return Carried(_sent(self.target, _ENDS[0]), _sent(self.host, _ENDS[1]))

    def make(self) -> None:
        """Make namespaces, cable and shaping; BackendMissing says what this machine refused."""
        try:
            for name in (self.target, self.host):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "link", "add", _ENDS[0], "netns", self.target, "type", "veth",
                 "peer", "name", _ENDS[1], "netns", self.host)  # fmt: skip
            ends = ((self.target, _ENDS[0], TARGET), (self.host, _ENDS[1], HOST))
            for name, device, address in ends:
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", device)
                _run("ip", "-n", name, "link", "set", device, "up")
                self._shape(name, device)
        except (subprocess.CalledProcessError, OSError) as error:
            said = getattr(error, "stderr", "") or str(error)
            raise BackendMissing(f"no link between namespaces here: {said.strip()}") from error

    def _shape(self, name: str, device: str) -> None:
        speed = self.speed
        root = ["root", "handle", "1:"]
        if speed.rate is None:
            _run("tc", "-n", name, "qdisc", "add", "dev", device, *root, "pfifo", "limit", "10000")
        else:
            _run("tc", "-n", name, "qdisc", "add", "dev", device, *root, "tbf", "rate",
                 f"{speed.rate:.0f}bit", "burst", str(speed.burst), "latency", "50ms")  # fmt: skip
        if not speed.delay_ms:
            return
        where = ["parent", "1:1"] if speed.rate is not None else root
        verb = "add" if speed.rate is not None else "replace"
        try:
            _run("tc", "-n", name, "qdisc", verb, "dev", device, *where, "netem", "delay",
                 f"{speed.delay_ms:g}ms")  # fmt: skip
        except subprocess.CalledProcessError as error:
            said = error.stderr.strip().splitlines()
            self.note = f"no delay: this kernel has no netem ({said[-1] if said else error})"

    def remove(self) -> None:
        """Take everything away; the cable goes with its ends."""
        for name in (self.target, self.host):
            with contextlib.suppress(subprocess.CalledProcessError, OSError):
                _run("ip", "netns", "del", name)


@contextlib.contextmanager
def joined(speed: Speed) -> Iterator[Link]:
    """Make a link for a block; BackendMissing where this machine cannot."""
    reason = probe()
    if reason is not None:
        raise BackendMissing(f"--link {speed.text}: {reason}")
    remove_stale()
    link = Link(speed)
    try:
        link.make()
        yield link
    finally:
        link.remove()


def remove_stale() -> None:
    """Remove the namespaces of runs that ended without doing so."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        pid = path.name.rpartition("-")[2]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", path.name)


def _sent(namespace: str, device: str) -> int:
    text = _run("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device)
    return next(int(found["bytes"]) for found in json.loads(text) if found.get("root"))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
