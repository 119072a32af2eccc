"""Waiting for some of several arrays: `pw.wait` and `pw.as_completed`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import jax

from pathways_ray.client.array import Array
from pathways_ray.client.buffer import PENDING, Buffer, BufferRecord
from pathways_ray.client.ending import FORKED
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.client.numbers import seconds, whole
from pathways_ray.errors import UsageError, WaitTimeout
from pathways_ray.waits import slice_s

SLICE_S = slice_s()
"""Waits look again this often, so that the end of a session is seen whatever woke them."""


FEW_LAUNCHES = 4
"""Launches each of whose hosts is asked, one after the other. The outcomes of more come together."""


class _Awaited(NamedTuple):
    """An item that is waited for, as it was given, and the arrays in it."""

    item: Any
    arrays: Sequence[Array]

    @property
    def is_done(self) -> bool:
        return all(array._buffer.record.shown is not PENDING for array in self.arrays)


def _pending(left: Sequence[_Awaited]) -> Iterator[Buffer]:
    """The arrays that are not there."""
    return (a._buffer for one in left for a in one.arrays if a._buffer.record.shown is PENDING)


def _first(left: Sequence[_Awaited]) -> Buffer:
    """The first array that is not there."""
    return next(_pending(left), left[0].arrays[0]._buffer)


def _is_of_parent(buffer: Buffer) -> bool:
    """Whether this process is a fork of that whose session has an array: nothing is heard of it here."""
    return buffer.session.closed_because == FORKED


def _split(left: Sequence[_Awaited]) -> tuple[list[Any], list[_Awaited]]:
    """The items that are done, and what is not; each is looked at once."""
    flags = [one.is_done for one in left]
    return [one.item for one in compress(left, flags)], list(compress(left, map(not_, flags)))


class _Bell:
    """A bell that rings when something has changed in one of the sessions of arrays."""

    def __init__(self, awaited: Iterable[_Awaited]) -> None:
        self.rung = Sleeper()  # no `Event`: a destructor of this thread may ring, and Ctrl-C leaves that taken
        self._showing = contextlib.ExitStack()
        self._shown: BufferRecord | None = None
        self.sessions = list({id(s): s for one in awaited for a in one.arrays for s in (a._buffer.session,)}.values())

    def __enter__(self) -> _Bell:
        for session in self.sessions:
            session.watch(self.rung.wake)
        return self

    def __exit__(self, *_: object) -> None:
        self._showing.close()
        for session in self.sessions:
            session.unwatch(self.rung.wake)

    def wait_for_all(self, awaited: Iterable[_Awaited], until: float | None) -> None:
        """Waits for the results of a few launches, one after the other, as long as hosts say that they are there: that
        is sooner than outcomes come."""
        left = [a._buffer for one in awaited for a in one.arrays if a._buffer.record.shown is PENDING]
        if len({buffer.record.launch for buffer in left}) > FEW_LAUNCHES:
            return
        for buffer in left:
            self._show(buffer)
            if buffer.record.shown is PENDING and not buffer.session.wait_there(buffer.record, until):
                return

    def wait(self, left_s: float | None, left: Sequence[_Awaited]) -> None:
        """Waits until it rings. Without a limit it raises `SessionClosed` in a fork, for arrays of its parent: for
        these it never would."""
        for session in self.sessions:
            session.hurry()
        first = _first(left)
        if left_s is None and _is_of_parent(first) and all(map(_is_of_parent, _pending(left))):
            first.session.check_open()
        self._show(first)
        self.rung.sleep(SLICE_S if left_s is None else min(left_s, SLICE_S))

    def _show(self, first: Buffer) -> None:
        """Has `pw.progress()` show why the first of what is left is not there."""
        if first.record is not self._shown:  # else that wait goes on
            self._showing.close()
            self._showing.enter_context(first.session.lasting(first.record))
            self._shown = first.record


def as_completed(arrays: Iterable[Any], timeout: float | None = None) -> Iterator[Any]:
    """Yields arrays as they are computed, whichever is first, as `concurrent.futures.as_completed` does.

        for loss in pw.as_completed([step(batch) for batch in batches], timeout=60):
            print(float(loss))

    An entry may be a pytree of arrays; it comes when all of them are there. What failed comes too, and raises where it
    is looked at.

    Args:
        timeout: seconds for all of them.

    Raises:
        WaitTimeout: some were not computed in time.
        UsageError: an entry holds no `pw.Array`.
    """
    left, limit = _checked(arrays), seconds(timeout)
    total = len(left)
    deadline = None if limit is None else time.monotonic() + limit
    with _Bell(left) as bell:
        while left:
            done, left = _split(left)
            yield from done
            if left and not done:
                rest = None if deadline is None else deadline - time.monotonic()
                if rest is not None and rest <= 0:
                    error = WaitTimeout(f"{len(left)} of {total} were not computed within {limit} s")
                    first = _first(left)
                    first.session.explain_timeout(error, first.record, limit)
                    raise error
                bell.wait(rest, left)


def wait(arrays: Iterable[Any], count: int | None = None, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    """Waits until `count` of some arrays are computed or have failed; all of them when it is left out.

        done, rest = pw.wait(arrays, count=1, timeout=5)

    Args:
        arrays: `pw.Array`s, or pytrees of them.
        count: from 0 to their number.
        timeout: seconds, after which it returns what there is.

    Returns:
        Those that are done and those that are not, each in the order given. What failed is done, and raises where it is
        looked at.

    Raises:
        UsageError: an entry holds no `pw.Array`, or `count` is not such a number.
    """
    awaited, limit = _checked(arrays), seconds(timeout)
    wanted = len(awaited) if count is None else whole(count, 0, len(awaited))
    if wanted is None:
        raise UsageError(f"count= is a number from 0 to that of the arrays, {len(awaited)}; not {count!r}")
    deadline = None if limit is None else time.monotonic() + limit
    with _Bell(awaited) as bell:
        if wanted == len(awaited):
            bell.wait_for_all(awaited, deadline)
        while True:
            done, left = _split(awaited)
            rest = None if deadline is None else deadline - time.monotonic()
            if len(done) >= wanted or (rest is not None and rest <= 0):
                return done, [one.item for one in left]
            bell.wait(rest, left)


def _checked(arrays: Iterable[Any]) -> list[_Awaited]:
    if isinstance(arrays, Array) or not isinstance(arrays, Iterable):  # the entries of one would be launches
        raise UsageError(f"several pw.Arrays are waited for, in a list; not {arrays!r}")
    awaited = []
    for item in arrays:
        found = [leaf for leaf in jax.tree.leaves(item) if isinstance(leaf, Array)]
        if not found:
            raise UsageError(f"only pw.Arrays, and pytrees of them, are waited for; not {item!r}")
        awaited.append(_Awaited(item, found))
    return awaited
