"""The sharded dataflow graph of a program.

The story in nouns: a `Graph` has `Node`s in an order in which every node comes after what it consumes. An `Argument`
brings a buffer in, a `Compute` runs a recipe on all devices of one slice, a `Transfer` moves a value to another layout,
a `Regroup` makes one value of shards of others where they lie, a `Branch` or a `Repeat` runs graphs of its own, as a
value decides; the one `Result` at the end names what goes out. A `Ref` names one output of one node. A `Recipe` is the
computation of a compute node: one exported function, or several composed, with a `Loop` where they repeat.

A node stands for all shards: nothing here grows with the number of devices. All classes are frozen, compare by value,
and encode to a few bytes, so a graph is also the message that registers a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from pathways_ray import limits
from pathways_ray.ir.types import ArrayType, Layout, SliceType


class Ref(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Output number `output` of node number `node`."""

    node: int
    output: int = 0

    def __str__(self) -> str:
        return f"%{self.node}" if self.output == 0 else f"%{self.node}.{self.output}"


MAX_ESTIMATED_US = 10**9
"""A part that is estimated to take longer than this, or without end, is said to take this."""

MAX_NAME_CHARACTERS = 1024
"""Of a program: failures repeat it."""

MAX_ROUNDS = 1 << 20
"""Rounds of one loop."""

MAX_HOST_LIMIT_MS = 3_600_000
"""Milliseconds for which a host function may run."""


class Part(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """One exported function inside a recipe, by content digest.

    In `inputs`, `Ref(-1, k)` is input k of what encloses the part, the recipe or a loop, and `Ref(j, k)` output k of
    part j there. A part that has `no_fusion` is never composed with others: it has optimisation barriers of its own,
    which mean something else in a composition. One that has a loop of its own (`has_loop`) does not become the body of
    another. `estimated_us` is the client's estimate of the time that it takes on its devices, in microseconds. One that
    is compiled `as_is` brings shardings of its own, for as many devices as its slice has: the compiler gets the module
    as it came, and the layouts of the node only say what comes of it. It has `no_fusion` too. `is_line` says that by
    the client's account it is plain arithmetic on one array, which compiles fast beside others of the kind.

    One with a `host_limit_ms` is no exported function but a *host function*: Python of a trusted tenant, which the
    hosts of the slice run beside the devices, for at most so many milliseconds. It stands alone in its recipe.
    """

    name: str
    function: str
    inputs: tuple[Ref, ...]
    no_fusion: bool = False
    estimated_us: Annotated[int, msgspec.Meta(ge=0, le=MAX_ESTIMATED_US)] = 0
    has_loop: bool = False
    as_is: bool = False
    host_limit_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOST_LIMIT_MS)] = 0
    is_line: bool = False

    @property
    def digest(self) -> str:
        """The name of the export that has the function: of member k of a joint one, DIGEST#k, what stands before it."""
        return self.function.partition("#")[0]


class Loop(msgspec.Struct, frozen=True, array_like=True, tag="loop"):
    """`times` rounds of a body, each fed by the one before it: one part of a recipe, whatever the number of rounds.

    In the body, `Ref(-1, k)` is input k of the loop. `inputs` are values of the enclosing recipe or loop, taken by the
    first round. `carried` pairs an input with a value of the body: every later round takes that value of the round
    before as this input, and all other inputs unchanged. `outputs` are values of the body in the last round.
    """

    body: tuple[Part | Loop, ...]
    times: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROUNDS)]
    inputs: tuple[Ref, ...]
    carried: tuple[tuple[int, Ref], ...]
    outputs: tuple[Ref, ...]


class Recipe(msgspec.Struct, frozen=True, array_like=True):
    """The computation of a compute node: parts and loops in order, and which of their values are its outputs."""

    parts: tuple[Part | Loop, ...]
    outputs: tuple[Ref, ...]


def functions_in(parts: Iterable[Part | Loop]) -> Iterator[Part]:
    """The parts, those inside loops included; each once, in order."""
    for part in parts:
        if isinstance(part, Loop):
            yield from functions_in(part.body)
        else:
            yield part


