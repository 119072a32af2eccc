"""The programs of a proxy's client as the runtime has them: those that it sent, and those that move its arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.graph import Graph
from pathways_ray.proxy import programs
from pathways_ray.transport.messages import encode

MAX_GRAPHS = 1024
"""Graphs that move arrays and are kept, one for each type and layout."""


class Loaded:
    """A program of the client, registered with the runtime once for each choice of arguments that it may take."""

    def __init__(self, program: programs.Program, where: VirtualSlice) -> None:
        self.program = program
        self.where = where
        self.registered: dict[tuple[int, ...], int] = {}
        signature = program.signature
        self.results = tuple(
            ArgumentType.of(kind, False, where, sharding.spec)
            for kind, sharding in zip(signature.outputs, signature.output_shardings, strict=True)
        )
        self.temporary_bytes = 0

    def graph(self, donated: tuple[int, ...]) -> Graph:
        return programs.call_graph(self.program, self.where.id, donated)


class ProgramRegistry(Protocol):
    """The part of a session that has programs."""

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int: ...

    def unregister(self, program: int) -> None: ...


class MovingGraphs:
    """Graphs without functions, registered with the runtime as they are first needed. The oldest goes for a further
    one."""

    def __init__(self, session: ProgramRegistry) -> None:
        self.session = session
        self.numbers: dict[Hashable, int] = {}

    def number(self, key: Hashable, made: Callable[[], Graph]) -> int:
        """The program of the graph that has a key."""
        found = self.numbers.get(key)
        if found is None:
            if len(self.numbers) >= MAX_GRAPHS:
                self.session.unregister(self.numbers.pop(next(iter(self.numbers))))
            graph = made()
            found = self.numbers[key] = self.session.register(graph, encode(graph), {})
        return found
