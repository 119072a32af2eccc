"""Two references in one process: one runs graphs, the other runs the plans of all islands, shard by shard.

The functions of a program are made up from their names: `compute` mixes all elements of all inputs into every element
of every output, so that a value that is wrong, old or in the wrong place changes all that follows from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pathways_ray.ir.evaluate import evaluate
from pathways_ray.ir.exchange import Exchange, exchange
from pathways_ray.ir.graph import Argument, Compute, Graph, Part, Recipe, Ref, Result, Transfer
from pathways_ray.ir.plan import (
    Call,
    Edge,
    Execute,
    IslandPlan,
    PlacedSlice,
    Receive,
    Reshard,
    Return,
    Send,
    Step,
    transfer_id,
)
from pathways_ray.ir.regions import Box, relative, shard_boxes
from pathways_ray.ir.types import ArrayType, Layout

Value = np.ndarray
Signatures = Mapping[str, tuple[ArrayType, ...]]
_ODD = np.uint64(0x9E3779B97F4A7C15)


def sample(array: ArrayType, seed: int) -> Value:
    """An array whose elements are all different."""
    size = int(np.prod(array.shape))
    return ((np.arange(size, dtype=np.uint64) + np.uint64(1000 * (seed + 1))) * _ODD).reshape(array.shape)


def compute(name: str, inputs: Sequence[Value], outputs: Sequence[ArrayType]) -> list[Value]:
    mixed = np.array([zlib.crc32(name.encode())], np.uint64)
    for value in inputs:
        weights = np.arange(1, value.size + 1, dtype=np.uint64) * _ODD
        mixed = mixed * np.uint64(31) + (value.reshape(-1) * weights).sum(keepdims=True, dtype=np.uint64)
    return [sample(array, k) * _ODD + mixed.reshape((1,) * len(array.shape)) for k, array in enumerate(outputs)]


def run_recipe(recipe: Recipe, inputs: Sequence[Value], signatures: Signatures) -> list[Value]:
    def call(part: Part, taken: list[Value]) -> Callable[[int], Value]:
        return compute(part.function, taken, signatures[part.function]).__getitem__

    return evaluate(recipe, inputs, call)


def run_graph(graph: Graph, arguments: Sequence[Value], signatures: Signatures) -> list[Value]:
    """The results of a graph. What was donated is gone: a later use is a KeyError."""
    values: dict[Ref, Value] = {}
    for index, node in enumerate(graph.nodes):
        match node:
            case Argument():
                values[Ref(index)] = arguments[node.index]
            case Transfer():
                values[Ref(index)] = values[node.input]
            case Compute():
                outputs = run_recipe(graph.recipes[node.recipe], [values[ref] for ref in node.inputs], signatures)
                for k in node.donated:
                    del values[node.inputs[k]]
                values.update({Ref(index, k): output for k, output in enumerate(outputs)})
            case Result():
                return [values[ref] for ref in node.inputs]
    raise AssertionError("the graph has no result")


# --- shards -----------------------------------------------------------------------------------------------------------


def cut(array: Value, box: Box) -> Value:
    where: Any = (*(slice(start, stop) for start, stop in box), ...)
    found: Value = array[where]
    return found


@dataclass(eq=False)
class Sharded:
    """A logical array as the shards of its devices, in order of the mesh; `dead` says why it may not be used."""

    type: ArrayType
    layout: Layout
    shards: list[Value]
    dead: str = ""


def shard(array: Value, type: ArrayType, layout: Layout, slice: PlacedSlice) -> Sharded:
    return Sharded(type, layout, [cut(array, box).copy() for box in shard_boxes(type, layout.spec, slice.mesh)])


def gather(value: Sharded, slice: PlacedSlice) -> Value:
    """The global array; replicas must agree, and every element must be there."""
    whole = np.zeros(value.type.shape, np.uint64)
    covered = np.zeros(value.type.shape, bool)
    for box, piece in zip(shard_boxes(value.type, value.layout.spec, slice.mesh), value.shards, strict=True):
        assert not cut(covered, box).any() or np.array_equal(cut(whole, box), piece), "replicas differ"
        cut(whole, box)[...] = piece
        cut(covered, box)[...] = True
    assert covered.all()
    return whole


def cut_parcels(made: Exchange, shards: Sequence[Value]) -> dict[tuple[int, int], list[Value]]:
    """What each host sends to each host: the parcels, cut out of the source shards."""
    return {
        pair: [cut(shards[p.source], relative(p.box, made.source_boxes[p.source])).copy() for p in parcels]
        for pair, parcels in made.parcels.items()
    }


def assemble(
    made: Exchange, edge: Edge, target: PlacedSlice, sent: Mapping[tuple[int, int], Sequence[Value]]
) -> Sharded:
    """The target's shards, put together from what arrived; an element that nothing brings keeps a poison value."""
    shards = []
    for k, device in enumerate(target.devices):
        shape = tuple(stop - start for start, stop in made.target_boxes[k])
        made_shard = np.full(shape, 0xDEAD, np.uint64)
        for sender, number, box in made.assembly.get(k, []):
            cut(made_shard, box)[...] = sent[sender, device.host][number]
        shards.append(made_shard)
    return Sharded(edge.type, edge.target, shards)


# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass
class _Island:
    """A launch on one island: its slots and the steps it has yet to take."""

    plan: IslandPlan
    slots: list[Sharded | None]
    steps: list[Step] = field(default_factory=list)

    def take(self, slot: int) -> Sharded:
        value = self.slots[slot]
        assert value is not None, f"slot {slot} of island {self.plan.island} is empty: dropped too early, or never made"
        assert not value.dead, f"slot {slot} of island {self.plan.island} {value.dead}"
        return value


class PlanRun:
    """One launch of the plans of all islands. `choose` says which of the islands that can go on takes its next step."""

    def __init__(
        self,
        plans: Sequence[IslandPlan],
        arguments: Sequence[Value],
        signatures: Signatures,
        choose: Callable[[list[int]], int] = min,
        launch: int = 1,
    ) -> None:
        self.signatures = signatures
        self.choose = choose
        self.launch = launch
        self.wire: dict[tuple[int, int], dict[int, list[Value]]] = {}
        self.used_names: set[tuple[int, int]] = set()
        self.islands = {plan.island: _Island(plan, [None] * len(plan.slots)) for plan in plans}
        self.given = {number: arguments[number].copy() for plan in plans for _, number in plan.arguments}
        for island in self.islands.values():
            self._place_arguments(island)

    def _place_arguments(self, island: _Island) -> None:
        layouts: dict[int, tuple[ArrayType, Layout]] = {}
        for step in island.plan.steps:
            if isinstance(step, Execute | Call):
                executable = island.plan.executables[step.executable]
                for slot, array, layout in zip(step.inputs, executable.inputs, executable.input_layouts, strict=True):
                    layouts[slot] = (array, layout)
            elif isinstance(step, Send | Reshard):
                for source, edge in zip(step.sources, island.plan.bundles[step.bundle].edges, strict=True):
                    layouts[source] = (edge.type, edge.source)
        for slot, number in island.plan.arguments:
            if slot in layouts:
                array, layout = layouts[slot]
                island.slots[slot] = shard(self.given[number], array, layout, island.plan.placed(layout.slice))
            else:  # handed through, used by nobody: any layout will do
                home = next(s for s in island.plan.slices if s.island == island.plan.island)
                array = ArrayType(self.given[number].shape, "uint64")
                island.slots[slot] = shard(self.given[number], array, Layout(home.mesh.id, ()), home)

    def run(self, by_gang: bool = False) -> list[Value]:
        """All steps of all islands, or gang by gang as sequential dispatch has them; the results in order."""
        gangs = max((island.plan.gangs for island in self.islands.values()), default=0)
        for gang in range(gangs) if by_gang else (None,):
            for island in self.islands.values():
                island.steps = [step for step in island.plan.steps if gang in (None, step.gang)]
            self._settle()
        assert not self.wire, f"sent and never received: {sorted(self.wire)}"
        results: dict[int, Value] = {}
        for island in self.islands.values():
            for slot in island.plan.awaited:
                island.take(slot)
            for slot, number in island.plan.results:
                assert number not in results, f"result {number} lies on two islands"
                value = island.take(slot)
                results[number] = gather(value, island.plan.placed(value.layout.slice))
        return [results[number] for number in range(len(results))]

    def _settle(self) -> None:
        while any(island.steps for island in self.islands.values()):
            able = [number for number, island in self.islands.items() if island.steps and self._can(island)]
            assert able, "every island waits for another one"
            island = self.islands[self.choose(able)]
            self._do(island, island.steps.pop(0))

    def _moves(self, island: _Island, number: int) -> list[tuple[Edge, PlacedSlice, PlacedSlice]]:
        bundle = island.plan.bundles[number]
        source, target = island.plan.placed(bundle.source), island.plan.placed(bundle.target)
        return [(edge, source, target) for edge in bundle.edges]

    def _can(self, island: _Island) -> bool:
        step = island.steps[0]
        if not isinstance(step, Receive):
            return True
        pairs = {pair for move in self._moves(island, step.bundle) for pair in exchange(*move).parcels}
        return all((s, transfer_id(self.launch, step.bundle, r)) in self.wire for s, r in pairs)

    def _do(self, island: _Island, step: Step) -> None:
        match step:
            case Execute() | Return():
                self._execute(island, step)
            case Call():
                for slot in step.inputs:
                    island.take(slot)
            case Send():
                served: dict[tuple[int, int], dict[int, list[Value]]] = {}
                for k, (move, slot) in enumerate(zip(self._moves(island, step.bundle), step.sources, strict=True)):
                    value = island.take(slot)
                    assert value.layout == move[0].source
                    for (sender, receiver), pieces in cut_parcels(exchange(*move), value.shards).items():
                        served.setdefault((sender, transfer_id(self.launch, step.bundle, receiver)), {})[k] = pieces
                assert self.used_names.isdisjoint(served), "two transfers of one name"
                self.used_names.update(served)
                self.wire.update(served)
            case Receive():
                moves = self._moves(island, step.bundle)
                pairs = {pair for move in moves for pair in exchange(*move).parcels}
                sent = {(s, r): self.wire.pop((s, transfer_id(self.launch, step.bundle, r))) for s, r in pairs}
                for k, (move, slot) in enumerate(zip(moves, step.targets, strict=True)):
                    mine = {pair: pieces[k] for pair, pieces in sent.items() if k in pieces}
                    island.slots[slot] = assemble(exchange(*move), move[0], move[2], mine)
            case Reshard():
                places = zip(self._moves(island, step.bundle), step.sources, step.targets, strict=True)
                for (edge, source, target), old, new in places:
                    assert source.devices == target.devices
                    value = island.take(old)
                    assert value.layout == edge.source
                    island.slots[new] = shard(gather(value, source), edge.type, edge.target, target)
        for slot in () if isinstance(step, Receive | Call) else step.drops:
            island.slots[slot] = None

    def _execute(self, island: _Island, step: Execute | Return) -> None:
        executable = island.plan.executables[step.executable]
        values = [island.take(slot) for slot in step.inputs]
        slice = island.plan.placed(executable.slice)
        assert slice.island == island.plan.island
        assert [v.layout for v in values] == list(executable.input_layouts)
        assert [v.type for v in values] == list(executable.inputs)
        outputs = run_recipe(executable.recipe, [gather(value, slice) for value in values], self.signatures)
        for k in executable.donated:
            values[k].dead = f"was donated to {island.plan.labels[step.node].name}"
        for slot, array, type, layout in zip(
            step.outputs, outputs, executable.outputs, executable.output_layouts, strict=True
        ):
            island.slots[slot] = shard(array, type, layout, slice)
