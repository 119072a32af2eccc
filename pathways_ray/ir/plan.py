"""Placement and plans: what each island does for a launch.

A `PlacedSlice` maps the virtual devices of a slice to physical ones. An `IslandPlan` lists the steps of a program that
one island takes, in the order its devices see them; all hosts of the island get the same plan and find their own part
in it. Values live in numbered slots. Every step belongs to a gang: the position of its compute node in the program.

Transfers become a `Send` right behind the producer and a `Receive` right before the first consumer. The two sides meet
by a transfer id that both compute from the launch, the edge and the receiving host, so nobody has to ask anybody.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import msgspec

from pathways_ray import limits
from pathways_ray.ir.graph import Argument, Compute, Graph, Recipe, Ref, Result, Transfer
from pathways_ray.ir.types import ArrayType, Layout, SliceType


class Device(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A physical device: the number of its host in the cluster and its place on that host."""

    host: int
    index: int

    def __str__(self) -> str:
        return f"{self.host}.{self.index}"


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring devices: `count` from number `index` on, on each of `hosts` hosts from `host` on."""

    host: int
    hosts: int
    index: int
    count: int


class PlacedSlice(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """A slice and its devices. They are written as blocks: on whole hosts side by side, however many, that is one."""

    mesh: SliceType
    island: int
    blocks: tuple[Block, ...]

    @classmethod
    def on(cls, mesh: SliceType, island: int, devices: Iterable[Device]) -> PlacedSlice:
        """On these devices, in row-major order of the mesh."""
        return cls(mesh, island, _blocks(devices))

    @functools.cached_property
    def devices(self) -> tuple[Device, ...]:
        """In row-major order of the mesh."""
        return tuple(
            Device(host, index)
            for block in self.blocks
            for host in range(block.host, block.host + block.hosts)
            for index in range(block.index, block.index + block.count)
        )

    @functools.cached_property
    def hosts(self) -> tuple[int, ...]:
        return tuple(sorted({host for b in self.blocks for host in range(b.host, b.host + b.hosts)}))


def _blocks(devices: Iterable[Device]) -> tuple[Block, ...]:
    """These devices in this order, as long blocks as can be taken from the front."""
    runs: list[list[int]] = []  # host, index, count
    for device in devices:
        if runs and runs[-1][0] == device.host and sum(runs[-1][1:]) == device.index:
            runs[-1][2] += 1
        else:
            runs.append([device.host, device.index, 1])
    blocks: list[list[int]] = []
    for host, index, count in runs:
        last = blocks[-1] if blocks else [0, 0, 0, 0]
        if last[2:] == [index, count] and last[0] + last[1] == host:
            last[1] += 1
        else:
            blocks.append([host, 1, index, count])
    return tuple(Block(*block) for block in blocks)


class Executable(msgspec.Struct, frozen=True, array_like=True):
    """A recipe for one slice with the types and layouts of its inputs and outputs: the unit of compilation."""

    recipe: Recipe
    slice: int
    inputs: tuple[ArrayType, ...]
    input_layouts: tuple[Layout, ...]
    outputs: tuple[ArrayType, ...]
    output_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]


class Edge(msgspec.Struct, frozen=True, array_like=True):
    """A value that changes its layout between producer and consumer."""

    type: ArrayType
    source: Layout
    target: Layout


class Execute(msgspec.Struct, frozen=True, tag_field="step", tag="execute"):
    """Enqueue an executable. `drops` lists slots nobody on this island needs afterwards."""

    gang: int
    node: int
    executable: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    drops: tuple[int, ...] = ()


class Send(msgspec.Struct, frozen=True, tag_field="step", tag="send"):
    """Serve the shards of a slot to the hosts of the edge's target."""

    gang: int
    edge: int
    source: int
    drops: tuple[int, ...] = ()


class Receive(msgspec.Struct, frozen=True, tag_field="step", tag="receive"):
    """Put together what the edge brings; the pull itself was posted when the launch arrived."""

    gang: int
    edge: int
    target: int


class Reshard(msgspec.Struct, frozen=True, tag_field="step", tag="reshard"):
    """Change the layout on the same devices: a computation of its own, inside the island."""

    gang: int
    edge: int
    source: int
    target: int
    drops: tuple[int, ...] = ()


Step = Execute | Send | Receive | Reshard


class NodeLabel(msgspec.Struct, frozen=True, array_like=True):
    """Name and user's line of a node, for errors."""

    name: str
    where: str


