"""What transports tell of lost connections, in words for people: during a run and after it."""

from collections.abc import Mapping
from typing import Any


def out_of_reach(stats: Mapping[str, Any]) -> str:
    """Return the addresses of a device, or of its first member, without any live path; else ""."""
    for member in stats.get("members", ()):
        found = out_of_reach(member)
        if found:
            return found
    paths = stats.get("paths", ())
    if any(path["live"] for path in paths):
        return ""
    return " and ".join(path["address"] for path in paths)


def losses(stats: Mapping[str, Any]) -> tuple[int, str]:
    """Return how often a device has lost a connection so far, and how the last time."""
    count, last = int(stats.get("losses", 0)), str(stats.get("last_loss", ""))
    for member in stats.get("members", ()):
        more, text = losses(member)
        count, last = count + more, text or last
    return count, last
