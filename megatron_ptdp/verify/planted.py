"""Bugs that are made in training steps like this one, planted from outside: the check of parity must find each.

    with planted("stale-tied"):
        step = build_step(...)
        loss, gradients = step.gradients(state, batch)      # wrong numbers

A bug replaces functions and methods of the training step until the block ends. So the step must be built and first
called inside the block, which is when it is traced. Only the thread that planted a bug gets it: all others go on with
the original, and wait if they want to plant one too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import layers
from megatron_ptdp.models.interface import TENSOR, Tree
from megatron_ptdp.parallel import action_order
from megatron_ptdp.parallel.batch_feed import BatchFeed
from megatron_ptdp.parallel.nodes import StageNodes
from megatron_ptdp.parallel.reduce import Reduction
from megatron_ptdp.parallel.stage import StageMath
from megatron_ptdp.parallel.step import Step
from megatron_ptdp.parallel.step_trace import StepTrace
from megatron_ptdp.parallel.update import Update
from megatron_ptdp.schedules import Action


class Patch(NamedTuple):
    """A replaced function.

    Attributes:
        owner: the module or class that has it
        name: of the function there
        wrong: is called instead, with the original function first
    """

    owner: Any
    name: str
    wrong: Callable[..., Any]


class PlantedBug(NamedTuple):
    """A bug: its effect with the sizes at which it shows, and the functions that it replaces."""

    effect: str
    patches: tuple[Patch, ...]


_PLANTING = threading.RLock()
"""Taken as long as bugs are planted: patches must be taken back in the reverse order."""


@contextlib.contextmanager
def planted(*names: str) -> Iterator[None]:
    """Plants bugs for the calling thread, by their names in `PLANTED_BUGS`, until the block ends.

    Raises:
        ConfigError: a name is unknown.
    """
    for name in names:
        if name not in PLANTED_BUGS:
            raise ConfigError.unknown("planted bug", name, PLANTED_BUGS)
    if not names:
        yield
        return
    with _PLANTING, contextlib.ExitStack() as stack:
        for name in names:
            for patch in PLANTED_BUGS[name].patches:
                stack.enter_context(_patched(patch))
        yield


@contextlib.contextmanager
def _patched(patch: Patch) -> Iterator[None]:
    original = getattr(patch.owner, patch.name)
    planter = threading.get_ident()

    @functools.wraps(original)
    def chosen(*arguments: Any, **keywords: Any) -> Any:
        if threading.get_ident() != planter:
            return original(*arguments, **keywords)
        return patch.wrong(original, *arguments, **keywords)

    setattr(patch.owner, patch.name, chosen)
    try:
        yield
    finally:
        setattr(patch.owner, patch.name, original)


# --- the model --------------------------------------------------------------------------------------------------------


def _leave_one_members(leave: Any, x: Any, compute: Any) -> Any:
    return leave(_first_members(x), compute)


def _first_members(x: Any) -> Any:
    """The array of the first member of TENSOR, and zeros on all others."""
    return jnp.where(jax.lax.axis_index(TENSOR) == 0, x, jnp.zeros_like(x))


def _losses_with_padding(token_losses: Any, x: Any, table: Any, targets: Any, vocabulary: int) -> Any:
    return token_losses(x, table, targets, vocabulary << 20)


def _first_part_of_positions(own_part: Any, x: Any, dimension: int) -> Any:
    if dimension != 0:
        return own_part(x, dimension)
    return layers.vary(x, TENSOR)[: x.shape[0] // jax.lax.axis_size(TENSOR)]


# --- a stage ----------------------------------------------------------------------------------------------------------


def _vary_norms(ready: Any, math: StageMath, params: Tree) -> Tree:
    """Parameters of norms typed as if members of TENSOR had different ones: autodiff does not sum over them."""

    def cast(path: Any, array: Any) -> Any:
        if not _is_norm(path) or TENSOR in layers.varying(array):
            return array
        return jax.lax.pcast(array, TENSOR, to="varying")

    return jax.tree_util.tree_map_with_path(cast, ready(math, params))


def _one_members_norms(differentiate: Any, math: StageMath, *arguments: Any, **keywords: Any) -> Any:
    """The gradients of norms as the first member of TENSOR has them."""
    gradients, downstream, loss = differentiate(math, *arguments, **keywords)
    one = jax.tree_util.tree_map_with_path(
        lambda path, array: jax.lax.psum(_first_members(array), TENSOR) if _is_norm(path) else array, gradients
    )
    return one, downstream, loss


def _is_norm(path: Any) -> bool:
    return any("norm" in str(key.key) or key.key == "final" for key in path)


# --- the order of a step ----------------------------------------------------------------------------------------------


def _donate_nothing(compiled: Any, nodes: StageNodes, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    """A bug that takes an array a second time, or too late, must find it there."""
    return compiled(nodes, *arguments)


_KEEPS_ARRAYS = Patch(StageNodes, "_compiled", _donate_nothing)


def _add_last_twice(backward: Any, trace: StepTrace, stage: int, k: int, weights: bool, inputs: bool) -> None:
    backward(trace, stage, k, weights, inputs)
    if weights and (stage, k) == (0, len(trace.numbers[0]) - 1):
        backward(trace, stage, k, weights, inputs)


def _forward_before(saved: Any, trace: StepTrace, stage: int, k: int) -> Any:
    return saved(trace, stage, max(k - 1, 0))


def _complete_too_early(completing: Any, actions: tuple[Action, ...]) -> frozenset[Action]:
    """The second to last B or W of each stage."""
    last = completing(actions)
    early = completing(tuple(action for action in actions if action not in last))
    stages = {action.stage for action in early}
    return frozenset(early | {action for action in last if action.stage not in stages})


# --- sums over stages and replicas ------------------------------------------------------------------------------------


def _scale_by_microbatches(feed: Any, self: BatchFeed, batch: Any) -> Any:
    arrays, scales = feed(self, batch)
    return arrays, [np.asarray(scale / self.sizes.microbatches, scale.dtype) for scale in scales]


def _tie_nothing(tie: Any, step: Step, row: Any, gradients: Any) -> None:
    del tie, step, row, gradients


def _leave_first_member_out(inside: Any, reduction: Reduction, sums: Tree) -> Tree:
    def without_first(total: Any, dimension: int) -> Any:
        return total if reduction.is_summed(dimension) else total.at[0].set(0)

    return inside(reduction, jax.tree.map(without_first, sums, reduction.shapes.shared))


def _leave_first_island_out(cross_island_sum: Any, reduction: Reduction, buckets: Any) -> Any:
    return cross_island_sum(reduction, buckets[1:])


def _count_replicated_twice(norm: Any, update: Update, gradients: Tree) -> Any:
    def doubled(gradient: Any, parameter: Any) -> Any:
        return gradient if TENSOR in tuple(parameter.spec) else gradient * 2**0.5

    return norm(update, jax.tree.map(doubled, gradients, update.shapes.parameters))


def _count_all(counted: Any, step: Step, number: int) -> Tree:
    return jax.tree.map(lambda _: True, counted(step, number))


PLANTED_BUGS: Mapping[str, PlantedBug] = {
    "dropped-all-reduce": PlantedBug(
        "a block's output is one member's partial sum (tensor 2 or more)",
        (Patch(layers, "leave", _leave_one_members),),
    ),
    "mean-twice": PlantedBug(
        "the loss is divided by the number of microbatches once more (2 microbatches or more)",
        (Patch(BatchFeed, "__call__", _scale_by_microbatches),),
    ),
    "stale-tied": PlantedBug(
        "stages that share the embedding keep their own gradient of it (tied, 2 stages or more)",
        (Patch(Step, "_tie", _tie_nothing),),
    ),
    "norm-unsummed": PlantedBug(
        "gradients of norms are one member's (sequence parallel)",
        (Patch(StageMath, "_ready", _vary_norms), Patch(StageMath, "gradients", _one_members_norms)),
    ),
    "replica-missing": PlantedBug(
        "the first replica is left out of the sum of gradients (data 2 or more)",
        (
            Patch(Reduction, "inside", _leave_first_member_out),
            Patch(Reduction, "cross_island_sum", _leave_first_island_out),
        ),
    ),
    "replicated-counted-twice": PlantedBug(
        "what all members of TENSOR hold counts twice in the norm (tensor 2 or more)",
        (Patch(Update, "norm", _count_replicated_twice),),
    ),
    "microbatch-twice": PlantedBug(
        "the last microbatch's gradient of the first stage is added twice",
        (Patch(StepTrace, "_backward", _add_last_twice), _KEEPS_ARRAYS),
    ),
    "wrong-activation": PlantedBug(
        "a backward takes what the microbatch before left (2 microbatches or more)",
        (Patch(StepTrace, "_saved", _forward_before), _KEEPS_ARRAYS),
    ),
    "padding-counted": PlantedBug(
        "the padding of the vocabulary is among what the loss is normalised by (padded)",
        (Patch(layers, "token_losses", _losses_with_padding),),
    ),
    "positions-unshifted": PlantedBug(
        "all members add the first part of the positions (sequence parallel, positions)",
        (Patch(layers, "own_part", _first_part_of_positions),),
    ),
    "tied-counted-twice": PlantedBug(
        "what two stages both hold counts as often in the norm (tied, 2 stages or more)",
        (Patch(Step, "_counted", _count_all),),
    ),
    "early-update": PlantedBug(
        "gradients are reduced before the last backward of a stage has added its own (2 microbatches or more)",
        (Patch(action_order, "completing", _complete_too_early), _KEEPS_ARRAYS),
    ),
}
"""Bugs by name."""
