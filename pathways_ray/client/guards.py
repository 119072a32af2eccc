"""Arrays that were lost, and that guards make again (`elastic`) for who looks at them or uses them."""

from __future__ import annotations

import threading

from pathways_ray.client.buffer import Buffer
from pathways_ray.client.weak import living


class _Thread(threading.local):
    """A thread, which runs `callbacks` now: other callbacks wait for it, so nothing is made again in it."""

    callbacks = 0


THREAD = _Thread()


def made_again(buffer: Buffer) -> bool:
    """Has a guard make an array again, which was lost; returns whether one did."""
    if THREAD.callbacks:
        return False
    for guard in living(buffer.session.guards):
        if guard.covers(buffer):
            guard.recover()
            return buffer.record.failure is None
    return False
