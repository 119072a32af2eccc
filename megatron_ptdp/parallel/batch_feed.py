"""The arguments of one launch of a step, cut from a NumPy batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ptdp.errors import BatchError
from megatron_ptdp.models.interface import Model
from megatron_ptdp.parallel.sizes import Sizes


@dataclass(frozen=True)
class BatchFeed:
    """Checks batches and cuts them.

    Attributes:
        model: whose batches they are
        sizes: of the run
        wanted: for each pipeline device the names of the arrays that its stages take; it gets no others
        dtype: of the loss's scale
    """

    model: Model
    sizes: Sizes
    wanted: Sequence[frozenset[str]]
    dtype: str

    def __call__(self, batch: Mapping[str, np.ndarray]) -> tuple[list[list[dict[str, np.ndarray]]], list[np.ndarray]]:
        """Arrays for each pipeline device of each group of replicas, [m, examples of all its members, ...]; and
        the factor of the losses.

        Raises:
            BatchError: an array is missing, or of another shape or kind; or no token has a weight.
        """
        sizes = self.sizes
        arrays = {name: self._checked(name, *kind, batch) for name, kind in self.model.batch(sizes.batch).items()}
        tokens = float(self.model.tokens(batch))
        if not tokens > 0:
            raise BatchError(f"the weights of the batch's tokens add up to {tokens}: nothing is to be predicted")
        groups = [self._group(arrays, group) for group in range(sizes.islands)]
        placed = [[{name: rows[name] for name in sorted(names)} for names in self.wanted] for rows in groups]
        return placed, [np.asarray(1.0 / tokens, self.dtype)] * sizes.islands

    def _checked(self, name: str, shape: tuple[int, ...], dtype: str, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The array as [m, d, examples, ...]."""
        sizes = self.sizes
        found = np.asarray(batch[name]) if name in batch else None
        if found is None or found.shape != shape:
            raise BatchError(
                f"the batch's {name!r} is {'missing' if found is None else f'of shape {found.shape}'}, but {shape} is "
                f"needed: {sizes.microbatches} microbatches of {sizes.examples} examples on each of {sizes.data} "
                "replicas"
            )
        if not np.can_cast(found.dtype, dtype, "same_kind"):
            raise BatchError(f"the batch's {name!r} is of {found.dtype}, but {dtype} is needed")
        return found.astype(dtype, copy=False).reshape(sizes.microbatches, sizes.data, -1, *shape[1:])

    def _group(self, arrays: Mapping[str, np.ndarray], group: int) -> dict[str, np.ndarray]:
        """The rows of one group's replicas."""
        mine = slice(group * self.sizes.members, (group + 1) * self.sizes.members)
        return {
            name: np.ascontiguousarray(array[:, mine]).reshape(self.sizes.microbatches, -1, *array.shape[3:])
            for name, array in arrays.items()
        }
