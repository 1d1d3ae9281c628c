import json
import sys

import pytest
from tests.reference.provisions import HOSTS, NQN, Killed, export_of, make_files, runs
from tests.reference.spdk_rpc import FakeSpdk

from hyades.common.errors import BackendMissing, PeerError, UsageError
from hyades.target_side.provision.spdk import Client, Spdk
from hyades.target_side.provision.steps import (
    Export,
    Journal,
    describe_steps,
)

pytest.importorskip("spdk.rpc.client", reason="needs SPDK's Python client: pip install spdk")


@pytest.fixture
def spdk(tmp_path):
    server = FakeSpdk(tmp_path / "spdk.sock")
    yield server
    server.close()


@pytest.fixture
def client(spdk):
    found = Client(spdk.path)
    yield found
    found.close()


@pytest.fixture
def files(tmp_path):
    return make_files(tmp_path)


@pytest.fixture
def export(files):
    return export_of(files)


@pytest.fixture
def run(tmp_path, client):
    with runs(tmp_path, "spdk") as make:
        yield lambda export, rpc=client: make(Spdk(rpc), export)


def test_what_is_made_and_undone(spdk, export, run, files):
    before = spdk.picture()
    provision = run(export)
    provision.start()
    subsystem = spdk.subsystems[NQN]
    assert not subsystem["allow_any_host"]
    assert [host["nqn"] for host in subsystem["hosts"]] == list(HOSTS)
    filenames = [
        spdk.bdevs[n["bdev_name"]]["driver_specific"]["uring"]["filename"]
        for n in subsystem["namespaces"]
    ]
    assert filenames == [str(path) for path in files]
    assert {bdev["block_size"] for bdev in spdk.bdevs.values()} == {4096}
    assert [n["nsid"] for n in subsystem["namespaces"]] == [1, 2]
    assert [(a["adrfam"], a["traddr"], a["trsvcid"]) for a in subsystem["listen_addresses"]] == [
        ("IPv4", "127.0.0.1", "4420"),
        ("IPv6", "::1", "4421"),
    ]
    assert spdk.calls[-1] == "nvmf_subsystem_add_listener"
    provision.stop()
    assert spdk.picture() == before
    assert spdk.transports  # SPDK cannot remove one


def test_any_host(spdk, files, run):
    run(Export(NQN, files, (("127.0.0.1", 4420),))).start()
    assert spdk.subsystems[NQN]["allow_any_host"]


def test_running_twice_changes_nothing(spdk, export, run):
    first = run(export)
    assert len(first.start()) == 10
    picture = spdk.picture()
    spdk.calls.clear()
    assert first.start() == []
    second = run(export)  # the first was killed
    assert second.start() == []
    assert spdk.calls == []
    assert spdk.picture() == picture
    second.stop()
    assert not spdk.subsystems
    assert not spdk.bdevs


@pytest.mark.parametrize("after", range(10))
def test_killed_after_any_call(spdk, client, export, run, after):
    class Mortal:
        def call(self, method, params=None):
            if "_get_" not in method and len(spdk.calls) == after:
                raise Killed
            return client.call(method, params)

    before = spdk.picture()
    provision = run(export, Mortal())
    provision.stop = lambda: None
    with pytest.raises(Killed):
        provision.start()
    assert len(spdk.calls) == after
    provision = run(export)
    provision.start()
    assert len(spdk.subsystems[NQN]["listen_addresses"]) == 2
    provision.stop()
    assert spdk.picture() == before


@pytest.mark.parametrize("at", range(10))
def test_a_refusal_undoes_what_was_made(spdk, export, run, at):
    before = spdk.picture()
    provision = run(export)
    spdk.fail_at = at
    with pytest.raises(UsageError, match=r"SPDK refuses \w+: Internal error"):
        provision.start()
    assert spdk.picture() == before


def test_what_was_there_before_stays(spdk, export, run):
    spdk.nvmf_create_transport("TCP")
    spdk.nvmf_create_subsystem("nqn.2020-01.org.example:other", max_namespaces=4)
    before = spdk.picture()
    provision = run(export)
    provision.start()
    assert "nvmf_create_transport" not in spdk.calls
    provision.stop()
    assert spdk.picture() == before


def test_objects_of_somebody_else_are_not_taken(spdk, export, run, files, client):
    spdk.nvmf_create_subsystem(NQN, allow_any_host=True, max_namespaces=4)
    before = spdk.picture()
    with pytest.raises(UsageError, match="lets in any host"):
        run(export).start()
    assert spdk.picture() == before
    open_export = Export(NQN, files[:1], export.listen)
    spdk.create_bdev("aio", "theirs", str(files[1]), 4096)
    spdk.nvmf_subsystem_add_ns(NQN, {"nsid": 1, "bdev_name": "theirs"})
    before = spdk.picture()
    with pytest.raises(UsageError, match=r"namespace 1 of SPDK's .* is theirs"):
        run(open_export).start()
    assert spdk.picture() == before
    name = Spdk(client).plan(open_export)[1].name
    spdk.create_bdev("aio", name, str(files[1]), 4096)
    with pytest.raises(UsageError, match="delete it or"):
        run(open_export).start()


