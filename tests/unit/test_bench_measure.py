import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from hyades.common.errors import UsageError
from hyades.common.units import MIB
from hyades.deploy.bench import measure, seqread
from hyades.deploy.bench.measure import run_measured
from hyades.deploy.bench.memlimit import Controller, find_controller
from hyades.deploy.bench.seqread import sequential_rate


def python(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


def run(code: str, **options) -> measure.Measurement:
    return run_measured(python(code), cold=False, **options)


def test_time_memory_and_exit_of_a_process() -> None:
    result = run("b = b'x' * (64 << 20); import time; time.sleep(0.3)")
    assert result.outcome == "ok"
    assert result.wall_s >= 0.3
    assert result.cpu_s > 0
    assert 64 * MIB < result.peak_rss < 128 * MIB
    assert not result.cold


def test_peak_memory_is_the_childs_not_ours() -> None:
    ballast = bytearray(os.urandom(1 << 20)) * 200
    assert run("pass").peak_rss < 60 * MIB
    assert len(ballast) > 0


def test_bytes_are_those_of_the_device(tmp_path: Path) -> None:
    path = tmp_path / "data"
    written = run(f"import os; open({str(path)!r}, 'wb').write(b'x' * (8 << 20)); os.sync()")
    assert 8 * MIB <= written.written_bytes < 9 * MIB
    read = run(
        "import os, mmap; b = mmap.mmap(-1, 8 << 20);"
        f"assert os.readv(os.open({str(path)!r}, os.O_RDONLY | os.O_DIRECT), [b]) == 8 << 20"
    )
    if "exit status 1" in read.detail:
        pytest.skip(f"{tmp_path} refuses O_DIRECT")
    assert 8 * MIB <= read.read_bytes < 10 * MIB


@pytest.mark.parametrize(
    ("code", "outcome", "detail"),
    [
        ("raise SystemExit(3)", "failed", "exit status 3: no output"),
        ("print('why'); raise SystemExit(1)", "failed", "exit status 1: why"),
        ("import os; os.kill(os.getpid(), 11)", "killed", "ended by signal 11: no output"),
    ],
)
def test_failures_carry_their_reason(code: str, outcome: str, detail: str) -> None:
    result = run(code)
    assert (result.outcome, result.detail) == (outcome, detail)


def test_a_command_that_is_not_there() -> None:
    result = run_measured(["/nonexistent/program"], cold=False)
    assert result.outcome == "failed"
    assert "cannot start /nonexistent/program" in result.detail


def test_a_timeout_ends_the_whole_session(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import os, time; pid = os.fork();"
        f"pid and open({str(note)!r}, 'w').write(str(pid)); time.sleep(60)"
    )
    result = run(code, timeout_s=0.7)
    assert (result.outcome, result.detail) == ("timeout", "stopped after 0.7 s")
    grandchild = Path(f"/proc/{note.read_text()}/stat")
    for _ in range(100):
        if not grandchild.exists() or " Z " in grandchild.read_text():
            return
        time.sleep(0.05)
    os.kill(int(note.read_text()), signal.SIGKILL)
    pytest.fail("the grandchild outlived the timeout")


def test_the_page_cache_is_dropped_or_the_result_says_that_it_was_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(measure, "_DROP", tmp_path / "drop_caches")
    assert run_measured(python("pass")).cold
    assert (tmp_path / "drop_caches").read_text() == "3"
    monkeypatch.setattr(measure, "_DROP", tmp_path / "absent" / "drop_caches")
    assert not run_measured(python("pass")).cold
    assert "not dropped" in (measure.drop_page_cache() or "")


@pytest.fixture
def controller() -> Controller:
    found = find_controller()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_a_limit_kills_what_exceeds_it_and_spares_the_rest(controller: Controller) -> None:
    groups = set(controller.parent.iterdir())
    large = run("b = b'x' * (200 << 20)", limit=64 * MIB)
    assert (large.outcome, large.detail) == ("killed", "killed for memory at 64.0 MiB")
    assert large.limit == 64 * MIB
    small = run("b = b'x' * (20 << 20)", limit=64 * MIB)
    assert small.outcome == "ok"
    if small.group_peak is not None:
        assert 20 * MIB < small.group_peak <= 64 * MIB
    assert set(controller.parent.iterdir()) == groups


def test_a_limit_without_a_controller_is_a_skipped_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_controller", lambda: "no writable memory cgroup: because")
    result = run("pass", limit=MIB)
    assert result.outcome == "skipped"
    assert result.detail == "no writable memory cgroup: because"


@pytest.fixture
def fake_cgroups(monkeypatch: pytest.MonkeyPatch):
    """A directory that behaves as a cgroup mount: new groups are born with their files."""
    real = Path.mkdir

    def mkdir(path: Path, *args, **options) -> None:
        real(path, *args, **options)
        parent = path.parent
        if (parent / "memory.limit_in_bytes").exists():
            names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cgroup.procs"]
        elif "memory" in (parent / "cgroup.subtree_control").read_text():
            names = ["memory.max", "memory.swap.max", "cgroup.procs", "cgroup.subtree_control"]
        else:
            names = []
        for name in names:
            (path / name).write_text("")

    def prepare(files: dict[Path, str]) -> None:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(Path, "mkdir", mkdir)
        monkeypatch.setattr(Path, "rmdir", lambda path: shutil.rmtree(path))

    return prepare


def test_version_1_limits_memory_and_swap_together(tmp_path: Path, fake_cgroups) -> None:
    own = tmp_path / "own"
    group = tmp_path / "memory" / "a" / "b"
    fake_cgroups(
        {own: "4:memory:/a/b\n1:cpu:/\n0::/\n", group / "memory.limit_in_bytes": "9223372036854"}
    )
    found = find_controller(tmp_path, own)
    assert found == Controller(1, group)
    with found.group(123 * MIB) as limited:
        assert (limited.path / "memory.limit_in_bytes").read_text() == str(123 * MIB)
        assert (limited.path / "memory.memsw.limit_in_bytes").read_text() == str(123 * MIB)
        assert limited.peak() is None
        (limited.path / "memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
        assert limited.oom_kills() == 2
    assert not limited.path.exists()


def test_version_2_enables_the_controller_where_it_is_allowed(tmp_path: Path, fake_cgroups) -> None:
    own = tmp_path / "own"
    fake_cgroups(
        {
            own: "0::/user/session\n",
            tmp_path / "cgroup.controllers": "cpu memory\n",
            tmp_path / "cgroup.subtree_control": "cpu",
            tmp_path / "user" / "cgroup.subtree_control": "",
            # A directory in the file's place: enabling fails, as in a group that holds processes.
            tmp_path / "user" / "session" / "cgroup.subtree_control" / "x": "",
        }
    )
    found = find_controller(tmp_path, own)
    assert found == Controller(2, tmp_path / "user")
    with found.group(7 * MIB) as limited:
        assert (limited.path / "memory.max").read_text() == str(7 * MIB)
        assert (limited.path / "memory.swap.max").read_text() == "0"
        (limited.path / "memory.peak").write_text("4096\n")
        assert limited.peak() == 4096
        (limited.path / "memory.events").write_text("low 0\noom 1\noom_kill 1\n")
        assert limited.oom_kills() == 1


def test_where_no_group_can_be_made_the_reason_names_what_was_tried(tmp_path: Path) -> None:
    assert "does not exist" in str(find_controller(tmp_path, tmp_path / "own"))
    (tmp_path / "own").write_text("3:cpu:/\n0::/\n")
    assert "no memory controller in" in str(find_controller(tmp_path, tmp_path / "own"))
    (tmp_path / "own").write_text("3:memory:/\n")
    reason = str(find_controller(tmp_path, tmp_path / "own"))
    assert f"{tmp_path}/memory (v1): No such file or directory" in reason


def test_the_sequential_rate_says_how_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(9 * MIB + 17))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    try:
        own = sequential_rate(path)
    except UsageError as error:
        pytest.skip(str(error))
    assert own.bytes_per_s > 0
    assert own.method == "own O_DIRECT reader, 1 MiB, 8 threads (fio is not installed)"
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/fio")
    monkeypatch.setattr(seqread, "_fio", lambda *_: "no io_uring")
    assert sequential_rate(path).method.endswith("(fio failed: no io_uring)")
    with pytest.raises(UsageError, match="smaller than 1 MiB"):
        sequential_rate(Path(__file__))


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_is_used_where_it_is_installed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(4 * MIB))
    rate = sequential_rate(path)
    assert rate.bytes_per_s > 0
    assert rate.method.startswith(("fio", "own O_DIRECT reader, 1 MiB, 8 threads (fio failed"))
