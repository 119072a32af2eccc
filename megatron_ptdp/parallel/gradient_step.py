"""A training step of a model that is cut otherwise than into the stages of `step`: it brings its own gradients.

Such a cut says which parts there are, on which slice each lies, and how a program comes to loss and gradients; norm,
decision, update, checkpoints and snapshots are those of all steps. There is one group of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

import pathways_ray as pw
from megatron_ptdp.models.interface import Model, Parameter, Tree
from megatron_ptdp.parallel.batch_feed import BatchFeed, Fed
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.part_nodes import PartNodes
from megatron_ptdp.parallel.sizes import Sizes
from megatron_ptdp.parallel.step_state import State, StatefulStep
from megatron_ptdp.parallel.update import Optimizer, Update


class Gradients(NamedTuple):
    """The loss and the gradients of a batch, as a program makes them.

    Attributes:
        losses: scaled; their sum is the loss
        parts: of each part the gradients of the sum, like its parameters
        metrics: further values to look at
    """

    losses: list[Any]
    parts: list[Tree]
    metrics: dict[str, Any]


class Cut(Protocol):
    """A model in parts."""

    @property
    def slices(self) -> Sequence[pw.VirtualSlice]:
        """The slice of each part."""

    @property
    def parameters(self) -> Sequence[Tree]:
        """Of each part, a tree of `Parameter`."""

    @property
    def wanted(self) -> Sequence[frozenset[str]]:
        """For each part the names of the arrays of the batch that it looks at."""

    @property
    def home(self) -> int:
        """The number of the part that has the loss."""

    def take(self, number: int, whole: Tree) -> Tree:
        """The tree of a part, in NumPy, from that of the whole model."""

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The tree of the whole model from those of all parts."""

    def gradients(self, params: Sequence[Tree], batch: Sequence[Mapping[str, Any]], scale: Any) -> Gradients:
        """Loss and gradients, traced in a program.

        Args:
            params: master parameters of each part
            batch: for each part its arrays, [m, examples, ...]
            scale: the factor of the losses
        """

    def losses(self, params: Sequence[Tree], batch: Sequence[Mapping[str, Any]], scale: Any) -> list[Any]:
        """The losses alone, scaled, traced in a program: their sum is that of the batch."""

    def explain(self) -> str:
        """The bytes that move between slices, as text."""


@dataclass(frozen=True)
class Part:
    """The arrays of a part: `update.PartShapes`."""

    parameters: Tree

    @property
    def master_specs(self) -> Tree:
        """Specs of the parameters: members of DATA hold all of them."""
        return specs_of(self.parameters)


def specs_of(parameters: Tree) -> Tree:
    """The spec of each `Parameter` of a tree."""
    return jax.tree.map(lambda parameter: parameter.spec, parameters, is_leaf=lambda leaf: isinstance(leaf, Parameter))


class GradientStep(StatefulStep):
    """The step of a cut. Made by `build_step`, and used like `Step`."""

    def __init__(self, model: Model, optimizer: Optimizer, cut: Cut, sizes: Sizes, options: Options) -> None:
        self.cut, self.sizes = cut, sizes
        row = []
        for number, (slice, parameters) in enumerate(zip(cut.slices, cut.parameters, strict=True)):
            part = Part(parameters)
            counted = jax.tree.map(lambda _: True, parameters)
            row.append(PartNodes(number, slice, part, Update(part, optimizer, counted, options.master)))
        super().__init__(model, options, [row])
        scales = "float64" if options.master == "float64" else "float32"
        self.feed = BatchFeed(model, sizes, cut.wanted, scales)
        self._step = pw.program(self._train, name="training_step")
        self._gradients = pw.program(self._differentiate, name="gradients")
        self._evaluation = pw.program(self._evaluate, name="evaluation")

    def take(self, number: int, whole: Tree) -> Tree:
        """The tree of a part."""
        return self.cut.take(number, whole)

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The tree of the whole model from those of the parts."""
        return self.cut.join(parts)

    def renew(self) -> None:
        """Nothing: beside its state such a step has no arrays."""

    def __call__(self, state: State, batch: Mapping[str, np.ndarray] | Fed) -> tuple[State, dict[str, Any]]:
        """As `Step`."""
        made: tuple[State, dict[str, Any]] = self._step(state, *self.feed(batch))
        return made

    def gradients(self, state: State, batch: Mapping[str, np.ndarray]) -> tuple[float, Tree]:
        """As `Step.gradients`."""
        loss, parts = self._gradients(state, *self.feed(batch))
        return float(loss), self.join(jax.tree.map(np.asarray, parts))

    def evaluate(self, state: State, batch: Mapping[str, np.ndarray]) -> Any:
        """As `Step.evaluate`."""
        return self._evaluation(state, *self.feed(batch))

    def explain(self) -> str:
        """The bytes that move between slices, as text."""
        return self.cut.explain()

    # --- traced -------------------------------------------------------------------------------------------------------

    def _train(self, state: State, batch: Any, scale: Any) -> tuple[State, dict[str, Any]]:
        made = self.cut.gradients(state.params[0], batch[0], scale[0])
        after, metrics = self.updated(state, [made.parts], made.losses)
        return after, {**metrics, **made.metrics}

    def _differentiate(self, state: State, batch: Any, scale: Any) -> tuple[Any, list[Tree]]:
        made = self.cut.gradients(state.params[0], batch[0], scale[0])
        return self._sum(made.losses), made.parts

    def _evaluate(self, state: State, batch: Any, scale: Any) -> Any:
        return self._sum(self.cut.losses(state.params[0], batch[0], scale[0]))

    def _sum(self, losses: list[Any]) -> Any:
        return self._decider().total(losses)

    def _decider(self) -> PartNodes:
        return self.parts[0][self.cut.home]
