"""`pw.jit`: `jax.jit` on a slice."""

from __future__ import annotations

import functools
import gc
import json
import os
import sysconfig
import textwrap
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import TraceError

V = np.arange(8, dtype=np.float32)


def double(v: Any) -> Any:
    return v * 2


def test_where_it_runs_and_how_results_lie(session, a4, b22) -> None:
    sharding = NamedSharding(a4.mesh, P("x"))
    x = pw.put(V, a4, P("x"))
    cases: list[tuple[Any, Any, Any, P]] = [
        (pw.jit(double, in_shardings=sharding), V, a4, P("x")),
        (pw.jit(double, in_shardings=sharding, out_shardings=NamedSharding(a4.mesh, P())), V, a4, P()),
        (pw.jit(double, slice=b22, in_shardings=P("y"), out_shardings=P("x")), V, b22, P("x")),
        (pw.jit(double, slice=b22), V, b22, P()),
        (pw.jit(double), x, a4, P("x")),
        (pw.jit(double, in_shardings=None), x, a4, P("x")),
        (pw.jit(slice=a4, in_shardings=P("x"))(double), V, a4, P("x")),
    ]
    for function, argument, where, spec in cases:
        found = function(argument)
        assert (found.slice, found.sharding.spec) == (where, spec)
        np.testing.assert_array_equal(np.asarray(found), V * 2)
    assert pw.jit(double)(V).slice is session.default_slice()


def test_static_arguments_of_compiled_functions_by_name_and_by_default(session, a4) -> None:
    def parts(x: Any, n: int = 2, times: int = 1) -> Any:
        return times * x.reshape(n, -1)

    options: dict[str, Any] = {"static_argnums": (1, 2)}
    f, plain = pw.compiled(parts, slice=a4, in_specs=(P("x"),), **options), jax.jit(parts, **options)
    x = np.arange(24, dtype=np.float32)
    calls: list[tuple[Any, Any]] = [((x,), {}), ((x,), {"n": 3}), ((x, 4), {}), ((x, 4), {"times": 5})]
    for args, named in [*calls, ((x,), {"times": 5}), ((x,), {"n": 3, "times": 5})]:
        expected = plain(*args, **named)
        np.testing.assert_array_equal(np.asarray(f(*args, **named)), expected)
        np.testing.assert_array_equal(np.asarray(pw.program(lambda a=args, n=named: f(*a, **n))()), expected)
        assert f.eval_shape(*args, **named).shape == expected.shape
        assert f.lower(*args, **named).as_text()
    g = pw.compiled(lambda x, y, n: x * n + y, slice=a4, static_argnums=2)
    with pytest.raises(pw.errors.UsageError, match=r"\['n'\] by name, but 'y', which comes before, is not given by"):
        g(x, y=x, n=2)
    with pytest.raises(pw.errors.UsageError, match="has static argument 2, but was called with 2 arguments"):
        g(x, x)


def test_static_and_donated_arguments_by_name_and_number(session, a4) -> None:
    def f(state: Any, mode: str, times: int = 2) -> Any:
        return state * times if mode == "times" else state

    for options in ({"static_argnames": ("mode", "times")}, {"static_argnums": (1, 2)}):
        g = pw.jit(f, slice=a4, donate_argnames="state", **options)
        x = pw.put(V, a4)
        np.testing.assert_array_equal(np.asarray(g(x, "times", times=3)), V * 3)
        assert x.is_deleted()
    with pytest.raises(pw.errors.BufferDeleted, match="it was donated to f"):
        g(x, "times", 3)


def test_donated_arguments_are_taken_where_a_result_has_room(session, a4) -> None:
    """As JAX takes them: each result is for one argument."""
    split = NamedSharding(a4.mesh, P("x"))

    def whole(v: Any) -> Any:
        return jax.lax.with_sharding_constraint(v, NamedSharding(a4.mesh, P()))

    functions: list[tuple[Any, tuple[bool, bool]]] = [
        (lambda s, b: (s * b).sum(), (False, False)),
        (lambda s, b: b * 2, (False, True)),
        (lambda s, b: s + b, (True, False)),
        (lambda s, b: (b - s, s + b), (True, True)),
        (lambda s, b: s, (True, False)),
        (lambda s, b: (s + b).reshape(2, 4), (False, False)),
        (lambda s, b: whole(s + b), (False, False)),
    ]
    for function, taken in functions:
        s, b = jax.device_put((V, V + 1), split)
        donating = jax.jit(function, donate_argnums=(0, 1))
        assert donating.lower(s, b).donate_argnums == (0, 1)  # what was asked for
        jax.block_until_ready(donating(s, b))
        assert (s.is_deleted(), b.is_deleted()) == taken


