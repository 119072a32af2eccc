"""The log of a run: every message and every fault, with its time."""

from __future__ import annotations

import hashlib
from typing import Any

from pathways_ray.simulation.clock import Clock

_SHOWN = {
    "sequence",
    "sequences",
    "session",
    "program",
    "launch",
    "launches",
    "buffer",
    "buffers",
    "host",
    "epoch",
    "island",
    "reason",
    "gang",
}
"""Fields of messages that the log has."""


class Log:
    """The digest of all lines; `lines` has them if `kept`."""

    def __init__(self, clock: Clock, kept: bool) -> None:
        self.lines: list[str] = []
        self._clock, self._kept = clock, kept
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def note(self, link: str, batch: list[Any]) -> None:
        """Notes a batch of messages that arrived over a link ("sender -> receiver")."""
        self._add(f"{link}: {' '.join(map(_brief, batch))}")

    def say(self, text: str) -> None:
        """Notes a fault, or the end of a process."""
        self._add(f"*** {text}")

    def _add(self, text: str) -> None:
        line = f"{self._clock.now:.6f} {text}"
        self._digest.update(line.encode())
        if self._kept:
            self.lines.append(line)


def _brief(message: Any) -> str:
    """A message in a few letters."""
    if isinstance(message, tuple):
        return f"Register({message[0]})"
    shown = [getattr(message, name) for name in message.__struct_fields__[:3] if name in _SHOWN]
    failure = getattr(message, "failure", None)
    if failure is not None:
        shown.append(f"{failure.kind}: {failure.message}")
    return f"{type(message).__name__}({', '.join(map(str, shown))})"
