"""The verifier of branches and loops: their bodies are graphs of their own, and fit the node that they belong to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import msgspec

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Argument, Body, Branch, Compute, Control, Graph, Ref, Repeat, Result
from pathways_ray.ir.types import ArrayType, Layout, item_bytes

MAX_DEPTH = 16
"""Branches and loops inside each other."""

_WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
"""Types of a value that decides."""


def verify_control(graph: Graph, verify: Callable[[Graph], None], depth: int = MAX_DEPTH) -> None:
    """Checks the branches and loops of a graph whose nodes are otherwise sound.

    Args:
        verify: checks a body as a graph.

    Raises:
        GraphError: naming the node and its line.
    """
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Branch | Repeat):
            if not depth:
                raise GraphError(f"program {graph.name!r} has branches and loops nested deeper than {MAX_DEPTH}")
            _Check(graph, index, node).run(verify)
            for body in node.bodies:
                verify_control(within(graph, body), verify, depth - 1)


def within(graph: Graph, body: Body) -> Graph:
    """A body as a graph, over the slices and recipes of the whole."""
    return msgspec.structs.replace(graph, nodes=body.nodes, decides=())


class _Check:
    """The checks of one node."""

    def __init__(self, graph: Graph, index: int, node: Control) -> None:
        self.graph = graph
        self.node = node
        self.label = f"%{index} {node.name}" + (f" ({node.where})" if node.where else "")

    def fail(self, what: str) -> NoReturn:
        raise GraphError(f"{self.label} {what}")

    def run(self, verify: Callable[[Graph], None]) -> None:
        node, given = self.node, [(self.graph.type_of(ref), self.graph.layout_of(ref)) for ref in self.node.inputs]
        made = list(zip(node.outputs, node.output_layouts, strict=False))
        if len(made) != max(len(node.outputs), len(node.output_layouts)):
            self.fail("does not name one layout for each output")
        for body in node.bodies:
            verify(within(self.graph, body))
            self.arguments(body, given)
        match node:
            case Branch():
                self.decider(self.graph, node.index)
                if not node.bodies:
                    self.fail("has no branch")
                for body in node.bodies:
                    self.results(body, made)
            case Repeat():
                if len(made) > len(given) or given[: len(made)] != made:
                    self.fail("does not give what it carries")
                self.results(node.body, made)
                if node.test is not None:
                    test = within(self.graph, node.test)
                    if len(test.result.inputs) != 1:
                        self.fail(f"has a test with {len(test.result.inputs)} results")
                    self.decider(test, test.result.inputs[0])

    def decider(self, graph: Graph, ref: Ref) -> None:
        kind = graph.type_of(ref)
        if kind.shape or kind.dtype not in _WHOLE or not item_bytes(kind.dtype):
            self.fail(f"is decided by {kind}; that has to be a scalar truth value or whole number")

    def arguments(self, body: Body, given: list[tuple[ArrayType, Layout]]) -> None:
        for node in body.nodes:
            if isinstance(node, Compute) and node.donated:
                self.fail(f"donates an argument of {node.name} inside a body")
            if isinstance(node, Argument):
                if not 0 <= node.index < len(given):
                    self.fail(f"takes input {node.index} in a body; it has {len(given)}")
                if (node.type, node.layout) != given[node.index]:
                    self.fail(
                        f"takes input {node.index} in a body as {node.type} @ {node.layout}; it is "
                        f"{given[node.index][0]} @ {given[node.index][1]}"
                    )

    def results(self, body: Body, made: list[tuple[ArrayType, Layout]]) -> None:
        graph = within(self.graph, body)
        last = body.nodes[-1]
        assert isinstance(last, Result)
        found = [(graph.type_of(ref), graph.layout_of(ref)) for ref in last.inputs]
        if found != made:
            shown = ", ".join(f"{kind} @ {layout}" for kind, layout in found)
            wanted = ", ".join(f"{kind} @ {layout}" for kind, layout in made)
            self.fail(f"has a body ({body.where}) that gives {shown}; it gives {wanted}")
