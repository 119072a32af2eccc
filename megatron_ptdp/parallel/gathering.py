"""ZeRO-3 inside a stage: members of DATA hold a part of each layer, and have a whole one only while they compute it.

A layer's parameters are gathered inside the loop over layers, in the dtype that is computed in. Its gradient is summed
and scattered there too, in the dtype of the sums. So of what is whole a member has one layer at a time, and never the
stage. What the backward needs of a layer's parameters is not kept: they are gathered again (`not_gathered`).

Parameters outside of the stacks, as the embedding, are gathered for as long as a microbatch runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from megatron_ptdp.models.interface import DATA, Fetch, Tree
from megatron_ptdp.parallel.reduce import scattered
from megatron_ptdp.parallel.shapes import StageShapes


def is_fetched(shapes: StageShapes) -> Tree:
    """A tree of bool: whether the parameter is gathered layer by layer."""
    return jax.tree.map(lambda p: shapes.zero == 3 and p.stacked, shapes.parameters)


def fetching(shapes: StageShapes, compute: str, master: str, direct: bool) -> Fetch | None:
    """The function that gathers a layer's parameters, for the stage's model; None where parameters are whole.

    Args:
        compute, master: dtypes, as `Options` has them
        direct: as `reduce.scattered`
    """
    if shapes.zero != 3:
        return None

    def fetch(name: str, layer: Tree) -> Tree:
        return jax.tree.map(
            lambda array, k: gathered(array, k - 1, compute, master, direct) if k >= 0 else array.astype(compute),
            layer,
            shapes.shared[name],
        )

    return fetch


def gathered(array: Any, dimension: int, compute: str, master: str, direct: bool) -> Any:
    """A whole array from the members' parts, of dtype `master`; its gradient is their part of the sum over DATA."""

    def gather(part: Any) -> Any:
        return jax.lax.all_gather(part.astype(compute), DATA, axis=dimension, tiled=True)

    def back(_: None, ct: Any) -> tuple[Any]:
        return (scattered(ct.astype(master), dimension, direct),)

    whole: Callable[[Any], Any] = jax.custom_vjp(gather)
    whole.defvjp(lambda part: (gather(part), None), back)  # type: ignore[attr-defined]
    return whole(array)