def has_loop(recipe: Recipe) -> bool:
    """Whether a function of a recipe has a loop of its own, whose rounds may be without end."""
    return any(part.has_loop for part in functions_in(recipe.parts))


def host_part(recipe: Recipe) -> Part | None:
    """The host function that a recipe is; None for a computation."""
    first = recipe.parts[0] if recipe.parts else None
    return first if isinstance(first, Part) and first.host_limit_ms else None


def references_in(parts: Iterable[Part | Loop]) -> int:
    """Values that parts refer to, and the parts themselves: what passes over a recipe have to look at."""
    found = 0
    for part in parts:
        found += 1 + len(part.inputs)
        if isinstance(part, Loop):
            found += len(part.carried) + len(part.outputs) + references_in(part.body)
    return found


def calls_in(parts: Iterable[Part | Loop]) -> int:
    """Calls of functions in one run of the parts: those inside a loop count in every round."""
    return sum(part.times * calls_in(part.body) if isinstance(part, Loop) else 1 for part in parts)


def estimated_us(parts: Iterable[Part | Loop]) -> int:
    """Estimated microseconds of parts on their devices, loops with all their rounds."""
    return sum(part.times * estimated_us(part.body) if isinstance(part, Loop) else part.estimated_us for part in parts)


class Argument(msgspec.Struct, frozen=True, tag_field="node", tag="argument"):
    """Buffer number `index` of a launch."""

    index: int
    type: ArrayType
    layout: Layout


class Compute(msgspec.Struct, frozen=True, tag_field="node", tag="compute"):
    """A compiled function on one slice. `donated`: inputs whose memory it may reuse; `where`: the user's line."""

    name: str
    recipe: int
    slice: int
    inputs: tuple[Ref, ...]
    input_layouts: tuple[Layout, ...]
    outputs: tuple[ArrayType, ...]
    output_layouts: tuple[Layout, ...]
    donated: tuple[int, ...] = ()
    where: str = ""


class Transfer(msgspec.Struct, frozen=True, tag_field="node", tag="transfer"):
    """The same value in another layout."""

    input: Ref
    type: ArrayType
    layout: Layout


class Regroup(msgspec.Struct, frozen=True, tag_field="node", tag="regroup"):
    """A value made of shards of others that lie on its devices already: nothing moves, and memory is shared.

    `shards` has, for each device of the layout's slice in order, the number of an input and the place of the shard
    there, both counted from 0.
    """

    inputs: tuple[Ref, ...]
    shards: tuple[tuple[int, int], ...]
    type: ArrayType
    layout: Layout


class Result(msgspec.Struct, frozen=True, tag_field="node", tag="result"):
    """The results of the program, in order, each value once."""

    inputs: tuple[Ref, ...]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """The graph of a branch, or of a loop's round or test, over the slices and recipes of the whole.

    Its arguments are numbered by the inputs of the node that it belongs to, and lie as these do. Nothing in it is
    donated. `where` is the function and its line.
    """

    nodes: tuple[Node, ...]
    where: str = ""


class Branch(msgspec.Struct, frozen=True, tag_field="node", tag="branch"):
    """One of several bodies: the one that `index`, a whole number, names; the first or the last for others."""

    name: str
    index: Ref
    inputs: tuple[Ref, ...]
    bodies: tuple[Body, ...]
    outputs: tuple[ArrayType, ...]
    output_layouts: tuple[Layout, ...]
    where: str = ""


class Repeat(msgspec.Struct, frozen=True, tag_field="node", tag="repeat"):
    """Rounds of a body, each fed by the one before it.

    The first inputs, as many as there are outputs, are carried: the results of a round are these inputs of the next
    one. There are `times` rounds; with a `test`, whose one result is a truth value, as many as it says before each.
    """

    name: str
    inputs: tuple[Ref, ...]
    times: Annotated[int, msgspec.Meta(ge=0, le=MAX_ROUNDS)]
    test: Body | None
    body: Body
    outputs: tuple[ArrayType, ...]
    output_layouts: tuple[Layout, ...]
    where: str = ""

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.body,) if self.test is None else (self.test, self.body)


