"""The compiled functions of one stage on one slice: the nodes of a step's program."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.parallel.part_nodes import PartNodes
from megatron_ptdp.parallel.reduce import BUCKET_SPEC, Reduction
from megatron_ptdp.parallel.split_backward.stage_split import SplitBackward
from megatron_ptdp.parallel.stage import StageMath
from megatron_ptdp.parallel.stage_specs import Signature
from megatron_ptdp.parallel.update import Update


class StageNodes(PartNodes):
    """One stage of one group of replicas. Names of functions show in timelines and plans: stage3_forward."""

    def __init__(
        self, number: int, slice: pw.VirtualSlice, math: StageMath, reduction: Reduction, update: Update
    ) -> None:
        super().__init__(number, slice, math.shapes, update)
        self.math, self.shapes = math, math.shapes
        shapes = self.shapes
        master, sums, buckets = shapes.master_specs, shapes.sum_specs, [BUCKET_SPEC] * reduction.buckets
        compute = math.compute

        self.copies_parameters = math.used != math.master or shapes.zero in (1, 2)
        self.prepare = self._compiled(
            "parameters",
            lambda params: jax.tree.map(lambda array: array.astype(compute), params),
            Signature((master,), shapes.used_specs),
        )
        self.zeros = self._compiled("zeros", lambda: shapes.zeros(math.master), Signature((), sums))
        self.forward = self._compiled("forward", math.forward, math.specs.forward(wires=True))
        self.evaluate = self._compiled("evaluation", math.evaluate, math.specs.evaluation(wires=True))
        self._backwards: dict[tuple[bool, bool, bool], Any] = {}
        self.reduce = self._compiled("reduce", reduction.inside, Signature((sums,), master), donate=(0,))
        self.reduce_scatter = self._compiled(
            "reduce_scatter", reduction.reduce_scatter, Signature((sums,), buckets), donate=(0,)
        )
        self.cross_island_sum = self._compiled(
            "cross_island_sum",
            reduction.cross_island_sum,
            Signature(([BUCKET_SPEC] * reduction.islands,), BUCKET_SPEC),
        )
        self.all_gather = self._compiled("all_gather", reduction.all_gather, Signature((buckets,), master))

    def backward(self, recompute: bool, weights: bool, inputs: bool) -> Any:
        """The node of `StageMath.backward`. Sums are donated; residuals too, unless a W after this takes them."""
        key = (recompute, weights, inputs)
        if key not in self._backwards:
            self._backwards[key] = self._compiled(
                "backward" if weights and inputs else "input_gradient" if inputs else "weight_gradient",
                self.math.backward(*key),
                self.math.specs.backward(*key, wires=True),
                donate=(2, 6) if weights else (6,),
            )
        return self._backwards[key]

    @cached_property
    def split(self) -> SplitBackward:
        """The backward in two parts, traced when a schedule has them."""
        return SplitBackward(self.math)

    @cached_property
    def input_gradient(self) -> Any:
        """I, as `SplitBackward.input_gradient`. Residuals that W does not take are donated."""
        split = self.split
        return self._compiled(
            "input_gradient", split.input_gradient(), split.input_gradient_specs(wires=True), donate=(2,)
        )

    @cached_property
    def weight_gradient(self) -> Any:
        """W, as `SplitBackward.weight_gradient`. Sums, saved values and residuals are donated."""
        split = self.split
        return self._compiled(
            "weight_gradient", split.weight_gradient(), split.weight_gradient_specs(wires=True), donate=(2, 4, 5)
        )

    def add(self, spec: P) -> Any:
        """The sum of two arrays with this layout."""
        return self._compiled("add", lambda a, b: a + b, Signature((spec, spec), spec))

    def total_loss(self) -> Any:
        """The loss from the losses of all microbatches in their order, [members] each, and the scale."""
        return self._compiled(
            "loss",
            lambda losses, scale: jnp.sum(jnp.stack(losses)) * scale.astype(losses[0].dtype),
            Signature((P(), P()), P()),
        )
