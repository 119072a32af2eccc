"""Requests for slices: what they ask for, in words as well, and what no slice can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pathways_ray.errors import Unschedulable
from pathways_ray.ir.links import text
from pathways_ray.ir.types import check_axis_names


@dataclass(frozen=True)
class SliceRequest:
    """A client's request. An empty `shape` stands for every device of one island, on one axis.

    `tenant` restricts it to the islands that this tenant has for itself, under the numbers of those they share devices
    with; "" stands for the islands of all. With `within`, it asks for a part of that slice of the session: its devices
    number `places`, in this order. One that is to be there `instead` of another slice of the session goes to another
    island than that, unless `island` names one.

    `topology` has the sides of the sub-grid that its devices are to be in the links of their island, `memory` is the
    bytes that each has at least, `generation` what their maker calls them; (), 0 and "" leave that open.

    `call` is the controller's number of the call that asks: asked again, it gets the slice that was made for it.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    island: int = -1
    platform: str = ""
    name: str = ""
    tenant: str = ""
    within: int = 0
    places: tuple[int, ...] = ()
    instead: int = 0
    topology: tuple[int, ...] = ()
    memory: int = 0
    generation: str = ""
    call: int = 0

    @property
    def is_particular(self) -> bool:
        """Whether it depends on what hosts say of their devices."""
        return bool(self.topology or self.memory or self.generation)


def check_shape(request: SliceRequest) -> None:
    """Raises `Unschedulable` unless there are one to three sizes of at least 1, and as many different axes."""
    if request.shape and not 1 <= len(request.shape) <= 3:
        raise Unschedulable(f"a slice has 1 to 3 axes, {request.shape} has {len(request.shape)}")
    if any(size < 1 for size in request.shape):
        raise Unschedulable(f"slice shape {request.shape} has a size below 1; every axis needs at least one device")
    check_axis_names(request.axes)
    if len(request.axes) != max(len(request.shape), 1):
        raise Unschedulable(f"slice shape {request.shape} and axis names {request.axes} differ in number")
    sides = request.topology
    if any(side < 1 for side in sides) or len(sides) > 3 or request.memory < 0:
        raise Unschedulable(f"a topology has up to 3 sides of at least 1, not {sides}; memory is not negative")
    if sides and request.shape and math.prod(sides) != math.prod(request.shape):
        raise Unschedulable(f"a sub-grid {text(sides)} has not as many devices as slice shape {request.shape}")


def request_text(request: SliceRequest) -> str:
    """A request in words, for refusals."""
    size = f"a slice of shape {request.shape} ({math.prod(request.shape)} devices)" if request.shape else "a slice"
    island = f" on island {request.island}" if request.island != -1 else ""
    platform = f" of platform {request.platform!r}" if request.platform else ""
    sub_grid = f" in a sub-grid {text(request.topology)}" if request.topology else ""
    memory = f" with {request.memory} bytes for each device" if request.memory else ""
    generation = f" of generation {request.generation!r}" if request.generation else ""
    return size + island + platform + generation + sub_grid + memory
