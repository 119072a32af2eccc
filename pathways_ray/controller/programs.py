"""Lowers a registered graph to plans for the islands: the controller's slow path, once per program."""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from pathways_ray import limits
from pathways_ray.controller.circuit_breaker import NOBODY, Culprit
from pathways_ray.errors import Failure, GraphError, TooLarge, WireError
from pathways_ray.ir import passes
from pathways_ray.ir.graph import Compute, Graph, Loop, Part, Result, functions_in, inputs_of, references_in
from pathways_ray.ir.passes.keep_small import keep_small
from pathways_ray.ir.passes.plan_islands import gang_count, plan_islands
from pathways_ray.ir.plan import Call, Device, IslandPlan, PlacedSlice
from pathways_ray.ir.script import Script
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from pathways_ray.scheduler.estimates import MovingAverage
from pathways_ray.transport.messages import Program, encode

SEGMENT_BITS = 16
"""A segment's number is that of its program, these bits for its place, and a sign: hosts know it by 64 bits."""

_GRAPH = msgspec.msgpack.Decoder(Graph)
_PLAN = msgspec.msgpack.Decoder(IslandPlan)


def number_of(key: int) -> int:
    """The number of the program that hosts know by a key, or one of whose segments they do."""
    return key if key > 0 else (-key - 1) >> SEGMENT_BITS


