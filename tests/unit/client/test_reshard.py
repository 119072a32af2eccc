"""`pw.reshard` in programs: transfers, and no computation; derivatives; bodies of branches; what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import context
from pathways_ray.client import derivatives as derivatives
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import SpecError, TraceError
from pathways_ray.ir.graph import Argument, Branch, Compute, Graph, Result, Transfer
from pathways_ray.ir.passes.split import split
from tests.unit.client.test_graph_size import NoCluster

V = jax.ShapeDtypeStruct((4, 4), np.float32)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> NoCluster:
    made = NoCluster()
    monkeypatch.setattr(context, "sessions", [made])
    return made


@pytest.fixture
def a(session: NoCluster) -> VirtualSlice:
    return session.slice(2, 1)


@pytest.fixture
def b(session: NoCluster) -> VirtualSlice:
    return session.slice(2, 2)


def kinds(graph: Graph) -> list[type]:
    return [type(node) for node in graph.nodes]


def test_a_tree_becomes_transfers_and_no_function(a: VirtualSlice, b: VirtualSlice) -> None:
    f = pw.compiled(lambda v: {"w": v + 1, "b": v.sum(0)}, slice=a, in_specs=P("x"), out_specs=P("x"))
    lowered = pw.program(lambda v: pw.reshard(f(v), b, {"w": P(None, "x"), "b": P()})).lower(V)
    assert kinds(lowered.graph) == [Argument, Compute, Transfer, Transfer, Result]
    assert [str(node.layout) for node in lowered.graph.nodes if isinstance(node, Transfer)] == [
        "slice2:P()",
        "slice2:P(None, x)",
    ]
    assert list(lowered.program._built.functions) == [lowered.graph.recipes[0].parts[0].function]


def test_what_lies_there_already_is_handed_on_and_equal_wishes_are_one(a: VirtualSlice, b: VirtualSlice) -> None:
    f = pw.compiled(lambda v: v + 1, slice=a, in_specs=P("x"), out_specs=P("x"))

    def program(v: Any) -> Any:
        y = f(v)
        return pw.reshard(y, a, P("x")), pw.reshard(y, b), pw.reshard([y], b)

    graph = pw.program(program).lower(V).graph
    assert kinds(graph) == [Argument, Compute, Transfer, Compute, Result]
    assert [node.name for node in graph.nodes if isinstance(node, Compute)] == ["<lambda>", "copy"]
    assert len(set(graph.result.inputs)) == 3, "of one transfer, and each an array of its own"


def test_what_is_still_with_the_client_goes_there_at_once(b: VirtualSlice) -> None:
    def program(v: Any) -> Any:
        return pw.reshard(v, b, P("x")), pw.reshard(jnp.ones((2,)), b)

    lowered = pw.program(program).lower(V)
    assert not any(isinstance(node, Transfer) for node in lowered.graph.nodes)
    assert all(str(node.layout).startswith("slice2") for node in lowered.graph.arguments)


def test_a_derivative_goes_back(a: VirtualSlice, b: VirtualSlice) -> None:
    f = pw.compiled(lambda v: jnp.sin(v), slice=a, in_specs=P("x"), out_specs=P("x"))
    loss = pw.compiled(lambda v: (v**2).sum(), slice=b, in_specs=P("x"))
    graph = pw.program(jax.grad(lambda v: loss(pw.reshard(f(v), b, P("x"))))).lower(V).graph
    slices = [node.slice for node in graph.nodes if isinstance(node, Compute)]
    assert slices[0] == slices[-1] == 1, "forward begins and backward ends on the slice of f"


def test_a_body_may_move_what_it_gives(a: VirtualSlice, b: VirtualSlice) -> None:
    f = pw.compiled(lambda v: v + 1, slice=a, in_specs=P("x"), out_specs=P("x"))
    g = pw.compiled(lambda v: v * 2, slice=b, in_specs=P("x"), out_specs=P("x"))

    def program(p: Any, v: Any) -> Any:
        return pw.cond(p, lambda v: pw.reshard(f(v), b, P("x")), g, v)

    lowered = pw.program(program).lower(jax.ShapeDtypeStruct((), np.bool_), V)
    assert any(isinstance(node, Branch) for node in lowered.graph.nodes)
    _, segments = split(lowered.graph)
    moving = [segment for segment in segments if any(isinstance(node, Transfer) for node in segment.nodes)]
    assert len(moving) == 1
    assert {mesh.id for mesh in moving[0].slices} == {1, 2}


def test_errors_name_the_leaf(a: VirtualSlice, b: VirtualSlice) -> None:
    with pytest.raises(SpecError, match=r"leaf \['w'\]: reshard: dimension 0 of float32\[3\] has size 3"):
        pw.program(lambda t: pw.reshard(t, b, P("x"))).lower({"w": jax.ShapeDtypeStruct((3,), np.float32)})
    with pytest.raises(TraceError, match=r"use pw\.reshard"):
        pw.program(lambda v: pw.put(v, b)).lower(V)
