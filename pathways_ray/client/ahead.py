"""Values that are asked for with the calls that make them: they come unasked, before somebody looks at them.

Who waits for the value of each call asks for it right after the call. So the question goes along with the next call
that is handed to its host (`EarlyCalls.expected` says of which program), and the value is there, or on its way, when
`np.asarray` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pathways_ray.client.array_pieces import FetchedArray, Fetching, FetchPlan, plan_of
from pathways_ray.client.buffer import DELETED, BufferRecord
from pathways_ray.client.siblings import Results, Siblings
from pathways_ray.transport import messages as wire

if TYPE_CHECKING:
    from pathways_ray.client.data_link import DataLink

MAX_AHEAD = 8
"""Values of a session that were asked for with their calls and that nobody has looked at; behind so many the first is
given up."""

MAX_AHEAD_BYTES = 100 << 10
"""The largest of them."""


Along = Mapping[int, tuple[int, FetchedArray]]
"""Arrays that may come with another one, by their buffers, each with the number of its request."""


class Asked(NamedTuple):
    """A value that was asked for with its call. `program` is 0 once somebody has waited for it; `along` are further
    results of the call, which may come with it."""

    link: DataLink
    request: int
    array: FetchedArray
    fetching: Fetching
    program: int
    along: Along

    def along_with(self, call: wire.LaunchEarly, buffer: int) -> wire.LaunchEarly:
        """The call, with the question for this result of it."""
        first, devices = call.results, self.array.plan.by_host[self.link.host]
        also = tuple([(request, other - first) for other, (request, _) in self.along.items()]) if self.along else ()
        place = buffer - first
        return wire.LaunchEarly(call.program, call.arguments, first, call.inline, self.request, devices, place, also)


class Ahead:
    """The values of a session that were `asked` for with their calls, by buffer. Any thread may take one out, and has
    it to itself. `ignored` is called with a program whose value nobody has waited for; `buffers` are those of the
    session: once one is there no more, `drop` is called."""

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.siblings = Siblings()
        self.ignored: Callable[[int], None] = lambda program: None
        self.buffers: Mapping[int, BufferRecord] | None = None

    def ask(self, link: DataLink, record: BufferRecord, requests: Iterator[int], program: int) -> Asked | None:
        """The question that a call is to take along, for `enter` once it has left, or `withdraw`; None where the value
        is not small, or not all on the host of the call. Small results beside it come with it, as with any question."""
        if len(self.asked) >= MAX_AHEAD and (unread := list(self.asked)):
            self.drop(unread[0])
            return None
        plan: FetchPlan = record.kind.cover or plan_of(record.kind)
        if plan.only_host != link.host or plan.nbytes > MAX_AHEAD_BYTES:
            return None
        array, request = FetchedArray(plan), next(requests)
        along = self._along(link, record.results, record.id, requests, plan) if record.results is not None else {}
        fetching = link.fetches[request] = array.by_host[link.host]
        if link.dead is not None:  # looked at behind the entry: the end of a stream fails what it finds
            fetching.failure = link.dead
        return Asked(link, request, array, fetching, program, along)

    def _along(self, link: DataLink, results: Results, buffer: int, requests: Iterator[int], plan: FetchPlan) -> Along:
        """The further results of a call that are asked for beside one of them."""
        along: dict[int, tuple[int, FetchedArray]] = {}
        if beside := self.siblings.beside(results, buffer):
            for other, one in plans_along(beside, results, self.buffers or {}, plan).items():
                along[other] = number, found = next(requests), FetchedArray(one)
                link.fetches[number] = found.by_host[link.host]
        return along

    def enter(self, buffer: int, asked: Asked) -> None:
        """Has a value for who looks at its buffer."""
        self.asked[buffer] = asked
        # Looked at behind the entry: a deletion, or a donation, drops what it finds.
        if self.buffers is not None and ((record := self.buffers.get(buffer)) is None or record.state is DELETED):
            self.drop(buffer)

    def take(self, buffer: int, plan: FetchPlan | None = None) -> Asked | None:
        """Takes a value out that has come or will, unless it cannot, or was asked for otherwise than by `plan`. It is
        `told` to nobody yet."""
        asked = self.asked.pop(buffer, None)
        if asked is None or (asked.fetching.failure is None and (plan is None or plan is asked.array.plan)):
            return asked
        self.withdraw(asked)
        return None

    def keep(self, buffer: int, asked: Asked) -> None:
        """Puts a value back that somebody has waited for, and not taken."""
        asked.fetching.told = None
        link, request, array, fetching, _, along = asked
        self.enter(buffer, Asked(link, request, array, fetching, 0, along) if asked.program else asked)

    def drop(self, buffer: int) -> None:
        """Nobody looks at a value any more. Safe in a destructor."""
        asked = self.asked.pop(buffer, None)
        if asked is not None:
            self.withdraw(asked)
            if asked.program:
                self.ignored(asked.program)

    def let_alone(self, asked: Asked) -> None:
        """Takes nothing that comes along with a value, nor with the next ones of its program."""
        for request, _ in asked.along.values():
            asked.link.fetches.pop(request, None)
        if asked.along and asked.program:
            self.siblings.of_no_use(asked.program)

    def withdraw(self, asked: Asked) -> None:
        """Asks no more."""
        asked.link.fetches.pop(asked.request, None)
        if asked.along:
            for request, _ in asked.along.values():
                asked.link.fetches.pop(request, None)
        if asked.fetching.missing and asked.fetching.failure is None:
            asked.link.outbox.send_later(wire.CancelFetch(asked.request))


def plans_along(
    numbers: Sequence[int], results: Results, buffers: Mapping[int, BufferRecord], plan: FetchPlan
) -> dict[int, FetchPlan]:
    """The results of these numbers that a question for one of them, by `plan`, brings along: those that are on the same
    devices."""
    found: dict[int, FetchPlan] = {}
    for number in numbers:
        other = buffers.get(number)
        if other is not None and other.state is not DELETED and other.failure is None:
            one = plan_of(results.kinds[number - results.first])
            if one.by_host == plan.by_host:
                found[number] = one
    return found


def came_along(along: Along, early: dict[int, np.ndarray[Any, Any]] | None) -> None:
    """Adds those of the arrays that have come to `early`."""
    if early is not None:
        early.update((number, other.value()) for number, (_, other) in along.items() if other.is_there)
