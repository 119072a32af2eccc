"""A client with queued launches that is stopped, and goes on when its session is gone."""

from __future__ import annotations

import sys

import jax
import numpy as np

import pathways_ray as pw

session = pw.connect(sys.argv[1], sys.argv[2], name="stopped")
where = session.virtual_slice((4,), ("x",), island=0, name="stopped slice")
inc = pw.compiled(lambda v: v + 1, slice=where)
slow = pw.compiled(lambda v: jax.lax.fori_loop(0, 3 * 10**7, lambda i, x: x * 0.5 + 1, v[0]), slice=where)
held = [pw.put(np.ones(1024, np.float32), slice=where) for _ in range(5)]
held += [inc(x) for x in held]
for x in held:
    x.block_until_ready()
# On any machine for longer than the cluster waits for a silent client: a round takes a nanosecond at least.
held += [slow(held[0]) for _ in range(900)]
print("holding", flush=True)
sys.stdin.readline()
try:
    held[-1].block_until_ready(timeout=20)
except pw.errors.PathwaysError as error:
    print(type(error).__name__, flush=True)
try:
    session.virtual_slice((1,), ("x",))
except pw.errors.PathwaysError as error:
    print(type(error).__name__, flush=True)
