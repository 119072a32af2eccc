"""Waits of more than a second, each interrupted by Ctrl-C."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pathways_ray as pw
from pathways_ray.client.local_reader import LocalReader

STEPS = 1_000_000_000  # of a loop that XLA does not shorten; more than a second on any machine


def long(v: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, STEPS, lambda i, x: x * 0.5 + 1.0, v)


def waits(thread: int) -> bool:
    """Whether a thread is inside the wait of a condition that is not one of `threading` itself, or reads for all."""
    frame = sys._current_frames()[thread]
    if frame.f_code is LocalReader._polled.__code__:
        return True
    caller = frame.f_back
    ours = caller is not None and caller.f_code.co_filename != threading.__file__
    return ours and frame.f_code is threading.Condition.wait.__code__


def announce() -> None:
    """Prints `waiting` once the main thread waits."""
    main = threading.main_thread().ident
    assert main is not None
    while not waits(main):
        time.sleep(0.001)
    print("waiting", flush=True)


def announced(wait: Callable[[pw.Array], Any], array: pw.Array) -> None:
    threading.Thread(target=announce).start()
    wait(array)


with pw.init(islands=1, devices_per_host=2) as session:
    slow = pw.compiled(long, slice=pw.virtual_slice((1,)))
    quick = pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((1,)))
    assert float(quick(np.float32(1))) == 2
    for wait in (np.asarray, pw.Array.block_until_ready):
        y = slow(np.float32(1))
        try:
            announced(wait, y)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        else:
            print("not interrupted", flush=True)
        assert float(quick(np.float32(2))) == 3
    assert float(y) == 2  # what was waited for can be waited for again
    print("usable", flush=True)
    announced(np.asarray, slow(np.float32(1)))
