"""Buffers that clients upload and free, and that launches make. They are counted per logical array, by the session's
own numbers.

A client says what it uploads (`Put`), each host what has arrived there (`Stored`). A launch takes an upload once all
hosts have it, as the client said: a gang of which only some hosts find their shards would leave the others in its
collective, and so would one that branches on an array that the client called replicated, and gave each host other bytes
of. Hosts keep the first array under a number; so a number is not used again whose first upload was
dropped while it was under way, since its removal may still be on the way to some of them. Nor is one whose upload
nobody knew of when its host came back, and which was dropped there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from pathways_ray.controller import quotas
from pathways_ray.controller.late_drops import SMALL_BYTES
from pathways_ray.controller.memory import never_holds
from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.state import Arriving, Buffer, Send, SendClient, SendIsland, Session, Tables
from pathways_ray.errors import Failure, GraphError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType, Spec, check_layout
from pathways_ray.transport.messages import BuffersLost, Drop, LateDrop, Put, Stored

UPLOAD_LIMIT_S = 20.0
"""A launch waits this long for hosts to report the arrays that were uploaded for it."""

MAX_EARLY = 16384
"""Uploads of a session that hosts have reported and its client has not named: it does so when it begins with them."""

MAX_BURNT = 65536
"""Numbers of a session that are remembered as burnt."""


@functools.lru_cache(maxsize=1024)
def _type_on(mesh: SliceType, array: ArrayType, spec: Spec) -> BufferType:
    """The type of an upload to a slice with this mesh: arrays of one type are put again and again. Raises `GraphError`
    where none can lie so."""
    check_layout(array, spec, mesh, "put")
    return BufferType.on(mesh, array, spec)


def put(
    tables: Tables,
    session: Session,
    message: Put,
    coming: int | None = None,
    alike: dict[BufferType, Mapping[int, int]] | None = None,
) -> list[Send] | None:
    """Enters a buffer. One whose type or slice is invalid is not made; a launch with it says so.

    Args:
        coming: bytes that launches will make which the session has called before, and which have yet to go; None
            without such.
        alike: for uploads that come together, and count against no quota: types of which one was entered, with the
            epochs of the processes that it went to. What holds for it holds for all like it.

    Returns: None where the tenant's quota has no room for it beside these: it has to wait for them, and for what is
        freed behind them.
    """
    number, place = message.buffer, session.places.get(message.slice)
    if place is None:
        return []
    try:
        kind = _type_on(place.mesh, message.type, message.spec)
    except GraphError:
        return []
    if session.lives(number):
        return []  # clients count their buffers up; what the hosts have there now is this session's own trouble
    if coming is not None and _over_quota(tables, session, kind, coming) is not None:
        return None
    session.named.add(number)
    is_like_another = alike is not None and alike.get(kind) == message.epochs
    if not is_like_another or number in session.burnt or not quotas.has_room(session, tables.buffers, 1):
        failure = _failure(tables, session, place, kind, message)
        if failure is not None:
            return _refused(tables, session, place, message, failure)
        if alike is not None:
            alike[kind] = message.epochs
    session.keep(number, Buffer(kind, 0))
    session.arriving[number] = Arriving(set(place.hosts), message.epochs)
    if not session.early or (early := session.early.pop(number, None)) is None:
        return []
    return [command for report in early.values() for command in stored(session, report)]


def _failure(tables: Tables, session: Session, place: PlacedSlice, kind: BufferType, message: Put) -> Failure | None:
    """The failure of an upload that cannot be entered."""
    number = message.buffer
    if number in session.burnt:
        text = (
            f"buffer {number} was dropped from its hosts before; its number cannot be used again: upload it once more"
        )
        return Failure("BufferLost", text)
    if session.suspended:
        return quotas.while_suspended(session)
    if not quotas.has_room(session, tables.buffers, 1):
        return quotas.buffers(session, tables.buffers, 1, f"{message.type} to put")
    return (
        _over_quota(tables, session, kind)
        or never_holds(tables, place, kind)
        or _sent_before_move(place, message)
        or sent_to_ended_process(tables, place.hosts, number, message.epochs)
    )


def _over_quota(tables: Tables, session: Session, kind: BufferType, coming: int = 0) -> Failure | None:
    """The failure of an upload for which the tenant's quota has no room."""
    if session.tenant.quota.device_bytes is None:
        return None
    asked = kind.charged_bytes + coming
    return quotas.device_bytes(session, tables.sessions.values(), asked, f"{kind.type} to put")


