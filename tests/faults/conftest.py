"""Fixtures of the tests of views that a host asks for."""

import pytest
from tests.reference.own_views import opening, serving
from tests.reference.view_host import write_volume


@pytest.fixture
def view_volume(tmp_path):
    """Return the path of a small volume."""
    return write_volume(tmp_path / "g.vol")


@pytest.fixture
def serve_views(view_volume):
    """Return a function that starts a target of it: own_views.serving."""
    with serving(view_volume) as start:
        yield start


@pytest.fixture
def open_views():
    """Return a function that opens a view: own_views.opening."""
    with opening() as start:
        yield start
