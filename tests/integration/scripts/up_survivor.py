"""A client whose session outlives the controller two times."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

url, token, victim = sys.argv[1:4]


def program() -> Callable[..., Any]:
    steps = [
        pw.compiled(lambda v: v + 1.0, slice=pw.virtual_slice((2,), island=k), in_specs=P("x"), out_specs=P("x"))
        for k in (0, 1)
    ]
    both = pw.program(lambda v: steps[1](steps[0](v)))
    both.slice = steps[0].slice  # it runs in this session, and not in the one that is made last
    return both


v = np.arange(8.0)
session = pw.connect(url, token)
numbers = {session.id}
run = program()
kept = run(v).block_until_ready()
for _kill in range(2):
    launches = [run(v) for _ in range(50)]
    os.kill(int(Path(victim).read_text()), signal.SIGKILL)
    start = time.monotonic()
    lost = 0
    for y in launches:
        try:
            assert np.asarray(y.block_until_ready(timeout=30)).tolist() == (v + 2).tolist()
        except pw.errors.ControllerLost:
            lost += 1
    known = time.monotonic() - start
    assert known < 10, known
    assert np.asarray(kept).tolist() == (v + 2).tolist()
    again = pw.retry(lambda: run(kept), on=pw.errors.ControllerLost)()
    assert np.asarray(again).tolist() == (v + 4).tolist()
    took = time.monotonic() - start
    with pw.connect(url, token) as other:
        assert other.id not in numbers
        numbers.add(other.id)
        assert np.asarray(program()(v)).tolist() == (v + 2).tolist()
    assert not session.closed_because
    print(f"{lost} of 50 lost, known in {known:.1f} s, serving in {took:.1f} s", flush=True)
    assert took < 20, took
    sys.stdin.readline()
