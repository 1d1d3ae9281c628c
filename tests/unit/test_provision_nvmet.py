import errno
import os

import pytest
from tests.reference.nvmet_tree import FakeTree
from tests.reference.provisions import HOSTS, NQN, Killed, export_of, make_files, runs

from hyades.common.errors import BackendMissing, UsageError
from hyades.target_side.provision.nvmet import Nvmet, Tree
from hyades.target_side.provision.steps import (
    Export,
    Journal,
    Provision,
    describe_steps,
    journal_path,
)


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


@pytest.fixture
def tree(tmp_path):
    return FakeTree(tmp_path)


@pytest.fixture
def export(files):
    return export_of(files)


@pytest.fixture
def run(tmp_path, tree):
    """Return a function that makes a Provision; its journal is released at the end."""
    with runs(tmp_path, "kernel") as make:
        yield lambda export: make(Nvmet(tree), export)


def kill(provision, tree, after):
    """Run *provision* and end it after *after* changes; return whether it got that far."""
    tree.budget, tree.failure = after, Killed()
    provision.stop = lambda: None  # the dead do not clean up
    try:
        provision.start()
    except Killed:
        return True
    finally:
        tree.budget = None
    return False


def test_what_is_made(tree, export, run, files):
    run(export).start()
    read, root = tree.read, tree.root
    subsystem = f"subsystems/{NQN}"
    assert read(f"{subsystem}/attr_allow_any_host") == "0"
    for nsid, path in enumerate(files, 1):
        namespace = f"{subsystem}/namespaces/{nsid}"
        assert read(f"{namespace}/device_path") == str(path)
        assert read(f"{namespace}/enable") == read(f"{namespace}/buffered_io") == "1"
        assert read(f"{namespace}/device_uuid")[:4] != "0000"
    assert tree.list(f"{subsystem}/allowed_hosts") == list(HOSTS)
    assert tree.list("ports") == ["1", "2"]
    for port, values in (("1", ("ipv4", "127.0.0.1", "4420")), ("2", ("ipv6", "::1", "4421"))):
        names = ("addr_adrfam", "addr_traddr", "addr_trsvcid")
        assert tuple(read(f"ports/{port}/{name}") for name in names) == values
        assert read(f"ports/{port}/addr_trtype") == "tcp"
        assert (root / f"ports/{port}/subsystems/{NQN}").readlink() == root / subsystem
    # Hosts get in when all is there.
    assert [line.split()[0] for line in tree.log].index("link") > tree.log.index(
        f"write {subsystem}/namespaces/2/enable 1"
    )
    assert tree.log[-1] == f"link ports/2/subsystems/{NQN}"


def test_undone_at_stop(tree, export, run):
    before = tree.picture()
    provision = run(export)
    provision.start()
    provision.stop()
    assert tree.picture() == before


def test_any_host(tree, files, run):
    run(Export(NQN, files, (("127.0.0.1", 4420),))).start()
    assert tree.read(f"subsystems/{NQN}/attr_allow_any_host") == "1"
    assert tree.list("hosts") == []


def test_running_twice_changes_nothing(tree, export, run):
    first = run(export)
    assert len(first.start()) > 20
    picture = tree.picture()
    tree.log.clear()
    assert first.start() == []
    second = run(export)  # the first was killed
    assert second.start() == []
    assert tree.log == []
    assert tree.picture() == picture
    second.stop()
    assert tree.list("subsystems") == tree.list("ports") == tree.list("hosts") == []


def test_two_runs_at_once(tree, export, run, tmp_path):
    run(export).start()
    with pytest.raises(UsageError, match="another hyades serve"):
        Journal(journal_path("kernel", NQN, tmp_path / "state"))
    Journal(journal_path("kernel", NQN + "x", tmp_path / "state")).close()


@pytest.mark.parametrize("after", range(0, 32))
def test_killed_after_any_step(tree, export, run, after):
    before = tree.picture()
    if not kill(run(export), tree, after):
        assert after > 20  # the whole export is made
    provision = run(export)
    provision.start()
    assert tree.list("ports") == ["1", "2"]
    assert tree.read(f"subsystems/{NQN}/namespaces/2/enable") == "1"
    provision.stop()
    assert tree.picture() == before


@pytest.mark.parametrize("after", [3, 12, 100])
def test_killed_and_started_with_another_export(tree, export, files, run, after):
    before = tree.picture()
    kill(run(export), tree, after)
    other = Export(NQN, files[1:], (("127.0.0.1", 4555),))
    provision = run(other)
    provision.start()
    assert tree.list(f"subsystems/{NQN}/namespaces") == ["1"]  # the second one is no longer there
    assert tree.read(f"subsystems/{NQN}/namespaces/1/device_path") == str(files[1])
    assert tree.list("hosts") == []
    assert [tree.read(f"ports/{p}/addr_trsvcid") for p in tree.list("ports")] == ["4555"]
    provision.stop()
    assert tree.picture() == before


