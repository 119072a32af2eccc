"""A session that runs its programs in this process: for tests of what users write, without processes.

Graphs are run as they were traced, node by node, on CPU devices of this process; the passes, plans and hosts are left
out. Import it before JAX has made its devices.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import pathways_ray as pw
from pathways_ray.client import api, context
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.buffer import DELETED, READY, Buffer, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice, mesh_of
from pathways_ray.executor.compile.analysis import analysis
from pathways_ray.ir.evaluate import evaluate, evaluate_control
from pathways_ray.ir.graph import Argument, Branch, Compute, Graph, Part, Repeat, Transfer, host_part, inputs_of
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import Layout, SliceType
from pathways_ray.jax_types import dtype_named, partition_spec
from pathways_ray.observe.computations import Computation
from pathways_ray.transport.host_calls import filled, taken_apart
from pathways_ray.transport.messages import Explained, InlineArgument
from tests.unit.client.offline import Controller, Hosts
from tests.unit.functions import functions_of

DEVICES = 4

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more


class LocalSession(Session):
    """A session of slices on the devices of this process. `launched` has the graphs of all launches,
    `fetched` and `compiled` count fetches and waits for compilations."""

    def __init__(self) -> None:
        super().__init__(ClientCore(1, 1 << 20), Controller(), Hosts(), ("cpu",), trusted=True)  # type: ignore[arg-type]
        self.values: dict[int, Any] = {}
        self.launched: list[Graph] = []
        self.fetched = self.compiled = 0
        self._programs: dict[int, tuple[Graph, dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        local: Any = self
        local.free = lambda record: self.values.pop(record.id, None)
        local.wait = lambda *_: None

    def virtual_slice(self, shape: Any = None, axes: Any = None, **options: Any) -> VirtualSlice:
        sizes, names = mesh_of(shape, axes)
        sizes = sizes or (DEVICES,)
        mesh = SliceType(next(self._numbers), sizes, names)
        placed = PlacedSlice.on(mesh, options.get("island") or 0, [Device(0, k) for k in range(mesh.size)])
        return VirtualSlice(self, placed, options.get("name", ""))

    def status(self) -> dict[str, Any]:
        return {"islands": [{"island": 0, "state": "up", "hosts": [{"host": 0, "devices": list(range(DEVICES))}]}]}

    def upload_all(self, given: Sequence[tuple[Any, ArgumentType]], alone: bool = False) -> list[pw.Array]:
        made = [array for one in given for array in super(LocalSession, self).upload_all([one])]
        hosts: Any = self._data
        for found in made:
            self.values[found._buffer.id] = hosts.arrays.pop(found._buffer.id)
            found._buffer.record.state, found._buffer.record.upload = READY, None
        hosts.uploads.clear()
        return made

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int:
        number = next(self._numbers)
        on_hosts = {part.function for recipe in graph.recipes if (part := host_part(recipe)) is not None}
        pickled = {name: pickle.loads(functions[name]) for name in on_hosts}
        self._programs[number] = graph, functions_of(graph, functions) | pickled
        return number

    def launch(
        self,
        program: int,
        arguments: list[BufferRecord],
        results: tuple[ArgumentType, ...],
        donated: Sequence[BufferRecord] = (),
        why: str = "",
        inline: Sequence[InlineArgument] = (),
    ) -> list[pw.Array]:
        self.check_open()
        graph, functions = self._programs[program]
        self.launched.append(graph)
        failure = next((record.failure for record in arguments if record.failure is not None), None)
        if failure is not None:
            made = [pw.Array(Buffer(self, BufferRecord(next(self._numbers) + (1 << 40))), kind) for kind in results]
            for one in made:
                one._buffer.record.fail(failure)
            return made
        with jax.debug_nans(False), jax.debug_infs(False):  # hosts do not have the client's settings
            kinds = {node.index: node.type for node in graph.arguments}
            carried = {k: np.ndarray(kinds[k].shape, dtype_named(kinds[k].dtype), data) for k, data in inline}
            given = [carried[k] if k in carried else self.values[record.id] for k, record in enumerate(arguments)]
            values = _run(graph, functions, given)
        for record in donated:
            record.state, record.why_deleted = DELETED, why
        found = []
        for value, kind in zip(values, results, strict=True):
            record = BufferRecord(next(self._numbers) + (1 << 40), READY)
            self.values[record.id] = value
            found.append(pw.Array(Buffer(self, record), kind))
        return found

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        self.fetched += 1
        return np.array(self.values[array._buffer.id])

    def explain(self, program: int, graph: bytes) -> Any:
        assert program in self._programs
        self.compiled += 1
        return Explained("", "", {0: 64})

    def computations(self, program: int, text: bool = False) -> list[Computation]:
        graph, functions = self._programs[program]
        found = []
        for number, node in enumerate(graph.nodes):
            if not isinstance(node, Compute) or host_part(graph.recipes[node.recipe]) is not None:
                continue
            (part,) = graph.recipes[node.recipe].parts
            assert isinstance(part, Part)
            meshes = _meshes(graph)
            shardings = [[_sharding(meshes, o) for o in side] for side in (node.input_layouts, node.output_layouts)]
            exported = functions[part.function]
            given = [
                jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
                for aval, sharding in zip(exported.in_avals, shardings[0], strict=True)
            ]
            compiled = jax.jit(exported.call, out_shardings=tuple(shardings[1])).lower(*given).compile()
            found.append(analysis(compiled, number, part.name, 1, text))
        return found

    def close(self) -> None:
        assert api  # has JAX take arrays and calls
        if self in context.sessions:
            context.sessions.remove(self)


def opened() -> LocalSession:
    """A local session that is the current one."""
    session = LocalSession()
    context.sessions.append(session)
    return session


@functools.lru_cache(1024)
def _jitted(exported: Any, shardings: Any) -> Any:
    return jax.jit(exported.call, out_shardings=shardings)


def _meshes(graph: Graph) -> dict[int, Mesh]:
    return {s.id: Mesh(np.array(jax.devices("cpu")[: s.size]).reshape(s.shape), s.axes) for s in graph.slices}


def _sharding(meshes: dict[int, Mesh], layout: Layout) -> NamedSharding:
    return NamedSharding(meshes[layout.slice], partition_spec(layout.spec))


def _run(graph: Graph, functions: dict[str, Any], arguments: list[Any]) -> list[Any]:
    meshes = _meshes(graph)

    def placed(value: Any, layout: Layout) -> Any:
        return jax.device_put(np.asarray(value), _sharding(meshes, layout))

    made: list[list[Any]] = []
    for node in graph.nodes[:-1]:
        if isinstance(node, Argument):
            made.append([arguments[node.index]])
            continue
        if isinstance(node, Branch | Repeat):
            taken = [made[ref.node][ref.output] for ref in inputs_of(node)]
            made.append(evaluate_control(graph, node, taken, lambda g, given: _run(g, functions, list(given)), int))
            continue
        if isinstance(node, Transfer):
            made.append(made[node.input.node][node.input.output : node.input.output + 1])
            continue
        assert isinstance(node, Compute)
        inputs = [
            placed(made[ref.node][ref.output], layout)
            for ref, layout in zip(node.inputs, node.input_layouts, strict=True)
        ]
        shardings = tuple(_sharding(meshes, layout) for layout in node.output_layouts)

        def call(part: Part, taken: list[Any], shardings: Any = shardings) -> Any:
            if part.host_limit_ms:
                function, arguments, results = functions[part.function]
                positional, named = filled(arguments, [np.asarray(value) for value in taken])
                return taken_apart(results, function(*positional, **named)).__getitem__
            with jax.disable_jit(False):  # hosts go by none of the client's settings
                return _jitted(functions[part.function], shardings)(*taken).__getitem__

        made.append([np.asarray(value) for value in evaluate(graph.recipes[node.recipe], inputs, call)])
    return [made[ref.node][ref.output] for ref in graph.nodes[-1].inputs]  # type: ignore[union-attr]
