"""Ahead of time, by the names of `jax.stages`: what `lower(...)` and `.compile()` give for functions on slices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.estimates import Work
from pathways_ray.ir.graph import Argument, Ref
from pathways_ray.ir.memory import peak_bytes, shard_bytes
from pathways_ray.jax_types import partition_spec
from pathways_ray.observe.computations import Computation, largest_memory, total_cost, total_memory


@dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes on the device that needs most, by the names of JAX's own `memory_analysis()`.

    `argument_size_in_bytes` and `output_size_in_bytes` are those of the program's arguments and results, and
    `peak_memory_in_bytes` counts what a launch keeps between its computations, them included. The rest is XLA's:
    `temp_size_in_bytes` is what one computation needs inside, on top; `alias_size_in_bytes` are results in the memory
    of donated arguments, and `generated_code_size_in_bytes` is code, both of all computations.
    """

    argument_size_in_bytes: int
    output_size_in_bytes: int
    temp_size_in_bytes: int
    peak_memory_in_bytes: int
    alias_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0


class Launchable(Protocol):
    """A program for given types, as `program.LoweredProgram` is one."""

    @property
    def graph(self) -> Any:
        """The traced graph."""

    @property
    def work(self) -> Work:
        """The work of its computations."""

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """The leaves of the arguments that a call donates."""

    def kind_of(self, leaf: Any) -> ArgumentType:
        """The type of an argument."""

    def places_of(self, number: int) -> list[NamedSharding]:
        """The layouts in which a launch takes a leaf of the arguments."""

    def output_kinds(self, kinds: Sequence[ArgumentType]) -> list[ArgumentType]:
        """The types of the results, given those of the arguments."""

    def launch(self, leaves: list[Any]) -> Any:
        """One call."""

    def wait_compiled(self) -> dict[int, int]:
        """Waits for the hosts, and returns the bytes that computations need inside, for each host."""

    def computations(self, text: bool = False) -> list[Computation]:
        """Its computations, with what the hosts' compilers say of them, and with `text` their code."""

    def as_text(self, stage: str = "graph") -> str:
        """The program as text."""

    def explain(self) -> str:
        """Devices, bytes, order and peak memory."""


class Compiled:
    """A function that the hosts have compiled for given types. Call it with arrays of these types and layouts; arrays
    of this process are placed, and those on a slice move where no sharding was said."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launches it.

        Raises:
            TypeError: the arguments are not those that it was compiled for.
        """
        return self._lowered.call(args, kwargs)

    def cost_analysis(self) -> dict[str, float]:
        """The cost that XLA finds in what the hosts compiled, by its names: operations and bytes of one device.

        Of a program of several computations it is the sum over them, each on a device of its slice. As in JAX, a loop
        counts as one round.
        """
        return total_cost(self._computations)

    def memory_analysis(self) -> MemoryAnalysis:
        """The memory that a launch takes on the device that needs most."""
        graph = self._lowered.graph
        said = self._computations
        given = [Ref(k) for k, node in enumerate(graph.nodes) if isinstance(node, Argument)]
        return MemoryAnalysis(
            _on_one_device(graph, given),
            _on_one_device(graph, graph.nodes[-1].inputs),
            largest_memory(said, "temp_size_in_bytes"),
            max(peak_bytes(graph).values(), default=0),
            total_memory(said, "alias_size_in_bytes"),
            total_memory(said, "generated_code_size_in_bytes"),
        )

    def as_text(self, dialect: str = "hlo") -> str:
        """The program as text: "hlo", the optimised code of each computation as the hosts' compilers made it; or one
        of those of `Lowered.as_text`."""
        if dialect != "hlo":
            return self._lowered.as_text(dialect)
        return "\n".join(one.text for one in self._lowered.program.computations(text=True))

    @functools.cached_property
    def _computations(self) -> list[Computation]:
        return self._lowered.program.computations()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # those of JAX's own class, and `_lowered` of a copy that has nothing yet
            raise AttributeError(f"what pathways_ray compiled has no attribute {name!r}")
        return getattr(self._lowered, name)  # trees, types and shardings are the same

    def __repr__(self) -> str:
        return f"Compiled({self._lowered.program.graph.name})"