def test_killed_and_started_with_less(tree, export, files, run):
    kill(run(export), tree, 100)
    run(Export(NQN, files[:1], export.listen[:1], HOSTS[:1])).start()
    subsystem = f"subsystems/{NQN}"
    assert tree.list(f"{subsystem}/namespaces") == ["1"]
    assert tree.list(f"{subsystem}/allowed_hosts") == [HOSTS[0]]
    assert tree.list("ports") == ["1"]


@pytest.mark.parametrize("after", range(0, 30, 3))
def test_an_error_undoes_what_was_made(tree, export, run, after):
    before = tree.picture()
    provision = run(export)
    change = tree._change

    def fail_once(text):
        if len(tree.log) == after:
            tree._change = change
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        change(text)

    tree._change = fail_once
    with pytest.raises(UsageError, match="No space left"):
        provision.start()
    assert tree.picture() == before
    provision.start()
    provision.stop()
    assert tree.picture() == before


def test_an_interrupt_undoes_what_was_made(tree, export, run):
    before = tree.picture()
    provision = run(export)
    change = tree._change

    def interrupt(text):
        change(text)
        if len(tree.log) == 15:
            raise KeyboardInterrupt

    tree._change = interrupt
    with pytest.raises(KeyboardInterrupt):
        provision.start()
    assert tree.picture() == before


def test_what_was_there_before_stays(tree, export, run, files):
    tree.make("hosts/" + HOSTS[0])
    tree.make("ports/7")
    values = {"adrfam": "ipv4", "trtype": "tcp", "traddr": "127.0.0.1", "trsvcid": "4420"}
    for name, value in values.items():
        tree.write(f"ports/7/addr_{name}", value)
    tree.make("subsystems/other")
    tree.link("ports/7/subsystems/other", "subsystems/other")
    before = tree.picture()
    provision = run(export)
    provision.start()
    assert tree.exists(f"ports/7/subsystems/{NQN}")  # shared: the address is taken
    assert tree.list("ports") == ["1", "7"]
    provision.stop()
    assert tree.picture() == before


def test_a_subsystem_of_somebody_else_is_not_changed(tree, export, run):
    tree.make(f"subsystems/{NQN}")
    before = tree.picture()
    with pytest.raises(UsageError, match="did not make that object"):
        run(export).start()
    assert tree.picture() == before


def test_what_others_use_stays_and_is_named(tree, export, run):
    provision = run(export)
    provision.start()
    tree.make("subsystems/other")
    tree.link("ports/1/subsystems/other", "subsystems/other")  # somebody shares our port
    with pytest.raises(UsageError, match=r"ports/1: .*still uses it.*tries again"):
        provision.stop()
    assert tree.list("subsystems") == ["other"]
    tree.unlink("ports/1/subsystems/other")
    provision.stop()
    assert tree.list("ports") == []


def test_dry_run(tmp_path, export):
    tree = FakeTree(tmp_path, loaded=False)
    lines = describe_steps(Nvmet(tree), export)
    assert lines[:2] == ["modprobe nvmet", "modprobe nvmet-tcp"]
    assert lines[2] == f"mkdir {tree.root}/subsystems/{NQN}"
    assert lines[-1].startswith("ln -s")
    assert tree.log == []
    provision = Provision(Nvmet(tree), export, Journal(tmp_path / "state" / "j"))
    lines.remove(f"echo 0 > {tree.root}/subsystems/{NQN}/attr_allow_any_host")  # so from the start
    assert provision.start() == lines
    assert all("is there already" in line for line in describe_steps(Nvmet(tree), export))


def test_the_real_tree_does_what_the_shell_would(tmp_path):
    tree = Tree(tmp_path)
    assert tree.list("ports") == []
    assert tree.read("ports/1/addr_traddr") == ""
    tree.make("ports")
    tree.make("ports/1")
    (tmp_path / "ports/1/addr_traddr").touch()
    tree.write("ports/1/addr_traddr", "::1")
    assert tree.read("ports/1/addr_traddr") == "::1"
    tree.link("link", "ports/1")
    assert (tmp_path / "link").readlink() == tmp_path / "ports/1"
    assert tree.exists("link")
    tree.unlink("link")
    assert tree.list(".") == ["ports"]
    tree.make("hosts")
    tree.remove("hosts")
    assert tree.list(".") == ["ports"]
    with pytest.raises(FileNotFoundError):
        tree.write("ports/1/none", "1")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'Module nvmet not found' >&2; exit 1", "Module nvmet not found.*TARGET_TCP"),
        ("exit 0", "mount -t configfs"),
        (None, "did not run"),
    ],
)
def test_modprobe(tmp_path, monkeypatch, script, words):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        program = tmp_path / "modprobe"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    with pytest.raises(BackendMissing, match=words):
        Tree(tmp_path / "config" / "nvmet", tmp_path).load("nvmet")


def test_permission(tmp_path, export, run, tree):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    tree.make = refuse
    with pytest.raises(UsageError, match=r"mkdir .*Permission denied \(this needs root"):
        run(export).start()
