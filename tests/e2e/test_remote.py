"""Volumes over stripes and URLs, outputs on another volume: the bits of a local run."""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference.engine import check_report
from tests.reference.processes import forked
from tests.reference.runs import (
    faulty_devices,
    least_memory,
    same_bits,
    three_layers,
    write_volume,
)
from torch import nn

import hyades
from hyades.common.errors import DeviceLost, UsageError
from hyades.common.layout import BLOCK, Op
from hyades.deploy.export import export
from hyades.deploy.ingest import ingest
from hyades.deploy.report.write import render
from hyades.proxy.transports.faulty import Fault, FaultPlan
from hyades.proxy.transports.mem import forget

pytestmark = pytest.mark.timeout(280)

KINDS = {
    "gcn": {"plan": "resident"}, "sage": {"plan": "log:12"},
    "norm": {"plan": "passes:3"}, "gat": {"plan": "passes:2", "fanout": (4, 4, 4)},
}  # fmt: skip
Volumes = Callable[[str], Path]
Models = Callable[[str], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Local:
    """A local volume and what runs with little memory made of it."""

    path: Path
    memory: dict[str, int]
    rows: dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """Refresh with the least memory: hidden rows and the log lie on the volume."""
    path = write_volume(tmp_path_factory.mktemp("local") / "g.vol", reorder="rcm")
    memory, rows = {}, {}
    with hyades.open(path, writable=True) as volume:
        for kind, options in KINDS.items():
            model = three_layers(kind)
            memory[kind] = least_memory(volume, model, **options)
            given = {"memory": memory[kind], "threads": 2, **options}
            hyades.refresh(volume, model, out=kind, **given)
            rows[kind] = volume.read(kind)
    return Local(path, memory, rows)


@pytest.fixture(scope="module")
def stripe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stripe")
    members = f"{folder}/a,file://{folder}/b?depth=8"
    write_volume(f"stripe:unit=64KiB,{members}", reorder="rcm")
    return f"stripe:{members}"


@pytest.fixture
def memory_url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"remote-{abs(hash(request.node.name))}"
    yield f"mem://{name}"
    forget(name)


def run(url: Any, local: Local, kind: str, **more: Any) -> Any:
    """Refresh output x as the local run was."""
    options = {"memory": local.memory[kind], "threads": 2, **KINDS[kind], **more}
    result = hyades.refresh(url, three_layers(kind), out="x", **options)
    if not options.get("resume"):
        check_report(result.report)
    return result


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- the bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_stripe_has_the_bits_of_a_file(local: Local, stripe: str, kind: str) -> None:
    run(stripe, local, kind, force=True)
    with hyades.open(stripe) as volume:
        assert same_bits(volume.read("x"), local.rows[kind])
        assert list(volume.volume.verify()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_elsewhere_have_the_same_bits(
    local: Local, kind: str, tmp_path: Path, memory_url: str
) -> None:
    """On a file, in memory, on a stripe; the volume that is read does not change."""
    before = hashed(local.path)
    places = [tmp_path / "out.vol", memory_url, f"stripe:{tmp_path}/q0,{tmp_path}/q1"]
    for place in places:
        result = run(local.path, local, kind, output_volume=place)
        source, outputs = result.report.volumes
        assert (source.volume, outputs.volume) == (str(local.path), str(place))
        assert source.written == 0
        assert outputs.written == result.report.traffic.written > 0
        assert source.read + outputs.read == result.report.traffic.read
        assert str(place) in render(result.report)
        with hyades.open(place) as volume:
            assert same_bits(volume.read("x"), local.rows[kind])
            assert list(volume.volume.verify()) == []
            assert not [n for n in volume.catalog.objects if n.startswith("running/")]
    assert hashed(local.path) == before


def test_several_runs_read_one_volume_at_once(local: Local, tmp_path: Path) -> None:
    """Each through a handle of its own, open all the time."""
    with hyades.open(local.path) as one, hyades.open(local.path) as two:
        for number, handle in enumerate((one, two, one)):
            run(handle, local, "gcn", output_volume=tmp_path / f"{number}.vol")
            assert not handle.volume.writable
    with hyades.open(tmp_path / "2.vol") as volume:
        assert same_bits(volume.read("x"), local.rows["gcn"])


def test_a_volume_takes_several_outputs(local: Local, tmp_path: Path) -> None:
    out = tmp_path / "out.vol"
    run(local.path, local, "gcn", output_volume=out)
    with pytest.raises(UsageError, match=r"already has an output 'x': --force"):
        run(local.path, local, "sage", output_volume=out)
    run(local.path, local, "sage", output_volume=out, force=True)
    with hyades.open(out) as handle:
        hyades.refresh(local.path, three_layers("gcn"), out="y", output_volume=handle, threads=2)
        assert not handle.volume.writable
        assert same_bits(handle.read("x"), local.rows["sage"])
        assert sorted(handle.catalog.runs) == ["x", "y"]


# -- an output volume by itself


def test_an_output_volume_is_all_that_export_needs(tmp_path: Path) -> None:
    """Reordered and relabelled: the user's ids come from the output volume alone."""
    random = np.random.default_rng(2)
    ids = random.permutation(5000)[:900] * 7 - 1000
    edges = ids[random.integers(0, 900, (2, 6000))]
    features = random.standard_normal((900, 24), np.float32)
    source, out = tmp_path / "g.vol", tmp_path / "out.vol"
    ingest(source, edges=edges, features=features, ids=ids, reorder="rcm", range_rows=64)
    model = three_layers("gcn")
    hyades.refresh(source, model, out="x", output_volume=out, threads=2)
    hyades.refresh(source, model, out="x", threads=2)
    with hyades.open(source) as volume:
        expected, some = volume.read("x"), volume.read("x", ids[[5, 3, 800]])
        export(volume, "x", tmp_path / "there.npy")
    source.unlink()
    with hyades.open(out) as volume:
        assert same_bits(volume.read("x"), expected)
        assert same_bits(volume.read("x", ids[[5, 3, 800]]), some)
        export(volume, "x", tmp_path / "here.npy")
        assert volume.catalog.graph is not None
        assert volume.catalog.graph.vertices == 900
    for name in ("npy", "ids.npy"):
        here, there = (tmp_path / f"{place}.{name}" for place in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()
    with pytest.raises(UsageError, match=rf"holds only outputs: refresh from {source}"):
        hyades.refresh(out, model, out="z")


def test_what_is_no_place_for_outputs(local: Local, tmp_path: Path, memory_url: str) -> None:
    other = write_volume(tmp_path / "other.vol", vertices=500, edges=900)
    for place, words in [
        (local.path, r"belongs to the volume that is read, .*: leave --output-volume out"),
        (other, "is a volume with a graph of its own: name a blank device"),
        (tmp_path / "no" / "out.vol", "no folder"),
        (tmp_path, "directory"),
    ]:
        with pytest.raises(UsageError, match=words):
            run(local.path, local, "gcn", output_volume=place)
    run(local.path, local, "gcn", output_volume=memory_url)
    with pytest.raises(UsageError, match=rf"holds outputs of {local.path} \(uuid .*not of {other}"):
        run(other, local, "gcn", output_volume=memory_url)
    noise = tmp_path / "noise"
    noise.write_bytes(b"\1" * 40 * BLOCK)
    with pytest.raises(UsageError, match="holds something that is no volume"):
        run(local.path, local, "gcn", output_volume=noise)
    assert noise.read_bytes() == b"\1" * 40 * BLOCK
    with hyades.open(memory_url) as opened, hyades.open(memory_url) as again:
        assert opened.volume.uuid == again.volume.uuid
        with pytest.raises(UsageError, match="is the volume that is read, too"):
            hyades.refresh(opened, three_layers("gcn"), out="x", output_volume=again)


def test_a_bad_request_makes_no_file(local: Local, tmp_path: Path) -> None:
    out = tmp_path / "out.vol"
    with pytest.raises(UsageError, match="holds no graph"):
        run(hyades.open(_empty(tmp_path)), local, "gcn", output_volume=out)
    assert not out.exists()
    out.write_bytes(b"")  # an empty file is blank
    run(local.path, local, "gcn", output_volume=out)
    assert out.stat().st_size > 0


def _empty(folder: Path) -> Path:
    from hyades.common.blocks import FileBlocks
    from hyades.common.volume import Volume

    path = folder / "empty.vol"
    Volume.create(FileBlocks(path, create=True)).close()
    return path


# -- interruptions


class Cut(Exception):  # noqa: N818 - it is what a user's interrupt would be
    """Stops a run from its progress callback."""


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_continued(local: Local, stripe: str, tmp_path: Path, kind: str) -> None:
    out = f"stripe:{tmp_path}/q0,{tmp_path}/q1"
    left = 5  # two calls come before the first stage

    def progress(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Cut

    with pytest.raises(Cut):
        run(stripe, local, kind, output_volume=out, progress=progress, checkpoint_seconds=0.0)
    with hyades.open(out) as volume:
        assert volume.catalog.runs["x"].state == "running"
    with pytest.raises(UsageError, match="was interrupted: --resume"):
        run(stripe, local, kind, output_volume=out)
    run(stripe, local, kind, output_volume=out, resume=True)
    with hyades.open(out) as volume:
        assert same_bits(volume.read("x"), local.rows[kind])


def victim(
    connection: Connection, source: str, out: str, local: Local, kind: str, calls: int
) -> None:
    """Say whether the run goes on; then run, and die at a call of the progress callback."""
    resume = False
    if Path(out).exists():
        with hyades.open(out) as volume:
            resume = "x" in volume.catalog.runs
    connection.send(resume)

    def progress(*_: Any) -> None:
        nonlocal calls
        calls -= 1
        if calls == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    run(
        source, local, kind, output_volume=out, resume=resume, checkpoint_seconds=0.0,
        progress=progress,
    )  # fmt: skip
    connection.send("ended")


@pytest.mark.parametrize("kind", ["gcn", "sage"])
def test_killed_and_resumed(local: Local, stripe: str, tmp_path: Path, kind: str) -> None:
    """kill -9 at several moments of one run, each process going on where the last one was cut."""
    out = str(tmp_path / "out.vol")
    resumed = []
    for calls in (4, 4, 0):  # two calls come before the first stage
        ours, theirs = forked().Pipe()
        child = forked().Process(target=victim, args=(theirs, stripe, out, local, kind, calls))
        child.start()
        theirs.close()
        resumed.append(ours.recv())
        child.join(100)
        assert child.exitcode == (-signal.SIGKILL if calls else 0)
    assert resumed == [False, True, True]
    with hyades.open(out) as volume:
        assert same_bits(volume.read("x"), local.rows[kind])
        assert list(volume.volume.verify()) == []


# -- failures


def fail(op: Op) -> Callable[[], FaultPlan]:
    return lambda: FaultPlan([Fault("io", op=op, after=20)])


def test_a_failure_names_volume_and_member(local: Local, stripe: str, tmp_path: Path) -> None:
    """Reads fail at the source, writes at the outputs."""
    out = f"stripe:{tmp_path}/q0,{tmp_path}/q1"
    with faulty_devices(fail(Op.READ)), pytest.raises(DeviceLost) as caught:
        run(stripe, local, "gcn", output_volume=out)
    text = str(caught.value)
    assert text.startswith(f"{stripe}: object '")
    assert ": member " in text
    with faulty_devices(fail(Op.WRITE)), pytest.raises(DeviceLost) as caught:
        run(stripe, local, "gcn", output_volume=out, resume=True)
    assert str(caught.value).startswith(f"{out}: object 'running/x/")
    run(stripe, local, "gcn", output_volume=out, resume=True)
    with hyades.open(out) as volume:
        assert same_bits(volume.read("x"), local.rows["gcn"])


def test_a_member_that_fails_is_named_with_its_block(local: Local, tmp_path: Path) -> None:
    """A page begins at one member; its second unit, at the other, is what fails."""
    paths = tmp_path / "a", tmp_path / "b"
    members = [str(path) for path in paths]
    write_volume(f"stripe:unit=8KiB,{','.join(members)}", reorder="rcm")
    with hyades.open(f"stripe:{','.join(members)}") as volume:
        lba = volume.volume.object("features").lba(0)
        assert volume.volume.object("features").page_blocks > 2
    unit = lba // 2 + 1
    index, there = unit % 2, (unit // 2 + 1) * 2
    members[index] = f"faulty+file://{paths[index]}?fault=io,op=read,lba={there}-{there + 1}"
    with pytest.raises(DeviceLost) as caught:
        run(f"stripe:{','.join(members)}", local, "gcn", output_volume=tmp_path / "o.vol")
    expected = f"object 'features' page 0 (LBA {lba}: member {index}: {members[index]} LBA {there})"
    assert expected in str(caught.value)
