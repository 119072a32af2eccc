"""The first questions of a controller that begins where another one was, to the resource manager."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray

RETRY_PAUSE_S = 0.5
"""Time between two calls of a controller that begins to a resource manager that is out of reach."""

KILL_PAUSE_S = 1.0
"""Time from the kill of a resource manager that is stopped to the next question. Ray ends it half a second after the
call, and its successor is there a third of a second later. A question that is on its way as it ends fails only 1.2 s
after that."""

MANAGER_START_LIMIT_S = 120.0
"""A resource manager that Ray starts again answers within this time, also on a busy machine."""

ASKED = 2
"""Times that one that is silent is asked before it is killed, and again after that: a pause of this process may have
used up the time for an answer that is there."""


async def ask_manager(
    manager: Any, own_process: tuple[int, int], limit_s: Callable[[], float], kill: Callable[[], None]
) -> tuple[Any, bytes] | None:
    """The islands that there are, and who holds slices; None where nobody says so.

    A resource manager that starts again too, however slowly, is waited for. One that is silent, as if it was stopped,
    is killed, once, and waited for.

    Args:
        own_process: pid and start of the process that begins, see `HostInfo`. They are said with each question: what
            those before it still ask is not answered any more, and a resource manager that starts again knows nothing.
        limit_s: seconds for an answer.
        kill: has the resource manager killed.
    """
    deadline = time.monotonic() + MANAGER_START_LIMIT_S
    silent = 0
    while True:
        manager.controller_starts.remote(*own_process)
        try:
            islands, slices = await asyncio.wait_for(_ask(manager, own_process[1]), limit_s())
        except TimeoutError:
            silent += 1
            if silent == 2 * ASKED:
                return None  # the watch over it goes on
            if silent == ASKED:
                kill()
                await asyncio.sleep(KILL_PAUSE_S)
        except ray.exceptions.RayError:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(RETRY_PAUSE_S)
        else:
            return islands, slices


async def _ask(manager: Any, started: int) -> tuple[Any, bytes]:
    slices = await manager.slices.remote(started)  # first: from then on none before this one changes anything
    return await manager.islands.remote(), slices
