"""The five exception types; each says whose fault it is.

Every message names the object, page, address and status where they exist, and the fix.
I/O results travel in completion status words; only misuse raises at submit.
"""


class HyadesError(Exception):
    """Base of all errors that Hyades raises on purpose."""


class UsageError(HyadesError):
    """The caller asked for something that cannot be done; the text says what to change."""


class DataError(HyadesError):
    """A file or volume holds something wrong; names path or object, offset or page, expectation."""


class PeerError(HyadesError):
    """The other side of a connection broke the protocol."""


class BackendMissing(HyadesError):  # noqa: N818 - the name states the fact, not that it is an error
    """Hardware or a library is absent; the text says what was searched and how to get it."""


class DeviceLost(HyadesError):  # noqa: N818
    """A device or path is gone, after retries."""
