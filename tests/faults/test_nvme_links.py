"""nvme+tcp between network namespaces: links that are slow, late, or unplugged."""

import threading
import time

import pytest
from tests.reference import nvme
from tests.reference.churn import Churn
from tests.reference.netns import TARGET, joined_namespaces
from tests.reference.relay import Relay
from tests.reference.runs import refresh_rows, same_bits, three_layers, write_volume

import hyades
from hyades.common.layout import BLOCK, Status
from hyades.common.units import MIB
from hyades.proxy.registry import open_transport

BLOCKS = 256
QUICK = {"kato": 1, "timeout": 0.5, "reconnect_delay": 0.02}


@pytest.fixture
def network():
    with joined_namespaces() as network:
        yield network


@pytest.fixture
def target(network, tmp_path):
    path = tmp_path / "pages"
    path.write_bytes(bytes(BLOCKS * BLOCK))
    with serving(network, path) as target:
        yield target


def serving(network, path):
    prefix = ["ip", "netns", "exec", network.target]
    return nvme.TargetProcess(path, "--allow-host", nvme.HOST, host=TARGET, prefix=prefix)


def after(seconds):
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def connect(target, **options):
    return open_transport(nvme.address_url(target.address, **{**QUICK, **options}))


def test_the_link_is_unplugged_for_a_while(network, target):
    """Nobody resets anything: both sides find out by silence."""

    def work():
        transport = connect(target)
        churn = Churn(transport, BLOCKS, patience=100)
        for _ in range(2):
            churn.run(after(0.2))
            network.set_link("down")
            timer = threading.Timer(1.5, network.set_link, ("up",))
            timer.start()
            churn.run(lambda timer=timer: not timer.is_alive())
        churn.run(after(0.2))
        assert churn.flush() == Status.OK
        churn.verify()
        stats = transport.stats()
        transport.close()
        return stats

    stats = network.as_host(work)
    assert stats["losses"] >= 2
    assert stats["reconnects"] >= 2
    assert stats["replays"] > 0


def test_a_short_gap_loses_nothing(network, target):
    def work():
        transport = connect(target, timeout=20, kato=20)
        churn = Churn(transport, BLOCKS, patience=100)
        churn.run(after(0.2))
        network.set_link("down")
        timer = threading.Timer(0.3, network.set_link, ("up",))
        timer.start()
        churn.run(lambda: not timer.is_alive())
        churn.verify()
        stats = transport.stats()
        transport.close()
        return stats

    assert network.as_host(work)["losses"] == 0  # TCP sends again by itself


def test_a_rate_limit_and_a_delay(network, target):
    network.limit("40mbit")

    def work():
        with Relay(target.address) as relay:
            relay.delay = 0.003
            transport = connect(target, timeout=5, kato=5)
            churn = Churn(transport, BLOCKS, longest=16, patience=100)
            churn.run(after(1.0))
            churn.verify()
            stats = transport.stats()
            transport.close()
            return stats

    stats = network.as_host(work)
    assert stats["losses"] == 0
    assert stats["bytes_read"] > 0


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_a_refresh_over_a_slow_link(network, tmp_path, delay):
    """The same bits over a link that is slow, perhaps late, and pulled once in the middle."""
    path = write_volume(tmp_path / "pages.vol")
    lean = {"memory": "64MiB", "plan": "passes:2", "force": True}
    with hyades.open(path, writable=True) as volume:
        expected, _ = refresh_rows(volume, three_layers("gcn"), "here", **lean)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 * MIB)
    network.limit("100mbit")
    pulled = []

    def pull(phase, *_):
        if phase.startswith("2/3") and not pulled:
            network.set_link("down")
            pulled.append(threading.Timer(1.0, network.set_link, ("up",)))
            pulled[0].start()

    with serving(network, path) as target:

        def work():
            with Relay(target.address) as relay:
                relay.delay = delay
                url = nvme.address_url(relay.address if delay else target.address, **QUICK)
                hyades.refresh(
                    url, three_layers("gcn"), out="there", threads=2, progress=pull, **lean
                )
                pulled[0].join()
                with hyades.open(url) as volume:
                    return volume.read("there")

        rows = network.as_host(work)
    assert same_bits(rows, expected)
