"""Suspending a session and resuming it: the steps of its client, in order. Pure: a driver carries the steps out.

Suspending:

1. The session's calls are held, until nothing of it is under way.
2. A copy of each array that a handle is left to goes to host memory, or a file.
3. The controller frees all arrays of the session, and takes back its slices. Until then nothing has changed.

Resuming:

1. A slice of the same mesh is made for one that the session had, on its island if that has room, or elsewhere.
2. The controller exchanges the old slice for the new one, which is given back at once: both have the same devices, and
   both count against the tenant's quota. Programs are registered again.
3. Each array there that a handle is left to is uploaded to the devices that the slice has now. While they are on their
   way, the next slice is made.
4. Handles name what was uploaded, and calls go on. What fails before leaves the session suspended as it was.

The values are the client's, so a session stays suspended when its controller dies, whichever step that falls into. The
successor knows nothing of slices that were to come back: then resuming begins from its first step.

A session that gave way is called back again and again while it cannot be resumed, and its user's calls wait. Where no
island can hold one of its slices, they do so for `RETURN_LIMIT_S`. Then it is suspended as if by its user, who is told
why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Generator, Sequence
from typing import Any

from pathways_ray.client.buffer import BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.moving import (
    Arrive,
    Ask,
    Drop,
    Exchanged,
    Finish,
    Hold,
    Load,
    Release,
    Save,
    Step,
    Suspended,
    listed,
    living,
    renumbered,
)
from pathways_ray.client.suspension import Kept, Suspension
from pathways_ray.errors import ControllerLost, PathwaysError, Unschedulable
from pathways_ray.transport import messages as wire

AHEAD = 4
"""Uploads that are under way while another one begins; each may be in memory twice."""

RETURN_LIMIT_S = 30.0
"""A session that gave way tries for so long to get slices that no island can hold: an operator may add an island in
place of one that was removed."""


def suspend(core: ClientCore, slices: Sequence[Kept], gives_way: bool = False) -> Generator[Step, Any, None]:
    """The steps that suspend a session.

    Args:
        slices: all that handles are left to, `released` ones too, since arrays may lie on them.
        gives_way: it is suspended for another session, and not by its user.

    Raises:
        PathwaysError: an array could not be saved, or a call did not end; nothing has changed.
    """
    saved: dict[int, tuple[int, wire.HeldBuffer]] = {}
    try:
        yield Hold(gives_way)
        held = yield from listed(core)
        for number, (record, one) in enumerate(living(core, held)):
            try:
                yield Save(number, record, one)
            except PathwaysError:
                if record.failure is None and record.id in core.buffers:
                    raise
            else:
                saved[record.id] = number, one
        yield Finish()
        found = Suspension(tuple(slices), saved, gives_way)
        yield Suspended(found)  # before: should Ctrl-C come, the values are kept
        try:
            yield Ask(wire.Suspend(core.session, gives_way))
        except Exception as error:
            if isinstance(error, PathwaysError) and not isinstance(error, ControllerLost):
                raise
            # Perhaps with the arrays: a successor is told that the session is suspended.
            yield Suspended(dataclasses.replace(found, tried=True))
    except Exception:
        yield Suspended(None)
        yield Release()
        raise
    yield Release()


def resume(
    core: ClientCore, suspension: Suspension, released: Container[int], now: float, limit_s: float = RETURN_LIMIT_S
) -> Generator[Step, Any, None]:
    """The steps that resume a session.

    Args:
        released: slices that the user has given back. They come for what lies on them, and go again.
        now: the time, in seconds.
        limit_s: seconds after which one that gave way, and gets no slices, is its user's to resume.

    Raises:
        Unschedulable: no island can hold one of its slices now.
        PathwaysError: it could not be resumed; it is suspended as it was.
    """
    pairs: list[tuple[int, int]] = []
    loaded: list[tuple[BufferRecord, BufferRecord]] = []
    losses = core.losses
    try:
        if suspension.tried:
            yield Ask(wire.Suspend(core.session, suspension.gives_way))  # again: slices may have come
        else:
            yield Suspended(dataclasses.replace(suspension, tried=True))
        for kept in _needed(suspension, released):
            made = yield from _made(core, kept)
            pairs += made
            _check_same(core, losses)
            found = yield Ask(wire.ExchangeSlices(core.session, tuple(made)))
            yield Exchanged(found.slices)
            yield Ask(wire.ReleaseSlice(core.session, made[0][1]))  # before the next is made: the quota may be tight
            yield from _loaded(core, suspension, {old for old, _ in made}, loaded)
        for _, copy in loaded[-AHEAD:]:
            yield Arrive(copy)
        yield Hold()  # so that no successor is told meanwhile that the session is suspended
        _check_same(core, losses)
    except Exception as error:
        yield Drop([copy for _, copy in loaded])
        yield Release()
        if suspension.gives_way and isinstance(error, Unschedulable):
            suspension = _refused(suspension, str(error), now, limit_s)
            yield Suspended(suspension)
        elif suspension.gives_way and pairs:  # there are islands; the next refusal is the first one again
            yield Suspended(dataclasses.replace(suspension, tried=True, refused_since=math.inf))
        yield Ask(wire.Suspend(core.session, suspension.gives_way))  # with all slices that it has got by now
        raise
    dropped = renumbered(core, loaded, {one for one, _ in pairs})
    yield Suspended(None)
    yield Drop([*(copy for _, copy in loaded), *dropped])
    yield Release()
    for number, _ in pairs:
        if number in released:
            yield Ask(wire.ReleaseSlice(core.session, number))


def _refused(suspension: Suspension, reason: str, now: float, limit_s: float) -> Suspension:
    """The suspension of a session that gave way, after another refusal of a slice: in the end, its user's."""
    since = min(suspension.refused_since, now)
    gives_way = now - since < limit_s
    stuck = "" if gives_way else reason
    return dataclasses.replace(suspension, gives_way=gives_way, tried=True, refused_since=since, stuck=stuck)


