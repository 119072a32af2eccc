"""Programs: what they return, how they nest and chain, when they are traced, which slices they use."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from tests.integration.conftest import stopped

V = np.arange(8, dtype=np.float32)


@pytest.fixture
def double(slices):
    return pw.compiled(lambda v: v * 2, slice=slices.b2, in_specs=P("x"), out_specs=P("x"))


def test_returns_arguments_constants_and_one_value_twice(session, inc, equal) -> None:
    constant = np.arange(3, dtype=np.int32)

    @pw.program
    def f(v, w):
        y = inc(v)
        return v, constant, y, y, w, 7, 2.5, True

    result = f(V, V * 2)
    equal(result, (V, constant, V + 1, V + 1, V * 2, np.int32(7), np.float32(2.5), np.bool_(True)))
    result[2].delete()
    with pytest.raises(pw.errors.BufferDeleted, match=r"float32\[8\].* cannot be used"):
        np.asarray(result[2])
    equal(result[3], V + 1)  # an array of its own, as of `jax.jit`
    equal(result[0], V)


def test_returned_argument_outlives_the_handle_that_was_passed(session, inc, equal) -> None:
    x = pw.put(V, slice=inc.slice, spec=P("x"))
    same, more = pw.program(lambda v: (v, inc(v)))(x)
    del x
    equal(same, V)
    equal(more, V + 1)


def test_program_without_any_computation(session, slices, equal) -> None:
    x = pw.put(V, slice=slices.a4, spec=P("x"))
    equal(pw.program(lambda v: v)(x), V)
    equal(pw.program(lambda v: (v, {"again": v}))(V), (V, {"again": V}))
    constant = pw.program(lambda: jnp.ones(3))
    equal(constant(), np.ones(3, np.float32))
    equal(constant(), np.ones(3, np.float32))


def test_nested_programs_are_inlined(session, inc, double, equal) -> None:
    @pw.program
    def inner(v):
        return {"inc": inc(v)}

    @pw.program
    def outer(v):
        return double(inner(inner(v)["inc"])["inc"])

    equal(outer(V), (V + 2) * 2)
    assert len(outer.lower(V).graph.nodes) == 5
    equal(inner(V), {"inc": V + 1})


def test_the_same_function_on_several_slices(session, slices, equal) -> None:
    def square(v):
        return v * v

    places = (slices.a4, slices.b4, slices.a22, slices.b2, slices.a1)
    functions = [pw.compiled(square, slice=s, in_specs=P("x"), out_specs=P("x")) for s in places]

    @pw.program
    def f(v):
        parts = [function(v) for function in functions]
        return functions[0](parts[1]), parts

    fourth, parts = f(V)
    equal(fourth, V**4)
    equal(parts, [V * V] * len(places))
    assert [part.sharding.mesh for part in parts] == [s.mesh for s in places]


def test_unused_results_are_dropped(session, inc, double, equal) -> None:
    @pw.program
    def f(v):
        double(double(v))
        return inc(v)

    plan = f.lower(V).as_text("plan")
    assert plan.count("execute") == 1
    assert "island 1" not in plan
    equal(f(V), V + 1)


def test_results_are_arguments_of_the_next_without_a_wait(session, inc, double, equal) -> None:
    f = pw.program(lambda v: double(inc(v)))
    x, expected = pw.put(V * 0, slice=inc.slice, spec=P("x")), V * 0
    np.asarray(f(x)), np.asarray(f(f(x)))
    with stopped(session, 0):  # none of them is through before all are called
        for _ in range(20):
            x, expected = f(x), (expected + 1) * 2
        assert not x.is_ready()
    equal(x, expected)


def test_traced_once_per_combination_of_argument_types(session, slices, equal) -> None:
    traces = {"program": 0, "function": 0}

    def body(v, w):
        traces["function"] += 1
        return v + w

    f = pw.compiled(body, slice=slices.a4)

    def program(v, w):
        traces["program"] += 1
        return f(v, w)

    g = pw.program(program)
    x = pw.put(V, slice=slices.a4)
    for _ in range(3):
        equal(g(V, V), V * 2)
        equal(g(V, 1.0), V + 1)
        equal(g(V, 2.0), V + 2)
        equal(g(V, np.float32(1)), V + 1)
        equal(g(x, V), V * 2)
    assert traces["program"] == 3  # where an argument lies is no part of its type
    one_trace = traces["function"] / 3
    assert one_trace in (1, 2), "exporting may run a function twice, a launch never"
    equal(g(V[:4], V[:4]), V[:4] * 2)
    equal(g(V.astype(np.int32), V), V * 2)
    assert traces["program"] == 5
    assert traces["function"] == 5 * one_trace


def test_captured_arrays(session, slices, inc, equal) -> None:
    held = pw.put(V * 10, slice=slices.a4, spec=P("x"))
    constant = np.full(8, 0.5, np.float32)
    add = pw.compiled(lambda a, b, c: a + b + c, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))

    @pw.program
    def f(v):
        return add(inc(v), held, constant), held, constant

    for _ in range(2):
        equal(f(V), (V + 1 + V * 10 + 0.5, V * 10, constant))
    held.delete()
    with pytest.raises(pw.errors.BufferDeleted, match="it was deleted"):
        f(V)


def test_constants_captured_by_a_compiled_function(session, slices, equal) -> None:
    table = np.arange(16, dtype=np.float32).reshape(2, 8)
    jax_table = jnp.asarray(table)
    f = pw.compiled(lambda v: table[0] + jax_table[1] + v, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    equal(f(V), table[0] + table[1] + V)


def test_results_of_one_program_from_several_islands(session, slices, inc, equal) -> None:
    there = pw.compiled(lambda v: v - 1, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))

    @pw.program
    def f(v):
        a, b = inc(v), there(v)
        return {"a": a, "b": b, "both": inc(b), "back": there(a)}

    equal(f(V), {"a": V + 1, "b": V - 1, "both": V, "back": V})


def test_many_results_and_many_arguments(session, slices, equal) -> None:
    f = pw.compiled(lambda *vs: [v + k for k, v in enumerate(vs)], slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    g = pw.program(lambda *vs: f(*f(*vs)))
    equal(g(*[V] * 50), [V + 2 * k for k in range(50)])


def test_calls_from_several_threads(session, inc, double, equal) -> None:
    from concurrent.futures import ThreadPoolExecutor

    f = pw.program(lambda v: double(inc(v)))

    def call(number: int) -> np.ndarray:
        return np.asarray(f(V + np.float32(number)))

    with ThreadPoolExecutor(4) as pool:
        for number, result in enumerate(pool.map(call, range(40))):
            equal(result, (V + number + 1) * 2)


def test_rounds_of_several_programs_leave_as_one_launch_with_the_same_bits(session, slices) -> None:
    """
    1. A loop of three programs, of which one takes another array in each round, with rounding in each of them.
    2. Once the cluster has compiled it, rounds leave together; what comes out are the bits of launches one by one.
    """
    where = {"slice": slices.a4, "out_specs": P("x")}
    turn = pw.compiled(lambda v, w: v * jnp.float32(1.1) + w, in_specs=(P("x"), P("x")), **where)
    bend = pw.compiled(lambda v: jnp.sin(v) * 3 - v / 7, in_specs=P("x"), **where)
    fold = pw.compiled(lambda v: v - jnp.float32(0.3) * v * v, in_specs=P("x"), **where)
    added = [pw.put(V * k / 16, slice=slices.a4, spec=P("x")) for k in range(3)]
    coalescer = session._core.coalescer

    def ran(rounds: int) -> bytes:
        value = pw.put(V / 8, slice=slices.a4, spec=P("x"))
        for k in range(rounds):
            value = fold(bend(turn(value, added[k % 3])))
        return np.asarray(value).tobytes()

    def composed() -> set[int]:
        return {n for r in coalescer._repetitions.values() if r.shape.varied for n in r.composed.values()}

    coalescer._enabled = False
    single = ran(400)
    coalescer._enabled = True
    for _ in range(200):
        assert ran(400) == single
        if composed():
            break
    assert composed()
    assert [ran(400) for _ in range(3)] == [single] * 3
