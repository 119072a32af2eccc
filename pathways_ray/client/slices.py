"""`pw.virtual_slice`: a mesh of virtual devices to pin functions and arrays to."""

from __future__ import annotations

import copyreg
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from pathways_ray import jax_hooks
from pathways_ray.client import notebook
from pathways_ray.client.slice_text import lie_of
from pathways_ray.client.wanted import ANY, Wanted
from pathways_ray.client.weak import living
from pathways_ray.errors import Unschedulable, UsageError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import SliceType, Spec, check_axis_names, plain_name

_MAX_AXIS_SIZE = 1 << 20
"""Devices on one axis of a slice; sizes beyond are a slip, and would not fit into a message either."""


_SLICE = "_pathways_slice"
"""The attribute of a slice's mesh that is the slice."""


class SliceOwner(Protocol):
    """The part of a session that its slices, and the functions on them, use."""

    @property
    def platforms(self) -> tuple[str, ...]: ...

    @property
    def trusted(self) -> bool: ...

    @property
    def closed_because(self) -> str: ...

    def to_put(self, value: Any, where: VirtualSlice, spec: Spec) -> tuple[Any, Any]: ...

    def upload_all(self, given: Sequence[tuple[Any, Any]], alone: bool = False) -> list[Any]: ...

    def release_slice(self, released: VirtualSlice) -> None: ...

    def move_slice(self, where: VirtualSlice, island: int) -> None: ...

    def status(self) -> dict[str, Any]: ...


class VirtualSlice:
    """A virtual slice of a session. Release it with `release()`, or use it as a context manager.

        s = pw.virtual_slice((2, 2), ("x", "y"))
        x = jax.device_put(np.ones((8, 8)), NamedSharding(s.mesh, P("x", "y")))

    Several slices may share physical devices; which devices a slice has is the resource manager's decision. A part of
    another one, `whole`, is on devices number `places` of it.
    """

    def __init__(
        self,
        session: SliceOwner,
        placed: PlacedSlice,
        name: str,
        tag: str = "",
        whole: VirtualSlice | None = None,
        places: tuple[int, ...] = (),
        wanted: Wanted = ANY,
    ) -> None:
        self.session = session
        self.wanted = wanted
        self.whole, self.places = whole, places
        self.parts: weakref.WeakValueDictionary[int, VirtualSlice] = weakref.WeakValueDictionary()
        if whole is not None:
            whole.parts[placed.mesh.id] = self
        self._apart: weakref.WeakValueDictionary[int, VirtualSlice] = weakref.WeakValueDictionary()
        self.placed = placed
        self.tag = tag
        self.name = name
        self.type: SliceType = placed.mesh
        self.released = False
        self.functions: dict[Any, Any] = {}
        """Those that placing and routing have made for the slice; they go with it."""
        self.mesh = jax_hooks.mesh_of_its_own(placed.mesh.shape, placed.mesh.axes)
        object.__setattr__(self.mesh, _SLICE, self)  # who has the mesh alone has the slice
        copyreg.dispatch_table[type(self.mesh)] = _mesh_by_its_slice

    @property
    def id(self) -> int:
        """Its number in the session."""
        return self.type.id

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its axes."""
        return self.type.shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of its axes."""
        return self.type.axes

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.type.size

    @property
    def island(self) -> int:
        """The island whose devices the slice has now."""
        return self.placed.island

    @property
    def devices(self) -> tuple[str, ...]:
        """The physical devices the slice has now, as `host.index`, in row-major order of the mesh."""
        return tuple(map(str, self.placed.devices))

    def explain(self) -> str:
        """The lie of the slice: its devices, their places in the links of their island, and for each axis how many
        hops are between neighbours. The controller is asked.

            print(pw.virtual_slice((2, 2), ("x", "y")).explain())
        """
        return lie_of(self.type, str(self), self.island, self.devices, self.session.status()["islands"])

    def move(self, island: int | None = None) -> None:
        """Moves the slice to other devices, with its arrays and its parts. Handles, functions and programs stay as they
        are, and values have the same bits. Calls of the session that are made meanwhile wait.

            s.move(island=1)

        Args:
            island: left out, another one than now, by the resource manager's choice.

        Raises:
            Unschedulable: no other island, or not this one, can hold it.
            UsageError: it was released, or is a part of another slice.
            PathwaysError: it could not be moved, and is where it was.
        """
        if self.whole is not None:
            raise UsageError(f"{self} is a part of {self.whole}, and moves with it")
        self.session.move_slice(self, island_of(island))

    def stay_apart(self, others: Sequence[VirtualSlice]) -> None:
        """Keeps the slice off the islands of others, where it can: the loss of one island is not to take both."""
        self._apart.update({other.id: other for other in others if other is not self})

    def refuges(self) -> list[int]:
        """The islands for it when it has to leave its own, best first, on which no slice is that it stays apart from;
        none where it stays apart from none."""
        apart = {other.island for other in living(self._apart) if not other.released}
        if not apart:
            return []
        islands = of_its_tenant(self.session.status()["islands"], self.island)
        up = [one for one in islands if one["state"] == "up"]
        return chosen(up, self.island, {self.island} | apart)

    def __copy__(self) -> VirtualSlice:
        """Itself: a slice is a place, of which there is one."""
        return self

    def __deepcopy__(self, memo: Any) -> VirtualSlice:
        return self

    def __reduce__(self) -> Any:
        raise UsageError(f"{self} is a slice of this session, and cannot be pickled; ask for one in the other process")

    def release(self) -> None:
        """Gives the slice back.

            s.release()  # or: with pw.virtual_slice((4,)) as s: ...

        Arrays on it stay until their handles are dropped; new programs cannot use it.
        """
        if not self.released:
            self.released = True
            try:
                self.session.release_slice(self)
            except BaseException:  # Ctrl-C too: a second call releases what is left
                self.released = False
                raise

    def __enter__(self) -> VirtualSlice:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))
        return f"slice {self.name or self.id} ({mesh})"

    def _repr_html_(self) -> str:
        return notebook.slice_html(self)


