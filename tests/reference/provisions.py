"""What the tests of exports through other targets share: an export, and runs of it."""

import contextlib

from hyades.target_side.provision.steps import Export, Journal, Provision, journal_path

NQN = "nqn.2024-01.org.example:volume"
HOSTS = ("nqn.2014-08.org.nvmexpress:uuid:1", "nqn.2014-08.org.nvmexpress:uuid:2")


class Killed(BaseException):
    """Ends a run without any of its clean-up, as SIGKILL does."""


def make_files(folder):
    """Return two files to export."""
    paths = tuple(folder / f"{name}.vol" for name in "ab")
    for path in paths:
        path.write_bytes(bytes(8192))
    return paths


def export_of(files):
    """Return an export of *files* at two addresses to two hosts."""
    return Export(NQN, files, (("127.0.0.1", 4420), ("::1", 4421)), HOSTS)


@contextlib.contextmanager
def runs(folder, name):
    """Give a function from a backend called *name* and an export to a Provision.

    Its journal is released at the end, and when the next one is made: the process before is gone.
    """
    open_ones = []

    def release():
        while open_ones:
            open_ones.pop().close()

    def make(backend, export):
        release()
        journal = Journal(journal_path(name, export.nqn, folder / "state"))
        open_ones.append(journal)
        return Provision(backend, export, journal)

    try:
        yield make
    finally:
        release()
