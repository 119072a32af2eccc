"""Calls that hosts serve for their values alone, on the real runtime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

LIMIT_S = 30.0
LONG_TURNS = 300_000
"""Some seconds."""

ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
WEIGHTS = np.array([[1.0, 2.0], [0.5, -1.0], [2.0, 0.25]], np.float32)


def counted(session: Any, what: str) -> int:
    """The sum of what hosts have counted."""
    return sum(ray.get(host.statistics.remote())[what] for host in session.cluster.hosts.values())


def served(session: Any) -> int:
    """The calls that hosts have begun to serve."""
    return counted(session, "served")


def until(what: Callable[[], object], call: Callable[[], object] = lambda: time.sleep(0.02)) -> None:
    """Calls until something holds."""
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        call()


def until_served(session: Any, call: Callable[[], object]) -> None:
    """Calls until a host serves a call."""
    before = served(session)
    until(lambda: served(session) > before, call)


def model(where: Any, join_calls: bool = False, **specs: Any) -> Any:
    return pw.padded(
        pw.compiled(lambda w, rows: {"y": rows @ w, "rank": rows.argsort(axis=1)}, slice=where, **specs),
        sizes=(2, 8),
        in_axes=(None, 0),
        join_calls=join_calls,
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_a_model_is_served_without_launches(session: Any, slices: Any, devices: int) -> None:
    """
    1. A caller asks until its host serves the model, on one device or cut over four.
    2. All values are right, whatever their size; none is launched but the first of its size; nothing is kept; what they
       took is in the accounts.
    """
    where = slices.a1 if devices == 1 else slices.a4
    specs: dict[str, Any] = {"in_specs": (P(), P()), "out_specs": {"y": P(), "rank": P(None, None)}}
    w, predict = pw.put(WEIGHTS, where), model(where, **specs)
    until_served(session, lambda: predict(w, ROWS))
    until(lambda: session.status()["in_flight"] == 0)
    before, calls = session.status(), served(session)
    for k in range(120):
        rows = ROWS[: 1 + k % 8] + k
        found = predict(w, rows)
        np.testing.assert_allclose(found["y"], rows @ WEIGHTS, rtol=1e-6)
        np.testing.assert_array_equal(found["rank"], rows.argsort(axis=1))
    assert served(session) - calls >= 118, "the first of each size is launched"
    until(lambda: session.status()["served"] - before["served"] >= 118)
    after = session.status()
    assert after["launches"] <= before["launches"] + 2
    until(lambda: session.status()["buffers"] <= before["buffers"])
    spent = [sum(status["device_seconds"].values()) for status in (before, after)]
    assert spent[1] > spent[0]


def test_what_a_call_takes_may_be_cut_over_devices(session: Any, slices: Any) -> None:
    w = pw.put(np.arange(32.0, dtype=np.float32).reshape(8, 4), slices.a4, P("x"))
    predict = pw.padded(
        pw.compiled(lambda w, rows: rows @ w, slice=slices.a4, in_specs=(P("x"), P("x")), out_specs=P("x")),
        sizes=(4, 8),
        in_axes=(None, 0),
    )
    rows = np.ones((3, 8), np.float32)
    until_served(session, lambda: predict(w, rows))
    np.testing.assert_array_equal(predict(w, rows), rows @ np.arange(32.0, dtype=np.float32).reshape(8, 4))


@pytest.mark.parametrize("join_calls", [False, True])
def test_threads_each_get_their_own_values(session: Any, slices: Any, join_calls: bool) -> None:
    w, predict = pw.put(WEIGHTS, slices.a1), model(slices.a1, join_calls)
    until_served(session, lambda: predict(w, ROWS))
    wrong: list[Any] = []

    def call(number: int) -> None:
        for k in range(60):
            rows = np.full((1 + k % 2, 3), number * 100 + k, np.float32)
            try:
                np.testing.assert_allclose(predict(w, rows)["y"], rows @ WEIGHTS, rtol=1e-6)
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=call, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert wrong == []


def test_another_tenant_has_calls_be_launched_and_gets_its_turn(session: Any, slices: Any) -> None:
    """Values are right before, meanwhile and after, when calls are served once more."""
    w, predict = pw.put(WEIGHTS, slices.a1), model(slices.a1)
    until_served(session, lambda: predict(w, ROWS))
    with pw.connect(session.url, session.token) as other:
        step = pw.compiled(lambda v: v + 1, slice=other.virtual_slice((1,), ("x",), island=0))
        value = step(0.0)
        for k in range(60):
            value = step(value)
            np.testing.assert_allclose(predict(w, ROWS + k)["y"], (ROWS + k) @ WEIGHTS, rtol=1e-6)
        assert float(value) == 61
    until_served(session, lambda: predict(w, ROWS))


def test_a_call_that_takes_longer_than_others_holds_up_no_other_client(session: Any, slices: Any) -> None:
    """
    1. A client hands over calls, whose loop is as long as an argument says: often short, and then for seconds.
    2. Meanwhile the host answers another client, which puts and fetches.
    """
    turns = pw.compiled(lambda n, x: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ x), x), slice=slices.a1)
    x, over = pw.put(np.full((32, 32), 0.01, np.float32), slices.a1), threading.Event()
    for _ in range(50):
        np.asarray(turns(1, x))
    before = counted(session, "early")
    until(lambda: counted(session, "early") > before, lambda: np.asarray(turns(1, x)))

    def call() -> None:
        np.asarray(turns(LONG_TURNS, x))
        over.set()

    answered, thread = 0, threading.Thread(target=call)
    with pw.connect(session.url, session.token) as other:
        where = other.virtual_slice((1,), ("x",), island=0)
        np.asarray(pw.put(ROWS, where))
        thread.start()
        while not over.is_set():
            np.testing.assert_array_equal(np.asarray(pw.put(ROWS + answered, where)), ROWS + answered)
            answered += not over.is_set()
    thread.join(LIMIT_S)
    assert answered >= 10, "while a thread waits for it, it serves nobody"


def test_weights_that_change_are_those_of_the_next_call(session: Any, slices: Any) -> None:
    """An array whose launch is under way, one that is deleted, and one of another layout."""
    predict = model(slices.a1)
    step = pw.compiled(lambda w: w + 1, slice=slices.a1)
    w = pw.put(WEIGHTS, slices.a1)
    until_served(session, lambda: predict(w, ROWS))
    for k in range(30):
        w = step(w)
        np.testing.assert_allclose(predict(w, ROWS)["y"], ROWS @ (WEIGHTS + k + 1), rtol=1e-5)
    w.delete()
    with pytest.raises(pw.errors.BufferDeleted):
        predict(w, ROWS)


def test_bad_batches_are_refused_and_the_next_one_is_served(session: Any, slices: Any) -> None:
    predict = pw.padded(pw.compiled(lambda rows: rows * 2, slice=slices.a1), sizes=(2, 8))
    until_served(session, lambda: predict(ROWS))
    with pytest.raises(pw.errors.UsageError, match="larger than the largest"):
        predict(np.ones((9, 3), np.float32))
    with pytest.raises(pw.errors.InvalidArray):
        predict(np.array(["a", "b"]))
    calls = served(session)
    np.testing.assert_array_equal(predict(ROWS), ROWS * 2)
    assert served(session) == calls + 1


def test_empty_and_narrow_values_are_served(session: Any, slices: Any) -> None:
    """Rows of no elements, which are launched, of one, of 16 bits and of truth values."""
    predict = pw.padded(pw.compiled(lambda v: (v, v.astype(jnp.bfloat16)), slice=slices.a1), sizes=(2, 4))
    batches: list[Any] = [np.zeros((3, 0), np.float32), np.array([1, 2, 3], np.float32)]
    for rows in (*batches, np.array([True, False]), np.array([[1], [2]], np.int8)):
        if rows.size:
            until_served(session, partial(predict, rows))
        same, narrow = predict(rows)
        np.testing.assert_array_equal(same, rows)
        np.testing.assert_array_equal(narrow.astype(np.float32), rows.astype(np.float32))
        assert (same.dtype, narrow.dtype) == (rows.dtype, jnp.bfloat16)