def chosen(islands: Sequence[dict[str, Any]], own: int, taken: set[int]) -> list[int]:
    """The islands for copies of what lies on island `own`, best first: of its platform before others, those after it
    before those at the beginning, so that of several islands each has the copies of another one."""
    platform = next((one["platform"] for one in islands if one["island"] == own), "")
    ranked = sorted((one["platform"] != platform, one["island"] < own, one["island"]) for one in islands)
    return [island for _, _, island in ranked if island not in taken]


def of_its_tenant(islands: Sequence[dict[str, Any]], own: int = -1) -> list[dict[str, Any]]:
    """The islands where a session gets slices, of those that it sees. The operator's see also those that tenants have
    for themselves.

    Args:
        own: one where it has a slice, if there is any.
    """
    tenants = {one["island"]: one.get("tenant", "") for one in islands}
    tenant = tenants.get(own, min(tenants.values(), default=""))
    return [one for one in islands if tenants[one["island"]] == tenant]


def slice_of(mesh: Any) -> VirtualSlice | None:
    """The slice whose `mesh` this is; None if it is that of none."""
    return getattr(mesh, _SLICE, None)


def _mesh_by_its_slice(mesh: Any) -> Any:
    """The mesh of a slice, for pickles of shardings and of what has them: it goes as its slice does, which says why it
    does not."""
    return operator.attrgetter("mesh"), (slice_of(mesh),)


def island_of(island: int | None) -> int:
    """The island a user asked for; -1 stands for any."""
    if island is None:
        return -1
    if not isinstance(island, int | np.integer) or isinstance(island, bool) or island < 0:
        raise UsageError(f"island= takes the number of an island, as pw.islands() says them, not {island!r}")
    return int(island)


def slice_belongs(closed_because: str) -> str:
    """The words for a slice of a session that is not the one at hand, and what to do where that was closed."""
    if not closed_because:
        return (
            "belongs to another session: a call runs in that of the first array or slice that it uses, and in no other"
        )
    return (
        f"belongs to another session, now closed ({closed_because}): make the slice again, and the functions that were "
        "made for it"
    )


def array_belongs(closed_because: str) -> str:
    """The words for an array of a session that is not the one at hand, and what to do."""
    if not closed_because:
        return "belongs to another session; fetch it there and pass the NumPy array here"
    return f"belongs to another session, now closed ({closed_because}), and went with it: make or put it again"


def mesh_of(shape: Sequence[int] | int | None, axes: Sequence[str] | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The mesh a user asked for, in plain integers and names."""
    sizes: tuple[int, ...] = ()
    if isinstance(shape, int | np.integer):
        shape = (int(shape),)
    try:
        if shape is not None:
            sizes = tuple(int(size) for size in shape)
        exact = shape is None or all(size == given for size, given in zip(sizes, shape, strict=True))
    except (TypeError, ValueError, OverflowError):  # the last of infinity
        exact = False
    if axes is None:
        axes = ("x", "y", "z")[: max(1, len(sizes))]
    names = tuple(axes) if isinstance(axes, Iterable) and not isinstance(axes, str) else (axes,)
    if not exact or not all(isinstance(axis, str) for axis in names):
        raise UsageError(f"a slice has whole sizes and axis names; got shape {shape!r} and axes {axes!r}")
    names = tuple(map(plain_name, names))
    if shape is None:
        return (), names
    if not sizes or any(size < 1 for size in sizes):
        raise Unschedulable(f"slice shape {sizes} needs at least one axis, and every axis at least one device")
    if max(sizes) > _MAX_AXIS_SIZE:
        raise Unschedulable(f"slice shape {sizes} is larger than any cluster")
    if len(sizes) > 3:
        raise Unschedulable(f"a slice has 1 to 3 axes, {sizes} has {len(sizes)}")
    check_axis_names(names)
    if len(sizes) != len(names):
        raise Unschedulable(f"slice shape {sizes} and axis names {names} differ in number")
    return sizes, names
