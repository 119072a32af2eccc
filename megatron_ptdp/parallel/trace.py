"""One pass of a schedule over a batch, while the program of a step is traced: which node is called with what, in order.

`Pass` knows of values only that they come from one call and go to another; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel.nodes import StageNodes
from megatron_ptdp.schedules import Action


@dataclass
class Pass:
    """One group of replicas' way through a schedule.

    Attributes:
        nodes: of each stage
        params: of each stage, as forward takes them
        batch: for each stage the arrays it looks at
        scale: what losses are multiplied with
        numbers: for each stage, the number of each microbatch, as arrays on its slice
        joined: microbatches whose forward and backward on the last stage are one node
        keep_input: whether a backward computes its forward again
    """

    nodes: Sequence[StageNodes]
    params: Sequence[Tree]
    batch: Sequence[dict[str, Any]]
    scale: Any
    numbers: Sequence[Sequence[Any]]
    joined: frozenset[int]
    keep_input: bool
    mistakes: frozenset[str] = frozenset()
    sums: list[Tree] = field(default_factory=list)
    values: dict[tuple[int, int], Tree] = field(default_factory=dict)
    kept: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    upstream: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    taps: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
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
        if last and (self.keep_input or k in self.joined):
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
        again = self.keep_input or (last and k in self.joined)
        here = self.nodes[stage]
        if weights != inputs and here.math.has_two_parts:
            return self._first_part(stage, k) if inputs else self._second_part(stage, k)
        taken = self._taken(stage, k)
        times = 2 if "microbatch-twice" in self.mistakes and (stage, k) == (0, len(self.numbers[0]) - 1) else 1
        for _ in range(times):
            sums, downstream, losses = here.backward(again, weights, inputs)(
                self.params[stage],
                self.values[stage, taken],
                [] if again else self.kept[stage, taken],
                self.batch[stage] if again else {},
                self.numbers[stage][taken] if again else (),
                self.upstream[stage, k],
                self.sums[stage] if weights else {},
            )
            if weights:
                self.sums[stage] = sums
        if inputs and stage:
            self.upstream[stage - 1, k] = downstream
        if last and again and inputs:
            self.losses[k] = losses

    def _first_part(self, stage: int, k: int) -> None:
        here, taken = self.nodes[stage], self._taken(stage, k)
        kept = self.kept[stage, taken]
        downstream, self.taps[stage, k] = here.first_part(
            self.params[stage],
            self.values[stage, taken],
            [kept[number] for number in here.parts.early],
            [kept[number] for number in here.parts.late],
            self.upstream[stage, k],
        )
        if stage:
            self.upstream[stage - 1, k] = downstream

    def _second_part(self, stage: int, k: int) -> None:
        here, taken = self.nodes[stage], self._taken(stage, k)
        times = 2 if "microbatch-twice" in self.mistakes and (stage, k) == (0, len(self.numbers[0]) - 1) else 1
        for _ in range(times):
            self.sums[stage] = here.second_part(
                self.params[stage],
                self.values[stage, taken],
                [self.kept[stage, taken][number] for number in here.parts.late],
                self.upstream[stage, k],
                self.taps[stage, k],
                self.sums[stage],
            )

    def _taken(self, stage: int, k: int) -> int:
        """The microbatch whose input the backward takes: its own."""
        return max(k - 1, 0) if "wrong-activation" in self.mistakes else k
