"""The canonical whole state: NumPy arrays that do not depend on stages, sharding or padding.

    {"params": tree, "slots": {"0/mu": tree, ...}, "counts": {"0/count": array, ...}}

Slots are the arrays that the optimizer has for each parameter, under their names in optax's state; counts are its other
arrays. Trees are those of the whole model (`models.split`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from megatron_ptdp.errors import CheckpointError
from megatron_ptdp.models import split
from megatron_ptdp.models.interface import Model, Tree
from megatron_ptdp.parallel.update import Update

Path = tuple[Any, ...]


def gather(
    join: Callable[[Sequence[Tree]], Tree], updates: Sequence[Update], params: Sequence[Tree], slots: Sequence[Any]
) -> dict[str, Any]:
    """The canonical whole state from the arrays of each part, of which `join` makes a whole tree."""
    trees: dict[str, list[dict[Path, Any]]] = {}
    counts: dict[str, Any] = {}
    for number, (update, held) in enumerate(zip(updates, slots, strict=True)):
        for (name, path), leaf in zip(_places(update), jax.tree.leaves(held), strict=True):
            if path is None:
                counts[name] = np.asarray(leaf)
            else:
                trees.setdefault(name, [{} for _ in updates])[number][path] = np.asarray(leaf)
    return {
        "params": join(jax.tree.map(np.asarray, list(params))),
        "slots": {
            name: join([_full(update, part) for update, part in zip(updates, parts, strict=True)])
            for name, parts in trees.items()
        },
        "counts": counts,
    }


def slots_of(take: Callable[[Tree], Tree], update: Update, whole: Mapping[str, Any]) -> Any:
    """The optimizer's state of one part, which `take` cuts from a whole tree.

    Raises:
        CheckpointError: the whole state has no such slots, or those of another model.
    """
    parts: dict[str, Tree] = {}
    leaves = []
    for (name, path), kind in zip(_places(update), jax.tree.leaves(update.slots), strict=True):
        kept = whole.get("counts" if path is None else "slots", {})  # a checkpoint has no dicts that were empty
        if name not in kept:
            raise CheckpointError(
                f"the state has no {name!r}, which this optimizer keeps; it has {', '.join(sorted(kept)) or 'nothing'}"
                ". Use the optimizer that it was written with"
            )
        if path is None:
            leaves.append(np.asarray(kept[name], kind.dtype).reshape(kind.shape))
            continue
        if name not in parts:
            parts[name] = take(kept[name])
        leaves.append(np.asarray(_at(parts[name], path), kind.dtype))
    return jax.tree.unflatten(jax.tree.structure(update.slots), leaves)


def unpadded(model: Model, tree: Tree) -> Tree:
    """The whole model's tree without the padding that some of its arrays have, if it is such a tree at all."""
    parameters = model.parameters(split.whole(model))
    found: Any = jax.tree.structure(tree)
    if found != jax.tree.structure(parameters):
        return tree
    return jax.tree.map(
        lambda array, p: split.unpad(np.asarray(array), p) if np.shape(array) == p.shape else array, tree, parameters
    )


def _places(update: Update) -> list[tuple[str, Path | None]]:
    """Name of each leaf of the optimizer's state, and the path of its parameter, or None."""
    paths = jax.tree_util.tree_map_with_path(lambda path, _: _Path(path), update.master)
    labels = optax.tree.map_params(
        update.transform, lambda _, path: path, update.slots, paths, transform_non_params=lambda _: _Path(None)
    )
    found: list[tuple[str, Path | None]] = []
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        of = label.keys
        start = path if of is None else path[: len(path) - len(of)]
        name = jax.tree_util.keystr(start, simple=True, separator="/")
        found.append((name, None if of is None else _keys(of)))
    return found


class _Path:
    """A path as a leaf of a tree."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys


def _full(update: Update, part: Mapping[Path, Any]) -> Tree:
    """The tree with zeros for the parameters for which the optimizer keeps nothing."""
    return jax.tree_util.tree_map_with_path(
        lambda path, kind: part.get(_keys(path), np.zeros(kind.shape, kind.dtype)), update.master
    )


def _keys(path: Any) -> Path:
    """The names, and numbers in lists, on the way to a leaf."""
    return tuple(getattr(entry, "key", getattr(entry, "idx", None)) for entry in path)


def _at(tree: Tree, path: Path) -> Any:
    for name in path:
        tree = tree[name]
    return tree