def _refused(tables: Tables, session: Session, place: PlacedSlice, message: Put, failure: Failure) -> list[Send]:
    """Refuses an upload, and takes it away from where it may be."""
    number = message.buffer
    session.refuse(number, 1, failure)
    burn(session, number)
    # A client may name any number of hosts; the slice lay on no more than it has devices.
    named = itertools.islice(message.epochs, len(place.devices))
    islands = {place.island} | _islands_of(tables, named)
    return [
        *(SendIsland(island, Drop(session.id, (number,))) for island in sorted(islands)),
        SendClient(session.id, BuffersLost((number,), failure)),
    ]


def _sent_before_move(place: PlacedSlice, message: Put) -> Failure | None:
    """The failure of an upload that went to the hosts where its slice lay before it moved: the exchange overtook this
    message. Its client has dropped the array, else it would have waited for it."""
    if message.epochs.keys() <= set(place.hosts):
        return None
    return Failure("BufferLost", f"buffer {message.buffer} went to where slice {message.slice} was; upload it again")


def _islands_of(tables: Tables, hosts: Iterable[int]) -> set[int]:
    """The islands of hosts that an upload went to: that of its slice may be another one by now."""
    return {tables.hosts[host].island for host in hosts if host in tables.hosts}


def sent_to_ended_process(
    tables: Tables, hosts: Iterable[int], buffer: int, epochs: Mapping[int, int]
) -> Failure | None:
    """The failure of an upload that went to a host's process which has ended since: nobody will report it.

    Args:
        epochs: those of the processes, by host.
    """
    for number in hosts:
        host = tables.hosts.get(number)
        sent_to = epochs.get(number)
        if host is None or sent_to is None:
            continue
        ended = host.down_since is not None and not host.orphaned
        if sent_to < host.epoch or (sent_to == host.epoch and ended):
            text = f"buffer {buffer} went to host {number} just before that was lost; upload it again"
            return Failure("BufferLost", text, host=number)
    return None


def host_began(tables: Tables, session: Session, host: int) -> list[Send]:
    """Gives up the uploads that went to a process which was a host before the one that is up now. Of one that ended
    under the controller before, this one has not heard."""
    commands: list[Send] = []
    for number, arriving in list(session.arriving.items()):
        failure = sent_to_ended_process(tables, arriving.hosts & {host}, number, arriving.epochs)
        if failure is not None:
            commands += lose(session, number, session.buffers[number], failure)
    return commands


def drop_late(tables: Tables, message: Stored) -> list[Send]:
    """Takes an upload away from a host where it has arrived behind the message that dropped it."""
    islands = _islands_of(tables, (message.host,))
    return [SendIsland(island, Drop(message.session, (message.buffer,))) for island in islands]


def stored(session: Session, message: Stored) -> list[Send]:
    """Notes that an upload has arrived on a host."""
    number, arriving = message.buffer, session.arriving.get(message.buffer)
    if arriving is None:
        if number not in session.buffers and number not in session.burnt:
            session.early.setdefault(number, {})[message.host] = message
            if len(session.early) > MAX_EARLY:
                del session.early[next(iter(session.early))]
        return []
    buffer = session.buffers[number]
    said = buffer.type
    if (message.slice, message.type, message.spec) != (said.slice, said.type, said.spec):
        text = (
            f"buffer {number} was said to be {said.type} on slice {said.slice}; what came to host {message.host} is "
            f"{message.type} on slice {message.slice}"
        )
        return lose(session, number, buffer, Failure("WireError", text, host=message.host))
    for position, digest in message.digests.items():
        other, found = arriving.digests.setdefault(position, (message.host, digest))
        if found != digest:
            text = (
                f"buffer {number}: hosts {other} and {message.host} hold the same part of it, and other bytes came to "
                "one than to the other; upload it again"
            )
            return lose(session, number, buffer, Failure("WireError", text, host=message.host))
    arriving.hosts.discard(message.host)
    if not arriving.hosts:
        del session.arriving[number]
    return []


