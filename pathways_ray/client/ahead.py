"""Values that are asked for with the calls that make them: they come unasked, before somebody looks at them.

Who waits for the value of each call asks for it right after the call. So the question goes along with the next call
that is handed to its host (`EarlyCalls.expected` says of which program), and the value is there, or on its way, when
`np.asarray` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from pathways_ray.client.array_pieces import FetchedArray, Fetching, FetchPlan
from pathways_ray.transport import messages as wire

if TYPE_CHECKING:
    from pathways_ray.client.data_link import DataLink

MAX_AHEAD = 8
"""Values of a session that were asked for with their calls and that nobody has looked at; behind so many the first is
given up."""

MAX_AHEAD_BYTES = 100 << 10
"""The largest of them."""


def _nobody() -> None:
    """Told of a value for which nobody waits yet."""


class Asked(NamedTuple):
    """A value that was asked for with its call. `program` is 0 once somebody has waited for it."""

    link: DataLink
    request: int
    array: FetchedArray
    fetching: Fetching
    program: int

    def along_with(self, call: wire.LaunchEarly, buffer: int) -> wire.LaunchEarly:
        """The call, with the question for this result of it."""
        devices = self.array.plan.by_host[self.link.host]
        return replace(call, request=self.request, devices=devices, asked=buffer - call.results)


class Ahead:
    """The values of a session that were asked for with their calls, by buffer. Any thread may take one out, and has it
    to itself. `ignored` is called with a program whose value nobody has waited for; `exists` says whether a buffer is
    there yet: once it is not, `drop` is called."""

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        self.ignored: Callable[[int], None] = lambda program: None
        self.exists: Callable[[int], bool] = lambda buffer: True

    def ask(self, link: DataLink, plan: FetchPlan, request: int, program: int) -> Asked | None:
        """The question that a call is to take along, for `enter` once it has left, or `withdraw`; None where the value
        is not small, or not all on the host of the call."""
        if len(self.asked) >= MAX_AHEAD and (unread := list(self.asked)):
            self.drop(unread[0])
            return None
        if plan.only_host != link.host or plan.nbytes > MAX_AHEAD_BYTES:
            return None
        array = FetchedArray(plan, _nobody)
        fetching = link.fetches[request] = array.by_host[link.host]
        if link.dead is not None:  # looked at behind the entry: the end of a stream fails what it finds
            fetching.failure = link.dead
        return Asked(link, request, array, fetching, program)

    def enter(self, buffer: int, asked: Asked) -> None:
        """Has a value for who looks at its buffer."""
        self.asked[buffer] = asked
        if not self.exists(buffer):  # looked at behind the entry: a deletion drops what it finds
            self.drop(buffer)

    def take(self, buffer: int, told: Callable[[], None], plan: FetchPlan | None = None) -> Asked | None:
        """Takes a value out that has come or will, unless it cannot come, or was asked for otherwise than by `plan`.

        Args:
            told: called when it is there, from now on.
        """
        asked = self.asked.pop(buffer, None)
        if asked is None:
            return None
        if asked.fetching.failure is not None or plan not in (None, asked.array.plan):
            self.withdraw(asked)
            return None
        asked.fetching.told = told
        return asked

    def keep(self, buffer: int, asked: Asked) -> None:
        """Puts a value back that somebody has waited for, and not taken."""
        asked.fetching.told = _nobody
        self.enter(buffer, Asked(asked.link, asked.request, asked.array, asked.fetching, 0))

    def drop(self, buffer: int) -> None:
        """Nobody looks at a value any more. Safe in a destructor."""
        asked = self.asked.pop(buffer, None)
        if asked is not None:
            self.withdraw(asked)
            if asked.program:
                self.ignored(asked.program)

    def withdraw(self, asked: Asked) -> None:
        """Asks no more."""
        asked.link.fetches.pop(asked.request, None)
        if asked.fetching.missing and asked.fetching.failure is None:
            asked.link.outbox.send_later(wire.CancelFetch(asked.request))
