"""Calls that go to their host before they are sent, on the real runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import small_puts
from pathways_ray.errors import BufferDeleted

LIMIT_S = 30.0


def taken(session: Any) -> int:
    """The calls that hosts have taken from clients."""
    return sum(ray.get(host.statistics.remote())["early"] for host in session.cluster.hosts.values())


def held(session: Any) -> int:
    """The arrays that hosts have."""
    return sum(ray.get(host.statistics.remote())["buffers"] for host in session.cluster.hosts.values())


def until_taken(session: Any, call: Any) -> None:
    """Calls until a host takes calls from this client."""
    before, deadline = taken(session), time.monotonic() + LIMIT_S
    while taken(session) == before:
        assert time.monotonic() < deadline, "no call went to its host before it was sent"
        call()


@pytest.fixture
def step(slices: Any) -> Any:
    return pw.compiled(lambda v: v * 2.0 + 1.0, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))


def test_values_are_those_of_launches_that_are_sent(session: Any, slices: Any, step: Any) -> None:
    """
    1. A client waits for each value until its host takes its calls.
    2. It goes on: every value is right, and is there for launches that follow, waited for or not, here and elsewhere.
    """
    x = pw.put(np.arange(8.0, dtype=np.float32), slice=slices.a4, spec=P("x"))
    until_taken(session, lambda: np.asarray(step(x)))
    before, expected, y = taken(session), np.arange(8.0, dtype=np.float32), x
    for k in range(40):
        y = step(y) if k % 20 else step(x)
        expected = np.arange(8.0, dtype=np.float32) * 2 + 1 if not k % 20 else expected * 2 + 1
        if k % 3:
            np.testing.assert_array_equal(np.asarray(y), expected)
        elif k % 2:
            y.block_until_ready()
    assert taken(session) > before
    elsewhere = pw.compiled(lambda v: v.sum(), slice=slices.b4, in_specs=P("x"), out_specs=P())
    np.testing.assert_array_equal(np.asarray(elsewhere(y)), expected.sum())


def test_a_loop_whose_values_are_looked_at_is_few_launches(session: Any, slices: Any, step: Any) -> None:
    """
    1. A client takes each value for the next call, and looks at it. All are right.
    2. Once the loop is known, and compiled as such, what is sent of it are few launches; results that it has dropped
       do not stay on the hosts.
    """
    x = pw.put(np.arange(8.0, dtype=np.float32), slice=slices.a4, spec=P("x"))
    until_taken(session, lambda: np.asarray(step(x)))
    buffers, deadline, calls, launches = held(session), time.monotonic() + LIMIT_S, 100, 100
    while launches > calls // 2:
        assert time.monotonic() < deadline, "each call is a launch"
        before, y, expected = session.status()["launches"], x, np.arange(8.0, dtype=np.float32)
        for _ in range(calls):
            y, expected = step(y), expected * 2 + 1
            np.testing.assert_array_equal(np.asarray(y), expected)
        launches = session.status()["launches"] - before
    y.delete()
    while held(session) > buffers:
        assert time.monotonic() < deadline, "what the loop made stays"
        time.sleep(0.05)


def test_a_call_that_went_to_its_host_has_one_outcome(session: Any, slices: Any, step: Any) -> None:
    """Its array is ready, can be waited for with others, is freed, and its launch is in the accounts."""
    x = pw.put(np.zeros(8, np.float32), slice=slices.a4, spec=P("x"))
    until_taken(session, lambda: step(x).block_until_ready())
    several = [step(x), step(x)]
    done, rest = pw.wait(several, timeout=LIMIT_S)
    assert (len(done), rest) == (2, [])
    deadline = time.monotonic() + LIMIT_S
    one = step(x).block_until_ready()
    while not one.is_ready():
        assert time.monotonic() < deadline
    jax.block_until_ready(several)
    assert "ready" in repr(one)


def test_of_several_results_each_is_right_whichever_is_looked_at_first(session: Any, slices: Any) -> None:
    """The one that was looked at first comes with the next call; who then looks at others, or at none, gets them."""
    step = pw.compiled(
        lambda v: (v + 1, v.sum(), v * 2), slice=slices.a4, in_specs=P("x"), out_specs=(P("x"), P(), P("x"))
    )
    x, n = pw.put(np.zeros(8, np.float32), slice=slices.a4, spec=P("x")), 0
    until_taken(session, lambda: float(step(x)[1]))
    for order in ([1], [1], [1, 0], [2], [], [2, 1], [0, 2], [], [1], [1]):
        results = step(x)
        for place in order:
            value = {0: np.full(8, n + 1), 1: 8 * n, 2: np.full(8, 2 * n)}[place]
            np.testing.assert_array_equal(np.asarray(results[place]), np.asarray(value, np.float32))
        x, n = results[0], n + 1


def test_calls_of_who_waits_and_has_put_and_fetched_nothing_go_to_their_host_as_well(session: Any) -> None:
    """Its values were made on the cluster, so it has no stream to a host until it waits for one."""
    with pw.connect(session.url, session.token, name="waits") as client, client.virtual_slice((4,), ("x",)) as where:
        y = pw.compiled(lambda: jnp.zeros(8), slice=where, out_specs=P("x"))()
        step, turns = pw.compiled(lambda v: v + 1, slice=where, in_specs=P("x"), out_specs=P("x")), 0

        def turn() -> None:
            nonlocal y, turns
            y, turns = step(y).block_until_ready(), turns + 1

        until_taken(session, turn)
        np.testing.assert_array_equal(np.asarray(y), np.full(8, turns, np.float32))


def test_what_is_put_for_each_call_is_there_before_it_and_the_call_goes_to_its_host(
    session: Any, slices: Any, step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A client puts an array for each call, and waits for each value, until the put waits for its host as well.
    2. The next calls go to their host; all values are right, whatever becomes of what was put.
    """
    waited, waits = list[Any](), small_puts.put
    monkeypatch.setattr(small_puts, "put", lambda *what: (waited.append(what), waits(*what))[1])
    given, deadline = np.arange(8.0, dtype=np.float32), time.monotonic() + LIMIT_S

    def turn(k: int) -> None:
        given[:] = k
        x = pw.put(given, slice=slices.a4, spec=P("x"))
        given[:] = -1
        np.testing.assert_array_equal(np.asarray(step(x)), np.full(8, 2 * k + 1, np.float32))
        if k % 2:
            np.testing.assert_array_equal(np.asarray(x), np.full(8, k, np.float32))
        if not k % 3:
            x.delete()

    while not waited:
        assert time.monotonic() < deadline, "no put waits"
        turn(0)
    before = taken(session)
    for k in range(20):
        turn(k)
    assert len(waited) > 10
    assert taken(session) - before > 10
    many = pw.put([given] * 7, slice=slices.a4, spec=P("x"))
    assert all(np.asarray(step(x)).tolist() == [-1.0] * 8 for x in many)