class Lowered:
    """A function traced and checked for given types.

    Args:
        kinds: the type of each leaf of the arguments, in the tree `in_tree`.
        dialect: the one that `as_text()` shows: "graph", or for what `jax.jit` made "stablehlo", as JAX does.
    """

    def __init__(
        self, program: Launchable, kinds: Sequence[ArgumentType], in_tree: Any, out_tree: Any, dialect: str = "graph"
    ) -> None:
        self.program = program
        self._dialect = dialect
        self.in_tree, self.out_tree = in_tree, out_tree
        self._kinds = list(kinds)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The leaves of the arguments that are donated."""
        return tuple(self.program.donated_leaves)

    @property
    def in_avals(self) -> Any:
        """The types of the arguments, in their tree."""
        return jax.tree.unflatten(self.in_tree, [kind.aval for kind in self._kinds])

    @property
    def args_info(self) -> Any:
        """The types of the arguments, and whether they are donated, in their tree."""
        donated = self.donate_argnums
        make: Any = jax.stages.ArgInfo  # of an abstract value, for which a type does
        infos = [make(kind.aval, k in donated) for k, kind in enumerate(self._kinds)]
        return jax.tree.unflatten(self.in_tree, infos)

    @property
    def out_info(self) -> Any:
        """The types of the results, in their tree."""
        return jax.tree.unflatten(self.out_tree, [_type(kind) for kind in self.program.output_kinds(self._kinds)])

    @property
    def input_shardings(self) -> Any:
        """The shardings of the arguments; None for those that come from this process."""
        return jax.tree.unflatten(self.in_tree, [_type(kind).sharding for kind in self._kinds])

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results."""
        return jax.tree.map(lambda kind: kind.sharding, self.out_info)

    def compile(self) -> Compiled:
        """Has the hosts compile it, and waits for that.

        Raises:
            CompileError: it cannot be compiled.
        """
        self.program.wait_compiled()
        return Compiled(self)

    def cost_analysis(self) -> dict[str, float]:
        """Floating-point operations and bytes that operations take and make, of all devices together, as counted from
        what was traced: XLA fuses operations, and moves fewer bytes. A loop without a known length counts once."""
        work: Work = self.program.work
        return {"flops": work.operations, "bytes accessed": work.bytes}

    def as_text(self, dialect: str | None = None) -> str:
        """The program: "graph" as traced, "plan" as placed, step by step for each island, "stablehlo" the code of its
        functions as exported."""
        return self.program.as_text(dialect or self._dialect)

    def explain(self) -> str:
        """Devices, bytes, order and peak memory. Compiles the program."""
        return self.program.explain()

    @property
    def graph(self) -> Any:
        """The traced graph (`pathways_ray.ir.graph.Graph`)."""
        return self.program.graph

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A launch, by a `Compiled`."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        name = self.program.graph.name
        if tree != self.in_tree:
            raise TypeError(f"{name} was compiled for arguments of the tree {self.in_tree}, and is called with {tree}")
        for number, (leaf, expected) in enumerate(zip(leaves, self._kinds, strict=True)):
            kind = self.program.kind_of(leaf)
            if kind is expected or _text(kind) == _text(expected):
                continue
            places = self.program.places_of(number)
            lies = kind.slice is not None  # where it does not, the launch places it
            if str(kind) != str(expected) or (lies and (expected.slice is not None or len(places) > 1)):
                raise TypeError(
                    f"{name} was compiled for {_text(expected)} as leaf {number}, and is called with {_text(kind)}"
                )
            if lies and places:
                leaves[number] = jax.device_put(leaf, places[0])
        return jax.tree.unflatten(self.out_tree, jax.tree.leaves(self.program.launch(leaves)))

    def __repr__(self) -> str:
        return f"Lowered({self.program.graph.name})"


def _on_one_device(graph: Any, refs: Sequence[Ref]) -> int:
    """Bytes of values on the device that has most of them."""
    held: dict[int, int] = {}
    for ref in dict.fromkeys(refs):
        where = graph.layout_of(ref).slice
        held[where] = held.get(where, 0) + shard_bytes(graph, ref)
    return max(held.values(), default=0)


def _text(kind: ArgumentType) -> str:
    return f"{kind} @ {kind.where()}"


def _type(kind: ArgumentType) -> jax.ShapeDtypeStruct:
    sharding = None if kind.slice is None else NamedSharding(kind.slice.mesh, partition_spec(kind.spec))
    return jax.ShapeDtypeStruct(kind.aval.shape, kind.aval.dtype, sharding=sharding, weak_type=kind.weak)