class Overdue(NamedTuple):
    """Uploads that were given up: the failure of a launch that waited for them, and who has to know of it."""

    failure: Failure
    commands: list[Send]


def overdue(tables: Tables, session: Session, arguments: Iterable[int], since: float) -> Overdue | None:
    """Gives up the uploads among these arguments that have not arrived, if a launch has waited for too long.

    Args:
        since: when it was called, by `Tables.counted`: clients and hosts of a slow machine are slow, too.
    """
    if tables.counted - since <= UPLOAD_LIMIT_S:
        return None
    commands: list[Send] = []
    failure = Failure("BufferLost", "an upload was given up")
    for number in arguments:
        if (arriving := session.arriving.get(number)) is not None:
            names = ", ".join(map(str, sorted(arriving.hosts)))
            text = f"buffer {number} has not come to host {names} in {UPLOAD_LIMIT_S:.0f} s; upload it again"
            failure = Failure("BufferLost", text, host=min(arriving.hosts))
            commands += lose(session, number, session.buffers[number], failure)
    return Overdue(failure, commands)


def host_lost(session: Session, host: int) -> None:
    """Forgets what a host reported before it was lost."""
    for reports in session.early.values():
        reports.pop(host, None)


def lose(session: Session, number: int, buffer: Buffer, failure: Failure) -> list[Send]:
    """Fails a buffer that is not as it should be, and takes away what hosts have of it."""
    session.arriving.pop(number, None)
    burn(session, number)
    session.fail(number, buffer, failure)
    place = session.places[buffer.type.slice]
    return [
        SendIsland(place.island, Drop(session.id, (number,))),
        SendClient(session.id, BuffersLost((number,), failure)),
    ]


def burn(session: Session, number: int) -> None:
    """Notes that hosts drop an upload which its client may yet name: it is told so then, and does not wait for it."""
    session.early.pop(number, None)
    session.burnt[number] = None
    if len(session.burnt) > MAX_BURNT:
        del session.burnt[next(iter(session.burnt))]


def make(session: Session, program: PlannedProgram, first: int, producer: int) -> list[Buffer]:
    """Enters what a launch of a program makes, under the client's numbers from `first` on."""
    made = list(map(Buffer, program.results, itertools.repeat(producer)))
    known, held, numbers = session.buffers, session.held, range(first, first + len(made))
    if not known.keys().isdisjoint(numbers):
        for number in known.keys() & numbers:
            session.array_bytes -= known[number].type.array_bytes  # it has failed, and its number is given again
    known.update(enumerate(made, first))
    session.array_bytes += program.array_bytes
    session.charged_bytes += program.charged_bytes
    for slice_id, size in program.held.items():
        held[slice_id] = held.get(slice_id, 0) + size
    return made


def free(tables: Tables, session: Session, numbers: Iterable[int]) -> list[Send]:
    """Forgets buffers; their islands drop them after the launches before. Those that were donated to a launch under way
    are dropped once that ends."""
    places, uploads = session.places, bool(session.early or session.arriving)
    dropped: dict[int, dict[int, None]] = {}
    kind: type[Drop] = LateDrop
    for number in numbers:
        buffer = session.forget(number)
        if buffer is not None:
            if buffer.type.device_bytes > SMALL_BYTES:
                kind = Drop
            dropped.setdefault(places[buffer.type.slice].island, {})[number] = None
        elif (donated := session.donated.get(number)) is not None:
            donated.freed = True
        if uploads and (number in session.arriving or number in session.early):
            kind = Drop  # of which nobody here knows how big it is
            for island in _cut_off(tables, session, number):
                dropped.setdefault(island, {})[number] = None
    return [SendIsland(island, kind(session.id, tuple(found))) for island, found in dropped.items()]


def _cut_off(tables: Tables, session: Session, number: int) -> Set[int]:
    """Ends an upload, if one is under way. Returns the islands of hosts that have said what its client has not."""
    told = session.early.pop(number, {})
    if session.arriving.pop(number, None) is not None or told:
        burn(session, number)
    return _islands_of(tables, told)