@pytest.mark.parametrize("engine", ["uring", "aio"])
def test_the_engine_that_the_application_has(spdk, export, run, engine):
    spdk.engines = (engine,)
    provision = run(export)
    provision.start()
    assert f"bdev_{engine}_create" in spdk.calls
    provision.stop()
    assert not spdk.bdevs
    spdk.engines = ()
    with pytest.raises(BackendMissing, match="libaio"):
        provision.start()


def test_dry_run(spdk, client, export, run):
    lines = describe_steps(Spdk(client), export)
    assert spdk.calls == []
    assert run(export).start() == lines
    assert all("is there already" in line for line in describe_steps(Spdk(client), export))


def test_an_old_application(spdk, client):
    spdk.version = (23, 9)
    with pytest.raises(BackendMissing, match=r"23\.09 is too old: 24\.01"):
        Spdk(client)


def test_nobody_answers(tmp_path):
    with pytest.raises(BackendMissing, match=r"no SPDK application answers.*nvmf_tgt"):
        Client(tmp_path / "none.sock")


def test_the_application_goes_away(spdk, client, export, run):
    provision = run(export)
    spdk.hang_up_at = 4
    with pytest.raises(BackendMissing, match="is gone"):
        provision.start()
    with pytest.raises(BackendMissing, match="is gone"):
        client.call("nvmf_get_subsystems")
    spdk.hang_up_at = None
    again = Client(spdk.path)  # it lives on, or was started again: the journal knows what was made
    try:
        provision = run(export, again)
        provision.start()
        provision.stop()
        assert not spdk.subsystems
        assert not spdk.bdevs
    finally:
        again.close()


def test_without_the_python_client(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "spdk.rpc.client", None)
    with pytest.raises(BackendMissing, match=r"pip install .*'\.\[fabrics\]'"):
        Client(tmp_path / "none.sock")


def test_answers_of_another_form(spdk, client):
    spdk.spdk_get_version = lambda: {"version": "SPDK"}
    with pytest.raises(PeerError, match="no 'fields'"):
        Spdk(client)


def test_journal_survives_a_cut_line(tmp_path):
    path = tmp_path / "state" / "x.steps"
    journal = Journal(path)
    for number in range(3):
        journal.add({"kind": "bdev", "name": str(number)})
    journal.remove({"kind": "bdev", "name": "1"})
    journal.close()
    with path.open("ab") as file:
        file.write(b'+{"kind":')
    journal = Journal(path)
    assert [record["name"] for record in journal.records] == ["0", "2"]
    journal.add({"kind": "bdev", "name": "3"})
    journal.close()
    journal = Journal(path)
    assert [record["name"] for record in journal.records] == ["0", "2", "3"]
    for record in list(journal.records):
        journal.remove(record)
    journal.close()
    assert path.read_bytes() == b""
    path.write_bytes(b"nonsense\n")
    with pytest.raises(UsageError, match="damaged"):
        Journal(path)
    path.write_text("-" + json.dumps({"kind": "none"}) + "\n")
    with pytest.raises(UsageError, match="damaged"):
        Journal(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nqn": "volume"}, "is no NQN"),
        ({"nqn": "nqn.2024-01.org.example:a b"}, "is no NQN"),
        ({"nqn": "nqn.2024-01.org.example:a/../b"}, "is no NQN"),
        ({"nqn": "nqn.2024-01.org.example:" + "x" * 200}, "223"),
        ({"allow_hosts": ("host",)}, "no host NQN"),
        ({"allow_hosts": ("nqn.x/..",)}, "no host NQN"),
        ({"namespaces": ()}, "--namespace"),
        ({"listen": ()}, "--listen"),
        ({"listen": (("127.0.0.1", 0),)}, "1 to 65535"),
        ({"listen": (("localhost", 4420),)}, "IP address"),
        ({"listen": (("127.0.0.1", 4420),) * 2}, "twice"),
    ],
)
def test_exports_that_no_target_takes(files, change, words):
    fields = {"nqn": NQN, "namespaces": files, "listen": (("127.0.0.1", 4420),), **change}
    with pytest.raises(UsageError, match=words):
        Export(**fields).check()


def test_files_that_cannot_be_exported(tmp_path, files):
    short = tmp_path / "short"
    short.write_bytes(bytes(100))
    listen = (("127.0.0.1", 4420),)
    for path, words in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "neither"),
        (short, "100 bytes"),
        (files[0], "twice"),
    ):
        with pytest.raises(UsageError, match=words):
            Export(NQN, (files[0], path), listen).check()
