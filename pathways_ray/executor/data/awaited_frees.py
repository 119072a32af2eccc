"""Uploads that wait until what their session has freed is gone: its drops come by the controller, a little later than
what the client sends here.

Those of a session wait in the order in which they came: arrays that are freed behind a launch go once that has all of
its uploads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pathways_ray.errors import QuotaExceeded

FREES_LIMIT_S = 60.0
"""An upload waits this long. Its frees may be behind a launch that waits for a compiler, or for memory."""

LOOK_S = 0.005
"""The pause between two looks, of as many sessions as wait so many times longer."""

SHARE = 20
"""The pauses are this many times as long as the looks: who has very many arrays is looked at for as long as others."""


class FreesAwaited(Exception):
    """An upload that does not fit, and will once what its session has freed is gone. It is refused with `refusal` if
    that does not go."""

    def __init__(self, refusal: QuotaExceeded) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class AwaitedFrees:
    """The uploads that wait, by session. Only for the event loop."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[object]] = {}

    def is_ahead(self, session: int, upload: object) -> bool:
        """Whether another upload of the session is to be looked at before."""
        line = self._lines.get(session)
        return line is not None and line[0] is not upload

    async def open(
        self, session: int, upload: object, begin: Callable[[], None], first: FreesAwaited, limit_s: float
    ) -> None:
        """Begins an upload once it fits.

        Args:
            begin: begins it, or raises `FreesAwaited`, as it has done `first`.

        Raises:
            FreesAwaited: it has waited for too long.
        """
        loop, line = asyncio.get_running_loop(), self._lines.setdefault(session, deque())
        line.append(upload)
        began, took, refusal = loop.time(), 0.0, first.refusal
        try:
            while loop.time() - began < limit_s:
                await asyncio.sleep(len(self._lines) * max(LOOK_S, SHARE * took))
                if self.is_ahead(session, upload):
                    continue
                looked = loop.time()
                try:
                    begin()
                    return
                except FreesAwaited as error:
                    refusal, took = error.refusal, loop.time() - looked
            raise FreesAwaited(refusal)
        finally:
            del line[next(place for place, other in enumerate(line) if other is upload)]
            if not line:
                del self._lines[session]
