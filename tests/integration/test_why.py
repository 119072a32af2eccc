"""Why an array is not ready, as a user and the operator of a real cluster see it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import limits
from pathways_ray.cli import commands
from tests.integration.conftest import stopped

LIMIT_S = 60.0


def until(found: Callable[[], str], *words: str) -> str:
    """Asks until the answer has all these words: heartbeats, and what they lead to, come once a second."""
    deadline = time.monotonic() + LIMIT_S
    while not all(word in (text := found()) for word in words):
        assert time.monotonic() < deadline, text
        time.sleep(0.1)
    return text


def spin(seconds: float) -> Callable[[jax.Array], jax.Array]:
    """A function that keeps a device for about as long, and gives its argument."""
    rounds = int(seconds * 2e8)

    def spinning(v: jax.Array) -> jax.Array:
        return v + jax.lax.fori_loop(0, rounds, lambda k, c: c * 3 + k, 1).astype(v.dtype) * 0

    return spinning


def double(v: jax.Array) -> jax.Array:
    return v * 2


def test_a_launch_behind_another_sessions_long_launch(session, slices) -> None:
    """The other one's name is in the chain, since the operator asks, and so it is on the command line."""
    long = pw.compiled(spin(1.5), slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    quick = pw.compiled(double, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    v = pw.put(np.arange(8.0), slice=slices.a4, spec=P("x"))
    quick(long(v)).block_until_ready()  # both are compiled
    held = [long(v) for _ in range(2)]
    y = quick(v)
    text = until(lambda: str(y.why()), "because", "program 'spinning'")
    assert text.startswith(f"array {y._buffer.id} of session {session.id} is a result of launch {session.id}.")
    done = CliRunner().invoke(
        commands, ["why", "session", str(session.id), "--url", session.url, "--token", session.token, "--json"]
    )
    assert done.exit_code == 0, done.output
    assert any("program 'spinning'" in link["text"] for link in json.loads(done.output)["links"])
    y.block_until_ready()
    assert str(y.why()).endswith("is ready")
    del held


def test_a_launch_behind_an_upload_to_a_host_that_does_not_take_it(session, slices) -> None:
    total = pw.compiled(lambda v: v.sum(), slice=slices.b4, in_specs=P("x"))
    total(np.zeros(8, np.float32)).block_until_ready()
    with stopped(session, 1):
        y = total(pw.put(np.zeros(1 << 23, np.float32), slice=slices.b4, spec=P("x")))
        text = str(y.why())
        assert "which has not left this process" in text
        assert "is on its way to host 1" in text
    assert float(y) == 0.0


def test_a_launch_behind_its_compilation(session, slices) -> None:
    def big(v: jax.Array) -> jax.Array:
        for k in range(1500):
            v = jax.numpy.sin(v) + k
        return v

    y = pw.compiled(big, slice=slices.a1)(np.arange(4.0))
    text = str(y.why())
    while not text.endswith("is ready") and "waits for its program" not in text:
        text = str(y.why())
    assert text.endswith("is ready") or "compiles" in text or "compiled" in text
    y.block_until_ready()


def test_a_wait_that_is_over_its_time_says_why(session, slices) -> None:
    with stopped(session, 1):
        y = pw.compiled(double, slice=slices.b2)(np.zeros(limits.MAX_INLINE_BYTES))  # which are uploaded
        with pytest.raises(pw.errors.WaitTimeout, match=r"was not ready within 1.5 s") as caught:
            y.block_until_ready(timeout=1.5)
    assert any("is on its way to host 1" in note for note in caught.value.__notes__)
    y.block_until_ready()


def test_what_failed_tells_its_story(session, slices) -> None:
    y = pw.compiled(lambda v: v + 1, slice=slices.a1)(np.arange(4.0))
    y.block_until_ready()
    y.delete()
    assert "is no more: it was deleted" in str(y.why())


@pytest.mark.parametrize("subject", ["weather", "slice 3", "session 1.2", "", "99999999999999999999"])
def test_a_subject_that_is_none_is_refused(session, subject) -> None:
    done = CliRunner().invoke(commands, ["why", subject, "--url", session.url, "--token", session.token])
    assert done.exit_code == 2
    assert "is no subject" in done.output
