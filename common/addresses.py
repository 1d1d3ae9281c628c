"""Host names and what they resolve to."""

import socket
from collections.abc import Sequence
from typing import Any

# family, kind, protocol, canonical name, socket address; as getaddrinfo gives them
Resolved = Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]]


def resolve(host: str, port: int | None, *, passive: bool = False) -> Resolved:
    """Return the stream sockets that *host* and *port* mean; OSError where there are none.

    A name that cannot be one (an empty label, one of more than 63 bytes) is such an OSError, too.
    """
    flags = socket.AI_PASSIVE if passive else 0
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except ValueError as error:  # UnicodeError from IDNA, and zero bytes
        raise socket.gaierror(socket.EAI_NONAME, "no name of a host") from error
