"""Lost connections in progress bars and summaries."""

import pytest

from hyades.common.trace import Advance
from hyades.deploy.api import _ProgressSink
from hyades.deploy.outage import losses, out_of_reach


def path(address, live):
    return {"address": address, "live": live}


AWAY = {"paths": [path("a:1", False), path("b:1", False)], "losses": 2, "last_loss": "b:1: gone"}
HALF = {"paths": [path("a:1", False), path("b:1", True)], "losses": 1, "last_loss": "a:1: gone"}
FILE = {"bytes_read": 1}


@pytest.mark.parametrize(
    ("stats", "away", "lost"),
    [
        (FILE, "", (0, "")),
        (HALF, "", (1, "a:1: gone")),
        (AWAY, "a:1 and b:1", (2, "b:1: gone")),
        ({"members": [FILE, HALF]}, "", (1, "a:1: gone")),
        ({"members": [HALF, AWAY, FILE]}, "a:1 and b:1", (3, "b:1: gone")),
    ],
)
def test_what_transports_tell(stats, away, lost):
    assert out_of_reach(stats) == away
    assert losses(stats) == lost


class Device:
    def __init__(self, found):
        self.found = found

    def stats(self):
        return self.found


def test_progress_says_what_a_run_waits_for():
    phases = []
    sink = _ProgressSink(lambda phase, *_: phases.append(phase), None, 2)
    sink.devices = (Device(FILE), device := Device(AWAY))

    def advance(done):
        sink.emit(Advance(0, "convs.0", 0, 1, done, 9, "page"))

    advance(1)
    advance(1)
    advance(2)
    device.found = HALF
    advance(2)
    assert phases == ["1/2 convs.0", "1/2 convs.0, waiting for a:1 and b:1"] + ["1/2 convs.0"] * 2
