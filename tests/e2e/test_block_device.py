"""Ingest, refresh, export and inspect on block devices: the bits are those of a file."""

import subprocess
import sys

import numpy as np
import pytest
from tests.reference.loops import loop_device
from tests.reference.runs import refresh_rows, same_bits, three_layers, write_volume

import hyades
from hyades.common.errors import UsageError

SIZE = 24 << 20


def command(*arguments):
    """Run the command line; return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "hyades.deploy.cli", *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return {model: rows} from a volume that is a file."""
    path = write_volume(tmp_path_factory.mktemp("file") / "g.vol")
    with hyades.open(path, writable=True) as volume:
        return {
            kind: refresh_rows(volume, three_layers(kind), kind, memory="16MiB")[0]
            for kind in ("sage", "gat")
        }


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("form", ["blk:{}", "blk://{}?engine=threads", "{}"])
def test_the_same_bits(tmp_path, expected, sector, form):
    odd = 512 if sector == 512 else 0
    with loop_device(tmp_path / "disk", sector, nbytes=SIZE + odd) as device:
        url = form.format(device)
        write_volume(url)
        for kind, rows in expected.items():
            with hyades.open(url, writable=True) as volume:
                found, _ = refresh_rows(volume, three_layers(kind), kind, memory="16MiB")
                assert same_bits(found, rows)
        with hyades.open(form.format(device)) as volume:
            assert same_bits(volume.read("sage"), expected["sage"])


def test_the_command_line(tmp_path, expected):
    out = tmp_path / "sage.npy"
    with loop_device(tmp_path / "disk", 512, nbytes=SIZE + 1024) as device:
        url = f"blk:{device}"
        write_volume(url)
        with hyades.open(url, writable=True) as volume:
            hyades.refresh(volume, three_layers("sage"), out="sage", memory="16MiB", threads=2)
        assert "sage" in command("inspect", url, "--verify")
        command("export", url, "sage", out)
    assert same_bits(np.load(out), expected["sage"])


def test_a_device_is_replaced_only_when_told(tmp_path):
    with loop_device(tmp_path / "disk", 512, nbytes=SIZE) as device:
        write_volume(f"blk:{device}")
        with pytest.raises(UsageError, match="--force"):
            write_volume(f"blk:{device}")
        write_volume(f"blk:{device}", force=True)


@pytest.mark.parametrize("nbytes", [4096, 512 * 9, 1 << 20])
def test_a_device_that_is_too_small(tmp_path, nbytes):
    with loop_device(tmp_path / "disk", 512, nbytes=nbytes) as device:
        with pytest.raises(UsageError, match=r"\d+ bytes are missing"):
            write_volume(f"blk:{device}")
        assert not any(device.read_bytes()[:8192])  # blank again


def test_a_device_in_use(tmp_path):
    with loop_device(tmp_path / "disk", 512, nbytes=SIZE) as device:
        write_volume(f"blk:{device}")
        with hyades.open(f"blk:{device}", writable=True):
            for name in (f"blk:{device}", f"blk://{device}", device):
                with pytest.raises(UsageError, match="is being"):
                    hyades.open(name, writable=True)
        with hyades.open(f"blk:{device}"), hyades.open(device):
            pass  # readers share it


def test_a_read_only_device(tmp_path, expected):
    path = write_volume(tmp_path / "g.vol")
    with hyades.open(path, writable=True) as volume:
        hyades.refresh(volume, three_layers("sage"), out="sage", memory="16MiB", threads=2)
    with loop_device(path, 512, read_only=True) as device:
        with hyades.open(f"blk:{device}") as volume:
            assert same_bits(volume.read("sage"), expected["sage"])
        with pytest.raises(UsageError, match=f"{device} is read-only"):
            hyades.open(f"blk:{device}", writable=True)
        with pytest.raises(UsageError, match=f"{device} is read-only"):
            write_volume(f"blk:{device}", force=True)


def test_names_that_are_no_device(tmp_path):
    path = write_volume(tmp_path / "g.vol")
    for call in (hyades.open, write_volume):
        with pytest.raises(UsageError, match="use a plain path"):
            call(f"blk:{path}")
        with pytest.raises(UsageError, match="No such file"):
            call(f"blk:{tmp_path / 'none'}")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["g.vol"]


def test_a_stripe_of_devices(tmp_path, expected):
    with (
        loop_device(tmp_path / "a", 512, nbytes=SIZE) as first,
        loop_device(tmp_path / "b", 4096, nbytes=SIZE) as second,
    ):
        url = f"stripe:blk:{first},blk:{second}"
        write_volume(url)
        with hyades.open(url, writable=True) as volume:
            rows, _ = refresh_rows(volume, three_layers("sage"), "sage", memory="16MiB")
            assert same_bits(rows, expected["sage"])
            with pytest.raises(UsageError, match="is being"):
                hyades.open(f"blk:{second}", writable=True)


def test_outputs_on_a_device(tmp_path, expected):
    path = write_volume(tmp_path / "g.vol")
    with loop_device(tmp_path / "disk", 512, nbytes=SIZE) as device:
        with hyades.open(path) as volume:
            hyades.refresh(
                volume, three_layers("sage"), out="sage", memory="16MiB", threads=2,
                output_volume=f"blk:{device}",
            )  # fmt: skip
        with hyades.open(f"blk:{device}") as outputs:
            assert same_bits(outputs.read("sage"), expected["sage"])
