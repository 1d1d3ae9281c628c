"""What the stages of views cost shows in the target's metrics."""

import re

from tests.reference.nvme_host import Host
from tests.reference.view_host import ask, identify, read_whole, view_server, write_volume

from hyades.common.layout import BLOCK
from hyades.common.nvme.vendor import ViewRequest
from hyades.common.units import KIB
from hyades.common.viewspec import SampleSpec
from hyades.target_side.metrics import render

SAMPLE = SampleSpec(1, 4, 1, ((0, 1),), "none")


def seconds(text: str) -> dict[str, float]:
    """Return the seconds of each operator."""
    found = re.findall(
        r'^hyades_stage_seconds_total\{operator="(\w+)"\} (\S+)$', text, re.MULTILINE
    )
    return {name: float(value) for name, value in found}


def test_operators_are_timed_over_all_views(tmp_path):
    path = write_volume(tmp_path / "g.vol")
    with view_server(path, threads=0) as (server, _):
        assert seconds(render(server.service, 0)) == {}
        host = Host(server.addresses[0])
        nsid = ask(host, ViewRequest("features", "float16", 64 * KIB, SAMPLE))
        before = seconds(render(server.service, 0))
        assert before["sample"] > 0
        assert "quantise" not in before
        info = identify(host, nsid)
        read_whole(host.io, nsid, info.blocks * info.block_bytes // BLOCK)
        after = seconds(render(server.service, 0))
        assert after["quantise"] > 0
        assert after["pages"] > 0
        assert all(after[name] >= before[name] for name in before)
        host.close()
