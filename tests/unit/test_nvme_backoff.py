"""How long a path of nvme+tcp waits between two attempts to connect."""

import threading
from types import SimpleNamespace

import pytest

from hyades.common.errors import PeerError
from hyades.proxy.transports import nvme_paths
from hyades.proxy.transports.nvme_paths import Paths
from hyades.proxy.transports.nvme_url import parse
from hyades.proxy.urls import Url

URL = "nvme+tcp://127.0.0.1:1/nqn.2026-01.org.example:x?reconnect_delay=0.25"


class Attempts:
    """Sessions that fail to open (None), or last so many seconds of a clock that is made up."""

    def __init__(self, lives: list[float | None], clock: SimpleNamespace) -> None:
        self.lives, self.clock = lives, clock
        self.reason = PeerError("lost")

    def __call__(self, *_: object) -> "Attempts":
        return self

    def open(self) -> None:
        """Connect, or not."""
        self.life = self.lives.pop(0)
        if self.life is None:
            raise PeerError("nobody there")

    def keep_alive(self) -> None:
        """Live."""
        assert self.life is not None
        self.clock.now += self.life

    def close(self) -> None:
        """End."""


@pytest.fixture
def pauses(monkeypatch):
    """Return a function that runs a path over lives of sessions and gives its pauses."""

    def run(lives: list[float | None]) -> list[float]:
        clock = SimpleNamespace(now=100.0)
        monkeypatch.setattr(nvme_paths, "time", SimpleNamespace(monotonic=lambda: clock.now))
        paths = Paths(parse(Url(URL)), Attempts(lives, clock))
        found: list[float] = []

        def pause(seconds: float) -> None:
            found.append(seconds)
            paths.stopping = not lives

        monkeypatch.setattr(paths, "pause", pause)
        monkeypatch.setattr(paths, "check", lambda session: None)
        monkeypatch.setattr(paths, "offer", lambda path, session: None)
        thread = threading.Thread(target=paths.paths[0]._run)
        thread.start()
        thread.join()
        paths.close()
        return found

    return run


def test_the_pause_doubles_up_to_five_seconds(pauses):
    assert pauses([None] * 8) == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_a_session_that_lasted_begins_again_with_the_shortest(pauses):
    assert pauses([None, None, None, 30.0, None]) == [0.25, 0.5, 1.0, 0.25, 0.5]


def test_a_session_that_ends_at_once_does_not(pauses):
    assert pauses([None, None, 0.5, 0.5, 0.5]) == [0.25, 0.5, 1.0, 2.0, 4.0]
