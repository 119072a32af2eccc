"""The layouts of a stage's arrays: parameters, what optimizer and sums hold, and what moves between stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models.interface import DATA, TENSOR, Model, Parameter, Stage, Tree, Value
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.sizes import Sizes


def spec_of(spec: P, dimensions: int) -> list[str | tuple[str, ...] | None]:
    """The entries of a spec, one for each dimension."""
    return [*spec, *[None] * (dimensions - len(spec))]


def shared_dimension(parameter: Parameter, members: int, zero: int) -> int:
    """The dimension along which members of DATA can share an array: the largest that they divide and that nothing else
    divides; -1 if no dimension does. With ZeRO-3 each has a part of every layer, so not the one that counts layers."""
    entries = spec_of(parameter.spec, len(parameter.shape))
    if not zero:
        return -1
    first = 1 if zero == 3 and parameter.stacked else 0
    able = [
        k for k, size in enumerate(parameter.shape) if k >= first and not entries[k] and size % members == 0 and size
    ]
    return max(able, key=lambda k: (parameter.shape[k], -k), default=-1)


def shared_spec(parameter: Parameter, dimension: int) -> P:
    """The spec with DATA at the dimension."""
    entries = spec_of(parameter.spec, len(parameter.shape))
    if dimension >= 0:
        entries[dimension] = DATA
    return P(*entries)


def wire_spec(value: Value, tensor: int, scatter: bool) -> P:
    """The spec of a value on its way from stage to stage: each member has a part of it, if it may be split."""
    entries = spec_of(value.spec, len(value.shape))
    at = value.split
    if scatter and at is not None and tensor > 1 and entries[at] is None and value.shape[at] % tensor == 0:
        entries[at] = TENSOR
    return P(*entries)


def tied_arrays(stages: Sequence[Tree]) -> dict[tuple[str, ...], tuple[int, ...]]:
    """The stages that hold each array that several stages share, by its path, from the parameters of each stage."""
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    for number, parameters in enumerate(stages):
        for path, parameter in jax.tree_util.tree_leaves_with_path(parameters):
            if parameter.tied:
                key = tuple(entry.key for entry in path)
                found[key] = (*found.get(key, ()), number)
    return {path: holding for path, holding in found.items() if len(holding) > 1}


def is_float(value: Value) -> bool:
    """Whether a value has a gradient."""
    return bool(jnp.issubdtype(jnp.dtype(value.dtype), jnp.floating))


def names_of(parameters: Tree) -> tuple[str, ...]:
    """The paths of parameters, in the order of the leaves."""
    paths = jax.tree_util.tree_leaves_with_path(parameters)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)


@dataclass(frozen=True)
class StageShapes:
    """Shapes and specs of one stage's arrays.

    Attributes:
        stage: its layers
        parameters: tree of `Parameter`
        values: tree of `Value`, what comes in; {} for a stage with the embedding
        outgoing: tree of `Value`, what goes out; {} for a stage with the loss
        shared: tree of int: the dimension along which members of DATA share the array's state, -1 for none
        wires: tree of specs, of `values` on their way
        outgoing_wires: the same of `outgoing`
        examples: of a microbatch on all members of DATA
        members: of DATA
        zero: as `Options` has it
    """

    stage: Stage
    parameters: Tree
    values: Tree
    outgoing: Tree
    shared: Tree
    wires: Tree
    outgoing_wires: Tree
    examples: int
    members: int
    zero: int

    @classmethod
    def of(
        cls, model: Model, stages: tuple[Stage, ...], number: int, sizes: Sizes, options: Options, moves: list[bool]
    ) -> StageShapes:
        """The shapes of stage `number`. `moves[k]`: stages k and k + 1 are on different slices."""
        stage = stages[number]
        examples = sizes.examples * sizes.members
        values = {} if stage.has_embedding else model.values(stage, examples)
        outgoing = {} if stage.has_loss else model.values(stages[number + 1], examples)

        def wires(tree: Tree, moved: bool) -> Tree:
            return jax.tree.map(lambda v: wire_spec(v, sizes.tensor, options.scatter_gather and moved), tree)

        parameters = model.parameters(stage)
        return cls(
            stage,
            parameters,
            values,
            outgoing,
            jax.tree.map(lambda p: shared_dimension(p, sizes.members, options.zero), parameters),
            wires(values, number > 0 and moves[number - 1]),
            wires(outgoing, number + 1 < len(stages) and moves[number]),
            examples,
            sizes.members,
            options.zero,
        )

    @property
    def whole_specs(self) -> Tree:
        """Specs of parameters that every member of DATA has."""
        return jax.tree.map(lambda p: p.spec, self.parameters)

    @property
    def master_specs(self) -> Tree:
        """Specs of the parameters that the optimizer updates, and of gradients once they are summed."""
        return jax.tree.map(shared_spec, self.parameters, self.shared)

    @property
    def used_specs(self) -> Tree:
        """Specs of the parameters as forward and backward take them."""
        return self.master_specs if self.zero == 3 else self.whole_specs

    def zeros(self, dtype: str) -> Tree:
        """Sums of the gradients of no microbatch: one for each member of DATA in a dimension in front, or from ZeRO-2
        on one for all, of which each has a part."""
        return jax.tree.map(
            lambda p, k: jnp.zeros((self.members, *p.shape) if self.zero < 2 or k < 0 else p.shape, dtype),
            self.parameters,
            self.shared,
        )

    @property
    def sum_specs(self) -> Tree:
        return jax.tree.map(
            lambda p, k: P(DATA, *p.spec) if self.zero < 2 or k < 0 else shared_spec(p, k),
            self.parameters,
            self.shared,
        )

    @property
    def value_specs(self) -> Tree:
        return jax.tree.map(lambda v: v.spec, self.values)

    @property
    def outgoing_specs(self) -> Tree:
        return jax.tree.map(lambda v: v.spec, self.outgoing)
