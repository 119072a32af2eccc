"""Counting of traces: a function that is traced again and again is compiled each time, and rarely on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from pathways_ray.client import source_info
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.errors import TraceError, UsageError

MANY = 10
"""Traces of one function at which a warning is given: as often as that, shapes change with the data."""


class ManyTraces(UserWarning):
    """A function was traced for the tenth time, or again where it says `on_retrace="warn"`."""


ACTIONS = (None, "warn", "raise")
"""What a function may do at each further trace (`on_retrace`); None warns at the tenth only."""


class Traces:
    """The traces of one function, and what differs between them."""

    def __init__(self, name: str, action: str | None = None) -> None:
        if action not in ACTIONS:
            raise UsageError(f"on_retrace= is 'warn', 'raise' or None, not {action!r}")
        self.name = name
        self.action = action
        self._last: list[str] | None = None
        self._count = 0

    def check(self, kinds: Sequence[ArgumentType]) -> None:
        """Refuses a trace for these argument types where `action` says so.

        Raises:
            TraceError: `action` is "raise", and it was traced before.
        """
        if self._count and self.action == "raise":
            raise TraceError(self._again(_difference(self._last, _texts(kinds)), self._count + 1))

    def note(self, kinds: Sequence[ArgumentType]) -> None:
        """Counts a trace that succeeded; warns at the tenth, or at each further one where `action` says so."""
        now = _texts(kinds)
        before, self._last = self._last, now
        self._count += 1
        if self._count > 1 and self.action == "warn":
            text = self._again(_difference(before, now), self._count)
            warnings.warn(text, ManyTraces, stacklevel=source_info.stacklevel())
        elif self._count == MANY and self.action is None:
            warnings.warn(
                f"{self.name} was traced for the {MANY}th time, and is compiled each time: {_difference(before, now)}. "
                "Pad what changes to a few sizes (pw.padded), or pass numbers as arrays instead of static arguments",
                ManyTraces,
                stacklevel=source_info.stacklevel(),
            )

    def _again(self, difference: str, count: int) -> str:
        return f"{self.name} was traced again ({count} times now): {difference}"


def _texts(kinds: Sequence[ArgumentType]) -> list[str]:
    return [f"{kind}{' (weak type)' if kind.weak else ''} on {kind.where()}" for kind in kinds]


def _difference(before: list[str] | None, now: list[str]) -> str:
    if before is None or len(before) != len(now):
        return f"the trees of its arguments differ ({len(before or ())} leaves, then {len(now)})"
    changed = [k for k, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]
    if not changed:
        return "its arguments have the same types, but other static values or trees, or JAX has other settings"
    shown = [f"leaf {k} was {before[k]}, now {now[k]}" for k in changed[:3]]
    return "; ".join(shown) + (f"; and {len(changed) - 3} more" if len(changed) > 3 else "")
