"""Small values of a call, which go with its launch: an upload of its own would cost each of them more than the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pathways_ray import limits
from pathways_ray.client.argument_types import to_numpy
from pathways_ray.client.graph_builder import BuiltProgram
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.ir.script import has_control
from pathways_ray.jax_types import dtype_named
from pathways_ray.transport.messages import InlineArgument


class Kind(NamedTuple):
    """The shape and dtype that a value has to have."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def kinds_of(built: BuiltProgram) -> dict[int, Kind]:
    """The arguments that a launch may carry, by number: nothing else is made of them, and it does not go in parts."""
    if has_control(built.graph):
        return {}
    kept = {output.leaf for output in built.outputs if output.result < 0} | {-1}
    numbers = {k for k, source in enumerate(built.sources) if source.leaf not in kept}
    numbers.difference_update(built.graph.donated_arguments)
    types = {node.index: node.type for node in built.graph.arguments}
    return {k: Kind(types[k].shape, dtype_named(types[k].dtype)) for k in numbers}


class Carrying:
    """The values that one launch carries: `inline`. No more than `MAX_INLINE` of them, nor than `room` bytes for all
    hosts together, or `most` of these, which is asked where there is not room enough."""

    def __init__(
        self,
        kinds: dict[int, Kind],
        room: int = limits.MAX_SENT_INLINE_BYTES,
        most: Callable[[], int] | None = None,
    ) -> None:
        self.inline: list[InlineArgument] = []
        self._kinds = kinds
        self._room = self._first = room
        self._most = most

    def takes(self, number: int, value: Any, where: VirtualSlice) -> bool:
        """Whether the launch carries argument `number` to a slice; the other ones are uploaded."""
        kind = self._kinds.get(number)
        if kind is None or where.released or len(self.inline) == limits.MAX_INLINE:
            return False
        half = getattr(value, "nbytes", 0) // 2  # 64 bits may become 32
        if half > self._room and not self._has_more_for(half):
            return False
        array = value if type(value) is np.ndarray and value.dtype == kind.dtype else to_numpy(value)[0]
        size = array.nbytes * len(where.placed.hosts)
        if (array.shape, array.dtype) != kind or not size or (size > self._room and not self._has_more_for(size)):
            return False
        self._room -= size
        self.inline.append((number, array.tobytes()))
        return True

    def _has_more_for(self, size: int) -> bool:
        """Whether there is room for so much with all that the launch may carry."""
        if self._most is not None:
            self._room += self._most() - self._first
            self._most = None
        return size <= self._room
