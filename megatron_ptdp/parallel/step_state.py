"""The state of a training step, whatever its parts are: placed, copied, gathered, updated.

A model is cut into parts, each on a slice: the stages of a pipeline, or what lies on slices of its own. Each part has
master parameters and the arrays of the optimizer. How a step comes to its gradients is its own business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

import pathways_ray as pw
from megatron_ptdp.models.interface import Model, Tree
from megatron_ptdp.parallel import canonical
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.part_nodes import PartNodes
from megatron_ptdp.parallel.shapes import names_of


class State(NamedTuple):
    """The state that a step changes, as `pw.Array`s.

    Attributes:
        params: for each group of replicas, for each part (stage), the tree of master parameters
        slots: the same of the optimizer's arrays
    """

    params: tuple[tuple[Tree, ...], ...]
    slots: tuple[tuple[Any, ...], ...]


class StatefulStep:
    """The part of a step that keeps its state.

    Args:
        nodes: of each part, for each group of replicas
    """

    def __init__(self, model: Model, options: Options, nodes: Sequence[Sequence[PartNodes]]) -> None:
        self.model, self.options, self.parts = model, options, nodes
        self._begin = pw.program(self._first_slots, name="first_slots")
        self._copy = pw.program(self._copied, name="copy_state")

    def take(self, number: int, whole: Tree) -> Tree:
        """The tree of a part, in NumPy, from that of the whole model.

        Raises:
            CheckpointError: it is no tree of this model.
        """
        raise NotImplementedError

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The tree of the whole model from those of all parts."""
        raise NotImplementedError

    # --- for users ----------------------------------------------------------------------------------------------------

    def initial(self, whole: Tree) -> State:
        """The state to begin with, from NumPy parameters of the whole model, with their padding or without.

        Raises:
            CheckpointError: they are not those of this model.
        """
        params = self._placed(canonical.unpadded(self.model, whole))
        if not jax.tree.leaves([nodes.update.slots for nodes in self.parts[0]]):  # plain SGD keeps nothing
            return State(params, tuple(tuple(nodes.update.slots for nodes in row) for row in self.parts))
        return State(params, self._begin(params))

    def snapshot(self, state: State) -> State:
        """A copy, to be read while training goes on."""
        copied: State = self._copy(state)
        return copied

    def gather(self, state: State) -> dict[str, Any]:
        """The canonical whole state, see `canonical`. Waits."""
        updates = [nodes.update for nodes in self.parts[0]]
        return canonical.gather(self.join, updates, state.params[0], state.slots[0])

    def place(self, whole: Mapping[str, Any]) -> State:
        """The state from a canonical whole state; the inverse of `gather`.

        Raises:
            CheckpointError: it is of another model or another optimizer.
        """
        parts = [
            canonical.slots_of(partial(self.take, number), nodes.update, whole)
            for number, nodes in enumerate(self.parts[0])
        ]
        slots = tuple(
            tuple(
                pw.put(part, nodes.slice, nodes.update.slot_specs) if jax.tree.leaves(part) else part
                for part, nodes in zip(parts, row, strict=True)
            )
            for row in self.parts
        )
        return State(self._placed(whole["params"]), slots)

    def first_bad(self, metrics: Mapping[str, Any]) -> tuple[int, str] | None:
        """The first stage and parameter whose gradient had a value that was not finite; None if all were finite. The
        backward runs from the last stage to the first, so the last stage comes first here."""
        for number in reversed(range(len(self.parts[0]))):
            counts = np.asarray(metrics["bad"][number])
            if counts.any():
                return number, names_of(self.parts[0][number].part.parameters)[int(np.flatnonzero(counts)[0])]
        return None

    # --- traced -------------------------------------------------------------------------------------------------------

    def updated(
        self, state: State, gradients: Sequence[Sequence[Tree]], losses: Sequence[Any]
    ) -> tuple[State, dict[str, Any]]:
        """The next state and the metrics of a step.

        Args:
            gradients: of each part, for each group of replicas, who all have the same
            losses: summed and scaled; those of several islands
        """
        found = [nodes.norm(own) for nodes, own in zip(self.parts[0], gradients[0], strict=True)]
        bad = [counts for _, counts in found]
        decided = self._decider().decide(self.options.clip)(list(losses), [square for square, _ in found], bad)
        new = [
            [
                nodes.apply(params, slots, own, decided["factor"], decided["applied"])
                for nodes, params, slots, own in zip(row, *parts, strict=True)
            ]
            for row, *parts in zip(self.parts, state.params, state.slots, gradients, strict=True)
        ]
        after = State(
            tuple(tuple(params for params, _ in row) for row in new),
            tuple(tuple(slots for _, slots in row) for row in new),
        )
        return after, {"loss": decided["loss"], "norm": decided["norm"], "applied": decided["applied"], "bad": bad}

    def _decider(self) -> PartNodes:
        """The part where the loss is."""
        return self.parts[0][-1]

    def _placed(self, whole: Tree) -> tuple[tuple[Tree, ...], ...]:
        """Master parameters on all slices."""
        parts = [self.take(number, whole) for number in range(len(self.parts[0]))]
        return tuple(
            tuple(
                pw.put(
                    jax.tree.map(lambda a: np.asarray(a, self.options.master), part),
                    nodes.slice,
                    nodes.part.master_specs,
                )
                for part, nodes in zip(parts, row, strict=True)
            )
            for row in self.parts
        )

    def _first_slots(self, params: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(
            tuple(nodes.begin(part) for nodes, part in zip(row, parts, strict=True))
            for row, parts in zip(self.parts, params, strict=True)
        )

    def _copied(self, state: State) -> State:
        made = [
            [nodes.copy(*parts) for nodes, *parts in zip(row, params, slots, strict=True)]
            for row, params, slots in zip(self.parts, *state, strict=True)
        ]
        return State(tuple(tuple(p for p, _ in row) for row in made), tuple(tuple(s for _, s in row) for row in made))
