"""Calls of a stage's nodes, in the order of a schedule, while the program of a step is traced.

`StepTrace` passes values from one call to another; it computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel.nodes import StageNodes
from megatron_ptdp.schedules import Action


class Saved(NamedTuple):
    """Arrays of one microbatch that the backward of a stage takes from its forward.

    Attributes:
        values: the stage's input
        residuals: none where the backward computes the forward again
        number: of the microbatch
    """

    values: Tree
    residuals: list[Any]
    number: Any


@dataclass
class StepTrace:
    """The trace of one schedule for one group of replicas.

    Attributes:
        nodes: of each stage
        params: of each stage, as forward takes them
        batch: for each stage the arrays of the batch that it takes
        scale: factor of the losses
        numbers: for each stage, the number of each microbatch, as arrays on its slice
        fused_last_stage: microbatches whose forward and backward on the last stage are one node
        keep_input: whether a backward computes its forward again
    """

    nodes: Sequence[StageNodes]
    params: Sequence[Tree]
    batch: Sequence[dict[str, Any]]
    scale: Any
    numbers: Sequence[Sequence[Any]]
    fused_last_stage: frozenset[int]
    keep_input: bool
    sums: list[Tree] = field(default_factory=list)
    values: dict[tuple[int, int], Tree] = field(default_factory=dict)
    kept: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    upstream: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    saved_for_wgrad: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sums = [nodes.zeros() for nodes in self.nodes]
        for k in range(len(self.numbers[0])):
            self.values[0, k] = {}
            self.upstream[len(self.nodes) - 1, k] = [self.scale]

    def act(self, action: Action) -> None:
        """Calls the node of one action."""
        if action.kind == "F":
            self._forward(action.stage, action.microbatch)
        else:
            self._backward(action.stage, action.microbatch, weights=action.kind in "BW", inputs=action.kind in "BI")

    def _forward(self, stage: int, k: int) -> None:
        last = stage == len(self.nodes) - 1
        if last and (self.keep_input or k in self.fused_last_stage):
            return  # its backward computes it
        here = self.nodes[stage]
        out, kept = here.forward(self.params[stage], self.values[stage, k], self.batch[stage], self.numbers[stage][k])
        self.kept[stage, k] = kept
        if last:
            self.losses[k] = out
        else:
            self.values[stage + 1, k] = out

    def _backward(self, stage: int, k: int, weights: bool, inputs: bool) -> None:
        last = stage == len(self.nodes) - 1
        recompute = self.keep_input or (last and k in self.fused_last_stage)
        here = self.nodes[stage]
        if weights != inputs and here.math.has_two_parts:
            return self._input_gradient(stage, k) if inputs else self._weight_gradient(stage, k)
        saved = self._saved(stage, k)
        sums, downstream, losses = here.backward(recompute, weights, inputs)(
            self.params[stage],
            saved.values,
            [] if recompute else saved.residuals,
            self.batch[stage] if recompute else {},
            saved.number if recompute else (),
            self.upstream[stage, k],
            self.sums[stage] if weights else {},
        )
        if weights:
            self.sums[stage] = sums
        if inputs and stage:
            self.upstream[stage - 1, k] = downstream
        if last and recompute and inputs:
            self.losses[k] = losses

    def _input_gradient(self, stage: int, k: int) -> None:
        here, saved = self.nodes[stage], self._saved(stage, k)
        downstream, self.saved_for_wgrad[stage, k] = here.input_gradient(
            self.params[stage],
            saved.values,
            [saved.residuals[number] for number in here.split.early],
            [saved.residuals[number] for number in here.split.late],
            self.upstream[stage, k],
        )
        if stage:
            self.upstream[stage - 1, k] = downstream

    def _weight_gradient(self, stage: int, k: int) -> None:
        here, saved = self.nodes[stage], self._saved(stage, k)
        self.sums[stage] = here.weight_gradient(
            self.params[stage],
            saved.values,
            [saved.residuals[number] for number in here.split.late],
            self.upstream[stage, k],
            self.saved_for_wgrad[stage, k],
            self.sums[stage],
        )

    def _saved(self, stage: int, k: int) -> Saved:
        return Saved(self.values[stage, k], self.kept.get((stage, k), []), self.numbers[stage][k])
