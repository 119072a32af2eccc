"""A client that outlives the controller two times."""

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
    return pw.program(lambda v: steps[1](steps[0](v)))


v = np.arange(8.0)
numbers: set[int] = set()
for _kill in range(2):
    session = pw.connect(url, token)
    numbers.add(session.id)
    run = program()
    assert np.asarray(run(v)).tolist() == (v + 2).tolist()
    launches = [run(v) for _ in range(50)]
    os.kill(int(Path(victim).read_text()), signal.SIGKILL)
    start = time.monotonic()
    lost = 0
    for y in launches:
        try:
            y.block_until_ready(timeout=30)
        except (pw.errors.ControllerLost, pw.errors.HostLost, pw.errors.BufferLost):
            lost += 1
    # What was called too late for an answer is lost as well. Hosts may be missed before the controller is.
    while time.monotonic() - start < 15:
        try:
            run(v).block_until_ready(timeout=30)
        except (pw.errors.HostLost, pw.errors.BufferLost):
            pass
        except (pw.errors.ControllerLost, pw.errors.SessionClosed):
            break
        time.sleep(0.01)
    else:
        raise SystemExit("the session goes on without its controller")
    known = time.monotonic() - start
    assert known < 10, known
    session.close()
    while True:
        try:
            with pw.connect(url, token) as session:
                assert session.id not in numbers
                numbers.add(session.id)
                assert np.asarray(program()(v)).tolist() == (v + 2).tolist()
            break
        except pw.errors.PathwaysError as error:
            print(type(error).__name__, error, file=sys.stderr)
            assert time.monotonic() - start < 20, error
            time.sleep(0.2)
    took = time.monotonic() - start
    print(f"{lost} of 50 lost, known in {known:.1f} s, serving in {took:.1f} s", flush=True)
    assert took < 20, took
    sys.stdin.readline()
