"""Processes of their own for refreshes that a test kills or whose memory it measures.

They are forked from a server that has compiled every kernel, so that they start at once.
"""

import multiprocessing
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
from tests.reference.runs import three_layers, write_volume

import hyades

_CASES = [
    ("gcn", "resident", None), ("sage", "passes:3", (3, 3, 3)), ("norm", "log:12", None),
    ("gat", "passes:2", None), ("gcn", "log:12", (3, 3, 3)),
]  # fmt: skip


def forked() -> ForkServerContext:
    """Return the context whose processes are forked from a warm one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.reference.preload"])
    return context


def warm_up() -> None:
    """Run every kind of refresh once on a small volume; one torch thread, since it is forked."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_volume(Path(folder) / "w.vol")
        with hyades.open(path, writable=True) as volume:
            for kind, plan, fanout in _CASES:
                hyades.refresh(
                    volume, three_layers(kind), out="w", plan=plan, fanout=fanout, memory="64MiB",
                    threads=2, force=True,
                )  # fmt: skip
