"""Lowers a registered graph to plans for the islands: the controller's slow path, once per program."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure, GraphError, TooLarge, WireError
from pathways_ray.ir import passes
from pathways_ray.ir.graph import Compute, Graph, Result, functions_in, references_in
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.plan import Device, Execute, IslandPlan, PlacedSlice, Receive, Reshard, Send
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from pathways_ray.scheduler.estimates import MovingAverage
from pathways_ray.transport.messages import Program, encode

_GRAPH = msgspec.msgpack.Decoder(Graph)


@dataclass(frozen=True)
class BufferType:
    """The type of a buffer, as its owner sees it: type, slice and spec; and the bytes of its shards on devices."""

    type: ArrayType
    slice: int
    spec: Spec
    device_bytes: int

    @classmethod
    def on(cls, mesh: SliceType, kind: ArrayType, spec: Spec) -> BufferType:
        """The type on a slice with this mesh; what is not partitioned along an axis lies on every device of it."""
        parts = math.prod(mesh.axis_size(axis) for axes in spec for axis in axes)
        return cls(kind, mesh.id, spec, kind.nbytes // parts * mesh.size)


@dataclass
class PlannedProgram:
    """A program with a plan for each island it touches, and what the controller needs to launch it.

    `donated` are the numbers of arguments whose memory it may take, `gang_islands[k]` the islands with steps of gang k.
    `ready` are hosts that hold its compiled functions.
    `digest` names what it computes: equal for all sessions. `device_time` is the time of a launch, summed over its
    `devices`. `result_bytes` are those of all results on devices. `number` is
    the client's for it; `announced` is set once the client has heard that every host has compiled it.
    """

    key: int
    session: int
    name: str
    arguments: tuple[BufferType, ...] = ()
    results: tuple[BufferType, ...] = ()
    donated: tuple[int, ...] = ()
    plans: dict[int, IslandPlan] = field(default_factory=dict)
    messages: dict[int, Program] = field(default_factory=dict)
    hosts: frozenset[int] = frozenset()
    gang_islands: tuple[tuple[int, ...], ...] = ()
    ready: set[int] = field(default_factory=set)
    temporary_bytes: dict[int, int] = field(default_factory=dict)
    failure: Failure | None = None
    digest: str = ""
    device_time: MovingAverage = field(default_factory=MovingAverage)
    number: int = 0
    announced: bool = False
    devices: int = 1
    result_bytes: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether all hosts have compiled it."""
        return len(self.ready) >= len(self.hosts)

    @property
    def cross_island(self) -> bool:
        """Whether it runs on several islands."""
        return len(self.plans) > 1


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


def check_size(graph: Graph) -> None:
    """Raises `TooLarge` for a graph whose nodes refer to too many values: passes look at each several times, while
    other clients wait."""
    computes = [node for node in graph.nodes if isinstance(node, Compute)]
    found = sum(len(n.inputs) + len(n.input_layouts) + len(n.outputs) + len(n.output_layouts) for n in computes)
    found += sum(len(n.donated) for n in computes) + len(graph.slices)
    found += sum(len(r.outputs) + references_in(r.parts) for r in graph.recipes)
    found += sum(len(node.inputs) for node in graph.nodes if isinstance(node, Result))
    if found > limits.MAX_REFERENCES:
        raise TooLarge(
            f"program {graph.name!r} refers to {found} values; the limit is {limits.MAX_REFERENCES}. Pass fewer, "
            "larger arrays, or split the program into several"
        )


def placed_graph(graph: Graph, slices: Mapping[int, PlacedSlice], fusion: bool) -> tuple[Graph, tuple[IslandPlan, ...]]:
    """The lowered graph and its plans.

    Raises:
        GraphError: the graph is malformed, or names a slice the session does not hold.
    """
    for mesh in graph.slices:
        if mesh.id not in slices:
            raise GraphError(
                f"program {graph.name!r} uses slice {mesh.id}, which this session does not hold (released?)"
            )
        if slices[mesh.id].mesh != mesh:
            raise GraphError(f"program {graph.name!r} takes slice {mesh.id} for {mesh}; it is {slices[mesh.id].mesh}")
    lowered = passes.lower(graph, fusion)
    return lowered, plan_islands(lowered, slices)


