"""Bob's programs end the host that alice computes on. His are refused, hers never; the operator lifts a refusal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pathways_ray as pw

CALM_WITHIN_S = 60.0
PATIENCE_S = 60.0
X = np.ones(2, np.float32)


def asked(*arguments: str) -> Any:
    from click.testing import CliRunner

    from pathways_ray.cli import commands

    told = CliRunner().invoke(commands, [*arguments, "--url", cluster.url, "--token", cluster.token, "--json"])
    assert told.exit_code == 0, told.output
    return json.loads(told.output)


def works(step: Callable[..., Any]) -> None:
    """Alice's step runs, at the latest when the island is back. She may lose a launch, and is never refused."""
    deadline = time.monotonic() + CALM_WITHIN_S
    while True:
        try:
            assert np.asarray(step(X))[0] == 2
            return
        except (pw.errors.HostLost, pw.errors.BufferLost, pw.errors.LaunchTimeout):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def fails(program: Callable[..., Any]) -> Exception:
    time.sleep(1.1)  # what could not be compiled is not tried again at once
    try:
        given = pw.put(X, both)  # one that went along would be tried thrice
        given.block_until_ready()  # or it might be on its way as the host ends
        program(given).block_until_ready(timeout=PATIENCE_S)
    except pw.errors.PathwaysError as error:
        return error
    raise SystemExit("it ran")


def doomed(program: Callable[..., Any], kind: type[Exception], reason: str) -> None:
    """Three times the program ends the host, then it is refused; alice goes on after each. The third one may hear that
    already, if its array was on another host."""
    for attempt in range(3):
        error = fails(program)
        assert isinstance(error, kind) or (attempt == 2 and isinstance(error, pw.errors.ProgramRefused)), error
        assert reason in str(error), error
        works(step)
    error = fails(program)
    assert isinstance(error, pw.errors.ProgramRefused), error
    works(step)


with contextlib.ExitStack() as stack:
    cluster = stack.enter_context(
        pw.init(1, 1, 2, policy="share", launch_limit_s=3.0, compile_limit_s=8.0, tenants=sys.argv[1])
    )
    alice, bob = (stack.enter_context(pw.connect(cluster.url, name, name=name)) for name in ("alice's", "bob's"))
    one, both = alice.virtual_slice((1,), name="one"), bob.virtual_slice((2,), name="both")
    step = pw.compiled(lambda v: v + 1, slice=one)
    works(step)

    @pw.program
    def deadly(v: Any) -> Any:
        return pw.compiled(lambda v: v * 3, slice=both)(v)

    @pw.program
    def slow(v: Any) -> Any:
        return pw.compiled(lambda v: v * 5, slice=both)(v)

    @pw.compiled(slice=both)
    def endless(v: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] >= 0, lambda c: c * 0.5, v)

    doomed(deadly, pw.errors.BufferLost, "its process ended")  # with the array that it was called with
    (refusal,) = asked("refusals")
    assert (refusal["tenant"], refusal["program"]) == ("bob", "deadly"), refusal
    assert asked("status")["refusals"][0]["id"] == refusal["id"]
    assert asked("refusals", "--lift", refusal["id"]) == []
    error = fails(deadly)
    assert isinstance(error, pw.errors.BufferLost), error
    works(step)
    error = fails(slow)
    assert isinstance(error, pw.errors.CompileError) and "the limit is 8 s" in str(error), error
    works(step)
    if sys.argv[2] == "endless":
        doomed(endless, pw.errors.LaunchTimeout, "the limit is 3 s")
        (refusal,) = asked("refusals")
        assert refusal["tenant"] == "bob" and "endless" in refusal["program"], refusal
    print("only bob's are refused")