def test_a_function_that_donates_is_differentiated(session, a4) -> None:
    """What its derivative keeps of its arguments is not taken for its result, which has no room for that."""
    loss = jax.jit(lambda s, b: (s * s * b).sum(), donate_argnames="s")
    np.testing.assert_array_equal(np.asarray(jax.grad(loss)(pw.put(V, a4), 2.0)), 4 * V)


def test_a_function_keeps_its_slice(session, a4) -> None:
    """Nobody else may have it."""
    f = pw.jit(double, slice=session.virtual_slice((2,), ("y",)))
    gc.collect()
    assert f(V).slice.shape == (2,)


def test_arrays_that_are_not_differentiated_go_with_their_handles(session, a4) -> None:
    loss = pw.jit(lambda w, x: (w * x).sum(), slice=a4)
    w, seen = pw.put(V, a4), []
    for other in (loss, pw.compiled(lambda w, x: (w * x).sum(), slice=a4)):
        x = pw.put(V, a4)
        np.testing.assert_array_equal(np.asarray(jax.grad(other)(w, x)), V)
        seen.append(weakref.ref(x))
    del x
    gc.collect()
    assert [one() for one in seen] == [None, None]


def test_in_programs_and_transformations(session, a4, b22) -> None:
    square = pw.jit(lambda v: (v**2).sum(), slice=a4, in_shardings=P("x"))
    for function in (jax.value_and_grad(square), pw.program(jax.value_and_grad(square))):
        value, gradient = function(V)
        assert (float(value), gradient.slice) == (float((V**2).sum()), a4)
        np.testing.assert_array_equal(np.asarray(gradient), 2 * V)
    twice = pw.jit(double, slice=b22, in_shardings=P("y"))
    f = pw.program(lambda v: twice(pw.jit(double, slice=a4)(v)))
    np.testing.assert_array_equal(np.asarray(f(V)), V * 4)
    assert [s.id for s in session.launched[-1].slices] == [a4.id, b22.id]
    np.testing.assert_array_equal(np.asarray(jax.vmap(twice)(np.stack([V, V]))), np.stack([V, V]) * 2)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"in_shardings": P("x")}, r"P\('x',\) says no slice; write NamedSharding\(slice.mesh, spec\), or slice= as w"),
        (
            {"in_shardings": "x"},
            r"shardings of pw.jit are NamedSharding\(slice.mesh, spec\) or a PartitionSpec, not",
        ),
        ({"slice": "x"}, r"slice= takes what pw.virtual_slice returns, not 'x'"),
    ],
)
def test_options_that_make_no_sense(session, options, match) -> None:
    with pytest.raises(pw.errors.UsageError, match=match):
        pw.jit(double, **options)


def test_shardings_that_do_not_fit(session, a4, b22) -> None:
    two: dict[str, Any] = {"in_shardings": NamedSharding(a4.mesh, P()), "out_shardings": NamedSharding(b22.mesh, P())}
    with pytest.raises(pw.errors.UsageError, match="a function runs on one slice; its shardings are on slice"):
        pw.jit(double, **two)
    f = pw.jit(double, slice=a4, in_shardings=P("x"))
    with pytest.raises(ValueError, match="the dimension size is 7"):
        f(V[:7])
    with pytest.raises(ValueError, match="was applied to a value of rank 0"):
        f(np.float32(1))
    with pytest.raises(TypeError, match="of type <class 'str'> and was passed to the function at path v"):
        f("text")
    with pytest.raises(pw.errors.UsageError, match=r"pw.jit decorates a function, not 3"):
        pw.jit(3)  # type: ignore[arg-type]


# --- many traces ------------------------------------------------------------------------------------------------------


def test_the_tenth_trace_is_warned_of_with_what_differs(session, a4) -> None:
    f = pw.compiled(lambda state, n: state["v"] * n, slice=a4)
    for size in range(1, 10):
        f({"v": np.ones(size, np.float32)}, 2.0)
    with pytest.warns(UserWarning, match=r"<lambda> was traced for the 10th time, .*leaf 0 was float32\[9\] on client"):
        f({"v": np.ones(10, np.float32)}, 2.0)
    for size in (10, 11):
        f({"v": np.ones(size, np.float32)}, 2.0)


