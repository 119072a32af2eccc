"""`jax.debug.print`, `jax.debug.callback` and `jax_debug_nans` of functions that run on slices."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import TraceError
from tests.unit.client.local import LocalSession

V = np.arange(8, dtype=np.float32)


@pytest.fixture
def a(session: LocalSession) -> Any:
    return session.virtual_slice((4,), ("x",), name="a")


def test_prints_are_those_of_jax(session, a, capsys) -> None:
    def loops(v):
        jax.debug.print("in {} {n}", v[:2], n=v.sum(), ordered=True)

        def row(c, r):
            jax.lax.cond(r > 5, lambda: jax.debug.print("big {}", r), lambda: jax.debug.print("small"))
            return c + r, r

        last, _ = jax.lax.scan(row, jnp.float32(0), v, reverse=True)

        def body(s):
            jax.debug.print("k={k} {}", s[1][0], k=s[0])
            return s[0] + 1, jax.nn.relu(s[1] * 2)

        jax.debug.callback(lambda x, text: print(text, np.asarray(x)), last, text="sum")
        return jax.lax.while_loop(lambda s: s[0] < 3, body, (0, v))[1]

    jax.jit(loops)(V)
    jax.effects_barrier()
    expected = sorted(capsys.readouterr().out.splitlines())
    assert len(expected) == 13
    f = pw.compiled(loops, slice=a, in_specs=P("x"), out_specs=P("x"))
    silent = pw.compiled(lambda v: v + 1, slice=a)
    for function in (f, pw.jit(loops, slice=a), pw.program(lambda v: silent(f(v)))):
        function(V)
        jax.effects_barrier()
        assert sorted(capsys.readouterr().out.splitlines()) == expected


def test_only_the_last_rounds_of_a_long_loop_are_shown(session, a, capsys) -> None:
    def count(v):
        def body(k):
            jax.debug.print("round {}", k)
            return k + 1

        return jax.lax.while_loop(lambda k: k < 100, body, v.astype(int)[0])

    pw.compiled(count, slice=a)(V)
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["(68 earlier rounds are not shown)", *(f"round {k}" for k in range(68, 100))]


def test_a_shard_prints_with_its_device(session, a, capsys) -> None:
    def shard(v):
        jax.debug.print("{}", v)
        return v

    f = jax.shard_map(shard, mesh=a.mesh, in_specs=P("x"), out_specs=P("x"))
    for function in (pw.compiled(f, slice=a), jax.jit(f), f):
        function(pw.put(V, a, P("x")))
        jax.effects_barrier()
        assert capsys.readouterr().out.splitlines() == [f"[device 0.{k}] [{2 * k}. {2 * k + 1}.]" for k in range(4)]


def test_prints_in_programs_derivatives_and_outside(session, a, capsys) -> None:
    def loss(v):
        jax.debug.print("v={}", v[1])
        return (v**2).sum()

    f = pw.compiled(loss, slice=a, in_specs=P("x"))

    @pw.program
    def step(v):
        jax.debug.print("program {}", v.sum())
        return jax.value_and_grad(f)(v)

    assert float(step(V)[0]) == 140
    jax.effects_barrier()
    assert capsys.readouterr().out == "program 28.0\nv=1.0\n"
    jax.debug.print("outside {}", pw.put(V, a)[1])
    assert capsys.readouterr().out == "outside 1.0\n"
    k = pw.put(jax.random.key(0), a)
    jax.jit(lambda k: (jax.debug.callback(lambda key: print(key.dtype), k), k)[1])(k)
    jax.effects_barrier()
    assert capsys.readouterr().out == "key<fry>\n"


def test_a_print_in_a_loop_over_slices_is_refused(session, a) -> None:
    """What it takes has no way out of the loop's body: it would vanish without a word."""
    b = session.virtual_slice((2,), ("x",), name="b")

    def shown(v):
        jax.debug.print("v={}", v[0])
        return v + 1

    here, there = pw.compiled(shown, slice=a), pw.compiled(lambda v: v * 2, slice=b)
    program = pw.program(lambda v: pw.fori_loop(0, 3, lambda _, v: there(here(v)), v))
    with pytest.raises(pw.errors.GraphError, match=r"a debug call \(.*test_debugging.py:\d+\) in a branch or loop"):
        program(V)


def test_a_function_whose_result_nobody_uses_prints_all_the_same(session, a, capsys) -> None:
    def show(v):
        jax.debug.print("shown {}", v[0])
        return v

    f = pw.compiled(show, slice=a)

    @pw.program
    def g(v):
        f(v)
        return v + 1

    g(V)
    jax.effects_barrier()
    assert capsys.readouterr().out == "shown 0.0\n"


