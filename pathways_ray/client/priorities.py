"""`pw.priority`: calls that pass others of their session, or let them pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from pathways_ray import limits
from pathways_ray.client.numbers import whole
from pathways_ray.errors import UsageError

PRIORITY: ContextVar[int] = ContextVar("priority", default=0)
"""The priority of the calls that are made now."""


@contextlib.contextmanager
def priority(level: int) -> Iterator[None]:
    """Gives the calls in a block, of programs, compiled functions and operations on arrays, a priority among those of
    the session.

        with pw.priority(10):
            answer = serve(params, request)  # before the training steps that wait

    A call counts as made one second earlier for each level, and goes before those that wait and count as made later. So
    nothing is passed for more seconds than there are levels between; calls outside of blocks have 0. A call waits for
    what makes its arguments, and a call that donates for those that read what it takes; one over several islands, once
    it has been sent to them, is not passed. What hosts have already, up to 0.2 s of work, is not either. Between
    tenants it changes nothing. Calls in such a block are not coalesced. Of two blocks inside each other the inner one
    counts; so does that of the thread, or of the asyncio task, that makes the call.

    Args:
        level: from -100 to 100.

    Raises:
        UsageError: it is no such number.
    """
    most = limits.MAX_PRIORITY
    number = whole(level, -most, most)
    if number is None:
        raise UsageError(f"a priority is a whole number from {-most} to {most}, not {level!r}")
    before = PRIORITY.set(number)
    try:
        yield
    finally:
        PRIORITY.reset(before)
