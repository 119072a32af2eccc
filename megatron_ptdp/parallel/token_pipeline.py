"""A GPT as a pipeline over slices of tokens, as a cut of `gradient_step`: the stages of `step`, and the units of
`schedules.token_slices`.

A stage keeps, of each unit, what came in and its keys and values; its backward computes the forward again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import DATA, TENSOR, Gpt, split
from megatron_ptdp.models.interface import Stage, Tree
from megatron_ptdp.parallel.gradient_step import Gradients, specs_of
from megatron_ptdp.parallel.layout import Layout
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.sizes import Sizes
from megatron_ptdp.parallel.stage_specs import BATCH_SPEC
from megatron_ptdp.parallel.token_slices import SliceGradients, SliceSpecs, SliceStage
from megatron_ptdp.schedules import Schedule

LEFT = P(None, DATA, None, TENSOR)
"""The layout of keys and values, [layers, B, S, a, d]."""


def check(model: Any, sizes: Sizes, options: Options, stages: Sequence[Stage]) -> None:
    """Makes sure that a model can be trained in slices of tokens, if it is to be.

    Args:
        stages: the layers of each

    Raises:
        ConfigError: another part of the configuration looks at whole examples, or at all stages.
        BadSizes: there are more slices than tokens, or a stage has no layers.
    """
    slices = sizes.token_slices
    if slices == 1:
        return
    if not isinstance(model, Gpt) or model.config.experts:
        raise ConfigError(f"token_slices {slices} are for a gpt without experts: in others tokens look at later ones")
    if slices > model.config.sequence:
        raise BadSizes(f"token_slices {slices} are more than the {model.config.sequence} tokens of an example")
    if model.compute.sequence_parallel or options.zero or sizes.islands > 1:
        raise ConfigError(
            "token_slices go without sequence_parallel, zero and data_islands, which are "
            f"{model.compute.sequence_parallel}, {options.zero} and {sizes.islands}"
        )
    if model.config.tied and sizes.stages > 1:
        raise ConfigError("with token_slices no array is shared by two stages, as the embedding is; set tied to false")
    if empty := [number for number, stage in enumerate(stages) if stage.first == stage.last]:
        raise BadSizes(f"with token_slices each stage needs a layer, but stages {empty} have none; choose fewer stages")


class TokenPipeline:
    """The cut of a model into stages that take slices of tokens: `gradient_step.Cut`."""

    def __init__(self, model: Gpt, layout: Layout, schedule: Schedule, options: Options) -> None:
        self.model, self.layout, self.dtype = model, layout, options.compute
        (self.slices,) = layout.slices
        self.parameters = [model.parameters(stage) for stage in layout.stages]
        last = self.home = len(layout.stages) - 1
        names = frozenset(model.batch(1))
        self.wanted = [names if number in (0, last) else frozenset() for number in range(len(self.slices))]
        sizes = layout.sizes
        stages = [self._stage(number) for number in range(len(layout.stages))]
        self.units = SliceGradients(stages, schedule, sizes.token_slices)
        ends = [model.config.sequence * k // sizes.token_slices for k in range(sizes.token_slices + 1)]
        self.bounds = list(pairwise(ends))
        self.cut = [
            pw.compiled(self._cut, slice=self.slices[number], in_specs=(BATCH_SPEC,), out_specs=P(DATA))
            for number in (0, last)
        ]

    def take(self, number: int, whole: Tree) -> Tree:
        """The tree of a stage."""
        return split.take(self.model, self.layout.stages[number], whole)

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The tree of the whole model from those of the stages."""
        return split.join(self.model, self.layout.stages, parts)

    def explain(self) -> str:
        """The bytes that move between stages, as text."""
        config, sizes = self.model.config, self.layout.sizes
        each = sizes.examples * sizes.members * config.sequence * config.hidden * jnp.dtype(self.dtype).itemsize
        return (
            f"from each stage to the next, and back: {each * sizes.microbatches:,} bytes in {sizes.units} slices of "
            f"{sizes.token_slices} to a microbatch"
        )

    def gradients(self, params: Sequence[Tree], batch: Sequence[Mapping[str, Any]], scale: Any) -> Gradients:
        """Loss and gradients, traced in a program."""
        return Gradients(*self.units.traced(params, *self._units(batch, scale)), {})

    def losses(self, params: Sequence[Tree], batch: Sequence[Mapping[str, Any]], scale: Any) -> list[Any]:
        """The losses alone, traced in a program."""
        return self.units.losses(params, *self._units(batch, scale))

    def _units(self, batch: Sequence[Mapping[str, Any]], scale: Any) -> tuple[list[Any], list[Any]]:
        """The inputs of the first stage and the targets of the last, unit by unit."""
        first, last = self.cut
        inputs = first(dict(batch[0]))
        targets = inputs if self.home == 0 else last(dict(batch[self.home]))
        return inputs, [(rows, scale) for rows in targets]

    def _cut(self, batch: dict[str, jax.Array]) -> list[jax.Array]:
        """The tokens of each unit, with the one behind them, of all microbatches."""
        tokens = batch["tokens"]
        return [rows[:, start : end + 1] for rows in tokens for start, end in self.bounds]

    def _stage(self, number: int) -> SliceStage:
        stage, slice = self.layout.stages[number], self.slices[number]
        targets = (P(DATA), (P(DATA), P()))
        specs = SliceSpecs(
            specs_of(self.parameters[number]),
            targets if stage.has_loss else P(DATA),
            P() if stage.has_loss else P(DATA),
            LEFT,
        )
        mesh = slice.mesh.abstract_mesh

        def mapped(function: Callable[..., Any], inputs: Any, output: Any) -> Callable[..., Any]:
            return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=output)

        return SliceStage(slice, partial(self._forward, stage), specs, mapped)

    def _forward(self, stage: Stage, params: Tree, given: Any, past: list[Tree]) -> Any:
        """A member's part of a stage for one unit. The loss is the scaled sum over all members."""
        params = jax.tree.map(lambda array: array.astype(self.dtype), params)
        if not stage.has_loss:
            hidden, batch = (None, {"tokens": given}) if stage.has_embedding else (given, {})
            return self.model.forward_after(stage, params, hidden, batch, past)
        values, (targets, scale) = given
        hidden = None if stage.has_embedding else values
        out, kept = self.model.forward_after(stage, params, hidden, {"tokens": targets}, past)
        return jax.lax.psum(out, DATA) * scale.astype(out.dtype), kept
