"""A program without end: ended by the limit of a launch, and refused after three times."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np

import pathways_ray as pw

with pw.init(2, 1, 1, launch_limit_s=2.0) as session:
    fast, slow = (pw.virtual_slice((1,), island=k) for k in (0, 1))
    good = pw.compiled(lambda v: v + 1, slice=fast)
    other = pw.compiled(lambda v: v * 3, slice=slow)

    @pw.compiled(slice=slow)
    def endless(v: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] >= 0, lambda c: c * 0.5, v)

    x = np.ones(2, np.float32)
    assert np.asarray(good(x))[0] == 2
    for attempt in range(3):
        start = time.monotonic()
        lost, alive = endless(x), good(x)
        assert np.asarray(alive)[0] == 2
        try:
            lost.block_until_ready(timeout=30)
            raise SystemExit("it ended")
        except pw.errors.LaunchTimeout as error:
            assert "endless" in str(error) and "the limit is 2 s" in str(error), error
        print(f"attempt {attempt}: ended after {time.monotonic() - start:.1f} s", flush=True)
        assert time.monotonic() - start < 15
        assert np.asarray(other(x))[0] == 3
    try:
        endless(x).block_until_ready(timeout=10)
        raise SystemExit("it ran")
    except pw.errors.ProgramRefused as error:
        assert str(error).count("the limit is 2 s") == 3, error
    assert np.asarray(other(x))[0] == 3
    print("refused")

    go_on, add = pw.compiled(lambda v: v.max() >= 0, slice=slow), pw.compiled(lambda v: v + 1, slice=slow)

    @pw.program
    def on_one_slice(v):
        return pw.while_loop(go_on, add, other(v))  # on one slice

    @pw.program
    def on_two_slices(v):
        return pw.while_loop(go_on, lambda c: add(good(c)), other(v))  # on two slices

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for program in (on_one_slice, on_two_slices):
        where = program.__name__.replace("_", " ")
        (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# {where}"))
        try:
            program(x).block_until_ready(timeout=60)
            raise SystemExit("it ended")
        except pw.errors.LaunchTimeout as error:
            assert f"ownership_endless_program.py:{line}" in str(error), error
            print(error, flush=True)
        assert np.asarray(other(x))[0] == 3
