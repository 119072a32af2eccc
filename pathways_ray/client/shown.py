"""The waits of this process that `pw.progress()` shows, and work that says how much of it is done."""

from __future__ import annotations

import contextlib
from typing import Any

from pathways_ray.observe.why import Link, Why, bytes_text

waits: Any = None
"""The `progress.Waits` while they are shown, or None."""


class Work:
    """Something long of which the client knows the size, such as a checkpoint.

    Args:
        text: what is done.
        size: its bytes.

    `done` are those that are done.
    """

    def __init__(self, text: str, size: int) -> None:
        self.text, self.size, self.done = text, size, 0

    def why(self) -> Why:
        """Says how far it is."""
        text = f"{self.text}: {bytes_text(self.done)} of {bytes_text(self.size)}"
        return Why(self.text, (Link(text, done=self.done / self.size if self.size else -1.0),))

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """Shows it, with a bar, as long as the block lasts."""
        if waits is None:
            return contextlib.nullcontext()
        found: contextlib.AbstractContextManager[None] = waits.waiting(self.why)
        return found
