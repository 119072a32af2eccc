"""The arguments of one launch of a step, cut from a NumPy batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron_ptdp.errors import BatchError
from megatron_ptdp.models.interface import Model
from megatron_ptdp.parallel.sizes import Sizes


class Fed(NamedTuple):
    """The arguments of a step that are its batch.

    Attributes:
        arrays: for each pipeline device of each group of replicas those that its stages take, [m, examples of all its
            members, ...]
        scales: for each group the factor of the losses
    """

    arrays: list[list[dict[str, Any]]]
    scales: list[np.ndarray]


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

    def __call__(self, batch: Mapping[str, np.ndarray] | Fed) -> Fed:
        """The arguments of a step, from the arrays of a whole batch; those that were made elsewhere stay as they are.

        Raises:
            BatchError: an array is missing, or of another shape or kind; or no token has a weight.
        """
        if isinstance(batch, Fed):
            return batch
        sizes = self.sizes
        arrays = {name: self._checked(name, *kind, batch) for name, kind in self.model.batch(sizes.batch).items()}
        tokens = float(self.model.tokens(batch))
        if not tokens > 0:
            raise BatchError(f"the weights of the batch's tokens add up to {tokens}: nothing is to be predicted")
        groups = [
            {name: self.rows_of(group, array) for name, array in arrays.items()} for group in range(sizes.islands)
        ]
        placed = [[{name: rows[name] for name in sorted(names)} for names in self.wanted] for rows in groups]
        return Fed(placed, self.scales(tokens))

    def scales(self, tokens: float) -> list[np.ndarray]:
        """The factor of the losses for each group, of a batch of so many predicted tokens."""
        return [np.asarray(1.0 / tokens, self.dtype)] * self.sizes.islands

    def rows_of(self, group: int, array: np.ndarray) -> np.ndarray:
        """The rows of a group's replicas, [m, examples of its members, ...], of an array of a batch."""
        sizes = self.sizes
        mine = slice(group * sizes.members, (group + 1) * sizes.members)
        found = array.reshape(sizes.microbatches, sizes.data, -1, *array.shape[1:])[:, mine]
        return np.ascontiguousarray(found).reshape(sizes.microbatches, -1, *array.shape[1:])

    def _checked(self, name: str, shape: tuple[int, ...], dtype: str, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The array [examples of all, ...] in its dtype."""
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
        return found.astype(dtype, copy=False)
