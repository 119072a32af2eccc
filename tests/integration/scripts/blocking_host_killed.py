"""A host is killed while a value that lies on it, and one that is made of it, are waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

with pw.init(islands=2, hosts_per_island=2, devices_per_host=1) as session:
    a, b = (pw.virtual_slice((2,), ("x",), island=k) for k in (0, 1))
    slow, quick = (
        pw.compiled(
            lambda v, n=n: jax.lax.fori_loop(0, n, lambda i, x: x * 0.5 + 1, v),
            slice=s,
            in_specs=P("x"),
            out_specs=P("x"),
        )
        for n, s in ((2 * 10**9, a), (3, b))
    )
    v = np.arange(4, dtype=np.float32)
    expected = np.asarray(quick(v))
    np.asarray(pw.compiled(lambda v: v, slice=a, in_specs=P("x"), out_specs=P("x"))(v))
    fed = pw.program(lambda v: quick(slow(v)))
    pw.warmup(slow, (v,))
    pw.warmup(fed, (v,))  # a launch that waits for its compilation would begin on the host that comes back
    found: dict[str, Any] = {}

    def ask(name: str, array: Any) -> None:
        try:
            found[name] = np.asarray(array)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=ask, args=("slow", slow(v)))]
    threads += [threading.Thread(target=ask, args=("fed", quick(fed(v))))]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert not found, found
    host = pw.islands()[0]["hosts"][1]
    os.kill(host["pid"], signal.SIGKILL)
    began = time.monotonic()
    assert np.array_equal(np.asarray(quick(v)), expected)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"
    print("known in", round(time.monotonic() - began, 1))
    assert {type(e).__name__ for e in found.values()} == {"HostLost"}, found
    while True:
        try:
            got = np.asarray(pw.compiled(lambda v: v + 1, slice=a, in_specs=P("x"), out_specs=P("x"))(v))
            break
        except (pw.errors.HostLost, pw.errors.BufferLost):
            assert time.monotonic() - began < 40
    assert np.array_equal(got, v + 1)
    print("left:", session.status()["in_flight"])