class BufferType(msgspec.Struct, frozen=True, array_like=True):
    """The type of a buffer, as its owner sees it: type, slice and spec; and the bytes of its shards on devices. From
    these follow the bytes of the array itself, and those that count against the tenant's quota."""

    type: ArrayType
    slice: int
    spec: Spec
    device_bytes: int
    array_bytes: int = 0
    charged_bytes: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "array_bytes", self.type.nbytes)
        force_setattr(self, "charged_bytes", max(self.device_bytes, limits.MIN_BUFFER_BYTES))

    @classmethod
    def on(cls, mesh: SliceType, kind: ArrayType, spec: Spec) -> BufferType:
        """The type on a slice with this mesh; what is not partitioned along an axis lies on every device of it."""
        parts = math.prod(mesh.axis_size(axis) for axes in spec for axis in axes)
        return cls(kind, mesh.id, spec, kind.nbytes // parts * mesh.size)


class IslandPart(msgspec.Struct, frozen=True, array_like=True):
    """A program's plan for an island, encoded; the functions that it names; the devices that it uses there; its
    `computations` (see `messages.Program`)."""

    plan: bytes
    functions: tuple[str, ...]
    devices: tuple[Device, ...]
    computations: int
    calls: bool = False


class Lowered(msgspec.Struct, frozen=True, array_like=True):
    """All that the controller keeps of a program that was lowered and planned; see `PlannedProgram`."""

    name: str
    arguments: tuple[BufferType, ...]
    results: tuple[BufferType, ...]
    donated: tuple[int, ...]
    islands: dict[int, IslandPart]
    hosts: tuple[int, ...]
    gang_islands: tuple[tuple[int, ...], ...]
    digest: str
    devices: int
    script: Script | None = None
    segments: tuple[Lowered, ...] = ()
    takes_memory: bool = False


def _check_functions(lowered: Lowered, functions: Mapping[str, bytes]) -> None:
    """Refuses a program whose functions were not all sent, or are larger than a message."""
    names = sorted({digest for part in lowered.islands.values() for digest in part.functions})
    if missing := [digest for digest in names if digest not in functions]:
        raise GraphError(f"program {lowered.name!r} needs functions that were not sent: {missing[0][:12]}…")
    size = sum(len(functions[digest]) for digest in names)
    if size > limits.MAX_PROGRAM_BYTES:
        raise TooLarge(
            f"the functions of program {lowered.name!r} take {size} bytes, constants included; the limit is "
            f"{limits.MAX_PROGRAM_BYTES}. Pass large constants as arguments"
        )


@dataclass
class PlannedProgram:
    """A program with its part for each island it touches, and what the controller needs to launch it.

    `donated` are the numbers of the arguments that it is given, `takes_memory` says whether it takes the memory of one;
    `gang_islands[k]` are the islands with steps of gang k.
    `unready` are those of its hosts that have yet to compile it, `unsent` islands whose hosts have yet to get it.
    `culprit` is what the circuit breaker knows it by. `device_time` is the time of a launch, summed over its `devices`,
    `result_bytes` those of all results on devices, `held` the same by slice, `most_bytes` those of a launch,
    temporaries among them. `number` is the client's for it; `announced` is set once the client has heard that every
    host has compiled it. Launches have asked for that since `wanted_since`. A `failure` to compile it is void from
    `retry_at` on. `in_flight` counts its launches on islands, `launches` all that there were, `promised` the results of
    one that could not be planned; its client registers it `again` where the cause may pass. One that decides has a
    `script`, and a program for each of its `segments`; it has no plan of its own.
    """

    key: int
    session: int
    name: str
    arguments: tuple[BufferType, ...] = ()
    results: tuple[BufferType, ...] = ()
    donated: tuple[int, ...] = ()
    messages: dict[int, Program] = field(default_factory=dict)
    hosts: frozenset[int] = frozenset()
    gang_islands: tuple[tuple[int, ...], ...] = ()
    unsent: set[int] = field(default_factory=set)
    temporary_bytes: dict[int, int] = field(default_factory=dict)
    failure: Failure | None = None
    retry_at: float = math.inf
    wanted_since: float = math.inf
    culprit: Culprit = NOBODY
    device_time: MovingAverage = field(default_factory=MovingAverage)
    number: int = 0
    announced: bool = False
    devices: int = 1
    in_flight: int = 0
    launches: int = 0
    promised: int = 0
    again: bool = False
    result_bytes: int = 0
    script: Script | None = None
    segments: tuple[PlannedProgram, ...] = ()
    takes_memory: bool = False

    def __post_init__(self) -> None:
        self.islands = tuple(self.messages)
        self.cross_island = len(self.islands) > 1
        self.unready = set(self.hosts)
        self.result_count = len(self.results) or self.promised
        self.array_bytes = sum(kind.array_bytes for kind in self.results)
        self.charged_bytes = sum(kind.charged_bytes for kind in self.results)
        self.held = Counter[int]()
        for kind in self.results:
            self.held[kind.slice] += kind.device_bytes
        self.most_bytes = self.result_bytes + self.devices * max(self.temporary_bytes.values(), default=0)
        self.calls = any(message.calls for message in self.messages.values())

    @classmethod
    def of(
        cls,
        key: int,
        session: int,
        lowered: Lowered,
        functions: Mapping[str, bytes],
        tenant: str = "",
        trusted: bool = False,
    ) -> PlannedProgram:
        """Joins a lowered program with its functions. Raises `GraphError` where one was not sent, `TooLarge` where all
        are more than fit in a message."""
        _check_functions(lowered, functions)
        segments = tuple(
            cls.of(-((key << SEGMENT_BITS) + k + 1), session, one, functions, tenant, trusted)
            for k, one in enumerate(lowered.segments)
        )
        for segment in segments:
            segment.announced = True  # the client knows nothing of it
        cross_island = len(lowered.islands) > 1
        messages = {
            island: Program(
                program=key,
                plan=part.plan,
                functions={digest: functions[digest] for digest in part.functions},
                name=lowered.name,
                devices=part.devices,
                cross_island=cross_island,
                islands=len(lowered.islands),
                tenant=tenant,
                computations=part.computations,
                trusted=trusted,
                calls=any(one.calls for one in lowered.islands.values()),
                results=len(lowered.results),
                donated=lowered.donated,
            )
            for island, part in lowered.islands.items()
        }
        return cls(
            key=key,
            session=session,
            name=lowered.name,
            arguments=lowered.arguments,
            results=lowered.results,
            donated=lowered.donated,
            messages=messages,
            hosts=frozenset(lowered.hosts),
            gang_islands=lowered.gang_islands,
            culprit=Culprit(tenant, lowered.digest),
            devices=lowered.devices,
            result_bytes=sum(kind.device_bytes for kind in lowered.results),
            script=lowered.script,
            segments=segments,
            takes_memory=lowered.takes_memory,
        )

    @functools.cached_property
    def plans(self) -> dict[int, IslandPlan]:
        """Its plans, decoded when somebody asks for them."""
        return {island: _PLAN.decode(message.plan) for island, message in self.messages.items()}

    @property
    def parts(self) -> tuple[PlannedProgram, ...]:
        """Its segments, each of which hosts compile; or itself."""
        return self.segments or (self,)

    @property
    def is_ready(self) -> bool:
        """Whether all hosts have compiled it."""
        return not self.unready


def decode_graph(data: bytes) -> Graph:
    """Raises `WireError` unless `data` is a graph."""
    try:
        return _GRAPH.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"program of {len(data)} bytes refused: {error}") from None


