"""Islands that an operator drains or removes: two calls to the controller, and the wait for slices to go."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from pathways_ray.client.asking import call, text_in
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.transport.messages import DrainIsland, RemoveIsland, Status, UndrainIsland

DRAIN_LIMIT_S = 60.0
"""A drain waits this long for slices to go, and keeps them this long, where the caller says nothing else."""

LOOK_S = 0.25
"""Time between two looks at whether an island is empty."""


def drain(url: str, token: str, island: int, deadline_s: float, ca: str = "") -> list[dict[str, Any]]:
    """Has an island get no slices any more, and waits until it has none, for at most `deadline_s`.

    Returns:
        The slices that it still has, as status shows them; none once it is empty.

    Raises:
        UsageError: there is no such island; it is the last one that takes slices; a negative deadline.
        PathwaysError: the drain was taken back meanwhile.
        AuthenticationError: the token is not the operator's.
    """
    island = checked(island)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or math.isnan(deadline_s):
        raise UsageError(f"deadline_s= is a number of seconds, not {deadline_s!r}")
    call(url, token, DrainIsland(0, island, float(deadline_s)), ca=ca)
    until = time.monotonic() + deadline_s
    while True:
        status = json.loads(text_in(call(url, token, Status(0), ca=ca), url))
        left = [one for one in status["slices"] if one["island"] == island]
        state = next((one["state"] for one in status["islands"] if one["island"] == island), "draining")
        if state not in ("draining", "lost"):
            raise PathwaysError(f"island {island} takes slices again: its drain was taken back by somebody else")
        if not left or time.monotonic() >= until:
            return left
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))


def undrain(url: str, token: str, island: int, ca: str = "") -> None:
    """Has a drained island get slices again. Those that have left it stay where they are.

    Raises:
        UsageError: the island is not draining.
        AuthenticationError: the token is not the operator's.
    """
    call(url, token, UndrainIsland(0, checked(island)), ca=ca)


def remove(url: str, token: str, island: int, ca: str = "") -> None:
    """Ends an island for good: its processes, and what was reserved for them.

    Raises:
        UsageError: there is no such island; it is the last one that takes slices; or it has slices, and the deadline of
            its drain is not over.
        AuthenticationError: the token is not the operator's.
    """
    call(url, token, RemoveIsland(0, checked(island)), ca=ca)


def checked(island: int) -> int:
    """Raises `UsageError` unless this may be the number of an island."""
    if not isinstance(island, int) or isinstance(island, bool) or not 0 <= island < 1 << 31:
        raise UsageError(f"an island is named by its number, as pw.islands() says it, not {island!r}")
    return island
