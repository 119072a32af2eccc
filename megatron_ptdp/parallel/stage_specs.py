"""Layouts of what the functions of one stage take and give, for each function once.

Values and their gradients have two layouts: on the *wires* between slices a member may have a part of what the stage's
model needs whole on every member (scatter/gather, see `shapes.wire_spec`). Nodes take and give them as they lie on the
wires, the functions inside of `jax.shard_map` as the model needs them. All else is laid out alike in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models.interface import DATA, Tree
from megatron_ptdp.parallel.shapes import StageShapes, is_float

BATCH_SPEC = P(None, DATA)
LOSS_SPEC = P(DATA)


class Signature(NamedTuple):
    """Specs of a function: a tuple with those of each argument, and those of the result. None: replicated."""

    inputs: Any
    output: Any


@dataclass(frozen=True)
class StageSpecs:
    """The signatures of one stage's functions, on wires or not.

    Attributes:
        shapes: of the stage
        batch: spec of each array of the batch that the stage looks at
        residuals: specs of what a forward keeps for its backward
    """

    shapes: StageShapes
    batch: dict[str, P]
    residuals: list[P]

    def forward(self, wires: bool) -> Signature:
        """(params, values, batch, k) -> (values or losses, residuals)."""
        inputs, output = self.evaluation(wires)
        return Signature(inputs, (output, self.residuals))

    def evaluation(self, wires: bool) -> Signature:
        """(params, values, batch, k) -> values or losses."""
        shapes = self.shapes
        outgoing = shapes.outgoing_wires if wires else shapes.outgoing_specs
        return Signature(
            (shapes.used_specs, self._values(wires), self.batch, P()), LOSS_SPEC if shapes.stage.has_loss else outgoing
        )

    def backward(self, recompute: bool, weights: bool, inputs: bool, wires: bool) -> Signature:
        """(params, values, residuals, batch, k, upstream, sums) -> (sums, downstream, losses)."""
        sums = self.shapes.sum_specs if weights else {}
        loss = recompute and self.shapes.stage.has_loss and inputs
        return Signature(
            (
                self.shapes.used_specs,
                self._values(wires),
                [] if recompute else self.residuals,
                self.batch if recompute else {},
                P() if recompute else (),
                self.upstream(wires),
                sums,
            ),
            (sums, self._downstream(wires) if inputs else [], LOSS_SPEC if loss else ()),
        )

    def input_gradient(self, early: Sequence[int], late: Sequence[int], saved: list[P], wires: bool) -> Signature:
        """(params, values, early residuals, late residuals, upstream) -> (downstream, what W needs).

        Args:
            early, late: numbers of the residuals that only I takes, and of those that W takes too
            saved: specs of what I saves for W
        """
        return Signature(
            (
                self.shapes.used_specs,
                self._values(wires),
                [self.residuals[k] for k in early],
                [self.residuals[k] for k in late],
                self.upstream(wires),
            ),
            (self._downstream(wires), saved),
        )

    def weight_gradient(self, late: Sequence[int], saved: list[P], wires: bool) -> Signature:
        """(params, values, late residuals, upstream, saved, sums) -> sums, with arguments as `input_gradient`."""
        return Signature(
            (
                self.shapes.used_specs,
                self._values(wires),
                [self.residuals[k] for k in late],
                self.upstream(wires),
                saved,
                self.shapes.sum_specs,
            ),
            self.shapes.sum_specs,
        )

    def upstream(self, wires: bool) -> list[P]:
        """Specs of the gradients of the stage's results; with the loss, of its scale."""
        shapes = self.shapes
        if shapes.stage.has_loss:
            return [P()]
        return _of_floats(shapes.outgoing, shapes.outgoing_wires if wires else shapes.outgoing_specs)

    def _downstream(self, wires: bool) -> list[P]:
        """Specs of the gradients of the stage's input."""
        return _of_floats(self.shapes.values, self._values(wires))

    def _values(self, wires: bool) -> Tree:
        return self.shapes.wires if wires else self.shapes.value_specs


def _of_floats(values: Tree, specs: Tree) -> list[P]:
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(specs), strict=True)
    return [spec for value, spec in pairs if is_float(value)]
