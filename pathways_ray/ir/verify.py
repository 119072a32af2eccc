"""The verifier: small, always on, run after every pass. A pass that breaks the graph fails in the pass."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping

from pathways_ray import limits
from pathways_ray.errors import GraphError, TooLarge
from pathways_ray.ir.graph import (
    Argument,
    Branch,
    Compute,
    Graph,
    Loop,
    Part,
    Recipe,
    Ref,
    Regroup,
    Repeat,
    Result,
    Transfer,
    bodies_in,
    functions_in,
    host_part,
    inputs_of,
    output_count,
)
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import SliceType, check_layout
from pathways_ray.ir.verify_control import verify_control


def verify(graph: Graph, lowered: bool = False) -> Graph:
    """Checks `graph` and returns it.

    Args:
        lowered: also require that every compute node gets its inputs in the layouts it asks for, which holds once
            transfers were inserted.

    Raises:
        GraphError: naming the node, and the user's line where there is one.
        TooLarge: more nodes than `limits.MAX_NODES`.
    """
    count = len(graph.nodes) + sum(len(body.nodes) for body in bodies_in(graph.nodes))
    if count > limits.MAX_NODES:
        raise TooLarge(f"program {graph.name!r} has {count} nodes; the limit is {limits.MAX_NODES}")
    _verify(graph, lowered)
    verify_control(graph, lambda body: _verify(body, lowered))
    return graph


def _verify(graph: Graph, lowered: bool) -> None:
    if not graph.nodes or not isinstance(graph.nodes[-1], Result):
        raise GraphError(f"program {graph.name!r} does not end with a result node")
    meshes = graph.slice_types
    if len(meshes) < len(graph.slices):
        raise GraphError(f"program {graph.name!r} names {len(graph.slices)} slices, of which {len(meshes)} differ")
    taken: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        _check_references(graph, index)
        match node:
            case Result():
                if index != len(graph.nodes) - 1:
                    raise GraphError(f"program {graph.name!r} has a second result node, %{index}")
            case Compute():
                _check_compute(graph, index, node, meshes, lowered, taken)
            case Branch() | Repeat():
                pass  # with the bodies
            case Argument() | Transfer() | Regroup():
                mesh = meshes.get(node.layout.slice)
                if mesh is None:
                    raise GraphError(f"%{index} lies on slice {node.layout.slice}, which the program does not have")
                check_layout(node.type, node.layout.spec, mesh, f"%{index}")
                if isinstance(node, Regroup):
                    _check_regroup(graph, index, node, mesh, meshes)
    _check_donation(graph)


def _check_references(graph: Graph, index: int) -> None:
    for ref in inputs_of(graph.nodes[index]):
        if not 0 <= ref.node < index:
            raise GraphError(f"%{index} consumes {ref}, which does not come before it: the graph has a cycle or a gap")
        if not 0 <= ref.output < output_count(graph.nodes[ref.node]):
            raise GraphError(f"%{index} consumes {ref}; %{ref.node} has {output_count(graph.nodes[ref.node])} outputs")


def _check_compute(
    graph: Graph, index: int, node: Compute, meshes: Mapping[int, SliceType], lowered: bool, taken: dict[int, int]
) -> None:
    label = f"%{index} {node.name}" + (f" ({node.where})" if node.where else "")
    mesh = meshes.get(node.slice)
    if mesh is None:
        raise GraphError(f"{label} runs on slice {node.slice}, which the program does not have")
    if not 0 <= node.recipe < len(graph.recipes):
        raise GraphError(f"{label} runs recipe {node.recipe}; there are {len(graph.recipes)}")
    _check_recipe(graph, label, node, taken)
    if len(node.inputs) != len(node.input_layouts) or len(node.outputs) != len(node.output_layouts):
        raise GraphError(f"{label} does not name one layout for each input and output")
    for k, (ref, layout) in enumerate(zip(node.inputs, node.input_layouts, strict=True)):
        if layout.slice != node.slice:
            raise GraphError(f"{label} asks for input {k} on slice {layout.slice}, but runs on slice {node.slice}")
        check_layout(graph.type_of(ref), layout.spec, mesh, f"{label}, input {k}")
        if lowered and graph.layout_of(ref) != layout:
            raise GraphError(f"{label} gets input {k} as {graph.layout_of(ref)}, but asks for {layout}")
    for k, (array, layout) in enumerate(zip(node.outputs, node.output_layouts, strict=True)):
        if layout.slice != node.slice:
            raise GraphError(f"{label} puts output {k} on slice {layout.slice}, but runs on slice {node.slice}")
        check_layout(array, layout.spec, mesh, f"{label}, output {k}")


def _check_regroup(graph: Graph, index: int, node: Regroup, mesh: SliceType, meshes: Mapping[int, SliceType]) -> None:
    """Checks that each shard is there and has the type of a shard of the value; where they lie is for the plan."""
    if len(node.shards) != mesh.size:
        raise GraphError(f"%{index} is made of {len(node.shards)} shards; {mesh} has {mesh.size} devices")
    wanted = shard_shape(node.type, node.layout.spec, mesh)
    for number, place in node.shards:
        if not 0 <= number < len(node.inputs):
            raise GraphError(f"%{index} is made of input {number}; it has {len(node.inputs)}")
        ref = node.inputs[number]
        array, layout = graph.type_of(ref), graph.layout_of(ref)
        if not 0 <= place < meshes[layout.slice].size:
            raise GraphError(f"%{index} is made of shard {place} of {ref}; it has {meshes[layout.slice].size}")
        found = shard_shape(array, layout.spec, meshes[layout.slice])
        if found != wanted or array.dtype != node.type.dtype:
            raise GraphError(
                f"%{index} has shards of type {node.type.dtype}{list(wanted)}; those of {ref} are of type "
                f"{array.dtype}{list(found)}"
            )


def _check_recipe(graph: Graph, label: str, node: Compute, taken: dict[int, int]) -> None:
    """Checks the recipe of a node, the parts of one that several nodes share once; `taken` keeps how many inputs each
    recipe takes."""
    recipe = graph.recipes[node.recipe]
    first = node.recipe not in taken
    if first:
        _check_parts(label, recipe.parts, len(node.inputs), limits.MAX_LOOP_DEPTH)
        if any(not _is_made(ref, recipe.parts, len(recipe.parts)) for ref in recipe.outputs):
            raise GraphError(f"{label}: an output of its recipe is made by no part of it")
        inputs = (ref.output for part in recipe.parts for ref in part.inputs if ref.node == -1)
        taken[node.recipe] = 1 + max(inputs, default=-1)
    if first or host_part(recipe) is not None:  # its inputs and donations are each node's own
        _check_host_function(label, recipe, node)
    if taken[node.recipe] > len(node.inputs):
        raise GraphError(f"{label} has {len(node.inputs)} inputs; its recipe consumes {taken[node.recipe]}")
    if len(recipe.outputs) != len(node.outputs):
        raise GraphError(f"{label} has {len(node.outputs)} outputs, its recipe {len(recipe.outputs)}")
    if any(not 0 <= k < len(node.inputs) for k in node.donated):
        raise GraphError(f"{label} donates input {max(node.donated)}; it has {len(node.inputs)}")


def _check_host_function(label: str, recipe: Recipe, node: Compute) -> None:
    """Checks that a host function stands alone, takes all inputs of its node in order, and gives all outputs."""
    if not any(part.host_limit_ms for part in functions_in(recipe.parts)):
        return
    taken, given = (
        tuple(Ref(of, k) for k in range(count)) for of, count in ((-1, len(node.inputs)), (0, len(node.outputs)))
    )
    alone = len(recipe.parts) == 1 and recipe.parts[0].inputs == taken and recipe.outputs == given
    if not alone or isinstance(recipe.parts[0], Loop) or not node.outputs or node.donated:
        raise GraphError(
            f"{label}: a host function stands alone in its node, takes its inputs and gives its outputs in order, and "
            "takes the memory of none"
        )


def _check_parts(label: str, parts: tuple[Part | Loop, ...], inputs: int, depth: int) -> None:
    """Checks the references of a recipe's parts, or of a loop's body, which takes `inputs` values."""
    for number, part in enumerate(parts):
        for ref in part.inputs:
            if not (0 <= ref.output < inputs if ref.node == -1 else _is_made(ref, parts, number)):
                raise GraphError(f"{label}: part {number} of its recipe consumes {ref}, which is not there")
        if isinstance(part, Loop):
            if depth == 0:
                raise GraphError(f"{label}: loops of its recipe are nested deeper than {limits.MAX_LOOP_DEPTH}")
            _check_loop(f"{label}, loop {number}", part)
            _check_parts(f"{label}, loop {number}", part.body, len(part.inputs), depth - 1)


def _check_loop(label: str, loop: Loop) -> None:
    places = [place for place, _ in loop.carried]
    if len(set(places)) != len(places) or any(not 0 <= place < len(loop.inputs) for place in places):
        raise GraphError(f"{label} carries values to inputs {places}; it has {len(loop.inputs)}")
    if any(not _is_made(ref, loop.body, len(loop.body)) for ref in [*(v for _, v in loop.carried), *loop.outputs]):
        raise GraphError(f"{label} carries or gives a value that its body does not make")


def _is_made(ref: Ref, parts: tuple[Part | Loop, ...], before: int) -> bool:
    """Whether a part before number `before` makes a value. The outputs of a function are known to its compiler."""
    if not 0 <= ref.node < before or ref.output < 0:
        return False
    part = parts[ref.node]
    return not isinstance(part, Loop) or ref.output < len(part.outputs)


def _check_donation(graph: Graph) -> None:
    """A donated value may have no use after the node that takes it, and none beside it in the same node."""
    users = graph.consumers()
    for index, node in enumerate(graph.nodes):
        if not isinstance(node, Compute):
            continue
        # Looked at once for each input: a node may have very many, and a client may say that all are donated.
        times = Counter(node.inputs) if node.donated else Counter()
        for k in dict.fromkeys(node.donated):
            ref: Ref = node.inputs[k]
            later = users[ref][bisect_right(users[ref], index) :]
            if later or times[ref] > 1:
                user = graph.nodes[later[0]] if later else node
                name = user.name if isinstance(user, Compute) else "a transfer" if later else "the result"
                if later and isinstance(user, Result):
                    name = "the result"
                raise GraphError(
                    f"{node.name} ({node.where}) donates {ref} as argument {k}, but {name} uses it afterwards; "
                    "drop donate_argnums or the later use"
                )