def test_a_debug_call_where_it_cannot_leave(session, a) -> None:
    def test(v):
        jax.debug.print("{}", v)
        return v < 3

    with pytest.raises(pw.errors.TraceError, match=r"in the condition of a while_loop .*put it in the body"):
        pw.compiled(lambda v: jax.lax.while_loop(test, lambda u: u + 1, v[0]), slice=a)(V)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_callback_that_raises_is_logged_and_others_are_called(session, a, caplog, capsys, error) -> None:
    def fail(_):
        raise error

    def show(v):
        jax.debug.callback(fail, v)
        jax.debug.print("{}", v[0])
        return v

    f = pw.compiled(show, slice=a)
    f(V)
    f(V)
    said = pytest.raises(ZeroDivisionError) if error is ZeroDivisionError else contextlib.nullcontext()
    with said:
        jax.effects_barrier()
    assert caplog.text.count("a debug call of show") == 2
    assert error.__name__ in caplog.text
    assert capsys.readouterr().out == "0.0\n0.0\n"


def test_checkify_errors_say_the_values(session, a) -> None:
    def positive(v):
        checkify.check(v[0] > 0, "first is {}", v[0])
        return jnp.log(v)

    for function in (pw.compiled(checkify.checkify(positive), slice=a), jax.jit(checkify.checkify(positive))):
        error, _ = function(pw.put(V, a))
        with pytest.raises(checkify.JaxRuntimeError, match=r"first is 0.0 \(`check` failed\)"):
            error.throw()
        error, out = function(pw.put(V + 1, a))
        error.throw()
        assert out.slice is a


def test_debug_nans_names_operation_and_line(session, a) -> None:
    def bad(v):
        w = jnp.log(v - 3)
        return jnp.where(v > 3, w, 0.0).sum()

    f = pw.compiled(bad, slice=a, in_specs=P("x"))
    g = pw.program(lambda v: f(v) + 1)
    f(V)
    with jax.debug_nans(True):
        for function in (f, g, jax.jit(bad)):
            with pytest.raises(
                FloatingPointError, match=r"nan\) made by log \(test_debugging.py:\d+\) in bad on slice a"
            ):
                function(pw.put(V, a))
        with pytest.raises(FloatingPointError, match=r"made by log in log on slice a .*, called at test_deb"):
            jnp.log(pw.put(V - 3, a))
        f(V + 4)
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"inf\) made by log"):
        f(V + 3)
    jnp.log(pw.put(V - 3, a))


def test_debug_nans_looks_at_what_branches_and_loops_over_slices_give(session, a) -> None:
    """What their functions find has no way out of a body: the values were handed on without a word."""
    b = session.virtual_slice((2,), ("x",), name="b")
    log, double = pw.compiled(lambda v: jnp.log(v - 3), slice=a), pw.compiled(lambda v: v * 2, slice=b)
    both = lambda v: double(log(v))  # noqa: E731
    nested = lambda v: pw.cond(v[0] < 9, lambda u: pw.fori_loop(0, 2, lambda _, w: both(w), u), both, v)  # noqa: E731
    programs = {
        "while": pw.program(lambda v: pw.while_loop(lambda u: u[0] < 9, both, v)),
        "cond": pw.program(lambda v: pw.cond(v[0] < 9, both, lambda u: u, v)),
        "scan": pw.program(lambda v: pw.scan(lambda u, _: (both(u), u), v, length=2)),
    }
    with jax.debug_nans(True):
        for made, program in [*programs.items(), ("cond", pw.program(nested))]:
            with pytest.raises(
                FloatingPointError,
                match=rf"\(nan\) made by {made} in {made}\(.* on slice b.*, called at test_debugging.py:",
            ):
                program(pw.put(V, b))
            program(pw.put(V + 100, b))
    np.testing.assert_array_equal(np.isnan(programs["cond"](pw.put(V, b))), V < 3)
    scale = pw.program(lambda v: pw.cond(v[0] < 9, lambda u: double(pw.reshard(u, a) / 0), lambda u: u, v))
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) made by cond in cond"):
        scale(pw.put(V + 1, b))


def test_a_move_is_a_move_under_debug_nans(session, a) -> None:
    b, f = session.virtual_slice((2,), ("x",), name="b"), pw.compiled(lambda v: v + 1, slice=a)
    with jax.debug_nans(True):
        moved = pw.program(lambda v: pw.reshard(f(v), b))(pw.put(V, a))
        assert moved.slice is b
        np.testing.assert_array_equal(pw.reshard(moved, a), V + 1)


def test_callbacks_outside_of_functions_take_what_they_fetch(session, a) -> None:
    """There the user's Python is beside them, as in JAX."""
    given: list[Any] = []

    def double(x: Any, by: Any) -> Any:
        given.append(type(x))
        return np.asarray(x) * by

    v, kind = pw.put(V, a), jax.ShapeDtypeStruct(V.shape, V.dtype)
    for call in (jax.pure_callback, io_callback):
        found = call(double, kind, v, np.float32(2))
        np.testing.assert_array_equal(found, V * 2)
    shape = jax.ShapeDtypeStruct((), V.dtype)
    found = jax.vmap(lambda x: jax.pure_callback(double, shape, x, 2, vmap_method="sequential"))(v)
    np.testing.assert_array_equal(found, V * 2)
    assert not any(issubclass(one, pw.Array) for one in given)
    with pytest.raises(TraceError, match=r"calls back to the host \(pure_callback at test_debugging.py:\d+\)"):
        jax.jit(lambda x: jax.pure_callback(double, kind, x, 2))(v)
