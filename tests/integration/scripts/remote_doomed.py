"""A client that holds a slice and arrays until it is killed."""

from __future__ import annotations

import sys
import time

import jax
import numpy as np

import pathways_ray as pw

session = pw.connect(sys.argv[1], sys.argv[2], name="doomed")
where = pw.virtual_slice((2,), ("x",), island=0, name="doomed slice")
inc = pw.compiled(lambda v: v + 1, slice=where)
held = [pw.put(np.ones((64, 1024), np.float32), slice=where) for _ in range(10)]
held += [inc(x) for x in held]
for x in held:
    x.block_until_ready()
if sys.argv[3] == "busy":
    slow = pw.compiled(lambda v: jax.lax.fori_loop(0, 2 * 10**8, lambda i, x: x * 0.5 + 1, v[0, 0]), slice=where)
    held += [slow(held[0]) for _ in range(2)]
print("holding", flush=True)
time.sleep(600)
