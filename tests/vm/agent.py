"""PID 1 of the guest: runs the commands that machine.py sends; standard library only.

One JSON object a line over a virtio port.  The host sends {id, script, timeout, env, cwd} or
{id, signal}; each script runs in bash, in a session of its own, and is answered once, in any order,
by {id, code, out, err}; code is 124 where its time ran out and -N where signal N ended it.
The first line that the guest sends is {id: 0, ...}: it is up.
"""

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

PORT = "hyades.agent"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "HOME": "/root", "TERM": "dumb", "LANG": "C.UTF-8"}
MODULES = ("configfs", "nvme", "nvme-tcp", "nvmet-tcp", "crc32c-intel")


class Agent:
    """Answers commands on one port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sending = threading.Lock()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def send(self, **message: Any) -> None:
        """Write one line whole: a port takes part of a large write."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        with self.sending:
            while data:
                data = data[os.write(self.port, data) :]

    def serve(self) -> None:
        """Start what the host asks for until the port closes, which never happens."""
        rest = b""
        while True:
            *lines, rest = (rest + os.read(self.port, 1 << 16)).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "signal" in request:
                    self.signal(**request)
                else:
                    self.start(request)

    def signal(self, id: int, signal: int) -> None:  # noqa: A002 - the names in the request
        """Send a signal to the session of one command, if it still runs."""
        process = self.processes.get(id)
        if process is not None:
            os.killpg(process.pid, signal)

    def start(self, request: dict[str, Any]) -> None:
        """Start one script; a kill that follows at once finds it."""
        process = subprocess.Popen(
            ["/bin/bash", "-c", request["script"]], env=ENVIRONMENT | request["env"],
            cwd=request["cwd"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        number = request["id"]
        self.processes[number] = process
        arguments = (number, process, request["timeout"])
        threading.Thread(target=self.finish, args=arguments, daemon=True).start()

    def finish(self, number: int, process: subprocess.Popen[bytes], timeout: float) -> None:
        """Wait for one script and answer."""
        late = False
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            late = True
            self.signal(number, signal.SIGKILL)
            out, err = process.communicate()
        del self.processes[number]
        texts = {"out": out.decode(errors="replace"), "err": err.decode(errors="replace")}
        self.send(id=number, code=124 if late else process.returncode, **texts)


def open_port() -> int:
    """Return the descriptor of the virtio port named PORT."""
    for folder in Path("/sys/class/virtio-ports").iterdir():
        if (folder / "name").read_text().strip() == PORT:
            return os.open(f"/dev/{folder.name}", os.O_RDWR)
    raise OSError(f"no virtio port {PORT}")


def main() -> None:
    """Prepare what every test needs, say so, and serve."""
    os.environ.update(ENVIRONMENT)
    subprocess.run(["modprobe", "-a", *MODULES], check=True)
    subprocess.run(["mount", "-t", "configfs", "configfs", "/sys/kernel/config"], check=True)
    agent = Agent(open_port())
    agent.send(id=0, code=0, out=os.uname().release, err="")
    agent.serve()


if __name__ == "__main__":
    main()