class IslandPlan(msgspec.Struct, frozen=True):
    """What one island does for a launch of a program.

    `slots` has the slice of every slot. `arguments` and `results` pair a slot with its number in the launch; `awaited`
    are the slots whose readiness ends the launch on this island.
    """

    name: str
    island: int
    gangs: int
    slots: tuple[int, ...]
    arguments: tuple[tuple[int, int], ...]
    results: tuple[tuple[int, int], ...]
    awaited: tuple[int, ...]
    slices: tuple[PlacedSlice, ...]
    executables: tuple[Executable, ...]
    edges: tuple[Edge, ...]
    steps: tuple[Step, ...]
    labels: tuple[NodeLabel, ...]

    def placed(self, slice_id: int) -> PlacedSlice:
        return next(s for s in self.slices if s.mesh.id == slice_id)


def transfer_id(launch: int, edge: int, receiver: int) -> int:
    """The name under which a producer serves, and a receiver pulls, an edge of a launch. Unique for 2**38 launches."""
    return (launch * limits.MAX_NODES + edge) * limits.MAX_HOSTS + receiver


def launch_of(name: int) -> int:
    """The launch that a transfer id belongs to."""
    return name // (limits.MAX_NODES * limits.MAX_HOSTS)


def plan(graph: Graph, placement: Mapping[int, PlacedSlice]) -> tuple[IslandPlan, ...]:
    """One plan for each island that a lowered graph touches.

    Args:
        placement: the placed slice for every slice id of the graph.
    """
    touched = {node.slice for node in graph.nodes if isinstance(node, Compute)}
    touched |= {node.layout.slice for node in graph.nodes if isinstance(node, Argument | Transfer)}
    slices = tuple(placement[s.id] for s in graph.slices if s.id in touched)
    gangs = _gangs(graph)
    islands = sorted({placed.island for placed in slices})
    return tuple(_IslandPlanner(graph, placement, slices, gangs, island).build() for island in islands)


def _gangs(graph: Graph) -> dict[int, int]:
    """The gang of every node: compute nodes count up, a transfer of a computed value belongs to its producer."""
    gangs: dict[int, int] = {}
    count = 0
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Compute):
            gangs[index] = count
            count += 1
    consumers = graph.consumers()
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Transfer):
            first = min((gangs[u] for u in consumers.get(Ref(index), ()) if u in gangs), default=0)
            gangs[index] = gangs.get(node.input.node, first)
    return gangs


