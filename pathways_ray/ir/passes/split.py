"""Cuts a program with branches and loops into the segments of its script, where it decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from pathways_ray.ir.graph import (
    Argument,
    Branch,
    Compute,
    Control,
    Graph,
    Node,
    Ref,
    Regroup,
    Repeat,
    Result,
    Transfer,
    inputs_of,
    output_count,
    with_inputs,
)
from pathways_ray.ir.passes.prune import prune
from pathways_ray.ir.script import Block, Choose, Rounds, Run, Script, Step
from pathways_ray.ir.verify_control import within


def split(graph: Graph) -> tuple[Script, list[Graph]]:
    """The script of a verified graph, and its segments."""
    return _Splitter(graph).split()


@dataclass
class _Scope:
    """The nodes of a program or a body while they are cut.

    `registers` has the values that are there, `done` the nodes that are launched by now, `made` the registers that are
    written here.
    """

    graph: Graph
    registers: dict[Ref, int]
    done: set[int] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.consumers = self.graph.consumers()

    def ancestors(self, refs: Iterable[Ref]) -> set[int]:
        """The nodes that are not launched yet and that values depend on."""
        found: set[int] = set()
        left = [ref.node for ref in refs]
        while left:
            index = left.pop()
            if index not in found and index not in self.done:
                found.add(index)
                left += [ref.node for ref in inputs_of(self.graph.nodes[index])]
                left += self.readers(index)
        return found

    def readers(self, index: int) -> list[int]:
        """The nodes before a node that read what it takes the memory of."""
        node = self.graph.nodes[index]
        taken = [node.inputs[k] for k in node.donated] if isinstance(node, Compute) else []
        return [user for ref in taken for user in self.consumers[ref] if user < index]

    def ready(self) -> list[int]:
        """The plain nodes that wait for no branch or loop; one that takes memory waits for those that read it."""
        found: list[int] = []
        there = set(self.done)
        for index, node in enumerate(self.graph.nodes):
            if (
                index in there
                or not isinstance(node, Compute | Transfer | Regroup)
                or any(r.node not in there for r in inputs_of(node))
            ):
                continue
            if there.issuperset(self.readers(index)):
                found.append(index)
                there.add(index)
        return found


class _Splitter:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.segments: list[Graph] = []
        self.decided: list[tuple[int, ...]] = []
        self.count = 0

    def split(self) -> tuple[Script, list[Graph]]:
        arguments = 1 + max((node.index for node in self.graph.arguments), default=-1)
        self.count = arguments
        block = self.block(self.graph, range(arguments), ())
        return Script(arguments, block, len(self.segments) - 1, tuple(self.decided)), self.segments

    def block(self, graph: Graph, inputs: Sequence[int], deciding: Sequence[int], body: bool = False) -> Block:
        """The steps of a graph whose argument k is in register `inputs[k]`.

        Args:
            deciding: the numbers of results whose values the step around it decides by.
            body: whether it belongs to a step around it; otherwise its last segment gives the results.
        """
        graph = prune(graph)
        scope = _Scope(graph, {})
        for index, node in enumerate(graph.nodes):
            if isinstance(node, Argument):
                scope.registers[Ref(index)] = inputs[node.index]
                scope.done.add(index)
        for index, node in enumerate(graph.nodes):
            if isinstance(node, Branch | Repeat):
                self.control(scope, index, node)
        if not body:
            return self.last(scope)
        for number in deciding:
            self.decide(scope, graph.result.inputs[number])
        self.run(scope, scope.ready())
        results = tuple(scope.registers[ref] for ref in graph.result.inputs)
        return Block(tuple(scope.steps), results, tuple(dict.fromkeys(scope.made)))

    def control(self, scope: _Scope, index: int, node: Control) -> None:
        if isinstance(node, Branch):
            self.decide(scope, node.index)
        self.run(scope, scope.ready())
        inputs = [scope.registers[ref] for ref in node.inputs]
        outputs = tuple(self.new() for _ in node.outputs)
        given: Sequence[int] | None = None
        match node:
            case Branch():
                branches = tuple(self.block(within(scope.graph, b), inputs, (), body=True) for b in node.bodies)
                scope.steps.append(Choose(scope.registers[node.index], branches, outputs))
            case Repeat():
                given = self.rounds(scope, node, inputs, outputs)
        scope.registers.update({Ref(index, k): register for k, register in enumerate(given or outputs)})
        scope.made += outputs if given is None else ()
        scope.done.add(index)

    def rounds(
        self, scope: _Scope, node: Repeat, inputs: Sequence[int], outputs: tuple[int, ...]
    ) -> Sequence[int] | None:
        """Adds a loop, unless it has no rounds, or these only hand on what they get: then the registers of what it
        gives are known, and are returned. A course would go through a million such rounds, and a million in each of
        them, without a launch at which it could stop."""
        carried = [*outputs, *inputs[len(outputs) :]]
        test = None
        body = within(scope.graph, node.body)
        if node.test is not None:
            alone = within(scope.graph, node.test)
            test = self.block(alone, carried, (0,), body=True)
            body = _with_test(body, alone)
        elif not node.times:
            return inputs[: len(outputs)]
        deciding = () if node.test is None else (len(outputs),)
        made = self.block(body, carried, deciding, body=True)
        if test is None and not made.steps:
            return [inputs[place] for place in _handed_on(carried, made.results, node.times)]
        first = tuple(inputs[: len(outputs)])
        scope.steps.append(Rounds(first, outputs, node.times, test, made, node.name, node.where))
        return None

    def decide(self, scope: _Scope, ref: Ref) -> None:
        """Has a segment say the value of `ref`: the one that makes it, or one that does nothing else."""
        cone = sorted(scope.ancestors([ref]))
        if cone and ref not in scope.registers:
            self.run(scope, cone, deciding=ref)
        else:
            self.say(scope, ref)

    def say(self, scope: _Scope, ref: Ref) -> None:
        argument = Argument(0, scope.graph.type_of(ref), scope.graph.layout_of(ref))
        graph = self.plain((argument, Result((Ref(0),))), (0,))
        register = scope.registers[ref]
        said = scope.registers[ref] = self.new()
        scope.made.append(said)
        self.segments.append(graph)
        self.decided.append((said,))
        scope.steps.append(Run(len(self.segments) - 1, (register,), (said,)))

    def run(self, scope: _Scope, chosen: Sequence[int], deciding: Ref | None = None) -> None:
        """A segment of these nodes, unless there is no node."""
        if not chosen:
            return
        scope.done.update(chosen)
        own = set(chosen)
        wanted = [
            Ref(index, k)
            for index in chosen
            for k in range(output_count(scope.graph.nodes[index]))
            if any(user not in own for user in scope.consumers.get(Ref(index, k), ()))
        ]
        inputs, nodes = _cut(scope.graph, chosen, wanted)
        outputs = tuple(self.new() for _ in wanted)
        scope.registers.update(zip(wanted, outputs, strict=True))
        scope.made += outputs
        decides = () if deciding is None else (wanted.index(deciding),)
        self.segments.append(self.plain(nodes, decides))
        self.decided.append(tuple(outputs[k] for k in decides))
        scope.steps.append(Run(len(self.segments) - 1, tuple(scope.registers[ref] for ref in inputs), outputs))

    def last(self, scope: _Scope) -> Block:
        """The end of the program: what is left, and the results, also those that are there already."""
        left = [k for k in range(len(scope.graph.nodes) - 1) if k not in scope.done]
        inputs, nodes = _cut(scope.graph, left, scope.graph.result.inputs)
        self.segments.append(self.plain(nodes, ()))
        self.decided.append(())
        registers = tuple(scope.registers[ref] for ref in inputs)
        return Block(tuple(scope.steps), registers, ())

    def plain(self, nodes: tuple[Node, ...], decides: tuple[int, ...]) -> Graph:
        """A segment with the slices and recipes that it uses."""
        recipes = sorted({node.recipe for node in nodes if isinstance(node, Compute)})
        numbers = {recipe: k for k, recipe in enumerate(recipes)}
        used: set[int] = set()
        kept: list[Node] = []
        for node in nodes:
            match node:
                case Compute():
                    used.add(node.slice)
                    kept.append(msgspec.structs.replace(node, recipe=numbers[node.recipe]))
                case Argument() | Transfer() | Regroup():
                    used.add(node.layout.slice)
                    kept.append(node)
                case _:
                    kept.append(node)
        slices = tuple(mesh for mesh in self.graph.slices if mesh.id in used)
        return Graph(
            self.graph.name, slices, tuple(self.graph.recipes[number] for number in recipes), tuple(kept), decides
        )

    def new(self) -> int:
        self.count += 1
        return self.count - 1


def _handed_on(carried: Sequence[int], results: Sequence[int], times: int) -> list[int]:
    """The place of each result of a loop among its inputs, after so many rounds that make nothing.

    Args:
        carried: the registers of a round's inputs.
        results: those of them that are the first inputs of the next round.
    """
    places = {register: place for place, register in enumerate(carried)}
    step = [places[register] for register in results]
    step += range(len(step), len(carried))
    found = list(range(len(carried)))
    while times:
        if times & 1:
            found = [step[place] for place in found]
        step = [step[place] for place in step]
        times >>= 1
    return found[: len(results)]


def _cut(graph: Graph, chosen: Sequence[int], wanted: Sequence[Ref]) -> tuple[list[Ref], tuple[Node, ...]]:
    """Nodes of a graph as a graph of their own that gives `wanted`; and the values that it takes, in order."""
    own = set(chosen)
    taken = [ref for index in chosen for ref in inputs_of(graph.nodes[index])] + list(wanted)
    inputs = list(dict.fromkeys(ref for ref in taken if ref.node not in own))
    new = {ref: Ref(k) for k, ref in enumerate(inputs)}
    nodes: list[Node] = [Argument(k, graph.type_of(ref), graph.layout_of(ref)) for k, ref in enumerate(inputs)]
    for index in chosen:
        node = graph.nodes[index]
        new.update({Ref(index, k): Ref(len(nodes), k) for k in range(output_count(node))})
        nodes.append(with_inputs(node, tuple(new[ref] for ref in inputs_of(node))))
    nodes.append(Result(tuple(new[ref] for ref in wanted)))
    return inputs, tuple(nodes)


def _with_test(body: Graph, test: Graph) -> Graph:
    """A round and the test behind it, on what the round gives: the truth value is the last result."""
    nodes = list(body.nodes[:-1])
    results = body.result.inputs
    there = {node.index: Ref(k) for k, node in enumerate(nodes) if isinstance(node, Argument)}
    new: dict[Ref, Ref] = {}
    for index, node in enumerate(test.nodes[:-1]):
        if isinstance(node, Argument):
            if node.index >= len(results) and node.index not in there:
                there[node.index] = Ref(len(nodes))
                nodes.append(node)
            new[Ref(index)] = results[node.index] if node.index < len(results) else there[node.index]
            continue
        new.update({Ref(index, k): Ref(len(nodes), k) for k in range(output_count(node))})
        nodes.append(with_inputs(node, tuple(new[ref] for ref in inputs_of(node))))
    nodes.append(Result((*results, new[test.result.inputs[0]])))
    return msgspec.structs.replace(body, nodes=tuple(nodes))
