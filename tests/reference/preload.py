"""Imported once by the server of tests/reference/processes.py: what it compiles, forks inherit."""

from tests.reference.processes import warm_up

warm_up()
