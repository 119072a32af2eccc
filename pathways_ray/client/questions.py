"""Questions to hosts of this machine, for small shards and whether a value is there: asked now, answered by a call,
with no thread that waits (but for that of `await_there`).

The caller looks at the failures of the array by itself, and takes the question back; then a fetch, which waits, says
what is wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pathways_ray import limits
from pathways_ray.client.ahead import Asked
from pathways_ray.client.array_pieces import THERE, FetchedArray, Fetching, FetchPlan
from pathways_ray.client.buffer import ID_OF, PENDING, READY, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import SHARED_BYTES, DataLink
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.errors import PathwaysError
from pathways_ray.transport import messages as wire
from pathways_ray.waits import slice_s

Done = Callable[[np.ndarray[Any, Any] | None], None]
"""Takes what was asked for, None where it cannot come; called once, by the thread that reads."""

_WAIT_SLICE_S = slice_s()

MAX_ASKED = 2
"""Hosts of an array that are asked whether it is there. Where it lies on more, which were not measured, its outcome is
waited for."""


class Question:
    """A question under way. `done` gets True for an answer, False where none can come; it is called once."""

    def __init__(self, link: DataLink, request: int, done: Callable[[bool], None]) -> None:
        self._link, self._request, self._done = link, request, done

    def ask(self, message: wire.Fetch, fetching: Fetching) -> bool:
        """Sends it; False where that cannot be, and `done` was and is not called."""
        self._link.fetches[self._request] = fetching
        if not self._link.send_local(message):  # its end, in another thread, may have found it
            return self._link.fetches.pop(self._request, None) is None
        if self._link.dead is not None:
            self.end(False)
        return True

    def end(self, came: bool) -> None:
        """Gives the answer, unless it was given or taken back before."""
        if self._link.fetches.pop(self._request, None) is not None:
            self._done(came)

    def take_back(self) -> bool:
        """Gives up; False when it has been answered."""
        if self._link.fetches.pop(self._request, None) is None:
            return False
        self._link.outbox.send(wire.CancelFetch(self._request))
        return True


def _local_link(data: DataLinks, host: int) -> DataLink | None:
    link = data.link_of(host)
    return link if link is not None and link.is_local else None


def ask(data: DataLinks, buffer: int, cover: FetchPlan, done: Done) -> Question | None:
    """Asks for a shard, unless that was done with its call. None where it is big, or its host is not of this machine or
    was not spoken to yet."""
    if len(cover.by_host) != 1 or cover.nbytes >= SHARED_BYTES:
        return None
    ((host, devices),) = cover.by_host.items()
    if (link := _local_link(data, host)) is None:
        return None
    if (ahead := data.ahead.take(buffer, cover)) is not None:
        return _expect(data, ahead, done)
    found = FetchedArray(cover, lambda: question.end(fetching.failure is None))
    request, fetching = data.new_request(), found.by_host[host]
    question = Question(link, request, lambda came: done(found.value() if came else None))
    return question if question.ask(wire.Fetch(request, buffer, devices, ()), fetching) else None


def _expect(data: DataLinks, ahead: Asked, done: Done) -> Question:
    """A question that was asked with the call that makes the value: it is there, or comes unasked."""
    fetching = ahead.fetching
    data.ahead.let_alone(ahead)
    question = Question(ahead.link, ahead.request, lambda came: done(ahead.array.value() if came else None))
    fetching.told = lambda: question.end(fetching.failure is None)
    if not fetching.missing or fetching.failure is not None:  # since before, when nobody was told
        fetching.told()
    return question


def ask_whether_there(data: DataLinks, buffer: int, host: int, done: Callable[[bool], None]) -> Question | None:
    """Asks a host to say when it has a value; None where it is not of this machine."""
    if (link := _local_link(data, host)) is None:
        return None
    request = data.new_request()
    question = Question(link, request, done)
    fetching = Fetching(None, host, THERE, lambda: question.end(fetching.failure is None))
    return question if question.ask(wire.Fetch(request, buffer, ()), fetching) else None


def read(data: DataLinks) -> None:
    """Reads what hosts of this machine have sent, unless a thread that waits for it does: for a loop that polls their
    reader."""
    if data.reader.leading.acquire(blocking=False):
        try:
            data.reader.read()
        finally:
            data.reader.leading.release()
            data.wake()  # another one leads


def await_there(
    data: DataLinks,
    core: ClientCore,
    record: BufferRecord,
    check: Callable[[BufferRecord], None],
    until: float | None = None,
) -> bool:
    """Waits until the hosts of a result have it, and what else its launch makes on its slice, or the outcome comes,
    which takes longer, or the time of `time.monotonic` does; of an upload there is its outcome alone. False where the
    outcome has to be waited for: after a loss, which `check` raises, where an array was deleted, where its hosts are
    many, or were not spoken to yet, and where it is not there in time."""
    early = core.early

    def is_over() -> bool:
        check(record)
        return record.state is not PENDING

    if record.upload is not None:
        return _await_upload(data, record, is_over, until)
    hosts = hosts_of(data, record)
    if not hosts:
        return False
    early.looked_at(record)
    others: Sequence[BufferRecord] = ()
    try:
        if not (record.early in early.there if record.early else record.fetched):
            others = () if record.early else _beside(core, record)
            came = data.await_values([record.id, *map(ID_OF, others)], hosts, is_over, until)
            if not came and record.state is PENDING:
                return False
        check(record)  # again: it may have been lost since, or in the midst of a look
    except PathwaysError:
        return False  # the controller knows why
    if record.state is PENDING:
        for other in others:
            early.came(other)
    early.came(record)
    return record.state is READY or (record.state is PENDING and record.fetched)


def _await_upload(data: DataLinks, record: BufferRecord, is_over: Callable[[], bool], until: float | None) -> bool:
    """Waits until an array is uploaded, or the time has come. Of what came by a local socket its hosts say so there,
    where who waits reads it."""
    sleeper, number = Sleeper(), data.new_request()
    try:
        data.awaited[number] = is_over, sleeper.wake
        data.reader.wait(is_over, sleeper, _WAIT_SLICE_S, until)
    except PathwaysError:  # the outcome says it
        return False
    finally:
        data.awaited.pop(number, None)
    return record.state is READY


def _beside(core: ClientCore, record: BufferRecord) -> Sequence[BufferRecord]:
    """The further results of its launch that lie on its slice, for which one question is enough: a tree is waited for
    leaf by leaf."""
    if record.results is None:
        return ()
    here = (n for n, kind in enumerate(record.results.kinds, record.results.first) if kind.slice is record.kind.slice)
    known = (core.buffers.get(number) for number in here if number != record.id)
    found = (other for other in known if other is not None and other.state is PENDING and not other.fetched)
    return tuple(itertools.islice(found, limits.MAX_SIBLINGS))


def hosts_of(data: DataLinks, record: BufferRecord) -> tuple[int, ...]:
    """The hosts of a result, where all of them can be asked; else none. Those that were not spoken to yet can be the
    next time: who waits for values, and looks at none, would otherwise hear of each by way of the controller."""
    unplaced = record.kind is None or record.kind.slice is None or record.upload is not None
    if record.early and (unplaced or record.kind.slice.placed.hosts == (record.host,)):
        return (record.host,) if data.link_of(record.host) is not None else ()  # it has died: the outcome says so
    if unplaced:
        return ()
    hosts: tuple[int, ...] = record.kind.slice.placed.hosts
    if len(hosts) > MAX_ASKED:
        return ()
    others = [host for host in hosts if data.link_of(host) is None]
    for host in others:
        data.open(host)
    return () if others else hosts