def test_a_branch_begins_by_its_value_before_it_is_sent(session: Any, slices: Any) -> None:
    """
    1. A value on one island decides, again and again, until the host of the branch on the other begins it early.
    2. Both branches give what they should in any order, also where the next one takes what the last one gave.
    """
    first = pw.compiled(lambda k: k % 2, slice=slices.a1)
    more, less = pw.compiled(lambda v: v + 1, slice=slices.b2), pw.compiled(lambda v: v - 2, slice=slices.a1)
    program = pw.program(lambda k, v: pw.cond(first(k) == 1, more, lambda v: more(less(v)), v))
    counts, v = [pw.put(np.int32(k), slices.a1) for k in range(4)], pw.put(np.zeros(4, np.float32), slices.b2)
    until_taken(session, lambda: program(counts[1], v).block_until_ready())
    wanted, before = 0, taken(session)
    for k in (1, 1, 0, 1, 0, 0, 3, 2, 1, 3):
        v, wanted = program(counts[k], v), wanted + (1 if k % 2 else -1)
        np.testing.assert_array_equal(np.asarray(v), np.full(4, wanted, np.float32))
    assert taken(session) > before


PROGRAM = """
import jax, time
step = jax.jit(lambda v: v + 1)
value = jax.device_put(0.0)
float(step(value))
time.sleep(1.0)  # after which its tenant is alone
for k in range(600):
    value = step(value)
    if k % 3:
        assert float(value) == k + 1
    else:
        value.block_until_ready()
"""


@pytest.mark.timeout(180)
def test_calls_of_a_program_through_a_proxy_that_waits_for_each_go_to_their_host_first(session: Any) -> None:
    with session.proxy(devices=1) as proxy:
        before = taken(session)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
        subprocess.run([sys.executable, "-c", PROGRAM], env=clean | proxy.env, check=True, timeout=120)
    assert taken(session) - before > 400


def test_a_deleted_result_is_no_argument(session: Any, slices: Any, step: Any) -> None:
    x = pw.put(np.zeros(8, np.float32), slice=slices.a4, spec=P("x"))
    until_taken(session, lambda: np.asarray(step(x)))
    gone = step(x)
    np.asarray(gone)
    gone.delete()
    with pytest.raises(BufferDeleted):
        jnp.add(gone, 1)
    np.testing.assert_array_equal(np.asarray(step(x)), np.ones(8, np.float32))