def test_a_warning_of_traces_points_at_the_users_line(session, a4) -> None:
    """However many functions of this package are between; and where a library calls, at the line that called it."""

    def compiled() -> Any:
        return pw.compiled(lambda v: v + 1, slice=a4, on_retrace="warn")

    for f in (compiled(), pw.program(compiled(), on_retrace="warn"), pw.padded(compiled(), sizes=(4, 8, 16))):
        f(V[:3])
        for call, rows in ((f, 8), (mock.Mock(side_effect=f), 16)):
            with pytest.warns(UserWarning, match="was traced again") as seen:
                call(np.ones(rows, np.float32))
            assert [one.filename for one in seen] == [__file__]


def test_moves_alone_are_not_warned_of(session, a4, b22) -> None:
    """Each is a transfer: there is no function of the user's that could be padded."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(1, 13):
            moved = pw.put(pw.put(np.ones(size, np.float32), a4), b22)
            assert (moved.slice, pw.reshard(moved, a4).slice) == (b22, a4)


# --- errors of traces -------------------------------------------------------------------------------------------------


def test_an_error_of_a_library_says_the_users_line(session, a4) -> None:
    """1. The line that called it. 2. Where nobody but JAX called it, its own."""

    def parsed(v: Any) -> Any:
        return v * json.loads("{")["a"]

    def limited(v: Any) -> Any:
        return jnp.iinfo(v.dtype).max + v

    for fun in (parsed, limited):
        line = fun.__code__.co_firstlineno + 1
        for f in (pw.compiled(fun, slice=a4), pw.program(fun)):
            with pytest.raises(pw.errors.TraceError, match=rf"\(test_jit.py:{line}\) cannot be traced"):
                f(V)
    with pytest.raises(pw.errors.TraceError, match=r"\(decoder.py:\d+\) cannot be traced"):
        pw.compiled(functools.partial(json.JSONDecoder.decode, json.JSONDecoder(), "{"), slice=a4)()


def test_a_package_of_the_users_may_be_installed(session, a4) -> None:
    """As in a container: the lines are of that package, before those of Python's own, of NumPy, and of the script that
    calls it, which runs in a thread here, as tests are not installed."""
    package = os.path.join(sysconfig.get_path("purelib"), "theirs", "main.py")
    script = os.path.join(sysconfig.get_path("scripts"), "theirs")
    main = defined(
        """
        def parsed(v):
            return v * json.loads("{")["a"]

        def ordered(v):
            return v * numpy.cross(v, numpy.ones(7))

        def main(f, *given):
            for one in given:
                f(one)
        """,
        package,
        json=json,
        numpy=np,
    )
    for name, line in (("parsed", 3), ("ordered", 6)):
        with pytest.raises(pw.errors.TraceError, match=rf"\(main.py:{line}\) cannot be traced"):
            pw.compiled(main[name], slice=a4)(V)

    f = pw.compiled(lambda v: v + 1, slice=a4, on_retrace="warn")
    run = defined("\ndef run(*given):\n    main(*given)", script, main=main["main"])["run"]
    with ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning, match="was traced again") as seen:
        pool.submit(run, f, V[:3], V).result()
    assert [(one.filename, one.lineno) for one in seen] == [(package, 10)]


def defined(text: str, file: str, **known: Any) -> dict[str, Any]:
    """What Python's text defines, as if it were in that file."""
    exec(compile(textwrap.dedent(text), file, "exec"), known)
    return known


def test_a_mesh_of_this_process_of_another_size_is_named(session, a4) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("x",))
    total = jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    for function in (jax.jit(total), pw.compiled(total, slice=a4)):
        with pytest.raises(TraceError) as caught:
            function(pw.put(V, a4, P("x")))
        assert any("over a mesh of devices of this process" in note for note in caught.value.__notes__)


def test_shard_map_over_the_mesh_of_a_slice_or_an_equal_one(session, a4) -> None:
    for mesh in (a4.mesh, jax.sharding.AbstractMesh((4,), ("x",))):
        total = jax.shard_map(lambda v: jax.lax.psum(v, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
        expected = V.reshape(4, 2).sum(0)
        f = pw.compiled(total, slice=a4, in_specs=P("x"))
        for function in (f, pw.jit(total, slice=a4), pw.program(lambda v, f=f: f(v))):
            np.testing.assert_array_equal(np.asarray(function(V)), expected)
        gradient = pw.program(lambda v, f=f: jax.grad(lambda u: f(u).sum())(v))
        np.testing.assert_array_equal(np.asarray(gradient(V)), np.ones(8))
        sharding = NamedSharding(mesh, P("x"))
        held = pw.compiled(lambda v, s=sharding: jax.lax.with_sharding_constraint(v * 2, s), slice=a4)
        np.testing.assert_array_equal(np.asarray(held(V)), V * 2)
