"""hyades serve --view: the flags, the settings, the log; and torch stays out."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.reference.nvme_host import NQN, Host
from tests.reference.view_host import (
    ServedView,
    W,
    ask,
    identify,
    namespaces,
    read_whole,
    send_request,
    write_volume,
)

from hyades.common.errors import UsageError
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB
from hyades.deploy.cli import cli
from hyades.deploy.serving import Settings, build_server
from hyades.deploy.serving_views import parse_cores
from hyades.target_side.events import NullSink
from hyades.target_side.view_service import parse_view

HALF = ViewRequest("features", "float16")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("views") / "g.vol")


def test_a_served_process(path, tmp_path):
    ready = tmp_path / "ready"
    command = [
        sys.executable, "-m", "hyades.deploy.cli", "serve", "--nqn", NQN, "--log", "json",
        "--namespace", f"{path},ro", "--view", "features:float16", "--view", "features:int8",
        "--stage-memory", "64MiB", "--stage-threads", "2", "--stage-cores", "0",
        "--listen", "127.0.0.1:0", "--ready-file", str(ready),
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        name, _, port = ready.read_text().strip().rpartition(":")
        host = Host((name, int(port)))
        assert namespaces(host) == [1, 2, 3]
        view = ServedView(read_whole(host.io, 3, identify(host, 3).blocks))
        assert view.spec.encoding == "int8"
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        assert ask(host, HALF, [W]) == 4
        host.close()
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0
    events = {event["event"]: event for event in map(json.loads, text.splitlines())}
    assert events["listening"]["namespaces"] == [
        str(path), f"{path}:features:float16", f"{path}:features:int8"
    ]  # fmt: skip
    assert events["viewopened"]["view"] == f"{path}:features:float16,project=16"
    assert events["viewclosed"]["view"] == events["viewopened"]["view"]


def settings(path, **other):
    return Settings([f"{path},ro"], NQN, ["127.0.0.1:0"], **other)


def test_no_views_where_none_are_wanted(path):
    with build_server(settings(path, views=0), NullSink()) as server:
        host = Host(server.addresses[0])
        denied = (StatusCode.OPERATION_DENIED | DNR, 0)
        assert send_request(host, build_request(HALF)) == denied


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"view": ["features:float8"]}, "--view features:float8: OBJECT:ENCODING"),
        ({"view": ["hidden:int8"]}, "no matrix 'hidden'"),
        ({"view": ["features:int8,of=2"]}, "no --namespace number 2"),
        ({"view": ["features:int8", "features:int8,page=100KiB"]}, "page size 102400"),
        ({"view": ["features:int8"], "stage_memory": "64KiB"}, "--stage-memory"),
        ({"stage_cores": "4000"}, "this process may use"),
        ({"stage_cores": "1-x"}, "--stage-cores 1-x"),
        ({"stage_threads": -1}, "-1 threads"),
        ({"views": -1}, "from 0 to 1000"),
        ({"view_host": ["me"]}, "no NVMe qualified name"),
    ],
)  # fmt: skip
def test_what_is_refused_leaves_the_volume_free(path, wrong, text):
    with pytest.raises(UsageError, match=text.replace("[", r"\[")):
        build_server(settings(path, **wrong), NullSink())
    with path.open("r+b"), build_server(settings(path, read_only=False), NullSink()):
        pass


def test_forms():
    assert parse_view("features") == (1, ViewRequest("features"))
    assert parse_view("a:b,c:int8,page=64KiB,of=3") == (3, ViewRequest("a:b,c", "int8", 64 * KIB))
    assert parse_cores("3,0-1") == (0, 1, 3)


def test_views_are_of_the_embedded_target(path):
    flags = ["serve", "-n", str(path), "--nqn", NQN, "--backend", "kernel", "--dry-run"]
    for more in (["--view", "features:int8"], ["--stage-memory", "2GiB"]):
        result = CliRunner().invoke(cli, [*flags, *more], prog_name="hyades")
        assert result.exit_code == 2
        assert f"{more[0]} is for --backend embedded" in result.output
