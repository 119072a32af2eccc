"""`pw.snapshot`: copies of arrays in the memory of other hosts, for when their own is lost.

A copy is a launch like any other: transfers from the slice of an array to a *shadow*, a slice on another island, since
the loss of a host takes the memory of its whole island. Calls after it may donate what it copies. A copy is spread over
the devices of its shadow where it divides, so that of what is replicated one copy is kept.

A step over several islands donates its state on all of them, and a loss on one ends it on all. Then what is restored is
the copies elsewhere of what was lost, and copies on their own devices (`local`) of the rest, all of the same moment.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.buffer import PENDING, READY, BufferRecord
from pathways_ray.client.compiled import compiled
from pathways_ray.client.moving import COPIES, copies_graph
from pathways_ray.client.program import Program
from pathways_ray.client.returned import owned
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice, chosen, of_its_tenant
from pathways_ray.errors import BufferLost, ForeignArray, PathwaysError, Unschedulable, UsageError
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.observe.why import bytes_text
from pathways_ray.transport.messages import encode

AXIS = "copy"
"""The one axis of a shadow."""


class Snapshot:
    """A copy of a tree, made by `pw.snapshot`. Its memory is free once it is dropped.

    `tree` is the structure, `copies` has for each leaf its copies, and nothing where the leaf is no `pw.Array`.
    """

    def __init__(self, leaves: Sequence[Any], tree: Any, copies: Sequence[Sequence[Array]]) -> None:
        self._leaves = [leaf._type if isinstance(leaf, Array) else owned(leaf) for leaf in leaves]
        self._tree = tree
        self._copies = copies

    def __repr__(self) -> str:
        """The arrays, bytes and islands that it has, and whether they are there; nobody is asked."""
        found = [copies for copies in self._copies if copies]
        islands = sorted({_slice(copy._type).island for copies in found for copy in copies})
        waits = any(copy._buffer.record.shown is PENDING for copies in found for copy in copies)
        state = "under way" if waits else "whole" if self.is_whole() else "lost in part"
        arrays = f"{len(found)} array{'s' * (len(found) != 1)}"
        return f"pw.Snapshot({arrays}, {bytes_text(self.nbytes)} on islands {islands}, {state})"

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copies in self._copies for copy in copies)

    def is_ready(self) -> bool:
        """Whether all copies are made, or have failed."""
        return all(copy.is_ready() for copies in self._copies for copy in copies)

    def is_whole(self) -> bool:
        """Whether of each array a copy is there, and was not lost."""
        return all(_living(copies) for copies in self._copies if copies)

    def is_exposed(self) -> bool:
        """Whether it is over, and has no copy of some array on another island than that where the array's slice lies
        now: the loss of that island would take both."""
        return self.is_ready() and any(
            isinstance(leaf, ArgumentType)
            and all(_slice(c._type).island == _slice(leaf).island for c in _living(copies))
            for leaf, copies in zip(self._leaves, self._copies, strict=True)
        )

    def wait(self, timeout: float | None = None) -> None:
        """Waits until of each array a copy is there.

        Args:
            timeout: seconds for each copy.

        Raises:
            PathwaysError: all copies of an array have failed, or were lost.
            WaitTimeout: it took longer than `timeout`.
        """
        for copies in self._copies:
            for number, copy in enumerate(copies):
                try:
                    copy._wait(timeout)
                    break
                except PathwaysError:
                    if number == len(copies) - 1:
                        raise

    def wait_for_all(self) -> None:
        """Waits until all copies are made, or have failed."""
        for copies in self._copies:
            for copy in copies:
                with contextlib.suppress(PathwaysError):
                    copy._wait(None)

    def restore(self, timeout: float | None = None) -> Any:
        """The tree as it was when the snapshot was taken: arrays with the same bits, on the slices and in the layouts
        that they had, wherever these slices are now. Other leaves are as they were.

            state = snapshot.restore()

        It waits for the copies, not for the way back. The snapshot stays.

        Raises:
            BufferLost: all copies of an array are lost.
            PathwaysError: the snapshot itself has failed.
        """
        sources = [living[0] for living in self._found(timeout) if living]
        kinds = [leaf for leaf in self._leaves if isinstance(leaf, ArgumentType)]
        arrays = iter(copied(sources, kinds))
        leaves = [next(arrays) if isinstance(leaf, ArgumentType) else owned(leaf) for leaf in self._leaves]
        return jax.tree.unflatten(self._tree, leaves)

    def values(self, timeout: float | None = None) -> Any:
        """The tree as it was when the snapshot was taken, with NumPy arrays (typed keys as `jax.Array`s): for a state
        that is to lie otherwise than before, where its slices were lost for good.

            state = pw.put(snapshot.values(), another_slice)

        Raises:
            As `restore`.
        """
        found = zip(self._leaves, self._found(timeout), strict=True)
        leaves = [jax.device_get(living[0]) if living else owned(leaf) for leaf, living in found]
        return jax.tree.unflatten(self._tree, leaves)

    def _found(self, timeout: float | None) -> list[list[Array]]:
        """The copies of each leaf that are there; none of one that is no array."""
        self.wait(timeout)
        found = [_living(copies) for copies in self._copies]
        if any(copies and not living for copies, living in zip(self._copies, found, strict=True)):
            raise BufferLost("the snapshot is gone: the hosts that had its copies were lost after they were made")
        return found


def snapshot(tree: Any, copies: int = 1, local: bool = False) -> Snapshot:
    """Keeps a copy of each array of a pytree in the memory of other hosts, and gives it back after a loss.

        safe = pw.snapshot(state)
        state = safe.restore()  # after HostLost or BufferLost

    It returns at once; the arrays may be used and donated as before. A copy goes from device to device to another
    island than the one of the array, which a lost host takes along. On CPU devices that is the memory of other hosts,
    on accelerators that of their devices.

    Args:
        tree: a pytree with `pw.Array`s. Other leaves are kept as they are, NumPy arrays copied.
        copies: islands that each array is copied to.
        local: whether each array is copied on its own devices too. Where a program runs on several islands and donates
            its state, the loss of one takes the state along on all of them.

    Raises:
        Unschedulable: there are fewer other islands that are up.
        UsageError: no `pw.Array` in the tree, or not a number of copies.
        BufferDeleted: an array was deleted or donated.
    """
    if not isinstance(copies, int | np.integer) or isinstance(copies, bool) or copies < 1:
        raise UsageError(f"copies= is a number of islands from 1 up, not {copies!r}")
    return _taken(tree, copies, local)


def beside(tree: Any) -> Snapshot:
    """A snapshot with copies on the arrays' own devices alone: the loss of a host takes both, and a launch that donates
    the arrays and fails does not."""
    return _taken(tree, 0, True)


def _taken(tree: Any, copies: int, local: bool) -> Snapshot:
    leaves, structure = jax.tree.flatten(tree)
    arrays = [leaf for leaf in leaves if isinstance(leaf, Array)]
    if not arrays:
        raise UsageError("there is no pw.Array in the tree to take a snapshot of")
    shadows = _shadows(arrays)
    slices = dict.fromkeys(_slice(array._type) for array in arrays)
    try:
        made = _copies(shadows, arrays, {where: shadows.of(where, copies) for where in slices if copies}, copies, local)
    finally:
        for where in slices:
            if where.released:  # nobody will release it, and its shadows with it; what lies on them stays
                shadows.release(where)
    of_array = iter(made)
    return Snapshot(leaves, structure, [next(of_array) if isinstance(leaf, Array) else [] for leaf in leaves])


def _copies(
    shadows: Shadows,
    arrays: Sequence[Array],
    places: Mapping[VirtualSlice, Sequence[VirtualSlice]],
    copies: int,
    local: bool,
) -> list[list[Array]]:
    """The copies of each array in its `places`, and with `local` one beside it, which comes first."""
    # What peers read is copied again when a call donates it: they read the copies here, where there are some.
    beside = shadows.beside(arrays) if local else []
    made: list[list[Array]] = [[copy] for copy in beside] or [[] for _ in arrays]
    for number in range(copies):
        targets = [_spread(array._type, places[_slice(array._type)][number]) for array in arrays]
        for found, copy in zip(made, copied(beside or arrays, targets), strict=True):
            found.append(copy)
            shadows.last[copy._type.slice] = copy._buffer.record
    return made


def copied(arrays: Sequence[Array], targets: Sequence[ArgumentType]) -> list[Array]:
    """Copies of arrays of one session, in the layouts of these types: a launch for each group of them."""
    shadows = _shadows(arrays)
    found: list[Array] = []
    for at in range(0, len(arrays), COPIES):
        group, kinds = arrays[at : at + COPIES], tuple(targets[at : at + COPIES])
        found += shadows.copies(group, kinds)
    return found


class Shadows:
    """The shadows of one session, and its programs that copy. `last` has the last array that was copied to each."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.last: dict[VirtualSlice | None, BufferRecord] = {}
        self._of: weakref.WeakKeyDictionary[VirtualSlice, list[VirtualSlice]] = weakref.WeakKeyDictionary()
        self._programs: dict[tuple[tuple[ArgumentType, ...], tuple[ArgumentType, ...]], int] = {}
        self._lock = threading.RLock()  # no program is dropped between its registration and its launch

    def of(self, where: VirtualSlice, copies: int) -> list[VirtualSlice]:
        """Shadows of a slice, each on an island of its own. They are made again where the last copy failed, or one of
        the slices has moved to the island of another.

        Raises:
            Unschedulable: there are not enough islands.
        """
        known = self._of.get(where, [])
        apart = len({where.island, *(shadow.island for shadow in known)}) > len(known)
        if len(known) < copies or not apart or any(self._failed(shadow) for shadow in known):
            return self._renewed(where, known, copies)
        return known

    def _failed(self, shadow: VirtualSlice) -> bool:
        return shadow in self.last and self.last[shadow].failure is not None

    def _renewed(self, where: VirtualSlice, known: Sequence[VirtualSlice], copies: int) -> list[VirtualSlice]:
        islands = of_its_tenant(self.session.status()["islands"], where.island)
        up = {one["island"]: one for one in islands if one["state"] == "up"}
        taken = {where.island}
        # Changed on the way: one that is refused, or that cannot be released, leaves none behind that nobody knows.
        found = self._of[where] = list(known)
        for shadow in known:
            if shadow.island in up and shadow.island not in taken and not shadow.released:
                taken.add(shadow.island)
            else:
                shadow.release()
                found.remove(shadow)
            self.last.pop(shadow, None)
        for island in chosen(list(up.values()), where.island, taken)[: max(0, copies - len(found))]:
            size = min(where.size, sum(len(host["devices"]) for host in up[island]["hosts"]))
            name = f"copies of {where.name or where.id}"
            found.append(self.session.virtual_slice((size,), (AXIS,), island=island, name=name))
        for one in found:
            one.stay_apart([where, *found])
            where.stay_apart([one])
        if len(found) < copies:
            raise Unschedulable(
                f"a snapshot of arrays on {where} with copies={copies} takes as many other islands that are up; "
                f"there are {len(up.keys() - {where.island})} beside island {where.island}"
            )
        return found

    def copies(self, arrays: Sequence[Array], targets: tuple[ArgumentType, ...]) -> list[Array]:
        """Copies of arrays in the layouts of these types: one launch."""
        kinds = tuple(array._type for array in arrays)
        with self._lock:
            program = self._program(kinds, targets)
            found = self.session.launch(program, [array._buffer.record for array in arrays], targets)
            self._forget({where for where in map(_slice, kinds + targets) if where.released})
        return found

    def _program(self, sources: tuple[ArgumentType, ...], targets: tuple[ArgumentType, ...]) -> int:
        """The program that copies arrays of some types into others' layouts."""
        key = sources, targets
        if key not in self._programs:
            graph = copies_graph(
                "copy",
                [(kind.array, _slice(kind).type, kind.spec) for kind in sources],
                [(_slice(kind).type, kind.spec) for kind in targets],
            )
            self._programs[key] = self.session.register(graph, encode(graph), {})
        return self._programs[key]

    def beside(self, arrays: Sequence[Array]) -> list[Array]:
        """Copies of arrays on their own devices, in the layouts that they have: one launch."""
        key = "copy", *(array._type for array in arrays)
        known = _slice(arrays[0]._type).functions
        if key not in known:
            known[key] = _copying(arrays)
        found: list[Array] = known[key](*arrays)
        return found

    def release(self, where: VirtualSlice) -> None:
        """A slice was released: gives back its shadows. Copies there can be fetched while somebody has a handle."""
        for shadow in self._of.get(where, ()):
            shadow.release()
            self.last.pop(shadow, None)
        self._of.pop(where, None)  # behind that: where one cannot be released, the next call finds the rest
        with self._lock:
            self._forget({where})

    def _forget(self, gone: Set[VirtualSlice]) -> None:
        """Drops the programs that name slices which were released. The next copy of what is there yet takes another."""
        if gone:
            for key in [key for key in self._programs if any(kind.slice in gone for kinds in key for kind in kinds)]:
                self.session.unregister(self._programs.pop(key))


