"""URLs of volumes: a scheme, a path and typed options; a plain path is a file."""

import re
from urllib.parse import parse_qsl, urlencode

from hyades.common.errors import UsageError
from hyades.common.units import parse_size

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_OPAQUE = re.compile(r"(stripe):")  # what follows is a list of URLs, each with its own options
_DEVICE = re.compile(r"((?:faulty\+)?blk):(?!//)")  # blk:/dev/x is blk:///dev/x
_TRUE, _FALSE = ("1", "yes", "true", "on"), ("0", "no", "false", "off")


class Url:
    """``scheme://path?key=value&...``; every option is read once, what is left over is an error.

    A text without ``scheme://`` is the path of a file, taken literally (``?`` included), but for
    ``stripe:``, whose path is everything behind it, and ``blk:/dev/name``.
    """

    def __init__(self, text: str) -> None:
        self.original = text
        text = _DEVICE.sub(r"\1://", text, count=1) if _DEVICE.match(text) else text
        match = _SCHEME.match(text)
        self._options: list[tuple[str, str]] = []
        self._known: dict[str, None] = {}  # options that were asked for, in this order
        opaque = _OPAQUE.match(text)
        if opaque is not None:
            self.scheme, self.path = opaque[1], text[opaque.end() :]
            return
        if match is None:
            self.scheme, self.path = "file", text
            return
        self.scheme = match[1].lower()
        rest = text[match.end() :]
        self.path, mark, query = rest.partition("?")
        try:
            self._options = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError:
            raise UsageError(f"{text}: options are written ?key=value&key=value") from None
        if mark and not query:
            raise UsageError(f"{text}: no options after the question mark")

    def __str__(self) -> str:
        return self.original

    def take_all(self, key: str) -> list[str]:
        """Remove and return every value of *key*."""
        self._known[key] = None
        found = [v for k, v in self._options if k == key]
        self._options = [(k, v) for k, v in self._options if k != key]
        return found

    def text(self, key: str, default: str) -> str:
        """Remove and return the one value of *key*."""
        found = self.take_all(key)
        if len(found) > 1:
            raise UsageError(f"{self}: {key} is given {len(found)} times")
        return found[0] if found else default

    def integer(self, key: str, default: int, *, least: int = 0) -> int:
        """Remove and return *key* as a whole number of at least *least*."""
        text = self.text(key, str(default))
        if not text.isdecimal() or int(text) < least:
            raise UsageError(f"{self}: {key} is a whole number from {least} on, not {text!r}")
        return int(text)

    def seconds(self, key: str, default: float, *, least: float = 0.0) -> float:
        """Remove and return *key* as a number of seconds from *least* to 1e6."""
        text = self.text(key, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= 1e6:
            raise UsageError(
                f"{self}: {key} is a number of seconds from {least:g} on, not {text!r}"
            )
        return value

    def size(self, key: str, default: int) -> int:
        """Remove and return *key* in bytes."""
        return parse_size(self.text(key, str(default)))

    def flag(self, key: str, default: bool) -> bool:
        """Remove and return *key* as yes or no."""
        text = self.text(key, "1" if default else "0").lower()
        if text not in _TRUE + _FALSE:
            raise UsageError(f"{self}: {key} is 1 or 0, not {text!r}")
        return text in _TRUE

    def rest(self) -> str:
        """Return the options that nobody took, as ``?key=value`` text, and forget them."""
        text = urlencode(self._options)
        self._options = []
        return f"?{text}" if text else ""

    def refuse_unused(self) -> None:
        """Raise UsageError naming options that nobody took."""
        if self._options:
            names = ", ".join(sorted({k for k, _ in self._options}))
            known = ", ".join(self._known) or "none"
            raise UsageError(
                f"{self}: {self.scheme}:// has no option {names}; its options are: {known}"
            )
