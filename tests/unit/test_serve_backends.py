import signal
import subprocess
import sys
import time

import pytest
from tests.reference.nvmet_tree import FakeTree
from tests.reference.spdk_rpc import FakeSpdk

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.deploy.commands import serve_backends
from hyades.deploy.commands.serve_backends import serve_external
from hyades.target_side.provision.steps import Export

NQN = "nqn.2024-01.org.example:volume"


@pytest.fixture
def export(tmp_path):
    path = tmp_path / "a.vol"
    path.write_bytes(bytes(8192))
    return Export(NQN, (path,), (("127.0.0.1", 4420), ("::1", 4420)))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    found = FakeTree(tmp_path)
    monkeypatch.setattr(serve_backends, "Tree", lambda root: found)
    return found


def interrupt():
    raise KeyboardInterrupt


def test_kernel(tree, export, tmp_path, capsys):
    before, ready = tree.picture(), tmp_path / "ready"

    def wait():
        assert ready.read_text() == "127.0.0.1:4420\n[::1]:4420\n"
        assert tree.exists(f"ports/1/subsystems/{NQN}")
        with pytest.raises(UsageError, match="is being used"):  # hosts write to it
            FileBlocks(export.namespaces[0], writable=True)
        interrupt()

    serve_external("kernel", export, state=tmp_path / "state", ready_file=ready, wait=wait)
    assert tree.picture() == before
    assert not ready.exists()
    FileBlocks(export.namespaces[0], writable=True).close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"{NQN} is served at 127.0.0.1:4420, [::1]:4420")
    assert lines[-1] == "stopping"


def test_dry_run(tree, export, tmp_path, capsys):
    serve_external("kernel", export, dry_run=True, state=tmp_path / "state")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "modprobe nvmet (is there already)"
    assert lines[-1].startswith("ln -s ")
    assert tree.log == []
    assert not (tmp_path / "state").exists()


def test_a_failure_while_serving_undoes_it_too(tree, export, tmp_path):
    before = tree.picture()
    folder = tmp_path / "none" / "ready"
    with pytest.raises(UsageError, match="cannot write"):
        serve_external("kernel", export, state=tmp_path / "state", ready_file=folder)
    assert tree.picture() == before


def test_a_file_that_is_in_use(tree, export, tmp_path):
    held = FileBlocks(export.namespaces[0], writable=True)
    with pytest.raises(UsageError, match="is being used"):
        serve_external("kernel", export, state=tmp_path / "state", wait=interrupt)
    assert tree.log == []
    held.close()


def test_backends(export):
    with pytest.raises(UsageError, match="embedded, kernel or spdk"):
        serve_external("scsi", export)


def test_sigterm_in_a_process_of_its_own(export, tmp_path):
    pytest.importorskip("spdk.rpc.client", reason="needs SPDK's Python client: pip install spdk")
    spdk, ready = FakeSpdk(tmp_path / "spdk.sock"), tmp_path / "ready"
    code = f"""
import signal
from pathlib import Path
from hyades.deploy.commands.serve_backends import serve_external
from hyades.deploy.signals import terminate
from hyades.target_side.provision.steps import Export
signal.signal(signal.SIGTERM, terminate)
serve_external("spdk", Export({NQN!r}, (Path({str(export.namespaces[0])!r}),), {export.listen!r}),
    spdk_socket=Path({str(spdk.path)!r}), state=Path({str(tmp_path / "state")!r}),
    ready_file=Path({str(ready)!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(spdk.subsystems[NQN]["listen_addresses"]) == 2
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output.endswith("stopping\n")
        assert not spdk.subsystems
        assert not spdk.bdevs
    finally:
        process.kill()
        process.communicate()
        spdk.close()