def _check_same(core: ClientCore, losses: int) -> None:
    """Raises `ControllerLost` where the controller that has made slices is gone, and they with it."""
    if core.losses > losses:
        raise ControllerLost("the controller was lost while the session came back; it is suspended as it was")


def _needed(suspension: Suspension, released: Container[int]) -> list[Kept]:
    """The slices that have to come back, with such parts: those that were not given back, or that arrays lie on."""
    used = {one.slice for _, one in list(suspension.arrays.values())}
    found = []
    for kept in suspension.slices:
        parts = tuple(p for p in kept.parts if p.mesh.id in used or p.mesh.id not in released)
        if kept.mesh.id not in released or kept.mesh.id in used or parts:
            found.append(dataclasses.replace(kept, parts=parts))
    return found


def _loaded(
    core: ClientCore, suspension: Suspension, slices: Container[int], loaded: list[tuple[BufferRecord, BufferRecord]]
) -> Generator[Step, Any, None]:
    """Uploads the arrays of some slices, each to a record beside the one that handles name."""
    for buffer, (number, one) in list(suspension.arrays.items()):
        record = core.buffers.get(buffer)
        if one.slice not in slices or record is None:
            continue  # its last handle went meanwhile
        (copy,) = core.new_buffers(1)
        loaded.append((record, copy))
        yield Load(number, copy, one)
        if len(loaded) > AHEAD:
            yield Arrive(loaded[-1 - AHEAD][1])


def _made(core: ClientCore, kept: Kept) -> Generator[Step, Any, list[tuple[int, int]]]:
    """Makes a slice for one that the session had, with its parts: on the same island, or, where that has no room, on
    any. Returns the pairs of old and new ones, that of the slice itself first."""
    mesh = kept.mesh
    try:
        asked = wire.CreateSlice(core.session, mesh.shape, mesh.axes, kept.island, "", kept.name)
        made = yield Ask(kept.wanted.added_to(asked))
    except Unschedulable:
        asked = wire.CreateSlice(core.session, mesh.shape, mesh.axes, -1, "", kept.name)
        made = yield Ask(kept.wanted.added_to(asked))
    whole = made.placed.mesh.id
    pairs = [(mesh.id, whole)]
    for part in kept.parts:
        same = part.mesh
        made = yield Ask(wire.CreateSlice(core.session, same.shape, same.axes, -1, "", "", whole, part.places))
        pairs.append((same.id, made.placed.mesh.id))
    return pairs
