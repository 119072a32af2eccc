"""A machine that is crowded for `SECONDS`: processes that get little time are not taken for dead."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

import pathways_ray as pw

COUNT, SECONDS, NICE = (int(argument) for argument in sys.argv[1:])

with pw.init(2, 1, 1) as session:
    f = pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((1,), island=1))
    x = f(np.zeros(2, np.float32))
    before = [host["pid"] for island in pw.islands() for host in island["hosts"]]
    spin = [
        sys.executable,
        "-c",
        f"import os, time\nos.nice({NICE})\nend = time.time() + {SECONDS}\nwhile time.time() < end: pass",
    ]
    crowd = [subprocess.Popen(spin) for _ in range(COUNT)]
    rounds = 0
    try:
        while any(process.poll() is None for process in crowd):
            x = f(x).block_until_ready(timeout=300)
            rounds += 1
            time.sleep(0.2)
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    assert np.asarray(x)[0] == rounds + 1
    after = [host["pid"] for island in pw.islands() for host in island["hosts"]]
    assert after == before, (before, after)
    print(f"rounds: {rounds}")
