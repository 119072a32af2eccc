"""A program of a proxy's client as the runtime has it."""

from __future__ import annotations

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.graph import Graph
from pathways_ray.proxy import programs


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
