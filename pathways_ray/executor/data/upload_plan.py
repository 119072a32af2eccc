"""Plans of uploads: what follows from the type and slice of one on a host, found out once for all that are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray import limits
from pathways_ray.errors import GraphError
from pathways_ray.executor.compile.compiler import Compiler, dtype_of
from pathways_ray.executor.data.upload_quota import check_type, device_bytes
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, shard_boxes
from pathways_ray.ir.types import ArrayType, Spec, check_layout
from pathways_ray.jax_arrays import array_maker

MAX_PLANS = 256
"""Kinds of uploads that a host remembers."""

MAX_DEVICES = 64
"""Devices of a slice beyond which it remembers none: each has a box."""


class UploadPlan:
    """Uploads of one type, layout and slice, on the devices of a host.

    `local` are the boxes of its devices, each with the device's number, `boxes` those that differ, and `positions` the
    first place in the mesh of each that other hosts hold as well. In bytes, `size` is that of a box, `sizes` those of
    all `boxes`, `bytes` their sum, and `device_bytes` that on all devices.
    """

    def __init__(self, kind: ArrayType, spec: Spec, placed: PlacedSlice, host: int) -> None:
        self.kind, self.spec, self.placed = kind, spec, placed
        boxes = shard_boxes(kind, spec, placed.mesh)
        pairs = list(zip(boxes, placed.devices, strict=True))
        self.local = [(box, device.index) for box, device in pairs if device.host == host]
        self.boxes: list[Box] = list(dict.fromkeys(box for box, _ in self.local))
        elsewhere = {box for box, device in pairs if device.host != host}
        self.positions = {box: boxes.index(box) for box in self.boxes if box in elsewhere}
        self.dtype = dtype_of(kind.dtype)
        self.shape = box_shape(self.boxes[0])
        self.size = math.prod(self.shape) * self.dtype.itemsize
        self.sizes = [self.size] * len(self.boxes)
        self.bytes = sum(self.sizes)
        numbers = {box: number for number, box in enumerate(self.boxes)}
        self._held = [numbers[box] for box, _ in self.local]
        self.device_bytes = max(device_bytes([box for box, _ in self.local], kind.dtype), limits.MIN_BUFFER_BYTES)
        self._make: Callable[[Sequence[np.ndarray[Any, Any]]], jax.Array] | None = None

    def array(self, buffers: Sequence[np.ndarray[Any, Any]], compiler: Compiler) -> jax.Array:
        """The array on the devices, of the bytes of its boxes. Devices of CPU hosts use that memory."""
        if self._make is None:
            sharding, devices = compiler.sharding(self.placed, self.spec), [compiler.devices[k] for _, k in self.local]
            self._make = array_maker(self.kind.shape, self.dtype, sharding, devices)
        arrays = [data.view(self.dtype).reshape(self.shape) for data in buffers]
        return self._make([arrays[number] for number in self._held])


class UploadPlans:
    """The plans of a host's uploads.

    Args:
        devices: how many the host has.
    """

    def __init__(self, host: int, devices: int) -> None:
        self._host, self._devices = host, devices
        self._known: dict[tuple[ArrayType, Spec, PlacedSlice], UploadPlan] = {}

    def of(self, kind: ArrayType, spec: Spec, placed: PlacedSlice) -> UploadPlan:
        """The plan of an upload.

        Raises:
            GraphError: the slice has no device here, or one that is not there; or the layout does not fit the type.
            TooLarge: the type is larger than a value may be.
        """
        key = kind, spec, placed
        if (known := self._known.get(key)) is not None:
            return known
        _check_devices(placed, self._host, self._devices)
        check_type(kind)
        check_layout(kind, spec, placed.mesh, "put")
        made = UploadPlan(kind, spec, placed, self._host)
        if placed.mesh.size <= MAX_DEVICES:
            if len(self._known) >= MAX_PLANS:
                del self._known[next(iter(self._known))]
            self._known[key] = made
        return made


def _check_devices(placed: PlacedSlice, host: int, count: int) -> None:
    """Raises `GraphError` unless a slice has devices of a host of `count` devices, and only such as there are."""
    mine = [device for device in placed.devices if device.host == host]
    if not mine or len(placed.devices) != placed.mesh.size:
        raise GraphError(f"no device of {placed.mesh} is on host {host}")
    for device in mine:
        if not 0 <= device.index < count:
            raise GraphError(f"host {host} has {count} devices, no number {device.index}")
