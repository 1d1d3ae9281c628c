"""The trained checkpoints from storage hosts: over nvme+tcp, and over the stand-in of SPDK."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference import nvme
from tests.reference.engine import check_report
from tests.reference.runs import same_bits
from tests.reference.spdk import StandIn, needs_compiler, remove_builds
from torch import nn

import hyades
from hyades.common.errors import BackendMissing, DeviceLost, UsageError
from hyades.common.layout import BLOCK
from hyades.common.nvme.psk import Keyring, Psk
from hyades.common.nvme.tls import probe as probe_tls
from hyades.common.units import MIB
from hyades.deploy.ingest import ingest
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace
from hyades.target_side.server import Server

pytestmark = pytest.mark.timeout(280)

NAMES = ("gcn", "graphsage", "gin", "gat")
Volumes = Callable[[str], Path]
Models = Callable[[str], tuple[nn.Module, Any]]
Rows = dict[str, NDArray[Any]]
LEAN = {"memory": "18MiB", "threads": 2, "plan": "passes:3"}  # hidden rows do not fit


@pytest.fixture(scope="module")
def source(facebook_volume: Volumes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a local volume that no test writes to."""
    return Path(shutil.copy(facebook_volume("none"), tmp_path_factory.mktemp("source") / "g.vol"))


@pytest.fixture(scope="module")
def expected(
    source: Path, facebook_model: Models, tmp_path_factory: pytest.TempPathFactory
) -> Rows:
    """Return the rows of local runs."""
    out = tmp_path_factory.mktemp("expected") / "out.vol"
    rows = {}
    for name in NAMES:
        module, _ = facebook_model(name)
        report = hyades.refresh(source, module, out=name, output_volume=out, **LEAN).report
        assert report.stages[0].bytes_written > 0, "hidden rows are in memory"
        with hyades.open(out) as volume:
            rows[name] = volume.read(name)
    return rows


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with nvme.stopped_at_end() as servers:
        yield servers


def check(url: Any, name: str, models: Models, expected: Rows, **more: Any) -> Any:
    """Refresh from *url*; the rows must be those of a local run."""
    module, _ = models(name)
    result = hyades.refresh(url, module, out=name, **{**LEAN, "force": True, **more})
    check_report(result.report)
    with hyades.open(more.get("output_volume", url)) as volume:
        assert same_bits(volume.read(name), expected[name])
        assert list(volume.volume.verify([f"output/{name}"])) == []
    return result.report


def copies(source: Path, folder: Path, number: int = 1) -> list[Path]:
    """Return copies of a volume with room behind them."""
    paths = [folder / f"served-{i}.vol" for i in range(number)]
    for path in paths:
        shutil.copy(source, path)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + 32 * MIB)
    return paths


# -- over the wire


@pytest.mark.parametrize("digest", ["none", "header,data"])
@pytest.mark.parametrize("name", NAMES)
def test_one_target(
    source: Path, expected: Rows, facebook_model: Models, servers: list[Server], tmp_path: Path,
    name: str, digest: str,
) -> None:  # fmt: skip
    """Reads and outputs on one namespace."""
    (path,) = copies(source, tmp_path)
    servers.append(nvme.start({1: FileNamespace(path)}))
    check(nvme.url(*servers, digest=digest), name, facebook_model, expected)


@pytest.mark.parametrize("name", NAMES)
def test_two_striped_targets(
    facebook: Path, expected: Rows, facebook_model: Models, servers: list[Server], name: str
) -> None:
    """Ingested over the wire, with digests on one member; named in the other order afterwards."""
    servers += [nvme.start({1: MemoryNamespace(32 * MIB)}) for _ in range(2)]
    one, two = nvme.url(servers[0]), nvme.url(servers[1], digest="header,data")
    report = ingest(
        f"stripe:unit=256KiB,{one},{two}", edges=facebook / "edge_index.npy",
        features=facebook / "features.npy", range_rows=1024,
    )  # fmt: skip
    assert one in report.lines()[0]
    check(f"stripe:{two},{one}", name, facebook_model, expected)


