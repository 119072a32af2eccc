"""A node stands for all shards: nothing that the client sends grows with the number of devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pathways_ray.client import context
from pathways_ray.client.compiled import compiled
from pathways_ray.client.program import program
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.graph import Argument, Compute, Graph, Result
from pathways_ray.ir.passes import lower
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.text import graph_text
from pathways_ray.ir.types import SliceType
from pathways_ray.transport.messages import encode

SIZES = [1, 4, 2048]


class NoCluster:
    """What tracing needs of a session: an id, the platforms to export for, and no connection."""

    id = 1
    url = "grpc://nowhere"
    platforms = ("cpu",)
    closed = False
    closed_because = ""
    trusted = False

    def known_by(self, known: Any) -> None:
        pass

    def check_open(self) -> None:
        pass

    def slice(self, size: int, number: int = 1) -> VirtualSlice:
        devices = tuple(Device(k // 8, k % 8) for k in range(size))
        return VirtualSlice(self, PlacedSlice.on(SliceType(number, (size,), ("x",)), 0, devices), "")  # type: ignore[arg-type]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> NoCluster:
    made = NoCluster()
    monkeypatch.setattr(context, "sessions", [made])
    return made


def two_calls(session: NoCluster, size: int) -> Any:
    """A then B on `size` devices, lowered for arguments of one row a device."""
    where = session.slice(size)

    @compiled(slice=where, in_specs=P("x"), out_specs=P("x"))
    def a(v: jax.Array) -> jax.Array:
        return v * 2 + jnp.sum(v)

    @compiled(slice=where, in_specs=P("x"), out_specs=P())
    def b(v: jax.Array) -> jax.Array:
        return v - jnp.max(v)

    return program(lambda v: b(a(v)), name="chain").lower(jax.ShapeDtypeStruct((2048, 4), np.float32))


@pytest.fixture
def graphs(session: NoCluster) -> dict[int, Graph]:
    return {size: two_calls(session, size).graph for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_two_calls_are_four_nodes(session: NoCluster, size: int) -> None:
    nodes = two_calls(session, size).graph.nodes
    assert [type(node) for node in nodes] == [Argument, Compute, Compute, Result]
    assert [node.name for node in nodes if isinstance(node, Compute)] == ["a", "b"]


def test_the_text_is_the_same_but_for_the_line_of_the_mesh(graphs: dict[int, Graph]) -> None:
    texts = {size: graph_text(graph).splitlines() for size, graph in graphs.items()}
    for size, lines in texts.items():
        assert lines[1] == f"  slice1(x={size})"
        assert lines[:1] + lines[2:] == texts[1][:1] + texts[1][2:]


def test_the_encoded_graph_is_the_same_but_for_the_mesh(graphs: dict[int, Graph]) -> None:
    """The names of the functions differ, as a digest does; the lengths are the same to the byte."""
    sizes = {size: len(encode(msgspec.structs.replace(graph, slices=()))) for size, graph in graphs.items()}
    assert len(set(sizes.values())) == 1
    whole = {size: len(encode(graph)) for size, graph in graphs.items()}
    assert whole[2048] - whole[1] == len(encode(2048)) - len(encode(1))
    assert whole[2048] < 1000


def test_lowering_adds_nothing_for_more_devices(graphs: dict[int, Graph]) -> None:
    counts = {size: len(lower(graph).nodes) for size, graph in graphs.items()}
    assert set(counts.values()) == {3}, "argument, a and b in one computation, result"


def test_what_is_exported_does_not_grow_with_the_devices(session: NoCluster) -> None:
    """One exported function is for all devices: beside the digits of the mesh it is the same."""
    sizes = {}
    for size in (4, 2048):
        lowered = two_calls(session, size)
        sizes[size] = sum(map(len, lowered.program._built.functions.values()))
    assert abs(sizes[2048] - sizes[4]) < 200


def test_a_chain_of_calls_exports_each_function_once(session: NoCluster) -> None:
    where = session.slice(8)

    @compiled(slice=where, in_specs=P("x"), out_specs=P("x"))
    def double(v: jax.Array) -> jax.Array:
        return v * 2

    def chain(v: jax.Array) -> jax.Array:
        for _ in range(128):
            v = double(v)
        return v

    lowered = program(chain).lower(jax.ShapeDtypeStruct((16,), np.float32))
    assert len(lowered.program._built.functions) == 1
    assert len(lowered.graph.nodes) == 130
    fused = [node for node in lower(lowered.graph).nodes if isinstance(node, Compute)]
    assert len(fused) == 1


def test_a_computation_is_bounded_by_an_estimate_of_its_time(session: NoCluster) -> None:
    """A product of these sizes takes 3.4 ms at 10 billion operations a second, so two of them are beyond the bound."""
    where = session.slice(1)

    @compiled(slice=where)
    def product(v: jax.Array) -> jax.Array:
        return v @ v

    @compiled(slice=where)
    def endless(v: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda u: u.sum() > 0, lambda u: u - 1, v)

    def chain(v: jax.Array) -> jax.Array:
        return endless(endless(product(product(product(v)))))

    def fused(size: int) -> int:
        lowered = program(chain).lower(jax.ShapeDtypeStruct((size, size), np.float32))
        return sum(isinstance(node, Compute) for node in lower(lowered.graph).nodes)

    assert fused(8) == 3
    assert fused(256) == 5


def test_every_node_knows_the_users_line(session: NoCluster) -> None:
    lines = [node.where for node in two_calls(session, 4).graph.nodes if isinstance(node, Compute)]
    assert all(line.startswith("test_graph_size.py:") for line in lines)
