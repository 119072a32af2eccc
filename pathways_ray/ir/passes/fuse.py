"""Composes chains of compute nodes on one slice into one computation.

A node joins the chain before it when no other node consumes what the chain's last node makes and everything else it
consumes was there before the chain began: then running the chain as one delays no other node. What a chain makes on
its way may be a result of the program, as the loss of a training step is, and waits for the chain's end; not where the
same function goes on, since a loop would hand on its last value alone. A chain runs where its last node stood, so it
ends before a node in between that takes the memory of what the chain reads. The executor puts an optimisation barrier
or a seal between the parts, so the bits are those of running them one by one; but a NaN may have the other sign.

A chain ends before its estimated time reaches a bound, since other tenants wait behind it; and before it has too many
parts to compile, where one that repeats the part before it costs nothing: `roll_loops` makes loops of those.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from pathways_ray import limits
from pathways_ray.ir.graph import (
    Argument,
    Compute,
    Graph,
    Loop,
    Node,
    Part,
    Recipe,
    Ref,
    Result,
    estimated_us,
    functions_in,
    has_loop,
    inputs_of,
    renumbered,
)


def fuse(graph: Graph, most: int = limits.MAX_FUSED_NODES) -> Graph:
    """Args: most: parts of one computation that are not the part before them again, or four times as many lines;
    compile time grows with those."""
    chains = _chains(graph, most)
    recipes = list(graph.recipes)
    number = {recipe: k for k, recipe in enumerate(recipes)}
    replaced: dict[int, Node | None] = {}
    places: dict[Ref, Ref] = {}
    for chain in chains:
        recipe, node = _compose(graph, chain, places)
        if recipe not in number:
            number[recipe] = len(recipes)
            recipes.append(recipe)
        replaced.update(dict.fromkeys(chain[:-1]))
        replaced[chain[-1]] = msgspec.structs.replace(node, recipe=number[recipe])
    last = graph.nodes[-1]
    if places and isinstance(last, Result):
        inputs = tuple(places.get(ref, ref) for ref in last.inputs)
        replaced[len(graph.nodes) - 1] = msgspec.structs.replace(last, inputs=inputs)
    return _without_unused_recipes(
        msgspec.structs.replace(graph, recipes=tuple(recipes), nodes=_rebuilt(graph, replaced))
    )


def _rebuilt(graph: Graph, replaced: dict[int, Node | None]) -> tuple[Node, ...]:
    def kept() -> Iterator[tuple[int, Node]]:
        for index, node in enumerate(graph.nodes):
            new = replaced.get(index, node)
            if new is not None:
                yield index, new

    return renumbered(kept())


def _chains(graph: Graph, most: int) -> list[list[int]]:
    consumers = graph.consumers()
    takers = {n.inputs[k]: i for i, n in enumerate(graph.nodes) if isinstance(n, Compute) for k in n.donated}
    sizes = [_size_of(recipe) for recipe in graph.recipes]  # once for each: nodes may share a long one
    chains: list[list[int]] = []
    taken: set[int] = set()
    for head, node in enumerate(graph.nodes):
        if not isinstance(node, Compute) or head in taken:
            continue
        chain, size = [head], sizes[node.recipe]
        overwritten: list[int] = []
        while (follower := _follower(graph, sizes, consumers, takers, chain, overwritten)) is not None:
            size = size.with_next(_size(graph, sizes, follower))
            if (
                size.work > most * limits.LINES_AS_ONE_NODE
                or size.parts > limits.MAX_FUSED_PARTS
                or size.estimated_us > limits.MAX_FUSED_US
            ):
                break
            chain.append(follower)
        if len(chain) > 1:
            chains.append(chain)
            taken.update(chain)
    return chains


def _follower(
    graph: Graph,
    sizes: list[_Size],
    consumers: dict[Ref, list[int]],
    takers: dict[Ref, int],
    chain: list[int],
    overwritten: list[int],
) -> int | None:
    """The node that may join `chain`, if there is one. `takers` has the node that each donated value is donated to;
    `overwritten`, a heap, those nodes behind the chain that take the memory of what it reads."""
    head, last = chain[0], chain[-1]
    for ref in inputs_of(graph.nodes[last]):
        if takers.get(ref, last) > last:
            heapq.heappush(overwritten, takers[ref])
    while overwritten and overwritten[0] <= last:
        heapq.heappop(overwritten)
    tail = graph.nodes[last]
    assert isinstance(tail, Compute)
    users = {user for k in range(len(tail.outputs)) for user in consumers.get(Ref(last, k), ())}
    others = {user for user in users if not isinstance(graph.nodes[user], Result)}
    if len(others) != 1:
        return None
    (user,) = others
    node = graph.nodes[user]
    if not isinstance(node, Compute) or node.slice != tail.slice:
        return None
    if others != users and _size(graph, sizes, last).last == _size(graph, sizes, user).first:
        return None
    if any(_size(graph, sizes, index).no_fusion for index in (last, user)):
        return None
    later = [graph.nodes[ref.node] for ref in node.inputs if ref.node != last and ref.node >= head]
    if not all(isinstance(other, Argument) for other in later):
        return None
    return None if overwritten and overwritten[0] < user else user


class _Size(NamedTuple):
    """The size of a chain: its parts, the work to compile those that differ from the part before (`_work`), and their
    estimated microseconds; and whether one of them must not be composed."""

    parts: int
    work: int
    estimated_us: int
    first: str
    last: str
    first_work: int
    no_fusion: bool

    def with_next(self, other: _Size) -> _Size:
        work = self.work + other.work - (other.first_work if self.last == other.first else 0)
        time = self.estimated_us + other.estimated_us
        no_fusion = self.no_fusion or other.no_fusion
        return _Size(self.parts + other.parts, work, time, self.first, other.last, self.first_work, no_fusion)


def _size_of(recipe: Recipe) -> _Size:
    parts = list(functions_in(recipe.parts))
    if not parts:  # one that no node runs may be empty
        return _Size(0, 0, 0, "", "", 0, False)
    first = _work(parts[0])
    work = first + sum(_work(b) for a, b in itertools.pairwise(parts) if a.function != b.function)
    no_fusion = any(part.no_fusion for part in parts)
    estimate = estimated_us(recipe.parts)
    return _Size(len(parts), work, estimate, parts[0].function, parts[-1].function, first, no_fusion)


def _work(part: Part) -> int:
    """The work to compile a part, where that of a line is 1."""
    return 1 if part.is_line else limits.LINES_AS_ONE_NODE


def _size(graph: Graph, sizes: list[_Size], index: int) -> _Size:
    node = graph.nodes[index]
    assert isinstance(node, Compute)
    return sizes[node.recipe]


def _compose(graph: Graph, chain: list[int], places: dict[Ref, Ref]) -> tuple[Recipe, Compute]:
    """One recipe and one node for a chain of nodes, each with any number of parts of its own.

    A value that several of them consume is one input, so that the last of them may take its memory. Results of the
    program that are made on the way are further outputs; `places` gets where each one is.
    """
    wanted = set(inputs_of(graph.nodes[-1]))
    kept: list[tuple[Ref, Ref]] = []
    parts: list[Part | Loop] = []
    numbers: dict[Ref, int] = {}
    layouts = []
    donated: set[int] = set()
    before: int | None = None
    previous: tuple[Ref, ...] = ()
    for index in chain:
        node = graph.nodes[index]
        assert isinstance(node, Compute)
        outer: list[Ref] = []
        for k, ref in enumerate(node.inputs):
            if ref.node == before:
                outer.append(previous[ref.output])
                continue
            if ref not in numbers:
                numbers[ref] = len(numbers)
                layouts.append(node.input_layouts[k])
            if k in node.donated:
                donated.add(numbers[ref])
            outer.append(Ref(-1, numbers[ref]))
        base = len(parts)
        recipe = graph.recipes[node.recipe]
        for part in recipe.parts:
            moved = tuple(outer[r.output] if r.node == -1 else Ref(r.node + base, r.output) for r in part.inputs)
            parts.append(msgspec.structs.replace(part, inputs=moved))
        before, previous = index, tuple(Ref(r.node + base, r.output) for r in recipe.outputs)
        if index != chain[-1]:
            kept += [(Ref(index, k), inside) for k, inside in enumerate(previous) if Ref(index, k) in wanted]
    last, first = graph.nodes[chain[-1]], graph.nodes[chain[0]]
    assert isinstance(last, Compute)
    assert isinstance(first, Compute)
    name = last.name if last.name == first.name else f"{first.name}..{last.name}"
    places.update({ref: Ref(chain[-1], len(previous) + k) for k, (ref, _) in enumerate(kept)})
    node = msgspec.structs.replace(
        last,
        name=name,
        outputs=(*last.outputs, *(graph.type_of(ref) for ref, _ in kept)),
        output_layouts=(*last.output_layouts, *(graph.layout_of(ref) for ref, _ in kept)),
        inputs=tuple(numbers),
        input_layouts=tuple(layouts),
        donated=tuple(sorted(donated)),
        where=_line(graph, chain),
    )
    return Recipe(tuple(parts), (*previous, *(inside for _, inside in kept))), node


def _line(graph: Graph, chain: list[int]) -> str:
    """The user's line of composed nodes: of the first that has a loop of its own, since only that may take without end,
    else of the first."""
    nodes = [node for index in chain if isinstance(node := graph.nodes[index], Compute)]
    return next((node for node in nodes if has_loop(graph.recipes[node.recipe])), nodes[0]).where


def _without_unused_recipes(graph: Graph) -> Graph:
    used = sorted({node.recipe for node in graph.nodes if isinstance(node, Compute)})
    new = {old: k for k, old in enumerate(used)}
    nodes = tuple(
        msgspec.structs.replace(node, recipe=new[node.recipe]) if isinstance(node, Compute) else node
        for node in graph.nodes
    )
    return msgspec.structs.replace(graph, recipes=tuple(graph.recipes[old] for old in used), nodes=nodes)
