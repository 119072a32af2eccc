"""Loops that `jax.vmap` has given a test for each element: values and prints are those of plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import pathways_ray as pw
from tests.unit.client.local import LocalSession

V = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
TIMES = np.array([1, 3, 0], np.int32)
Function = Callable[[Any], Any]


@pytest.fixture
def a(session: LocalSession) -> Any:
    return session.virtual_slice((4,), ("x",), name="a")


@pytest.fixture
def b(session: LocalSession) -> Any:
    return session.virtual_slice((2,), ("x",), name="b")


def double(v: Any) -> Any:
    return v * 2


def more(v: Any) -> Any:
    return v + 1


def looped(f: Function, g: Function, control: Any, held: Any, limit: Any) -> Function:
    """A loop whose test and body take constants of each element, and whose carry has a key."""

    def one(v: Any) -> Any:
        w = v * 5

        def body(state: Any) -> Any:
            u, count, key = state
            return g(f(u)) + held + w, count + 1, jax.random.split(key)[0]

        first = v, 0, jax.random.key(3)
        u, count, key = control.while_loop(lambda state: state[0].sum() < limit + w[0], body, first)
        return u, count, jax.random.key_data(key)

    return jax.vmap(one)


def counted(f: Function, g: Function, control: Any) -> Any:
    return jax.vmap(lambda n, v: control.fori_loop(0, n, lambda i, u: g(f(u)) + i, v))


def test_loops_that_each_element_ends_by_itself(session: LocalSession, a: Any, b: Any) -> None:
    f, others = pw.compiled(double, slice=a), (pw.compiled(more, slice=b), more)
    wanted = looped(double, more, jax.lax, 3.0, 50.0)(V)
    for g in others:  # over two slices, on one
        for held, limit in ((3.0, 50.0), (pw.put(np.float32(3), a), pw.put(np.float32(50), b))):
            jax.tree.map(np.testing.assert_array_equal, pw.program(looped(f, g, pw, held, limit))(V), wanted)
    wanted = counted(double, more, jax.lax)(TIMES, V)
    for g in others:
        np.testing.assert_array_equal(pw.program(counted(f, g, pw))(TIMES, V), wanted)
        with jax.enable_x64(True):
            wide = pw.program(counted(f, g, pw))(TIMES.astype(np.int64), V.astype(np.float64))
            assert wide.dtype == np.float64
            np.testing.assert_array_equal(wide, wanted)


def test_loops_in_branches_and_of_two_batches(session: LocalSession, a: Any, b: Any) -> None:
    f, g = pw.compiled(double, slice=a), pw.compiled(more, slice=b)
    program = pw.program(lambda n, v: pw.cond(v[0, 0] > 0, counted(f, g, pw), lambda n, v: g(v), n, v))
    np.testing.assert_array_equal(program(TIMES, V), counted(double, more, jax.lax)(TIMES, V))
    np.testing.assert_array_equal(program(TIMES, -V), 1 - V)
    twice = np.stack([TIMES, TIMES[::-1]]), np.stack([V, V + 1])
    wanted = jax.vmap(counted(double, more, jax.lax))(*twice)
    np.testing.assert_array_equal(pw.program(jax.vmap(counted(f, g, pw)))(*twice), wanted)


def test_a_print_in_such_a_loop(session: LocalSession, a: Any, capsys: Any) -> None:
    def loop(v: Any) -> Any:
        def body(u: Any) -> Any:
            jax.debug.print("u {}", u[0])
            return u * 2

        return jax.lax.while_loop(lambda u: u.sum() < 100, body, v)

    batched = jax.vmap(loop)
    wanted = np.asarray(batched(V))
    jax.effects_barrier()
    lines = sorted(capsys.readouterr().out.splitlines())
    assert len(lines) == 12
    for function in (pw.compiled(batched, slice=a), jax.jit(batched), batched):
        np.testing.assert_array_equal(function(pw.put(V, a)), wanted)
        jax.effects_barrier()
        assert sorted(capsys.readouterr().out.splitlines()) == lines
