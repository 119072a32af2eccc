"""The part that one host has of arrays over a slice: what a host function takes there, and gives.

Every host of a slice makes one call, with its part of each argument, and gives its part of each result. On one host
that is the whole array.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways_ray.errors import CompileError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, block_of, box_shape, relative, shard_boxes
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_arrays import array_of, shards_of


class LocalPart:
    """A host's part of an array: the box that its shards make together.

    Raises:
        CompileError: they make none, such as two blocks of rows with others between them.
    """

    def __init__(self, array: ArrayType, spec: Spec, placed: PlacedSlice, host: int, what: str = "an array") -> None:
        boxes = shard_boxes(array, spec, placed.mesh)
        self.type = array
        self.boxes = [box for box, device in zip(boxes, placed.devices, strict=True) if device.host == host]
        """The box of each shard here, in the order of the slice's devices."""
        box = block_of(self.boxes)
        if box is None:
            raise CompileError(
                f"host {host} has parts of {what} that are no block ({spec} over {placed.mesh}); choose another spec, "
                "or order the axes of the slice so that its hosts are along the first one"
            )
        self.box: Box = box
        self.shape = box_shape(box)

    def gather(self, array: jax.Array) -> np.ndarray[Any, Any]:
        """The part as one array; waits for the devices. It may share their memory."""
        array.block_until_ready()  # raises for one that failed; NumPy would wait for good, or end the process over it
        shards = dict(zip(self.boxes, shards_of(array), strict=True))
        if self.box in shards:
            return np.asarray(shards[self.box])
        made: np.ndarray[Any, Any] | None = None
        for box, shard in shards.items():
            piece = np.asarray(shard)
            made = np.empty(self.shape, piece.dtype) if made is None else made
            made[tuple(slice(*cut) for cut in relative(box, self.box))] = piece
        assert made is not None
        return made

    def scatter(self, value: np.ndarray[Any, Any], sharding: NamedSharding, devices: list[jax.Device]) -> jax.Array:
        """The array of which this is the part here.

        Args:
            devices: those of the slice on this host, in the slice's order.
        """
        cuts = [tuple(slice(*cut) for cut in relative(box, self.box)) for box in self.boxes]
        return array_of(self.type.shape, sharding, [np.array(value[cut]) for cut in cuts], devices)