def check_functions(functions: Mapping[str, bytes]) -> None:
    """Raises `WireError` for a function whose content is not what its name says, `TooLarge` for a big one."""
    for digest, blob in functions.items():
        if hashlib.sha256(blob).hexdigest() != digest:
            raise WireError(f"function {digest[:12]} does not match its digest")
        if len(blob) > 2 * limits.MAX_CONSTANT_BYTES:
            raise TooLarge(
                f"function {digest[:12]} has {len(blob)} bytes; the limit is {2 * limits.MAX_CONSTANT_BYTES}. "
                "Pass big constants as arguments"
            )


def references(graph: Graph) -> int:
    """Values that the nodes of a graph refer to, and the parts of their recipes, once for each node that runs them:
    what passes have to look at."""
    recipes = [len(recipe.outputs) + references_in(recipe.parts) for recipe in graph.recipes]
    found = len(graph.slices) + sum(recipes)
    for node in graph.nodes:
        if isinstance(node, Compute):
            found += len(node.inputs) + len(node.input_layouts) + len(node.outputs) + len(node.output_layouts)
            found += len(node.donated) + (recipes[node.recipe] if 0 <= node.recipe < len(recipes) else 0)
        elif isinstance(node, Result):
            found += len(node.inputs)
    return found


def check_size(graph: Graph) -> None:
    """Raises `TooLarge` for a graph with too many results, or whose nodes refer to too many values: passes look at each
    several times."""
    results = sum(len(node.inputs) for node in graph.nodes if isinstance(node, Result))
    if results > limits.MAX_RESULTS:
        raise TooLarge(
            f"program {graph.name!r} has {results} results; the limit is {limits.MAX_RESULTS}. Return fewer, larger "
            "arrays, or split the program into several"
        )
    found = references(graph)
    if found > limits.MAX_REFERENCES:
        raise TooLarge(
            f"program {graph.name!r} refers to {found} values; the limit is {limits.MAX_REFERENCES}. Pass fewer, "
            "larger arrays, or split the program into several"
        )


def check_slices(graph: Graph, slices: Mapping[int, PlacedSlice]) -> None:
    """Raises `GraphError` for a graph that names a slice which the session does not hold."""
    for mesh in graph.slices:
        if mesh.id not in slices:
            raise GraphError(
                f"program {graph.name!r} uses slice {mesh.id}, which this session does not hold (released?)"
            )
        if slices[mesh.id].mesh != mesh:
            raise GraphError(f"program {graph.name!r} takes slice {mesh.id} for {mesh}; it is {slices[mesh.id].mesh}")


def placed_graph(
    graph: Graph, slices: Mapping[int, PlacedSlice], fusion: bool, kept_bytes: int = 0
) -> tuple[Graph, tuple[IslandPlan, ...]]:
    """The lowered graph and its plans, which leave donated arguments of up to `kept_bytes` their memory.

    Raises:
        GraphError: the graph is malformed, or names a slice the session does not hold.
    """
    check_slices(graph, slices)
    lowered = passes.lower(graph, fusion)
    lowered = keep_small(lowered, [kind.device_bytes for kind in buffer_types(lowered, slices)], kept_bytes)
    return lowered, plan_islands(lowered, slices)


