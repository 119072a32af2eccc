"""Gradients of a pipeline whose units are slices of tokens, as `schedules.token_slices` has them.

A stage is a function of one slice: it takes what the earlier slices of the microbatch left there, and leaves something
for the later ones. Loss and gradients are those of whole examples, since a slice gets exactly what its tokens look at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes
from megatron_ptdp.parallel import action_order
from megatron_ptdp.parallel.part_nodes import named
from megatron_ptdp.schedules import Schedule, check_slices

Tree = Any


class SliceSpecs(NamedTuple):
    """The specs of a stage's parameters, of its values (the last stage's: with its targets), of what it gives, and of
    what it leaves for later slices. None: replicated."""

    params: Any = None
    values: Any = None
    out: Any = None
    left: Any = None


class SliceStage(NamedTuple):
    """A stage of a model that takes slices of tokens.

    Attributes:
        slice: where it lies
        function: (params, values, past) to (values for the next stage, what later slices need); `past` has for each
            earlier slice what it left. The last stage's gets `values` as a pair with its targets, and gives the sum of
            its losses.
        specs: of all these
        mapped: makes of a function of members' parts one of whole arrays, given the specs of its arguments, and of what
            it gives; left out, functions are of whole arrays
    """

    slice: pw.VirtualSlice
    function: Callable[[Tree, Any, list[Tree]], tuple[Any, Tree]]
    specs: SliceSpecs = SliceSpecs()
    mapped: Callable[[Callable[..., Any], Any, Any], Callable[..., Any]] = lambda function, inputs, output: function


class SliceGradients:
    """The loss and the gradients of a schedule over slices, as one program.

    Args:
        stages: from the first to the last
        schedule: of units, `slices` for each microbatch

    Raises:
        ScheduleError: the schedule does not keep the order of slices.
        BadSizes: it has other stages.
    """

    def __init__(self, stages: Sequence[SliceStage], schedule: Schedule, slices: int) -> None:
        check_slices(schedule, slices)
        if len(stages) != schedule.stages:
            raise BadSizes(f"the schedule {schedule.name} has {schedule.stages} stages, but there are {len(stages)}")
        self.stages, self.slices = stages, slices
        self.actions = action_order.enqueued(schedule)
        self.forwards = [_forward(number, stage) for number, stage in enumerate(stages)]
        self.first_backwards, self.backwards = (
            [_compiled_backward(number, stage, further) for number, stage in enumerate(stages)]
            for further in (False, True)
        )
        self._program = pw.program(self._summed, name="gradients_of_slices")

    def __call__(self, params: Sequence[Tree], inputs: Sequence[Any], targets: Sequence[Any]) -> tuple[Any, list[Tree]]:
        """The sum of the losses, and the gradients of each stage, as futures.

        Args:
            params: of each stage, on its slice
            inputs, targets: of each unit
        """
        made: tuple[Any, list[Tree]] = self._program(list(params), list(inputs), list(targets))
        return made

    def _summed(self, params: list[Tree], inputs: list[Any], targets: list[Any]) -> tuple[Any, list[Tree]]:
        losses, sums = self.traced(params, inputs, targets)
        total = losses[0]
        for one in losses[1:]:
            total = total + one
        return total, sums

    def losses(self, params: Sequence[Tree], inputs: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        """The losses of each unit, traced in a program: forwards alone, one microbatch after the other."""
        found = []
        left: dict[tuple[int, int], Tree] = {}
        for k, value in enumerate(inputs):
            for stage, forward in enumerate(self.forwards):
                past = [left[stage, u] for u in range(k - k % self.slices, k)]
                given = (value, targets[k]) if stage == len(self.stages) - 1 else value
                value, left[stage, k] = forward(params[stage], given, past)
            found.append(value)
        return found

    def traced(
        self, params: Sequence[Tree], inputs: Sequence[Any], targets: Sequence[Any]
    ) -> tuple[list[Any], list[Tree]]:
        """The losses of each unit, and the gradients of each stage, traced in a program."""
        last = len(self.stages) - 1
        values: dict[tuple[int, int], Any] = {(0, k): one for k, one in enumerate(inputs)}
        left: dict[tuple[int, int], Tree] = {}
        upstream: dict[tuple[int, int], Any] = {}
        wanted: dict[tuple[int, int], Tree] = {}
        sums: list[Tree] = [None] * len(self.stages)
        losses = []
        for stage, kind, k in self.actions:
            first = k - k % self.slices
            past = [left[stage, u] for u in range(first, k)]
            given = (values[stage, k], targets[k]) if stage == last else values[stage, k]
            if kind == "F":
                out, left[stage, k] = self.forwards[stage](params[stage], given, past)
                if stage == last:
                    losses.append(out)
                else:
                    values[stage + 1, k] = out
                continue
            later = [wanted.get((stage, u)) for u in range(first, k + 1)]
            taken = (params[stage], given, past, upstream.get((stage, k)), later)
            if sums[stage] is None:
                sums[stage], down, found = self.first_backwards[stage](*taken)
            else:
                sums[stage], down, found = self.backwards[stage](*taken, sums[stage])
            wanted.update({(stage, u): one for u, one in zip(range(first, k), found, strict=True)})
            if stage:
                upstream[stage - 1, k] = down
        return losses, sums


def _forward(number: int, stage: SliceStage) -> Any:
    params, values, out, left = stage.specs
    taken, made = (params, values, left), (out, left)
    function = named(f"stage{number}_forward", stage.mapped(stage.function, taken, made))
    return pw.compiled(function, slice=stage.slice, in_specs=taken, out_specs=made)


def _compiled_backward(number: int, stage: SliceStage, further: bool) -> Any:
    """The backward of a stage; the first one, or a further one, which takes the sums of those before."""
    params, values, out, left = stage.specs
    given = values[0] if isinstance(values, tuple) else values
    taken, made = (params, values, left, out, left, *([params] if further else [])), (params, given, left)
    function = named(f"stage{number}_backward", stage.mapped(_backward(stage.function), taken, made))
    return pw.compiled(
        function, slice=stage.slice, in_specs=taken, out_specs=made, donate_argnums=(5,) if further else ()
    )


def _backward(function: Callable[[Tree, Any, list[Tree]], tuple[Any, Tree]]) -> Callable[..., Any]:
    """The backward of a stage's function, which computes the forward again.

    It takes, beside its arguments, the gradient of what it gave (None: it is the loss); those of what this slice and
    the earlier ones left, as far as later slices have added them up; and the gradients of the parameters so far. It
    gives the new ones, the gradient of the values, and of what the earlier slices left.
    """

    def run(
        params: Tree, given: Any, past: list[Tree], upstream: Any, later: list[Tree], sums: Tree | None = None
    ) -> Any:
        is_last = upstream is None
        values, targets = given if is_last else (given, None)

        def of(params: Tree, values: Any, past: list[Tree]) -> Any:
            return function(params, (values, targets) if is_last else values, past)

        (out, own), pull = jax.vjp(of, params, values, past)
        one = jnp.ones_like(out) if is_last else upstream
        mine = jax.tree.map(jnp.zeros_like, own) if later[-1] is None else later[-1]
        gradients, down, found = pull((one, mine))
        if jax.tree.leaves(down) and not jnp.issubdtype(jax.tree.leaves(values)[0].dtype, jnp.floating):
            down = None  # of the first stage's tokens
        found = [_sum(before, new) for before, new in zip(later[:-1], found, strict=True)]
        return _sum(sums, gradients), down, found

    return run


def _sum(before: Tree, new: Tree) -> Tree:
    return new if before is None else jax.tree.map(jnp.add, before, new)