def plan_program(
    key: int,
    session: int,
    graph: Graph,
    functions: Mapping[str, bytes],
    slices: Mapping[int, PlacedSlice],
    fusion: bool,
) -> PlannedProgram:
    """Plans `graph`; raises what `placed_graph` raises, and `GraphError` for a function that was not sent."""
    lowered, plans = placed_graph(graph, slices, fusion)
    needed = {part.function for recipe in lowered.recipes for part in functions_in(recipe.parts)}
    if missing := needed - functions.keys():
        raise GraphError(f"program {graph.name!r} needs functions that were not sent: {sorted(missing)[0][:12]}…")
    arguments = {
        node.index: BufferType.on(slices[node.layout.slice].mesh, node.type, node.layout.spec)
        for node in graph.arguments
    }
    numbers = sorted(node.index for node in graph.arguments)
    if numbers != list(range(len(numbers))):
        raise GraphError(f"program {graph.name!r} numbers its arguments {numbers}")
    results = []
    for ref in lowered.result.inputs:
        layout = lowered.layout_of(ref)
        results.append(BufferType.on(slices[layout.slice].mesh, lowered.type_of(ref), layout.spec))
    return PlannedProgram(
        key=key,
        session=session,
        name=graph.name,
        arguments=tuple(arguments[k] for k in range(len(arguments))),
        results=tuple(results),
        donated=graph.donated_arguments,
        plans={p.island: p for p in plans},
        messages={p.island: _message(key, p, functions, cross_island=len(plans) > 1) for p in plans},
        hosts=frozenset(host for p in plans for s in p.slices for host in s.hosts),
        gang_islands=_gang_islands(lowered, plans),
        digest=_digest(graph, needed),
        devices=len({device for p in plans for s in p.slices for device in s.devices}) or 1,
        result_bytes=sum(kind.device_bytes for kind in results),
    )


def _digest(graph: Graph, functions: set[str]) -> str:
    """Names what a program computes, for all slices and sessions: its functions and how they hang together."""
    shape = [(type(node).__name__, [*node.inputs] if isinstance(node, Compute) else []) for node in graph.nodes]
    return hashlib.sha256(encode((graph.name, sorted(functions), shape))).hexdigest()


def _message(key: int, island: IslandPlan, functions: Mapping[str, bytes], cross_island: bool) -> Program:
    """The part of a program that an island gets. `device_set` is a number for its set of devices there: that two sets
    share one is unlikely, and would only make their launches wait for each other."""
    devices = sorted({d for s in island.slices if s.island == island.island for d in s.devices})
    return Program(
        program=key,
        plan=encode(island),
        functions=_functions_of(island, functions),
        name=island.name,
        devices=len(devices),
        device_set=zlib.crc32(encode(devices)),
        cross_island=cross_island,
        computations=_computations(island),
    )


def _computations(island: IslandPlan) -> int:
    """The most computations that a launch puts on the queue of one device."""
    counts: Counter[Device] = Counter()
    for step in island.steps:
        match step:
            case Execute():
                counts.update(island.placed(island.executables[step.executable].slice).devices)
            case Receive():
                counts.update(island.placed(island.edges[step.edge].target.slice).devices)
            case Send() | Reshard():
                counts.update(island.placed(island.edges[step.edge].source.slice).devices)
    return max(counts.values(), default=1)


def _functions_of(island: IslandPlan, functions: Mapping[str, bytes]) -> dict[str, bytes]:
    digests = {part.function for executable in island.executables for part in functions_in(executable.recipe.parts)}
    return {digest: functions[digest] for digest in sorted(digests)}


def _gang_islands(graph: Graph, plans: tuple[IslandPlan, ...]) -> tuple[tuple[int, ...], ...]:
    gangs = sum(isinstance(node, Compute) for node in graph.nodes)
    found: list[set[int]] = [set() for _ in range(max(gangs, 1))]
    for island in plans:
        for step in island.steps:
            found[step.gang].add(island.island)
    if not gangs:
        found[0].update(island.island for island in plans)
    return tuple(tuple(sorted(islands)) for islands in found)


def order_text(plans: Mapping[int, IslandPlan]) -> str:
    """The order in which gangs and transfers reach the devices, one line per gang over all islands."""
    lines: dict[int, list[str]] = {}
    for island in plans.values():
        for step in island.steps:
            match step:
                case Execute():
                    text = f"{island.labels[step.node].name} on island {island.island}"
                case Send():
                    edge = island.edges[step.edge]
                    text = f"send {edge.type} ({edge.type.nbytes} bytes) from island {island.island}"
                case Receive():
                    text = f"receive on island {island.island}"
                case _:
                    text = f"reshard on island {island.island}"
            lines.setdefault(step.gang, []).append(text)
    return "\n".join(f"gang {gang}: {'; '.join(parts)}" for gang, parts in sorted(lines.items()))
