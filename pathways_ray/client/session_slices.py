"""The slices of a session: made, given back, and, all of them at once, suspended and resumed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, cast

from pathways_ray.client.connection import Connection
from pathways_ray.client.core import ClientCore
from pathways_ray.client.driver import Driver
from pathways_ray.client.interrupted import Lock
from pathways_ray.client.known_programs import KnownPrograms, unused
from pathways_ray.client.mover import Mover
from pathways_ray.client.slices import SliceOwner, VirtualSlice, island_of, mesh_of
from pathways_ray.client.wanted import wanted_of
from pathways_ray.client.weak import living
from pathways_ray.ir.types import plain_name
from pathways_ray.transport import messages as wire


class SliceCalls:
    """The part of a session (`client.session.Session`) that has its slices."""

    _core: ClientCore
    _connection: Connection
    _driver: Driver
    _mover: Mover
    _default_slice: VirtualSlice | None = None
    _making_default_slice: Lock
    _knowing: weakref.WeakValueDictionary[int, KnownPrograms]
    """What functions have made for the session, each under its `id`."""
    _released: weakref.WeakValueDictionary[int, VirtualSlice]
    """Slices that were released, and that arrays may lie on yet, by number."""
    shadows: Any = None
    """Where copies of the session's arrays lie (`snapshots.Shadows`), once a snapshot was taken."""

    def virtual_slice(
        self,
        shape: Sequence[int] | None = None,
        axes: Sequence[str] | None = None,
        *,
        island: int | None = None,
        platform: str | None = None,
        name: str = "",
        topology: Sequence[int] | None = None,
        memory: int = 0,
        generation: str = "",
    ) -> VirtualSlice:
        """A slice of this session, where there are several sessions.

            s = session.virtual_slice((4,), ("x",), island=0)

        See `pw.virtual_slice`.
        """
        sizes, names = mesh_of(shape, axes)
        number = island_of(island)
        wanted = wanted_of(platform, name, topology, memory, generation)
        name = plain_name(name)
        asked = wire.CreateSlice(self._core.session, sizes, names, number, wanted.platform, name)
        owner = cast(SliceOwner, self)
        return self._mover.made(
            wanted.added_to(asked),
            lambda reply: VirtualSlice(owner, reply.placed, name, reply.slice_tag, wanted=wanted),
        )

    def part_of(
        self, whole: VirtualSlice, places: Sequence[int], shape: Sequence[int], axes: Sequence[str]
    ) -> VirtualSlice:
        """A slice on devices number `places` of another one, in this order; as a mesh of any number of axes.

        Raises:
            Unschedulable: there are no such devices, or their number is not that of the shape.
        """
        asked = wire.CreateSlice(self._core.session, tuple(shape), tuple(axes), -1, "", "", whole.id, tuple(places))
        owner = cast(SliceOwner, self)
        return self._mover.made(
            asked, lambda reply: VirtualSlice(owner, reply.placed, "", reply.slice_tag, whole, tuple(places))
        )

    def release_slice(self, released: VirtualSlice) -> None:
        """Gives a slice back to the cluster."""
        if not self._core.closed_because and self._driver.suspension is None:
            self._connection.call(wire.ReleaseSlice(self._core.session, released.id))
        if self.shadows is not None:
            self.shadows.release(released)
        self._released[released.id] = released
        self._forget_unused()

    def known_by(self, known: KnownPrograms) -> None:
        """A function is about to make a program for the session."""
        self._knowing[id(known)] = known
        self._forget_unused()

    def forget_programs(self) -> None:
        """The session is closed: what functions have made for it goes."""
        for known in living(self._knowing):
            known.forget_session(self)

    def _forget_unused(self) -> None:
        """Lets go of programs that take arguments on slices that were released, once no array lies there but what
        programs have placed for themselves."""
        if not self._released:
            return
        knowing = living(self._knowing)
        own: set[int] = set().union(*(known.placed() for known in knowing))
        buffers = [record for record in list(self._core.buffers.values()) if record.id not in own]
        if gone := unused(living(self._released), buffers):
            for where in gone:
                self._released.pop(where.id, None)
            for known in knowing:
                known.forget_slices(gone)

    def default_slice(self) -> VirtualSlice:
        """All devices of one island on one axis `x`; made when first needed, once for all threads."""
        with self._making_default_slice:
            if self._default_slice is None:
                self._default_slice = self.virtual_slice(None, ("x",), name="default")
            return self._default_slice

    def suspend(self, path: str | os.PathLike[str] | None = None) -> None:
        """Copies all arrays of the session to host memory, or to a directory, and frees its devices for others.

            session.suspend()  # waits for what is under way
            session.resume()

        Arrays, slices and functions stay as they are, and are of use again after `resume()`. Until then, who uses them
        gets `SessionSuspended`.

        Args:
            path: a directory that is not there yet, or is empty; left out, the memory of this process. It has no more
                than the values, which only this session can resume.

        Raises:
            UsageError: there is no such directory, or no room in it.
            SessionSuspended: it is suspended already.
            PathwaysError: an array could not be fetched, or a call did not end within 120 s. Nothing has changed then.
        """
        self._mover.suspend(path)

    def resume(self, path: str | os.PathLike[str] | None = None) -> None:
        """Brings back what `suspend()` copied: each slice on the island where it was if it has room there, or else on
        another one, and all arrays with the same bits.

            session.resume()

        Args:
            path: the directory of the suspension, where that was moved since.

        Raises:
            UsageError: the session is not suspended.
            SuspensionDamaged: a file of the directory is not as it was written, or it is another suspension's.
            Unschedulable: no island can hold one of the slices.
            PathwaysError: a host was lost meanwhile. After each of these it is suspended as before.
        """
        self._mover.resume(path)