def _copying(arrays: Sequence[Array]) -> Program:
    """A program that takes arrays of these types, and returns a copy of each where it is."""
    functions: list[tuple[list[int], Any]] = []
    for where in dict.fromkeys(_slice(array._type) for array in arrays):
        places = [k for k, array in enumerate(arrays) if array._type.slice is where]
        specs = tuple(arrays[k].sharding.spec for k in places)
        functions.append((places, compiled(_copied, slice=where, in_specs=specs, out_specs=specs)))

    def copies(*given: Any) -> list[Any]:
        made: dict[int, Any] = {}
        for places, copy in functions:
            made.update(zip(places, copy(*[given[k] for k in places]), strict=True))
        return [made[k] for k in range(len(given))]

    return Program(copies, "copy", check=False, slice=_slice(arrays[0]._type))


def _copied(*arrays: Any) -> tuple[Any, ...]:
    return tuple(map(jnp.copy, arrays))


def _shadows(arrays: Sequence[Array]) -> Shadows:
    """The shadows of the session of arrays."""
    session: Any = arrays[0]._buffer.session
    for array in arrays:
        if id(array._buffer.session) != id(session):
            raise ForeignArray("a snapshot takes arrays of one session")
        session.check_mine(array._buffer)
    if session.shadows is None:
        session.shadows = Shadows(session)
    return cast(Shadows, session.shadows)


def spread(kind: ArrayType, devices: int) -> Spec:
    """The layout of a copy on a shadow: divided along the first dimension that divides, or else whole on each."""
    for dimension, size in enumerate(kind.shape):
        if devices > 1 and size and size % devices == 0:
            return ((),) * dimension + ((AXIS,),)
    return ()


def _spread(kind: ArgumentType, shadow: VirtualSlice) -> ArgumentType:
    return ArgumentType.of(kind.array, kind.weak, shadow, spread(kind.array, shadow.size), kind.extended)


def _slice(kind: ArgumentType) -> VirtualSlice:
    assert kind.slice is not None
    return kind.slice


def _living(copies: Sequence[Array]) -> list[Array]:
    return [copy for copy in copies if copy._buffer.record.state is READY]
