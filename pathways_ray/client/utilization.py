"""`pw.utilization`: the part of the time in which each island's devices computed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from pathways_ray.client import context

Seen = tuple[float, dict[int, float]]
"""A moment, and the device seconds of each island until then."""

_last: weakref.WeakKeyDictionary[Any, Seen] = weakref.WeakKeyDictionary()
"""By session, the last call."""
_lock = threading.Lock()


def shares(before: Seen, now: Seen, devices: Mapping[int, int]) -> dict[int, float]:
    """The part of the time between two moments in which each island's devices were busy, from 0 to 1. Pure."""
    elapsed = now[0] - before[0]
    found = {}
    for island, count in devices.items():
        used = now[1].get(island, 0.0) - before[1].get(island, 0.0)
        found[island] = min(1.0, max(0.0, used / (elapsed * count))) if elapsed > 0 and count else 0.0
    return found


def utilization() -> dict[int, float]:
    """The part of the time since the call before in which the devices of each island computed, for whomever.

        pw.utilization()
        train()
        print(pw.utilization())  # {0: 0.31, 1: 0.88}

    An island is idle at 0.0, and at 1.0 all its devices computed all the time. The first call of a session begins the
    count, and gives 0.0. Launches count when they have ended. For the operator's sessions, such as those of
    `pw.init`; a tenant learns nothing of islands, and gets an empty dict. It asks the controller, and takes some
    milliseconds.

    Raises:
        NotInitialized: there is no session.
        ControllerLost: the controller does not answer.
    """
    session = context.current_session()
    status: dict[str, Any] = session.status()
    if "busy" not in status:
        return {}
    devices = {one["island"]: sum(len(host["devices"]) for host in one["hosts"]) for one in status["islands"]}
    now = time.monotonic(), {int(island): seconds for island, seconds in status["busy"].items()}
    with _lock:
        before = _last.get(session)
        _last[session] = now
    if before is None:
        return dict.fromkeys(devices, 0.0)
    return shares(before, now, devices)
