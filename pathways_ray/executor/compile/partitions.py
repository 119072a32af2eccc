"""Partitions of the devices of a mesh: on which of them a value is sure to be equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from pathways_ray.errors import ProgramRefused

Partition: TypeAlias = int
"""A partition of the devices, as its number in `Partitions`; 0 is the one in which all are equal."""

UNIFORM: Partition = 0

MAX_DEVICES = 1 << 14


class Partitions:
    """The partitions met so far, each with a number, and joins of them."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._tuples: list[tuple[int, ...]] = [(0,) * devices]
        self._numbers: dict[tuple[int, ...], Partition] = {self._tuples[0]: UNIFORM}
        self._joins: dict[tuple[Partition, Partition], Partition] = {}

    def of(self, labels: Iterable[Any]) -> Partition:
        """The partition in which devices with equal labels are equal."""
        seen: dict[Any, int] = {}
        labels = tuple(seen.setdefault(label, len(seen)) for label in labels)
        number = self._numbers.setdefault(labels, len(self._tuples))
        if number == len(self._tuples):
            self._tuples.append(labels)
        return number

    def labels(self, partition: Partition) -> tuple[int, ...]:
        return self._tuples[partition]

    def join(self, *partitions: Partition) -> Partition:
        """Devices are equal in the result if they are equal in each of these."""
        found = UNIFORM
        for other in partitions:
            if other in (found, UNIFORM):
                continue
            if found == UNIFORM:
                found = other
                continue
            pair = (min(found, other), max(found, other))
            if pair not in self._joins:
                self._joins[pair] = self.of(zip(self._tuples[pair[0]], self._tuples[pair[1]], strict=True))
            found = self._joins[pair]
        return found

    def equal_on(self, partition: Partition, devices: Sequence[int]) -> bool:
        labels = self._tuples[partition]
        return all(labels[device] == labels[devices[0]] for device in devices)


@dataclass(frozen=True)
class Mesh:
    """A mesh of the module: its axes, and the coordinates of each device (a row for each)."""

    axes: tuple[str, ...]
    coordinates: np.ndarray[Any, np.dtype[np.int64]]

    def along(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """For each device its coordinates on these axes."""
        chosen = [self.axes.index(axis) for axis in sorted(set(axes))]
        return [tuple(row) for row in self.coordinates[:, chosen].tolist()]

    @classmethod
    def read(cls, attribute: ir.Attribute) -> Mesh:
        mesh = sdy.MeshAttr(attribute)
        axes = [sdy.MeshAxisAttr(axis) for axis in mesh.axes]
        shape = [axis.size for axis in axes]
        size = int(np.prod(shape, dtype=object))
        if not 0 < size <= MAX_DEVICES:
            raise ProgramRefused(f"its mesh has {size} devices; {MAX_DEVICES} are the limit")
        places = np.indices(shape).reshape(len(shape), size).T
        numbers = list(mesh.device_ids) or range(size)
        if sorted(numbers) != list(range(size)):
            raise ProgramRefused(f"its mesh names devices {list(numbers)[:8]}, which are not its {size} devices")
        ordered = np.empty_like(places)
        ordered[list(numbers)] = places
        return cls(tuple(axis.name for axis in axes), ordered)
