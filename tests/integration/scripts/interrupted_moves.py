"""Ctrl-C at drawn moments of moves, suspensions and resumptions: arrays stay, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

TURNS, ARRAYS = 8, 8
LIMIT_S = 30.0


def interrupted(call: Callable[[], Any], after_s: float) -> None:
    """Makes a call that Ctrl-C comes amid, or behind."""
    striker = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    try:
        striker.start()
        call()
        striker.join()
        time.sleep(LIMIT_S)  # for Ctrl-C
        raise AssertionError("no Ctrl-C came")
    except KeyboardInterrupt:
        striker.join()


def ended(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def main() -> None:
    draw = random.Random(1)
    with pw.init(islands=2, devices_per_host=2) as session:
        where = session.virtual_slice((2,), ("x",))
        values = [np.random.default_rng(k).standard_normal((256, 256)).astype(np.float32) for k in range(ARRAYS)]
        arrays = [pw.put(value, where, P("x")).block_until_ready() for value in values]
        for name in ("move", "suspend", "resume"):
            for _ in range(TURNS):
                usual_s = ended(where.move)
                if name == "move":
                    interrupted(where.move, draw.uniform(0, usual_s))
                elif name == "suspend":
                    interrupted(session.suspend, draw.uniform(0, usual_s))
                else:
                    session.suspend()
                    interrupted(session.resume, draw.uniform(0, usual_s))
                with contextlib.suppress(pw.errors.SessionSuspended):  # what was interrupted may have happened
                    session.suspend()
                session.resume()
                for array, value in zip(arrays, values, strict=True):
                    assert np.array_equal(np.asarray(array), value), name
            slices = session.status()["slices"]
            assert len(slices) == 1, slices
            (memory,) = {pool["held"] for pool in session.status()["memory"]}
            assert memory == sum(value.nbytes for value in values), memory
            print(f"{TURNS} times Ctrl-C amid {name}: all arrays are there, on one slice")
    print("nothing was left behind")


if __name__ == "__main__":
    main()
