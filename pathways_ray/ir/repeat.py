"""The graph of a program called again and again, each time with what the call before gave: one graph for all calls.

A program that is one computation becomes one node with a loop. Another one becomes as many copies of its nodes as there
are calls, which the passes fuse as far as they can. Several programs that are called in turn are joined to one first.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pathways_ray.errors import GraphError
from pathways_ray.ir.graph import (
    Argument,
    Compute,
    Graph,
    Loop,
    Node,
    Recipe,
    Ref,
    Result,
    functions_in,
    inputs_of,
    with_inputs,
)
from pathways_ray.ir.passes import lower
from pathways_ray.ir.verify import verify

Feeds = tuple[tuple[int, int], ...]
"""(argument, result of the call before) pairs; all other arguments are the same for all calls."""


def joined(graphs: Sequence[Graph], taken: Sequence[Sequence[Ref]], given: Sequence[Ref]) -> Graph:
    """Calls of programs on one slice, one behind the other, as one.

    Args:
        taken: for each program its arguments: `Ref(-1, k)` is argument k of the whole, `Ref(j, k)` result k of program
            j before it.
        given: the results of the whole, as `Ref(j, k)`.

    Raises:
        GraphError: one program gives another type or layout than another one takes, uses what another one has donated,
            or has nodes that are no computations.
    """
    arguments: dict[int, Node] = {}
    for graph, sources in zip(graphs, taken, strict=True):
        for argument in graph.arguments:
            if (source := sources[argument.index]).node < 0:
                arguments.setdefault(source.output, msgspec.structs.replace(argument, index=source.output))
    if arguments.keys() != set(range(len(arguments))):
        raise GraphError(f"only the arguments {sorted(arguments)} are used by programs called in turn")
    made = [arguments[k] for k in range(len(arguments))]
    recipes: list[Recipe] = []
    results: list[list[Ref]] = []
    for graph, sources in zip(graphs, taken, strict=True):
        place: dict[Ref, Ref] = {}
        for number, node in enumerate(graph.nodes[:-1]):
            if isinstance(node, Argument):
                source = sources[node.index]
                place[Ref(number)] = Ref(source.output) if source.node < 0 else results[source.node][source.output]
                _check_fits(made, place[Ref(number)], node)
                continue
            if not isinstance(node, Compute) or graph.decides:
                raise GraphError(f"program {graph.name!r} is not made of computations alone")
            place.update((Ref(number, k), Ref(len(made), k)) for k in range(len(node.outputs)))
            moved = with_inputs(node, tuple(place[ref] for ref in node.inputs))
            made.append(msgspec.structs.replace(moved, recipe=len(recipes) + node.recipe))
        recipes += graph.recipes
        results.append([place[ref] for ref in graph.result.inputs])
    made.append(Result(tuple(results[ref.node][ref.output] for ref in given)))
    return verify(Graph("; ".join(graph.name for graph in graphs), graphs[0].slices, tuple(recipes), tuple(made)))


def _check_fits(nodes: Sequence[Node], given: Ref, argument: Argument) -> None:
    node = nodes[given.node]
    assert isinstance(node, Argument | Compute)
    if isinstance(node, Argument):
        found = node.type, node.layout
    else:
        found = node.outputs[given.output], node.output_layouts[given.output]
    if found != (argument.type, argument.layout):
        raise GraphError(f"{given} is {found}; argument {argument.index}, its next place, {argument}")


def repeated(graph: Graph, times: int, feeds: Feeds, fusion: bool = True, varied: Sequence[int] = ()) -> Graph:
    """`times` calls of a program as one. It takes what the first call takes and gives what the last one gives.

    Args:
        fusion: whether the nodes of a program may be composed into one computation.
        varied: arguments that are others in each call: behind those of the first call come, for each further one, its
            own.

    Raises:
        GraphError: a result has another type or layout than the argument that it is fed to, or what all calls take is
            donated by one.
    """
    fed = dict(feeds)
    arguments = {node.index: Ref(k) for k, node in enumerate(graph.nodes) if isinstance(node, Argument)}
    for argument, result in feeds:
        taken, given = arguments[argument], graph.result.inputs[result]
        for of in (graph.type_of, graph.layout_of):
            if of(taken) != of(given):
                raise GraphError(f"result {result} is {of(given)}; argument {argument}, its next place, {of(taken)}")
    looped = _looped(graph, times, fed) if fusion and times > 1 and not varied else None
    return verify(looped if looped is not None else _copied(graph, times, fed, varied))


def _looped(graph: Graph, times: int, fed: dict[int, int]) -> Graph | None:
    """The calls as rounds of one loop; None where the program is not one computation that may be in a loop."""
    body = lower(graph)
    computes = [node for node in body.nodes if isinstance(node, Compute)]
    if len(computes) != 1 or len(body.nodes) != len(body.arguments) + 2:
        return None
    (node,) = computes
    place = body.nodes.index(node)
    recipe = body.recipes[node.recipe]
    if any(part.no_fusion or part.has_loop for part in functions_in(recipe.parts)):
        return None
    if any(ref.node != place for ref in body.result.inputs):
        return None
    carried: list[tuple[int, Ref]] = []
    for k, ref in enumerate(node.inputs):
        argument = body.nodes[ref.node]
        assert isinstance(argument, Argument)
        if argument.index in fed:
            carried.append((k, recipe.outputs[body.result.inputs[fed[argument.index]].output]))
        elif k in node.donated:
            raise GraphError(
                f"{node.name} ({node.where}) donates {ref} as argument {k}, but the next call uses it afterwards"
            )
    if not carried:
        return None
    inputs = tuple(Ref(-1, k) for k in range(len(node.inputs)))
    loop = Loop(recipe.parts, times, inputs, tuple(carried), recipe.outputs)
    outputs = tuple(Ref(0, k) for k in range(len(recipe.outputs)))
    return msgspec.structs.replace(
        body,
        recipes=tuple(
            Recipe((loop,), outputs) if number == node.recipe else other for number, other in enumerate(body.recipes)
        ),
    )


def _copied(graph: Graph, times: int, fed: dict[int, int], varied: Sequence[int]) -> Graph:
    """The calls as copies of the program's nodes, one behind the other."""
    nodes: list[Node] = []
    shared: dict[int, Ref] = {}
    before: tuple[Ref, ...] = ()
    arguments = len(graph.arguments)
    for call in range(times):
        new: dict[int, int] = {}

        def moved(ref: Ref, new: dict[int, int] = new, before: tuple[Ref, ...] = before) -> Ref:
            node = graph.nodes[ref.node]
            if isinstance(node, Argument):
                return before[fed[node.index]] if before and node.index in fed else shared[node.index]
            return Ref(new[ref.node], ref.output)

        for number, node in enumerate(graph.nodes[:-1]):
            if isinstance(node, Argument):
                further = arguments + (call - 1) * len(varied)
                if call and node.index not in varied:
                    continue
                shared[node.index] = Ref(len(nodes))
                own = further + varied.index(node.index) if call else node.index
                nodes.append(msgspec.structs.replace(node, index=own))
                continue
            new[number] = len(nodes)
            nodes.append(with_inputs(node, tuple(map(moved, inputs_of(node)))))
        before = tuple(map(moved, graph.result.inputs))
    nodes.append(Result(before))
    return Graph(graph.name, graph.slices, graph.recipes, tuple(nodes))
