"""Digests of the results of several programs, with or without a training, on a cluster with the given options."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from examples import language_model

options = json.loads(sys.argv[1])
url = options.pop("url", None)
session = pw.connect(url, options["token"]) if url else pw.init([pw.Island(devices=4, memory=1 << 60)] * 2, **options)
random = np.random.default_rng(0)
V, W = random.standard_normal((2, 64)).astype(np.float32)
a4, b4 = (pw.virtual_slice((4,), ("x",), island=k) for k in (0, 1))
a22, b2 = pw.virtual_slice((2, 2), ("x", "y"), island=0), pw.virtual_slice((2,), ("x",), island=1)


def on(where: pw.VirtualSlice, f: Callable[..., Any], spec: P = P("x")) -> Callable[..., Any]:
    return pw.compiled(f, slice=where, in_specs=spec, out_specs=spec)


square, less = on(a4, lambda v: v * v), on(a4, lambda v, w: v - w)
there, cut = on(b2, lambda v: jnp.tanh(v) * 3), on(a22, lambda v: v + v.sum(), P(("y", "x")))
total = pw.compiled(lambda v: v.sum(), slice=b4, in_specs=P("x"))
bump = on(a4, lambda v: v * 0.999 + 0.01)


@pw.program
def mixed(v: Any, w: Any) -> Any:
    x = less(square(less(square(v), w)), w)
    y = there(cut(there(x)))
    return {"x": x, "y": y, "total": total(less(x, y)), "operations": jnp.where(x > 0, x * 2 - w, y)}


@pw.program
def long(v: Any) -> Any:
    for _ in range(1500):
        v = bump(v)
    return v


@pw.program
def back_and_forth(v: Any) -> Any:
    for _ in range(100):
        v = there(square(v))
    return v


found: dict[str, Any] = {}


def note(name: str, run: Callable[[], Any]) -> None:
    start = time.perf_counter()
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(run())]
    found[name] = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    print(f"{name}: {time.perf_counter() - start:.2f} s", file=sys.stderr)


note("mixed", lambda: mixed(V, W))
note("again", lambda: [mixed(V * np.float32(k), W) for k in range(8)])
note("long", lambda: long(V))
note("back and forth", lambda: back_and_forth(V))
if sys.argv[2]:
    note("training", lambda: language_model.train_pathways(3))

bad = pw.compiled(lambda v: jnp.sort(v[0] * jnp.arange(1 << 42, dtype=jnp.float32))[:64], slice=a4)
for f in (lambda v: there(square(bad(v))), lambda v: bad(there(v))):
    try:
        np.asarray(pw.program(f)(V))
    except pw.errors.ExecutionError as error:
        found.setdefault("failures", []).append("17592186044416" in str(error))
note("after failures", lambda: mixed(W, V))
status = session.status()
found["dispatch"] = status["controller"]["dispatch"]
session.close()
print(json.dumps(found))