class _IslandPlanner:
    """Walks the graph once and writes down the steps of one island."""

    def __init__(
        self,
        graph: Graph,
        placement: Mapping[int, PlacedSlice],
        slices: tuple[PlacedSlice, ...],
        gangs: dict[int, int],
        island: int,
    ) -> None:
        self.graph = graph
        self.placement = placement
        self.slices = slices
        self.gangs = gangs
        self.island = island
        self.consumers = graph.consumers()
        self.edge_numbers = {
            i: k for k, i in enumerate(i for i, n in enumerate(graph.nodes) if isinstance(n, Transfer))
        }
        self.slots: dict[Ref, int] = {}
        self.steps: list[Step] = []
        self.executables: dict[Executable, int] = {}
        self.waiting: dict[Ref, int] = {}

    def build(self) -> IslandPlan:
        graph = self.graph
        arguments = []
        for index, node in enumerate(graph.nodes):
            match node:
                case Argument():
                    if self._here(node.layout.slice):
                        arguments.append((self._slot(Ref(index)), node.index))
                case Transfer():
                    self._transfer(index, node)
                case Compute():
                    if self._here(node.slice):
                        self._execute(index, node)
                case Result():
                    pass
        results = tuple((self.slots[ref], k) for k, ref in enumerate(graph.result.inputs) if ref in self.slots)
        awaited = self._awaited(results)
        return IslandPlan(
            name=graph.name,
            island=self.island,
            gangs=sum(isinstance(node, Compute) for node in graph.nodes),
            slots=tuple(graph.layout_of(ref).slice for ref in self.slots),
            arguments=tuple(arguments),
            results=results,
            awaited=awaited,
            slices=self.slices,
            executables=tuple(self.executables),
            edges=tuple(
                Edge(node.type, graph.layout_of(node.input), node.layout)
                for node in graph.nodes
                if isinstance(node, Transfer)
            ),
            steps=_with_drops(self.steps, {slot for slot, _ in results} | set(awaited)),
            labels=tuple(
                NodeLabel(node.name, node.where) if isinstance(node, Compute) else NodeLabel("transfer", "")
                for node in graph.nodes
            ),
        )

    def _here(self, slice_id: int) -> bool:
        return self.placement[slice_id].island == self.island

    def _slot(self, ref: Ref) -> int:
        return self.slots.setdefault(ref, len(self.slots))

    def _transfer(self, index: int, node: Transfer) -> None:
        edge, ref = self.edge_numbers[index], Ref(index)
        source, target = self.graph.layout_of(node.input).slice, node.layout.slice
        if self.placement[source].devices == self.placement[target].devices:
            if self._here(source):
                self.steps.append(Reshard(self.gangs[index], edge, self._slot(node.input), self._slot(ref)))
            return
        if self._here(source):
            self.steps.append(Send(self.gangs[index], edge, self._slot(node.input)))
        if self._here(target):
            self.waiting[ref] = edge

    def _execute(self, index: int, node: Compute) -> None:
        for ref in dict.fromkeys(node.inputs):
            if ref in self.waiting:
                self.steps.append(Receive(self.gangs[index], self.waiting.pop(ref), self._slot(ref)))
        executable = Executable(
            recipe=self.graph.recipes[node.recipe],
            slice=node.slice,
            inputs=tuple(self.graph.type_of(ref) for ref in node.inputs),
            input_layouts=node.input_layouts,
            outputs=node.outputs,
            output_layouts=node.output_layouts,
            donated=tuple(k for k in node.donated if self._exclusive(node.inputs[k])),
        )
        number = self.executables.setdefault(executable, len(self.executables))
        inputs = tuple(self._slot(ref) for ref in node.inputs)
        outputs = tuple(self._slot(Ref(index, k)) for k in range(len(node.outputs)))
        self.steps.append(Execute(self.gangs[index], index, number, inputs, outputs))

    def _exclusive(self, ref: Ref) -> bool:
        """Whether the memory of a value is used by one node only, so that the node may overwrite it.

        What a transfer brings may be the very memory of its source, and what a transfer takes is read at a time of the
        receiver's choosing; neither is overwritten.
        """
        return len(self.consumers[ref]) == 1 and not isinstance(self.graph.nodes[ref.node], Transfer)

    def _awaited(self, results: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        if results:
            return tuple(dict.fromkeys(slot for slot, _ in results))
        last = next((step for step in reversed(self.steps) if isinstance(step, Execute)), None)
        return last.outputs if last else ()


def _with_drops(steps: list[Step], kept: set[int]) -> tuple[Step, ...]:
    """Marks on each step the slots that no later step uses, whether all steps run in order or one gang after another.

    The two orders differ for transfers of arguments: such a slot may have no last user, and then stays to the end, as
    do those in `kept`.
    """
    last_gang: dict[int, int] = {}
    for step in steps:
        last_gang.update({slot: max(step.gang, last_gang.get(slot, 0)) for slot in _slots_used(step)})
    seen = set(kept)
    marked: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Receive):
            marked.append(step)
            continue
        drops = (slot for slot in _slots_used(step) if slot not in seen and step.gang == last_gang[slot])
        marked.append(msgspec.structs.replace(step, drops=tuple(sorted(set(drops)))))
        seen.update(_slots_used(step))
    return tuple(reversed(marked))


def _slots_used(step: Step) -> tuple[int, ...]:
    """The slots that a step may drop once it has run."""
    match step:
        case Execute():
            return step.inputs + step.outputs
        case Send() | Reshard():
            return (step.source,)
        case Receive():
            return ()


def plan_text(plans: tuple[IslandPlan, ...]) -> str:
    """The steps of every island, one line each."""
    lines = []
    for island in plans:
        lines.append(f"island {island.island} {{")
        lines += [
            f"  {s.mesh} = devices {', '.join(map(str, s.devices))}" for s in island.slices if s.island == island.island
        ]
        lines += [f"  s{slot} = argument {number}" for slot, number in island.arguments]
        lines += [f"  {_step_text(island, step)}" for step in island.steps]
        lines += [f"  result {number} = s{slot}" for slot, number in island.results]
        lines.append("}")
    return "\n".join(lines)


def _step_text(plan: IslandPlan, step: Step) -> str:
    match step:
        case Execute():
            text = (
                f"[{step.gang}] {_slots(step.outputs)} = execute {plan.labels[step.node].name}({_slots(step.inputs)})"
            )
        case Send():
            edge = plan.edges[step.edge]
            text = f"[{step.gang}] send s{step.source} edge {step.edge}: {edge.type} {edge.source} -> {edge.target}"
        case Reshard():
            edge = plan.edges[step.edge]
            text = f"[{step.gang}] s{step.target} = reshard s{step.source}: {edge.type} {edge.source} -> {edge.target}"
        case Receive():
            edge = plan.edges[step.edge]
            return (
                f"[{step.gang}] s{step.target} = receive edge {step.edge}: {edge.type} {edge.source} -> {edge.target}"
            )
    return text + (f"; drop {_slots(step.drops)}" if step.drops else "")


def _slots(slots: tuple[int, ...]) -> str:
    return ", ".join(f"s{slot}" for slot in slots)