def lowered_program(
    graph: Graph, lowered: Graph, plans: tuple[IslandPlan, ...], slices: Mapping[int, PlacedSlice]
) -> Lowered:
    """The part of `graph` that the controller keeps, given what `placed_graph` made of it; raises what `buffer_types`
    raises."""
    results = []
    for ref in lowered.result.inputs:
        layout = lowered.layout_of(ref)
        results.append(BufferType.on(slices[layout.slice].mesh, lowered.type_of(ref), layout.spec))
    return Lowered(
        name=graph.name,
        arguments=buffer_types(graph, slices),
        results=tuple(results),
        donated=graph.donated_arguments,
        islands={p.island: _part(p) for p in plans},
        hosts=tuple(sorted({host for p in plans for s in p.slices for host in s.hosts})),
        gang_islands=_gang_islands(lowered, plans),
        digest=_digest(graph),
        devices=len({device for p in plans for s in p.slices for device in s.devices}) or 1,
        takes_memory=bool(lowered.donated_arguments),
    )


def buffer_types(graph: Graph, slices: Mapping[int, PlacedSlice]) -> tuple[BufferType, ...]:
    """The types of a graph's arguments. Raises `GraphError` unless they are numbered from 0 on."""
    arguments = {
        node.index: BufferType.on(slices[node.layout.slice].mesh, node.type, node.layout.spec)
        for node in graph.arguments
    }
    numbers = sorted(node.index for node in graph.arguments)
    if numbers != list(range(len(numbers))):
        raise GraphError(f"program {graph.name!r} numbers its arguments {numbers}")
    return tuple(arguments[k] for k in numbers)


def _digest(graph: Graph) -> str:
    """Names what a program computes, on any slices and under any names: its functions and how they hang together."""

    def work(parts: Iterable[Part | Loop]) -> list[Any]:
        return [
            (work(p.body), p.times, p.inputs, p.carried, p.outputs) if isinstance(p, Loop) else (p.function, p.inputs)
            for p in parts
        ]

    recipes = [(work(recipe.parts), recipe.outputs) for recipe in graph.recipes]
    nodes = [(type(n).__name__, inputs_of(n), n.recipe if isinstance(n, Compute) else -1) for n in graph.nodes]
    return hashlib.sha256(encode((recipes, nodes))).hexdigest()


def plan_program(
    key: int,
    session: int,
    graph: Graph,
    functions: Mapping[str, bytes],
    slices: Mapping[int, PlacedSlice],
    fusion: bool,
    tenant: str = "",
    kept_bytes: int = 0,
) -> PlannedProgram:
    """Plans `graph`; raises what `placed_graph`, `lowered_program` and `PlannedProgram.of` raise."""
    lowered, plans = placed_graph(graph, slices, fusion, kept_bytes)
    return PlannedProgram.of(key, session, lowered_program(graph, lowered, plans, slices), functions, tenant)


def _part(island: IslandPlan) -> IslandPart:
    """The part of a program that an island gets."""
    devices = sorted({d for s in island.slices if s.island == island.island for d in s.devices})
    digests = {part.digest for executable in island.executables for part in functions_in(executable.recipe.parts)}
    plan = encode(island)
    if len(plan) > limits.MAX_PLAN_BYTES:
        raise TooLarge(
            f"the plan of program {island.name[:100]!r} takes {len(plan)} bytes on island {island.island}; the limit "
            f"is {limits.MAX_PLAN_BYTES}. Split the program into several"
        )
    calls = any(isinstance(step, Call) for step in island.steps)
    return IslandPart(plan, tuple(sorted(digests)), tuple(devices), island.most_computations, calls)


def _gang_islands(graph: Graph, plans: tuple[IslandPlan, ...]) -> tuple[tuple[int, ...], ...]:
    gangs = gang_count(graph)
    found: list[set[int]] = [set() for _ in range(max(gangs, 1))]
    for island in plans:
        for step in island.steps:
            found[step.gang].add(island.island)
    if not gangs:
        found[0].update(island.island for island in plans)
    return tuple(tuple(sorted(islands)) for islands in found)