Node = Argument | Compute | Transfer | Regroup | Branch | Repeat | Result

Control = Branch | Repeat
"""Nodes whose course depends on a value."""


class Graph(msgspec.Struct, frozen=True):
    """A program. `nodes` is in topological order and ends with the `Result`. The values of results number `decides` are
    scalars that the controller hears of."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]
    slices: Annotated[tuple[SliceType, ...], msgspec.Meta(max_length=limits.MAX_SLICES)]
    recipes: tuple[Recipe, ...]
    nodes: tuple[Node, ...]
    decides: tuple[int, ...] = ()

    @property
    def result(self) -> Result:
        last = self.nodes[-1]
        assert isinstance(last, Result)
        return last

    @property
    def donated_arguments(self) -> tuple[int, ...]:
        """The numbers of the arguments that a node may take the memory of."""
        taken = {node.inputs[k] for node in self.nodes if isinstance(node, Compute) for k in node.donated}
        return tuple(n.index for at, n in enumerate(self.nodes) if isinstance(n, Argument) and Ref(at) in taken)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(node for node in self.nodes if isinstance(node, Argument))

    @property
    def slice_types(self) -> dict[int, SliceType]:
        """The slices by their ids."""
        return {mesh.id: mesh for mesh in self.slices}

    def type_of(self, ref: Ref) -> ArrayType:
        node = self.nodes[ref.node]
        if isinstance(node, Compute | Branch | Repeat):
            return node.outputs[ref.output]
        assert isinstance(node, Argument | Transfer | Regroup)
        return node.type

    def layout_of(self, ref: Ref) -> Layout:
        node = self.nodes[ref.node]
        if isinstance(node, Compute | Branch | Repeat):
            return node.output_layouts[ref.output]
        assert isinstance(node, Argument | Transfer | Regroup)
        return node.layout

    def consumers(self) -> dict[Ref, list[int]]:
        """Nodes that use each value, once per use."""
        found: dict[Ref, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for ref in inputs_of(node):
                found.setdefault(ref, []).append(index)
        return found


def inputs_of(node: Node) -> tuple[Ref, ...]:
    """The values a node consumes."""
    match node:
        case Argument():
            return ()
        case Transfer():
            return (node.input,)
        case Compute() | Regroup() | Repeat() | Result():
            return node.inputs
        case Branch():
            return (node.index, *node.inputs)


def output_count(node: Node) -> int:
    match node:
        case Compute() | Branch() | Repeat():
            return len(node.outputs)
        case Result():
            return 0
        case _:
            return 1


def with_inputs(node: Node, inputs: tuple[Ref, ...]) -> Node:
    """The same node, consuming other values."""
    match node:
        case Argument():
            return node
        case Transfer():
            return msgspec.structs.replace(node, input=inputs[0])
        case Compute() | Regroup() | Repeat() | Result():
            return msgspec.structs.replace(node, inputs=inputs)
        case Branch():
            return msgspec.structs.replace(node, index=inputs[0], inputs=inputs[1:])


def bodies_in(nodes: Iterable[Node]) -> Iterator[Body]:
    """All bodies of nodes, those inside other bodies included."""
    for node in nodes:
        if isinstance(node, Branch | Repeat):
            for body in node.bodies:
                yield body
                yield from bodies_in(body.nodes)


def renumbered(nodes: Iterator[tuple[int, Node]]) -> tuple[Node, ...]:
    """Nodes given as (old number, node), with every reference moved to the new numbers.

    Raises:
        KeyError: a node consumes one that is not among those given before it.
    """
    new: dict[int, int] = {}
    kept: list[Node] = []
    for old, node in nodes:
        moved = tuple(Ref(new[ref.node], ref.output) for ref in inputs_of(node))
        new[old] = len(kept)
        kept.append(with_inputs(node, moved))
    return tuple(kept)
