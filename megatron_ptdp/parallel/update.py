"""The update of parameters: global norm, the decision whether to apply it, and the optimizer of one stage.

All are functions of whole arrays, so an array that is replicated over TENSOR counts once. An array tied between two
stages counts on the first of them only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models.interface import Tree

Optimizer: TypeAlias = Callable[[Tree], optax.GradientTransformation]
"""Function from the tree of bool, whether a parameter decays, to the transformation of these parameters."""


class PartShapes(Protocol):
    """The arrays of a part of a model, such as a stage: a tree of `Parameter`, and the specs of what the optimizer
    updates."""

    @property
    def parameters(self) -> Tree: ...

    @property
    def master_specs(self) -> Tree: ...


def _require_same(slot: Any, parameter: Any) -> None:
    if slot.shape != parameter.shape:
        raise ConfigError(
            f"the optimizer keeps an array of shape {slot.shape} for a parameter of shape {parameter.shape}; only "
            "optimizers that work element by element can be cut into stages (adamw, adam, sgd, lion, ...)"
        )


class Update:
    """The last part of a step on one stage, or another part of the model.

    Args:
        shapes: of the part
        optimizer: see `Optimizer`
        counted: tree of bool, whether the array counts in the global norm
        master: dtype of the parameters that the optimizer updates
    """

    def __init__(
        self,
        shapes: PartShapes,
        optimizer: Optimizer,
        counted: Tree,
        master: str,
    ) -> None:
        self.shapes, self.counted = shapes, counted
        self.transform = optimizer(jax.tree.map(lambda p: p.decay, shapes.parameters))
        self.master = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, master), shapes.parameters)
        self.slots = jax.eval_shape(self.transform.init, self.master)
        optax.tree.map_params(self.transform, _require_same, self.slots, self.master)

    @property
    def slot_specs(self) -> Any:
        """Specs of the optimizer's arrays: those of their parameters, or replicated where there is no parameter."""
        return optax.tree.map_params(
            self.transform,
            lambda _, spec: spec,
            self.slots,
            self.shapes.master_specs,
            transform_non_params=lambda _: P(),
        )

    def begin(self, params: Tree) -> Any:
        """The optimizer's state at first."""
        return self.transform.init(params)

    def norm(self, gradients: Tree) -> tuple[Any, Any]:
        """(sum of squares, [parameters] how many values are not finite)."""
        leaves = jax.tree.leaves(gradients)
        squares = [
            jnp.sum(jnp.square(leaf))
            for leaf, counts in zip(leaves, jax.tree.leaves(self.counted), strict=True)
            if counts
        ]
        bad = [jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in leaves]
        return sum(squares, start=jnp.zeros((), leaves[0].dtype)), jnp.stack(bad)

    def apply(self, params: Tree, slots: Any, gradients: Tree, factor: Any, applied: Any) -> tuple[Tree, Any]:
        """The new parameters and slots; the old ones where `applied` is False."""
        scaled = jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients)
        updates, after = self.transform.update(scaled, slots, params)
        new = optax.apply_updates(params, updates)
        return jax.tree.map(lambda there, here: jnp.where(applied, there, here), (new, after), (params, slots))


def decide(losses: Sequence[Any], squares: Sequence[Any], bad: Sequence[Any], clip: float | None) -> dict[str, Any]:
    """Loss, norm and decision for all stages.

    Args:
        losses: of each island, summed and scaled
        squares, bad: of each stage, as `Update.norm` gives them
        clip: the largest norm

    Returns:
        loss, norm, factor (what gradients are multiplied with), applied (whether all is finite).
    """
    loss = sum(losses[1:], start=losses[0])
    norm = jnp.sqrt(sum(squares[1:], start=squares[0]))
    factor = jnp.ones_like(norm) if clip is None else jnp.minimum(1.0, clip / norm).astype(norm.dtype)
    found = sum((jnp.sum(counts) for counts in bad), start=jnp.zeros((), jnp.int32))
    applied = jnp.isfinite(loss) & jnp.isfinite(norm) & (found == 0)
    return {"loss": loss, "norm": norm, "factor": factor, "applied": applied}
