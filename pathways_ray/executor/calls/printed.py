"""Output of host functions, as lines for the log of their host: so many a second, since every line costs the host.

More is read, so that a function does not wait for its output, and left out.
"""

from __future__ import annotations

MAX_LINE = 4096
"""Bytes of a line; a longer one is cut into several."""

MAX_LINES = 500
"""Lines of a process that are logged in a second."""


class Printed:
    """The output of one process, in pieces as they are read. Pure."""

    def __init__(self) -> None:
        self._begun = b""
        self._since = float("-inf")
        self._left = 0
        self._left_out = 0

    def lines(self, data: bytes, now: float) -> list[str]:
        """The lines that a further piece, read at time `now` in seconds, completes. No bytes stand for the end."""
        found = []
        if now - self._since >= 1.0 or not data:
            found += self._said()
            self._since, self._left = now, MAX_LINES
        if not self._left and data:
            self._left_out += len(self._begun) + len(data)
            self._begun = b""
            return found
        whole = (self._begun + data).split(b"\n")
        self._begun = whole.pop()
        if not data or len(self._begun) > MAX_LINE:
            whole.append(self._begun)
            self._begun = b""
        pieces = [line[k : k + MAX_LINE] for line in whole for k in range(0, max(len(line), 1), MAX_LINE)]
        found += [line.decode(errors="replace") for line in pieces[: self._left]]
        self._left_out += sum(len(line) + 1 for line in pieces[self._left :])
        self._left -= min(self._left, len(pieces))
        return found if data else [*filter(None, found), *self._said()]

    def _said(self) -> list[str]:
        """A line about what was left out, if anything was."""
        size, self._left_out = self._left_out, 0
        return [f"({size} bytes more were printed; {MAX_LINES} lines a second are logged)"] if size else []
