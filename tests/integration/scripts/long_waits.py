"""Everything that a program waits for, on a cluster whose wait slices and ticks are an hour: each wait is woken."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

os.environ["PATHWAYS_LONG_WAITS"] = "slices,ticks"

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """What these functions return, or raise, each in a thread of its own."""
    found: list[Any] = [None] * len(work)

    def run(k: int) -> None:
        try:
            found[k] = work[k]()
        except pw.errors.PathwaysError as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,), daemon=True) for k in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"
    return found


def said(text: str) -> None:
    print(text, flush=True)


with pw.init(islands=2, devices_per_host=2) as session:
    slices = in_threads(*[session.default_slice] * 4)
    assert len({id(one) for one in slices}) == 1
    here, there = (pw.virtual_slice((2,), ("x",), island=k) for k in (0, 1))
    said("slices")

    x = np.arange(4, dtype=np.float32)
    for size in (4, 1 << 22):
        pw.put(np.zeros(size, np.float32), slice=here, spec=P("x")).block_until_ready()
    add = pw.compiled(lambda v: v + 1, slice=here, in_specs=P("x"), out_specs=P("x"))
    twice = pw.compiled(lambda v: v * 2, slice=there, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(np.asarray(add(pw.put(x, slice=here, spec=P("x")))), x + 1)
    add(x).block_until_ready()
    both = pw.program(lambda v: twice(add(v)))
    both(x).block_until_ready()
    np.testing.assert_array_equal(np.asarray(both(x)), (x + 1) * 2)
    assert both.lower(x).explain()
    said("values")

    value = pw.put(x, slice=here, spec=P("x"))
    held: list[pw.Array] = []
    for k in range(5000):  # more than a session may have under way
        value = add(value)
        held = [*held[-4:], both(x)] if k % 5 == 0 else held
    np.testing.assert_array_equal(np.asarray(value), x + 5000)
    del held
    said("room")

    slow = pw.compiled(lambda n, v: jax.lax.fori_loop(0, n, lambda _, y: y * 0.5 + 1, v), slice=here)
    np.asarray(slow(np.int32(3), x))
    array = slow(np.int32(10**9), x)  # some seconds: it is deleted long before it ends
    queued = add(array)

    def delete() -> None:
        started.wait()
        array.delete()

    def question(ask: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            threading.Timer(0.3, started.set).start()
            return ask()

        return run

    started = threading.Event()
    ends = in_threads(question(array.block_until_ready), question(lambda: np.asarray(array)), delete)
    assert [type(end) for end in ends[:2]] == [pw.errors.BufferDeleted] * 2, ends
    said("deletion")

    other = pw.connect(session.url, session.token)
    waiting = slow(np.int32(10**9), x)
    started = threading.Event()
    ends = in_threads(question(waiting.block_until_ready), question(lambda: np.asarray(waiting)), waiting.cancel)
    assert all(isinstance(end, pw.errors.PathwaysError | pw.Array | np.ndarray) for end in ends[:2]), ends
    other.close()
    said("cancellation")

    queued.block_until_ready()
    add = both = value = None
    said("all")
