"""The rows of a batch that a host reads for its devices. Little is loaded with it in the process that calls it."""

from __future__ import annotations

import numpy as np

from megatron_ptdp.data.batches import Batches


class HostRows:
    """The host function: its part of the arrays of a batch, by the places of its examples there."""

    __name__ = "load_examples"

    def __init__(self, batches: Batches, names: tuple[str, ...]) -> None:
        self.batches, self.names = batches, names

    def __call__(self, step: np.ndarray, places: np.ndarray) -> dict[str, np.ndarray]:
        """Arrays [m, examples, tokens] of places [m, examples]."""
        first = int(step) * self.batches.size
        rows = self.batches.rows(first + int(place) for place in places.ravel())
        return {name: rows[name].reshape(*places.shape, -1) for name in self.names}