@pytest.mark.parametrize("name", NAMES)
def test_features_on_one_host_and_outputs_on_another(
    source: Path, expected: Rows, facebook_model: Models, servers: list[Server], name: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The features are exported for reading only; outputs go to a host, then to a local file."""
    servers.append(nvme.start({1: FileNamespace(source, read_only=True)}))
    servers.append(nvme.start({1: MemoryNamespace(32 * MIB)}))
    features, outputs = (nvme.url(server) for server in servers)
    before = source.stat().st_mtime_ns
    for place in (outputs, tmp_path / "out.vol"):
        report = check(features, name, facebook_model, expected, output_volume=place)
        assert [v.volume for v in report.volumes] == [features, str(place)]
        assert report.volumes[0].written == 0
    assert source.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", NAMES)
def test_tls(
    source: Path, expected: Rows, facebook_model: Models, servers: list[Server], name: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    try:
        probe_tls()
    except BackendMissing as missing:
        pytest.skip(str(missing))
    psk = Psk(bytes(range(32)), 1, "test")
    key = tmp_path / "key"
    key.write_text(psk.interchange())
    key.chmod(0o600)
    (path,) = copies(source, tmp_path)
    servers.append(nvme.start({1: FileNamespace(path)}, keys=Keyring([psk])))
    check(nvme.url(*servers, tls=key), name, facebook_model, expected)


def test_a_namespace_that_is_too_small(facebook: Path, servers: list[Server]) -> None:
    servers.append(nvme.start({1: MemoryNamespace(4 * MIB)}))
    url = nvme.url(*servers)
    with pytest.raises(UsageError, match=r"holds 4\.0 MiB, this graph .* \d+ bytes are missing: "):
        ingest(url, edges=facebook / "edge_index.npy", features=facebook / "features.npy")


def test_an_output_namespace_that_is_too_small(
    source: Path, facebook_model: Models, servers: list[Server]
) -> None:
    servers.append(nvme.start({1: FileNamespace(source, read_only=True)}))
    servers.append(nvme.start({1: MemoryNamespace(128 * 1024)}))
    features, outputs = (nvme.url(server) for server in servers)
    module, _ = facebook_model("gcn")
    with pytest.raises(UsageError, match=r"larger.*\d+ bytes are missing"):
        hyades.refresh(features, module, out="x", output_volume=outputs, **LEAN)
    with pytest.raises(UsageError, match=r"is served read-only: .* --output-volume"):
        hyades.refresh(features, module, out="x", **LEAN)


def test_a_bad_block_is_named_with_target_and_namespace(
    source: Path, facebook_model: Models, servers: list[Server], tmp_path: Path
) -> None:
    """A target with a bad block under the features; the page begins before it."""
    (path,) = copies(source, tmp_path)
    with hyades.open(source) as volume:
        info = volume.volume.object("features")
        lba, bad = info.lba(1), info.lba(1) + info.page_blocks - 1

    class Bad(FileNamespace):
        def reference(self, offset: int, nbytes: int) -> Any:
            return None

        def read_into(self, offset: int, into: memoryview) -> int:
            if offset <= bad * BLOCK < offset + len(into):
                return 0x281  # unrecovered read error
            return super().read_into(offset, into)

    servers.append(nvme.start({1: Bad(path)}, max_transfer=4 * BLOCK))
    url = nvme.url(*servers)
    module, _ = facebook_model("gcn")
    with pytest.raises(DeviceLost) as caught:
        hyades.refresh(url, module, out="x", output_volume=tmp_path / "o.vol", **LEAN)
    host, port = servers[0].addresses[0]
    text = str(caught.value)
    assert f"object 'features' page 1 (LBA {lba}: " in text
    assert f"{host}:{port}" in text
    assert nvme.NQN in text
    assert "ns 1" in text


# -- SPDK's initiator


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    yield StandIn(monkeypatch, tmp_path)
    remove_builds()


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
def test_spdk_stand_in(
    source: Path, expected: Rows, facebook_model: Models, stand_in: StandIn, name: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Features and outputs on two of SPDK's namespaces."""
    names = [f"nqn.2026-01.org.example:{part}" for part in ("features", "outputs")]
    shutil.copy(source, tmp_path / names[0])
    stand_in.device(32 * MIB // BLOCK, names[1])
    features, outputs = (f"spdk+tcp://127.0.0.1:4420/{n}?ns=1" for n in names)
    check(features, name, facebook_model, expected, output_volume=outputs)


@needs_compiler
@pytest.mark.slow
def test_spdk_stand_in_striped(
    facebook: Path, expected: Rows, facebook_model: Models, stand_in: StandIn
) -> None:
    """Every device that is opened starts a process."""
    names = [f"nqn.2026-01.org.example:{part}" for part in ("one", "two")]
    for name in names:
        stand_in.device(32 * MIB // BLOCK, name)
    one, two = (f"spdk+tcp://127.0.0.1:4420/{n}?ns=1" for n in names)
    ingest(f"stripe:{one},{two}", edges=facebook / "edge_index.npy",
           features=facebook / "features.npy", range_rows=1024)  # fmt: skip
    check(f"stripe:{two},{one}", "gcn", facebook_model, expected)


def test_rows_are_not_all_alike(expected: Rows) -> None:
    """Else equal bits would say little."""
    assert all(len(np.unique(rows)) > 1000 for rows in expected.values())
