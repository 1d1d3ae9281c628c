"""A virtual machine that runs Debian's own kernel on the host's root file system.

The guest sees the host's files read-only under a tmpfs, so every program and the virtual
environment are there; what the guest writes is gone with it, except below `folder`, which both
sides share.  What the host changes elsewhere while the guest runs, the guest may not see.
Commands go to agent.py over a virtio port, so one boot serves many tests.

The guest reaches the host's loopback at HOST; the host reaches a port of the guest through
`forward`.  KVM is used only where a test boot came up with it.
"""

import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.vm.agent import PORT
from tests.vm.kernel import ROOT, Kernel

HOST = "10.0.2.2"
BOOT_SECONDS = 60.0
# Before a command: it is killed when the thread that started it ends, also where that is killed.
# Machines are started by the main thread, which lives as long as the process.
TIED = ["setpriv", "--pdeathsig", "KILL"]
_KERNEL_ARGUMENTS = (
    "console=ttyS0 panic=-1 quiet loglevel=4 mitigations=off nowatchdog no_timer_check "
    "tsc=reliable random.trust_cpu=on net.ifnames=0"
)


class GuestLost(Exception):  # noqa: N818 - the name states the fact
    """The guest did not come up, ended, or does not answer."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command gave."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the output parsed."""
        return json.loads(self.out)


