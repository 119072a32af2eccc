"""`pw.host` at the client: what becomes of a call in a graph, and what is refused before anything is sent."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from threading import Event, Lock
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import context, host_functions
from pathways_ray.ir.graph import Compute, host_part
from pathways_ray.transport.host_calls import filled, taken_apart
from tests.unit.client.offline import LIMIT_S, Background, Offline

V = np.arange(8, dtype=np.float32)
LIKE = jax.ShapeDtypeStruct((8,), np.float32)


@pytest.fixture
def offline() -> Iterator[Offline]:
    made = Offline()
    made.session.trusted = True
    context.sessions.append(made.session)
    yield made
    context.sessions.remove(made.session)


def double(v: Any) -> Any:
    return 2 * v


def test_a_call_is_a_node_with_the_pickled_function(offline: Offline) -> None:
    """
    1. The function takes a dict and gives a pair; it is called between two compiled functions.
    2. What is sent can be read without this module, and is called as it was written.
    """
    where = offline.where

    @pw.host(slice=where, in_specs=P("x"), out_specs=P("x"), result=(LIKE, {"n": LIKE}), limit_s=1.5)
    def both(values: Any, scale: Any) -> Any:
        return double(values["v"]) * scale, {"n": -values["v"]}

    same = pw.compiled(lambda v: v + 1, slice=where, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: same(both({"v": same(v)}, scale=v)[1]["n"]))
    graph = program.prepared((V,)).graph
    nodes = [node for node in graph.nodes if isinstance(node, Compute)]
    assert [node.name for node in nodes] == ["<lambda>", "both", "<lambda>"]
    part = host_part(graph.recipes[nodes[1].recipe])
    assert part is not None
    assert part.host_limit_ms == 1500
    code = program.prepared((V,))._built.functions[part.function]
    function, arguments, results = pickle.loads(code)
    assert function.__globals__ is not globals()
    positional, named = filled(arguments, [V, V])
    given = taken_apart(results, function(*positional, **named))
    np.testing.assert_array_equal(given[0], 2 * V * V)
    np.testing.assert_array_equal(given[1], -V)


@pytest.mark.parametrize("asked", [False, True])
def test_what_the_user_has_pickled_by_value_stays_as_it_was(offline: Offline, asked: bool) -> None:
    module = sys.modules[__name__]
    if asked:
        cloudpickle.register_pickle_by_value(module)
    try:
        pw.program(pw.host(double, slice=offline.where, result=LIKE)).prepared((V,))
        assert (__name__ in cloudpickle.list_registry_pickle_by_value()) == asked
    finally:
        if asked:
            cloudpickle.unregister_pickle_by_value(module)


def test_threads_that_pickle_at_once_do_not_undo_what_another_needs(
    offline: Offline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is amid its function when the second comes, which would be through before it goes on."""
    found: list[bool] = []
    begun, second_is_through = Event(), Event()
    plain = host_functions.pickled

    def slow(*arguments: Any) -> bytes:
        if not begun.is_set():
            begun.set()
            second_is_through.wait(0.5)
        found.append(__name__ in cloudpickle.list_registry_pickle_by_value())
        return plain(*arguments)

    monkeypatch.setattr(host_functions, "pickled", slow)
    functions = [pw.host(double, slice=offline.where, result=LIKE) for _ in range(2)]

    def pickles(function: Any) -> None:
        function._pickled(((0,), {}), 0, 1, 1)

    first = Background(lambda: pickles(functions[0]))
    assert begun.wait(LIMIT_S)
    second = Background(lambda: [pickles(functions[1]), second_is_through.set()])
    first.end()
    second.end()
    assert found == [True, True]
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


def test_the_types_of_results_may_follow_from_those_of_arguments(offline: Offline) -> None:
    rows = pw.host(lambda v: v.sum(1), slice=offline.where, result=lambda v: jax.ShapeDtypeStruct(v.shape[:1], v.dtype))
    program = pw.program(lambda v: rows(v))
    assert program.eval_shape(np.zeros((3, 5), np.int32)).shape == (3,)
    assert program.eval_shape(np.zeros((4, 5), np.float32)).dtype == np.float32


def test_in_a_loop_it_is_no_part_of_a_computation(offline: Offline) -> None:
    """The whole loop is on one slice; it is a node with bodies all the same, around which the controller decides."""
    move = pw.host(double, slice=offline.where, result=LIKE)
    program = pw.program(lambda v: pw.fori_loop(0, 3, lambda _, c: move(c), v))
    text = program.lower(V).as_text()
    assert "3 times" in text
    assert "host double" in text


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"result": 3.0}, pw.errors.UsageError, "result= of double says 3.0; it takes a tree of jax.ShapeDtypeStruct"),
        ({"result": ()}, pw.errors.UsageError, "result= of double has no array"),
        ({"result": LIKE, "limit_s": 0}, pw.errors.UsageError, "limit_s= of pw.host is from 0.001 to 3600 seconds"),
        ({"result": LIKE, "limit_s": "1"}, pw.errors.UsageError, "limit_s= of pw.host takes seconds, not '1'"),
        ({"result": LIKE, "out_specs": P("y")}, pw.errors.SpecError, "'y'"),
        ({"result": jax.ShapeDtypeStruct((7,), "f4"), "out_specs": P("x")}, pw.errors.SpecError, "double, output 0"),
        ({"result": jax.ShapeDtypeStruct((8,), "int4")}, pw.errors.UsageError, "result 0 of double is of type int4"),
    ],
)
def test_options_that_do_not_fit(offline: Offline, options: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        pw.host(double, slice=offline.where, **options)(V)


def test_what_cannot_travel_is_refused(offline: Offline) -> None:
    def call(function: Any, *arguments: Any) -> None:
        pw.host(function, slice=offline.where, result=LIKE)(*arguments)

    big = np.zeros(17 << 20, np.uint8)
    with pytest.raises(pw.errors.TooLarge, match="the limit of a host function is 16777216"):
        call(lambda v: v + big[0], V)
    lock = Lock()
    with pytest.raises(pw.errors.UsageError, match="cannot be sent to hosts: TypeError"):
        call(lambda v: lock and v, V)
    with pytest.raises(pw.errors.UsageError, match=r"has typed keys; pass jax.random.key_data"):
        call(double, jax.random.key(0))


def test_a_tenant_that_is_not_trusted_is_told_before_it_sends(offline: Offline) -> None:
    offline.session.trusted = False
    with pytest.raises(pw.errors.ProgramRefused, match="hosts run Python only of tenants that the operator trusts"):
        pw.host(double, slice=offline.where, result=LIKE)(V)


def test_jax_cannot_look_into_it(offline: Offline) -> None:
    grade = pw.host(lambda v: v.sum(), slice=offline.where, result=jax.ShapeDtypeStruct((), "f4"))
    with pytest.raises(pw.errors.TraceError, match="JAX can neither differentiate it nor batch it"):
        pw.program(jax.grad(lambda v: grade(v))).lower(V)
    held = pw.program(jax.grad(lambda v: (grade(jax.lax.stop_gradient(v)) * v).sum()))
    assert "host <lambda>" in held.lower(V).as_text()
    with pytest.raises(pw.errors.TraceError, match="calls a compiled function"):
        pw.compiled(lambda v: grade(jnp.sin(v)), slice=offline.where)(V)
