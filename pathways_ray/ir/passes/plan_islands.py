"""Plans a lowered graph, with the places of its slices: one plan for each island.

Transfers become edges, and those that can travel together one bundle (`bundles`): a `Send` right behind the producer
and a `Receive` right before the first consumer, or at the end where the values are results; or a `Reshard` where both
slices have the same devices. Every plan is verified before it leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Ref, Regroup, Result, Transfer, host_part, inputs_of
from pathways_ray.ir.passes.bundles import bundles
from pathways_ray.ir.plan import (
    Bundle,
    Call,
    Edge,
    Executable,
    Execute,
    IslandPlan,
    NodeLabel,
    PlacedSlice,
    Receive,
    Reshard,
    Return,
    Send,
    Step,
)
from pathways_ray.ir.plan import Regroup as RegroupStep
from pathways_ray.ir.verify_plan import verify_plan


def plan_islands(graph: Graph, placement: Mapping[int, PlacedSlice]) -> tuple[IslandPlan, ...]:
    """One plan for each island that a lowered graph touches.

    Args:
        placement: the placed slice for every slice id of the graph.
    """
    touched = {node.slice for node in graph.nodes if isinstance(node, Compute)}
    touched |= {node.layout.slice for node in graph.nodes if isinstance(node, Argument | Transfer | Regroup)}
    slices = tuple(placement[s.id] for s in graph.slices if s.id in touched)
    gangs = _gangs(graph)
    groups = bundles(graph, gangs)
    islands = sorted({placed.island for placed in slices})
    return tuple(
        verify_plan(_IslandPlanner(graph, placement, slices, gangs, groups, island).build()) for island in islands
    )


def _gangs(graph: Graph) -> dict[int, int]:
    """The gang of every node: compute nodes count up, a transfer of a computed value belongs to its producer. A host
    function has two gangs, of its call and of its return, and this is the second one."""
    gangs: dict[int, int] = {}
    count = 0
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Compute):
            gangs[index] = count + _is_host(graph, node)
            count = gangs[index] + 1
    consumers = graph.consumers()
    for index, node in enumerate(graph.nodes):
        if isinstance(node, Transfer | Regroup):
            users = [u for u in consumers.get(Ref(index), ()) if u in gangs]
            first = min((gangs[u] - _is_host(graph, graph.nodes[u]) for u in users), default=0)
            gangs[index] = max((gangs[ref.node] for ref in inputs_of(node) if ref.node in gangs), default=first)
    return gangs


def _is_host(graph: Graph, node: Node) -> bool:
    return isinstance(node, Compute) and host_part(graph.recipes[node.recipe]) is not None


def gang_count(graph: Graph) -> int:
    """The gangs of a program; a host function has two."""
    return sum(1 + _is_host(graph, node) for node in graph.nodes if isinstance(node, Compute))


class _IslandPlanner:
    """Walks the graph once and writes down the steps of one island."""

    def __init__(
        self,
        graph: Graph,
        placement: Mapping[int, PlacedSlice],
        slices: tuple[PlacedSlice, ...],
        gangs: dict[int, int],
        groups: Sequence[tuple[int, ...]],
        island: int,
    ) -> None:
        self.graph = graph
        self.placement = placement
        self.slices = slices
        self.gangs = gangs
        self.island = island
        self.consumers = graph.consumers()
        self.groups = groups
        self.first = {group[0]: number for number, group in enumerate(groups)}
        self.slots: dict[Ref, int] = {}
        self.steps: list[Step] = []
        self.executables: dict[Executable, int] = {}
        self.waiting: dict[Ref, int] = {}
        self.called: dict[int, Return] = {}

    def build(self) -> IslandPlan:
        graph = self.graph
        arguments, types = [], []
        for index, node in enumerate(graph.nodes):
            match node:
                case Argument():
                    if self._here(node.layout.slice):
                        arguments.append((self._slot(Ref(index)), node.index))
                        types.append((node.type, node.layout))
                case Transfer():
                    if index in self.first:
                        self._transfer(self.first[index], node)
                case Compute():
                    if self._here(node.slice):
                        self._execute(index, node)
                case Regroup():
                    if self._here(node.layout.slice):
                        self._regroup(index, node)
                case Result():
                    self._receive(node.inputs, None)
        results = tuple((self.slots[ref], k) for k, ref in enumerate(graph.result.inputs) if ref in self.slots)
        awaited = self._awaited(results)
        return IslandPlan(
            name=graph.name,
            island=self.island,
            gangs=gang_count(graph),
            slots=tuple(graph.layout_of(ref).slice for ref in self.slots),
            arguments=tuple(arguments),
            results=results,
            awaited=awaited,
            slices=self.slices,
            executables=tuple(self.executables),
            bundles=tuple(map(self._bundle, self.groups)),
            steps=_with_drops(self.steps, {slot for slot, _ in results} | set(awaited)),
            labels=tuple(
                NodeLabel(node.name, node.where) if isinstance(node, Compute) else NodeLabel("transfer", "")
                for node in graph.nodes
            ),
            decides=tuple(self.slots[ref] for k in graph.decides if (ref := graph.result.inputs[k]) in self.slots),
            argument_types=tuple(types),
        )

    def _here(self, slice_id: int) -> bool:
        return self.placement[slice_id].island == self.island

    def _slot(self, ref: Ref) -> int:
        return self.slots.setdefault(ref, len(self.slots))

    def _nodes(self, group: tuple[int, ...]) -> list[Transfer]:
        return [node for index in group if isinstance(node := self.graph.nodes[index], Transfer)]

    def _bundle(self, group: tuple[int, ...]) -> Bundle:
        edges = tuple(Edge(node.type, self.graph.layout_of(node.input), node.layout) for node in self._nodes(group))
        return Bundle(edges[0].source.slice, edges[0].target.slice, edges)

    def _transfer(self, number: int, first: Transfer) -> None:
        """The steps of a bundle, where the first of its transfers stands: what the others take is there too."""
        group = self.groups[number]
        gang = self.gangs[group[0]]
        self._return(first.input)
        source, target = self.graph.layout_of(first.input).slice, first.layout.slice
        if self._here(source):
            sources = tuple(self._slot(node.input) for node in self._nodes(group))
            if self.placement[source].devices == self.placement[target].devices:
                targets = tuple(self._slot(Ref(index)) for index in group)
                self.steps.append(Reshard(gang, number, sources, targets))
                return
            self.steps.append(Send(gang, number, sources))
        if self._here(target):
            self.waiting.update({Ref(index): number for index in group})

    def _receive(self, refs: Sequence[Ref], gang: int | None) -> None:
        """Has values arrive that are still on their way: before a gang, or where they are results, before the end."""
        for ref in dict.fromkeys(refs):
            self._return(ref)
            if ref in self.waiting:
                at = gang if gang is not None else self.gangs[ref.node]
                number = self.waiting[ref]
                group = [Ref(index) for index in self.groups[number]]
                for one in group:
                    del self.waiting[one]
                self.steps.append(Receive(at, number, tuple(map(self._slot, group))))

    def _return(self, ref: Ref) -> None:
        """Has the call that makes a value return, if it has not: before the first who takes something of it. What is
        sent on stands right behind its producer, so a launch never waits for data that it holds back itself."""
        if ref.node in self.called:
            self.steps.append(self.called.pop(ref.node))

    def _regroup(self, index: int, node: Regroup) -> None:
        target = self.placement[node.layout.slice]
        for k, (number, place) in enumerate(node.shards):
            source = self.placement[self.graph.layout_of(node.inputs[number]).slice]
            if source.devices[place] != target.devices[k]:
                raise GraphError(
                    f"%{index} takes a shard on device {source.devices[place]} as one on device {target.devices[k]}; "
                    "a regroup moves nothing"
                )
        self._receive(node.inputs, self.gangs[index])
        sources = tuple(self._slot(ref) for ref in node.inputs)
        self.steps.append(
            RegroupStep(self.gangs[index], sources, node.shards, node.type, node.layout, self._slot(Ref(index)))
        )

    def _execute(self, index: int, node: Compute) -> None:
        gang, is_host = self.gangs[index], _is_host(self.graph, node)
        self._receive(node.inputs, gang - is_host)
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
        if is_host:
            self.steps.append(Call(gang - 1, index, number, inputs))
            self.called[index] = Return(gang, index, number, inputs, outputs)
        else:
            self.steps.append(Execute(gang, index, number, inputs, outputs))

    def _exclusive(self, ref: Ref) -> bool:
        """Whether the memory of a value is used by one node only, so that the node may overwrite it.

        What a transfer brings may be the very memory of its source, and what a transfer takes is read at a time of the
        receiver's choosing; neither is overwritten. Nor is what shares its memory with other values.
        """
        return len(self.consumers[ref]) == 1 and not isinstance(self.graph.nodes[ref.node], Transfer | Regroup)

    def _awaited(self, results: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        if results:
            return tuple(dict.fromkeys(slot for slot, _ in results))
        last = next((step for step in reversed(self.steps) if isinstance(step, Execute | Return)), None)
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
        if isinstance(step, Receive | Call):
            marked.append(step)
            continue
        drops = (slot for slot in _slots_used(step) if slot not in seen and step.gang == last_gang[slot])
        marked.append(msgspec.structs.replace(step, drops=tuple(sorted(set(drops)))))
        seen.update(_slots_used(step))
    return tuple(reversed(marked))


def _slots_used(step: Step) -> tuple[int, ...]:
    """The slots that a step may drop once it has run."""
    match step:
        case Execute() | Return():
            return step.inputs + step.outputs
        case Send() | Reshard():
            return step.sources
        case RegroupStep():
            return step.sources
        case Receive() | Call():
            return ()