class Job:
    """A command that runs in the guest."""

    def __init__(self, machine: "Machine", number: int, script: str, timeout: float) -> None:
        self.machine, self.number, self.script, self.timeout = machine, number, script, timeout

    def running(self) -> bool:
        """Say whether no answer has come yet."""
        return not self.machine.answered(self.number)

    def wait(self, *, check: bool = True) -> Output:
        """Return what the command gave; AssertionError where it failed and *check* is set."""
        output = self.machine.answer(self.number, self.timeout + 30)
        if check and output.code != 0:
            raise AssertionError(
                f"{self.script}\nended with {output.code}\n{output.out}{output.err}"
            )
        return output

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the command and what it started."""
        self.machine.send(id=self.number, signal=number)


class Machine:
    """One running guest."""

    def __init__(
        self, kernel: Kernel, *, accelerator: str = "tcg", cpus: int = 1, memory: int = 2048,
        boot_seconds: float = BOOT_SECONDS,
    ) -> None:  # fmt: skip
        self.kernel = kernel
        self.accelerator = accelerator
        self.folder = Path(tempfile.mkdtemp(prefix="hyades-vm."))
        self.log = self.folder / "console.log"
        self._numbers = itertools.count(1)
        self._answers: dict[int, Output] = {}
        self._rest = b""
        shutil.copy(Path(__file__).with_name("agent.py"), self.folder)
        (self.folder / "drive.img").touch()
        with (self.folder / "drive.img").open("r+b") as drive:
            drive.truncate(64 << 20)
        self._closing = ExitStack()
        self._closing.callback(shutil.rmtree, self.folder, ignore_errors=True)
        with (self.folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(cpus, memory), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._closing.callback(self._end)
        try:
            self._port = self._connect("agent")
            self._closing.callback(self._port.close)
            self.answer(0, boot_seconds)
            self._monitor = Monitor(self._connect("monitor"))
            self._closing.callback(self._monitor.close)
        except BaseException:
            self.close()
            raise

    def _command(self, cpus: int, memory: int) -> list[str]:
        arguments = (
            f"{_KERNEL_ARGUMENTS} vm_release={self.kernel.release} vm_folder={self.folder} "
            f"vm_python={sys.executable}"
        )
        tcg = self.accelerator == "tcg"
        command = [*TIED, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot"]
        command += ["-display", "none", "-machine", "q35", "-smp", str(cpus), "-m", str(memory)]
        command += ["-accel", "tcg,thread=multi" if tcg else self.accelerator]
        command += ["-cpu", "max" if tcg else "host", "-kernel", str(self.kernel.vmlinux())]
        command += ["-initrd", str(self.kernel.initrd()), "-append", arguments]
        command += ["-serial", f"file:{self.log}", "-device", "virtio-serial-pci"]
        command += ["-chardev", f"socket,id=agent,path={self.folder}/agent,server=on,wait=off"]
        command += ["-device", f"virtserialport,chardev=agent,name={PORT}"]
        command += ["-qmp", f"unix:{self.folder}/monitor,server=on,wait=off"]
        command += ["-netdev", "user,id=net0", "-device", "virtio-net-pci,netdev=net0,romfile="]
        drive = f"file={self.folder}/drive.img,format=raw,if=none,id=drive0,cache=unsafe"
        command += ["-drive", drive, "-device", "nvme,serial=emulated,drive=drive0"]
        for tag, path, readonly in [
            ("host", "/", True), ("modules", self.kernel.modules, True),
            ("folder", self.folder, False),
        ]:  # fmt: skip
            options = f"local,id={tag},path={path},security_model=none,multidevs=remap"
            command += ["-fsdev", options + (",readonly=on" if readonly else "")]
            command += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
        return command

    def _connect(self, name: str) -> socket.socket:
        end = time.monotonic() + 10
        while True:
            port = socket.socket(socket.AF_UNIX)
            try:
                port.connect(str(self.folder / name))
                return port
            except OSError as error:
                port.close()
                if self._process.poll() is not None or time.monotonic() > end:
                    raise self._lost("QEMU did not start") from error
                time.sleep(0.02)

    def run(self, script: str, *, timeout: float = 60, check: bool = True, **env: str) -> Output:
        """Run *script* in bash as root and return what it gave."""
        return self.start(script, timeout=timeout, **env).wait(check=check)

    def start(self, script: str, *, timeout: float = 60, **env: str) -> Job:
        """Start *script* in bash as root; it is killed after *timeout* seconds."""
        number = next(self._numbers)
        self.send(id=number, script=script, timeout=timeout, env=env, cwd=str(ROOT))
        return Job(self, number, script, timeout)

    def send(self, **request: Any) -> None:
        """Give the agent one request."""
        try:
            self._port.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise self._lost("the guest is gone") from error

    def answered(self, number: int) -> bool:
        """Say whether the answer to a request is there."""
        self._receive(0)
        return number in self._answers

    def answer(self, number: int, timeout: float) -> Output:
        """Return the answer to a request, once it is there."""
        end = time.monotonic() + timeout
        while number not in self._answers:
            left = end - time.monotonic()
            if left <= 0:
                raise self._lost(f"no answer for {timeout:.0f} s")
            self._receive(left)
        return self._answers.pop(number)

    def _receive(self, timeout: float) -> None:
        self._port.settimeout(timeout)
        try:
            data = self._port.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            return
        except OSError as error:
            raise self._lost("the guest is gone") from error
        if not data:
            raise self._lost("the guest ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            number = message.pop("id")
            self._answers[number] = Output(**message)

    def forward(self, port: int) -> int:
        """Return a free port of the host's loopback that leads to *port* of the guest."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            number = int(free.getsockname()[1])
        problem = self._monitor.human(f"hostfwd_add net0 tcp:127.0.0.1:{number}-:{port}")
        if problem:
            raise GuestLost(f"hostfwd_add: {problem}")
        return number

    def set_link(self, up: bool) -> None:
        """Plug the guest's network cable in or out."""
        self._monitor.execute("set_link", name="net0", up=up)

    @property
    def process_id(self) -> int:
        """Return the process of QEMU."""
        return self._process.pid

    def alive(self) -> bool:
        """Say whether the guest runs a command."""
        try:
            return self.run("true", timeout=20, check=False).code == 0
        except GuestLost:
            return False

    def _lost(self, what: str) -> GuestLost:
        texts = [
            path.read_text(errors="replace")[-3000:]
            for path in (self.folder / "qemu.log", self.log)
            if path.exists()
        ]
        return GuestLost("\n".join([what, *texts]))

    def close(self) -> None:
        """End the guest at once and remove `folder`."""
        self._closing.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()


class Monitor:
    """QEMU's machine protocol: one command, one answer, events between them ignored."""

    def __init__(self, port: socket.socket) -> None:
        port.settimeout(20)
        self._file = port.makefile("rw", encoding="utf-8", newline="\n")
        port.close()  # the file keeps it open
        self._file.readline()  # the greeting
        self.execute("qmp_capabilities")

    def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command of the machine protocol and return what it gave."""
        self._file.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._file.flush()
        while True:
            message = json.loads(self._file.readline())
            if "error" in message:
                raise GuestLost(f"{command}: {message['error']['desc']}")
            if "return" in message:
                return message["return"]

    def human(self, line: str) -> str:
        """Run a line of the human monitor and return its text."""
        text = str(self.execute("human-monitor-command", **{"command-line": line}))
        return " ".join(text.split())

    def close(self) -> None:
        """Let go of the monitor."""
        self._file.close()
