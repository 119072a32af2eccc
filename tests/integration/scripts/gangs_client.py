"""One of several clients: programs with collectives, run alone first and then at the same time as the others.

With "first" as the last argument it leaves at the first wrong outcome, and takes what it has under way with it.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

url, token, seed, launches = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
until_wrong = sys.argv[5:] == ["first"]
pick = random.Random(seed)


def gang(where: pw.VirtualSlice, kind: int, factor: float) -> Callable[..., Any]:
    n = where.mesh.size

    def body(v: jax.Array) -> jax.Array:
        if kind == 0:
            return v + jax.lax.psum(v.sum(), "x") * factor
        if kind == 1:
            return jax.lax.all_gather(v, "x", tiled=True).reshape(n, -1)[::-1].sum(0) * factor + v
        if kind == 2:
            return jax.lax.ppermute(v, "x", [(i, (i + 1) % n) for i in range(n)]) * factor + 1
        return jax.lax.pmax(v, "x") - v * factor

    cut = P("x")
    inner = jax.shard_map(body, mesh=where.mesh, in_specs=cut, out_specs=cut, check_vma=False)
    return pw.compiled(inner, slice=where, in_specs=cut, out_specs=cut)


assert sys.stdin.readline().strip() == "alone"
with pw.connect(url, token, name=f"client {seed}") as session:
    slices = [pw.virtual_slice((4,), ("x",), island=island) for island in (0, 1)]
    programs = []
    for number in range(4):
        length = pick.randint(1, 4)
        gangs = [gang(pick.choice(slices), pick.randrange(4), pick.choice([0.25, 0.5, 2.0])) for _ in range(length)]

        def steps(v: Any, gangs: list[Callable[..., Any]] = gangs) -> Any:
            for one in gangs:
                v = one(v) * 0.125
            return v

        programs.append(pw.program(steps, name=f"program{number}"))
    x = np.arange(16, dtype=np.float32) + seed

    def outcome(value: Any) -> str:
        try:
            return np.asarray(value).tobytes().hex()
        except pw.errors.PathwaysError as error:
            return f"{type(error).__name__}: {error}"

    def launch(count: int) -> list[Any]:
        order = random.Random(seed)
        values: list[Any] = []
        for _ in range(count):
            # Some launches consume what one before has made, wherever that is by now.
            before = order.choice(values[-4:]) if values and order.random() < 0.3 else x
            values.append(programs[order.randrange(len(programs))](before))
        return values

    alone = [outcome(value) for value in launch(launches)]
    for _ in range(2):
        print("ready", flush=True)
        if sys.stdin.readline().strip() != "go":
            break
        together = zip(alone, map(outcome, launch(launches)), strict=True)
        wrong = list(itertools.islice((b for a, b in together if a != b), 1 if until_wrong else None))
        texts = [b for b in wrong if ":" in b]
        kinds = sorted({text.split(":")[0] for text in texts})
        print(json.dumps({"wrong": len(wrong), "errors": kinds, "example": texts[0] if texts else ""}), flush=True)
        if until_wrong:
            break
