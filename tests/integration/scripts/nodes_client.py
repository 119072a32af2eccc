"""A client that runs one program over some islands before, during and after a cut of the network."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.scripts.two_tenants import gang

url, token, ca = sys.argv[1:4]
islands = [int(island) for island in sys.argv[4:]]


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


with pw.connect(url, token, ca=ca) as session:
    slices = [pw.virtual_slice((2,), island=island) for island in islands]
    gangs = [gang(where) for where in slices]
    x = right = np.arange(4.0)
    for _ in islands:
        right = right + right.sum()

    @pw.program
    def chain(v: Any) -> Any:
        for step in gangs:
            v = step(v)
        return v

    def check(argument: Any) -> None:
        y = chain(argument).block_until_ready(timeout=60)
        assert np.array_equal(np.asarray(y), right), y

    check(x)
    # It lies where it is used: what is cut is the runtime, not this client's way to a host.
    placed = pw.put(x, slices[0], P("x"))
    check(placed)
    say(ready=True)

    cut = float(sys.stdin.readline())
    launches = [chain(placed) for _ in range(5)]
    outcomes = []
    for y in launches:
        try:
            y.block_until_ready(timeout=15)
            outcomes.append("right")
        except pw.errors.PathwaysError as error:
            outcomes.append(type(error).__name__)
    known = time.time() - cut
    slowest = 0.0
    while outcomes[-1] == "right" and time.time() - cut < 12:
        before = time.time()
        check(placed)
        slowest = max(slowest, time.time() - before)
    say(outcomes=outcomes, known=known, slowest=slowest)

    mended = float(sys.stdin.readline())
    last_error = None
    while True:
        try:
            check(x)
            break
        except (pw.errors.ExecutionError, pw.errors.WaitTimeout) as caught:
            last_error = f"{time.time() - mended:.1f} s: {type(caught).__name__}: {caught}"
            assert time.time() - mended < 60, last_error
            time.sleep(0.2)
    say(serving=time.time() - mended, last_error=last_error)
assert "ray" not in sys.modules
