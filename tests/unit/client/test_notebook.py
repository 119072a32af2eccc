"""What notebooks show: tiles on the devices that have them, graphs, clusters; all names escaped, all sizes bounded."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_ray.client import notebook
from pathways_ray.ir.graph import Argument, Compute, Graph, Recipe, Ref, Result
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from tests.unit.observe.snapshots import host, island

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do

MESH = SliceType(1, (2, 4), ("x", "y"))
KIND = ArrayType((8,), "float32")


@pytest.mark.parametrize(
    ("spec", "user"),
    [
        ((("x",), ("y",)), P("x", "y")),
        ((("y",),), P("y")),
        (((), ("y", "x")), P(None, ("y", "x"))),
        ((), P()),
    ],
)
def test_tiles_are_where_jax_has_them(spec: Any, user: P) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    where = NamedSharding(mesh, user).devices_indices_map((8, 8))
    for number, device in enumerate(mesh.devices.flat):
        found = notebook.tile_of(MESH, spec, 2, number)
        starts = tuple(part.start or 0 for part in where[device])
        widths = tuple((part.stop or 8) - (part.start or 0) for part in where[device])
        assert tuple(start // width for start, width in zip(starts, widths, strict=True)) == found


def test_a_replicated_array_is_one_tile_on_all_devices() -> None:
    page = notebook.tiles_html(MESH, (), 2, [f"0.{k}" for k in range(8)])
    assert page.count("<td") == 1
    assert "0.0, 0.1, 0.2" in page


@pytest.mark.parametrize("dimensions", [0, 3])
def test_other_dimensions_have_no_grid(dimensions: int) -> None:
    assert notebook.tiles_html(MESH, (), dimensions, ["0.0"] * 8) == ""


def graph(name: str, nodes: int) -> Graph:
    layout = Layout(1, ())
    computed = [Compute(name, 0, 1, (Ref(k),), (layout,), (KIND,), (layout,), (), "here <b>") for k in range(nodes)]
    return Graph("p<q", (MESH,), (Recipe((), ()),), (Argument(0, KIND, layout), *computed, Result((Ref(nodes),))))


def test_a_graph_is_drawn_and_its_names_are_no_markup() -> None:
    page = notebook.graph_html(graph("<script>", 2))
    assert "<script>" not in page
    drawn = ElementTree.fromstring(page.replace("<br>", "<br/>"))
    assert [text.text for text in drawn.iter("text")] == ["argument 0", "<script>", "<script>", "result"]
    assert len(list(drawn.iter("path"))) == 3
    assert next(drawn.iter("title")).text == "float32[8] @ slice1:P()"


def test_a_large_graph_is_drawn_in_part() -> None:
    page = notebook.graph_html(graph("f", 200))
    assert page.count("<rect") == notebook.MAX_NODES
    assert f"and {202 - notebook.MAX_NODES} more nodes" in page


def test_a_large_cluster_is_shown_in_part() -> None:
    found = {"islands": [island(0, *(host(k, 1) for k in range(100)))]}
    page = notebook.cluster_html("grpc://here:1", 3, found)
    assert page.count("<tr>") == notebook.MAX_HOSTS
    assert f"and {100 - notebook.MAX_HOSTS} more hosts" in page
