"""Early calls: which launches a client hands to their host itself, beside sending them. Pure.

A launch takes three processes to its host and its outcome three back. Who waits for each value waits for all of them,
though nobody has anything to decide. So a call that finds little of its session under way is handed to its host at
once; what is sent behind it, with others and later, decides everything about it and has its outcome (`EarlyLaunch`).
In a stream of calls nothing is gained: launches leave in batches there, and are not handed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pathways_ray.client.buffer import EARLY_OF, PENDING, READY, BufferRecord
from pathways_ray.transport.messages import EarlyLaunch, LaunchEarly, Message

NO_HOST = -1

_UNKNOWN = NO_HOST, 0

MAX_UNDER_WAY = 3
"""Launches under way that nobody waits for, as far as the client knows, beyond which none is handed over: a stream of
calls has many, and callers in threads, each of which waits for its value, have none. So it is before a value has come;
behind that, see `MAX_BETWEEN`."""

MAX_BETWEEN = 6
"""Calls between one look at their values and the next, all of which are handed over. Of more none is: they leave
together, and are sooner there."""

MAX_PUT = 3
"""Uploads between one look and the next that are waited for. Of more the others go on their way together."""

MAX_TOGETHER = 8
"""Launches under way in all, waited for or not, beyond which none is handed over: the host would leave it."""

MAX_HANDED = 64
"""Launches that were handed over and have no outcome, as far as the client knows. Hosts take half as many again: those
that they refuse are counted."""

MAX_REFUSED = 8
"""Calls of a program that hosts refuse, none that they take in between, beyond which few of it are handed over: its
arguments may lie there otherwise than those of the first launch, or other tenants come and go."""

ASKED_AGAIN = 16
"""Of so many calls of such a program at least one is handed over, or asked of its host, all the same."""


class EarlyCalls:
    """The programs and hosts to which calls may be handed.

    `hosts` are those that take calls now. `handed` are the programs of launches that were handed over and have no
    outcome; the values of those that are `there` have come, and those that are `over` were begun no later than these.
    `expected` are the programs whose last values were waited for before their launches had outcomes, each with the
    place of that one among its results.

    Args:
        most: see `MAX_UNDER_WAY`; 0 where it goes by the calls between the last two values that have come.
    """

    def __init__(self, most: int = 0) -> None:
        self.most, self.goes_by_values = most or MAX_UNDER_WAY, not most
        self.awaited: Callable[[], int] = lambda: 0
        """The values that threads wait for now."""
        self.hosts: set[int] = set()
        self.handed: dict[int, int] = {}
        self.there: set[int] = set()
        self.over: set[int] = set()
        self.expected: dict[int, int] = {}
        self._looked_at = 0
        self.seen = 0
        """The last launch of which a value has come: nothing that was called before it counts as under way."""
        self.called = self._called_at = 0
        self._put = 0
        """Uploads since a value came."""
        self._programs: dict[int, tuple[int, int]] = {}
        self._refused: Counter[int] = Counter()
        self._given_up: dict[int, int] = {}
        """Programs of which hosts have refused too many calls: each with the calls since."""
        self._unserved: dict[int, int] = {}
        self._left: set[int] = set()
        self._carrying: set[int] = set()
        """Those that were handed over with arguments of their own."""

    def prepared(self, program: int, key: int, host: int) -> None:
        """Calls of a program may be handed to a host, which knows it as `key`; or to none, with `NO_HOST`."""
        self._refused.pop(program, None)
        self._given_up.pop(program, None)
        self._unserved.pop(program, None)
        self._programs[program] = host, key

    def forget(self, program: int) -> None:
        """A program is called no more."""
        self._programs.pop(program, None)
        self._refused.pop(program, None)
        self._given_up.pop(program, None)
        self._unserved.pop(program, None)
        self.expected.pop(program, None)

    def host_of(self, program: int, arguments: Sequence[BufferRecord], pending: int, further: int = 0) -> int:
        """The host that a call is to be handed to; `NO_HOST` where it is not.

        Args:
            pending: all launches of the session without an outcome, this one among them.
            further: 1 where it was not called yet.
        """
        # Those that were called behind all whose values have come, as far as one can say. Streams have many.
        called = self.called + further - self.seen
        if called > self.most and (not self.most or self._are_many(min(pending - len(self.over), called))):
            return NO_HOST
        host, _ = self._programs.get(program, _UNKNOWN)
        if host not in self.hosts or len(self.handed) >= MAX_HANDED:
            return NO_HOST
        if self._given_up and self._is_given_up(program, 1 - further):
            return NO_HOST
        for record in () if all(map(EARLY_OF, arguments)) else arguments:
            if not record.early and not record.is_there:
                return NO_HOST
        return host

    def _are_many(self, under_way: int) -> bool:
        """Whether so many launches are under way that no further one is handed over, but for those that threads wait
        for."""
        return under_way > self.most and (under_way > MAX_TOGETHER or under_way - self.awaited() > self.most)

    def may_hand(self, program: int, pending: int, further: int = 0) -> bool:
        """Whether a call of a program is handed to its host, as far as one can say without its arguments."""
        return self.host_of(program, (), pending, further) != NO_HOST

    def answers_soon(self, host: int) -> bool:
        """Whether who uploads something small to a host waits for its answer: where the host takes calls at once, and
        values are waited for one by one, with few calls and uploads between them."""
        self._put += 1
        waits = self.most == MAX_TOGETHER and self.called - self.seen <= MAX_BETWEEN
        return waits and self._put <= MAX_PUT and host in self.hosts

    def hand(self, launch: EarlyLaunch, results: Sequence[BufferRecord], host: int) -> EarlyLaunch:
        """Notes that a call is handed to a host; returns the message that is sent of it."""
        number = launch.launch
        for record in results:
            record.early = number
            record.host = host
        self.handed[number] = launch.program
        if launch.inline:
            self._carrying.add(number)
        return launch

    def server_of(self, program: int) -> tuple[int, int] | None:
        """The host that serves calls of a program, and its number for it there; None where none does. One that has left
        some in a row is asked now and then."""
        host, key = self._programs.get(program, _UNKNOWN)
        if host not in self.hosts:
            return None
        if left := self._unserved.get(program, 0):
            self._unserved[program] = left + 1
            if left > MAX_REFUSED and left % ASKED_AGAIN:
                return None
        return host, key

    def served(self, program: int, served: bool) -> None:
        """A host has served a call, or has left it."""
        if served:
            self._unserved.pop(program, None)
        else:
            self._unserved.setdefault(program, 1)

    def message(self, launch: EarlyLaunch) -> tuple[int, LaunchEarly]:
        """The host of a call, and the message for it; `NO_HOST` where its program was refused meanwhile."""
        host, key = self._programs[launch.program]
        if self._given_up and self._is_given_up(launch.program):
            host = NO_HOST
        return host, LaunchEarly(key, launch.arguments, launch.results, launch.inline)

    def looked_at(self, record: BufferRecord) -> None:
        """Somebody waits for the value of a result, and so for those of calls to come, if he does it early."""
        early = record.early
        if not early or early == self._looked_at:  # of several values the first is waited for
            return
        if (program := self.handed.get(early)) is not None:
            self._looked_at = early
            self.expected[program] = record.id - record.results.first if record.results is not None else 0

    def expected_of(self, launch: EarlyLaunch, results: Sequence[BufferRecord]) -> BufferRecord | None:
        """The result whose value is to be asked for with a call: the one that was looked at first the last time."""
        place = self.expected.get(launch.program)
        return results[place] if place is not None and place < len(results) else None

    def ignored(self, program: int) -> None:
        """Nobody has looked at a value that was asked for with its call."""
        self.expected.pop(program, None)

    def lightened(self, messages: list[Message]) -> list[Message]:
        """The same messages, but for the bytes that calls carry and their host is known to have."""
        if self.there.isdisjoint(self._carrying):
            return messages
        return [
            EarlyLaunch(message.launch, message.program, message.arguments, message.results)
            if type(message) is EarlyLaunch and message.inline and message.launch in self.there
            else message
            for message in messages
        ]

    def is_begun(self, launch: EarlyLaunch) -> bool:
        """Whether the host of a call has begun it, as far as is known. False for one that carries arguments."""
        number = launch.launch
        return number in self.over and number not in self._left and 0 not in launch.arguments

    def came(self, record: BufferRecord) -> None:
        """The value of a result is there. It is ready, unless its launch fails yet, as with its host; one whose launch
        was only sent is when that has an outcome. Calls may be handed over with it before: else who waits for each
        value, and takes it for the next call, would be ahead of all outcomes, and nothing ever handed over."""
        launch, early = record.launch, record.early
        if launch > self._called_at:  # else it is a further value of the same calls
            if self._called_at and self.goes_by_values:
                self.most = MAX_TOGETHER if self.called - self._called_at <= MAX_BETWEEN else 0
            self._called_at = self.called
        if launch > self.seen:
            self.seen = launch
        self._put = 0
        if not early:
            record.fetched = True
            return
        if record.state is PENDING:
            record.state = READY
            if record.failure is not None:  # since the look
                record.fail(record.failure)
        handed, over, programs = self.handed, self.over, self._programs
        self.there.add(early)
        over.add(early)
        if self._refused and early not in self._left:
            program = handed.get(early, 0)
            self._refused.pop(program, None)
            self._given_up.pop(program, None)
        if early not in handed:  # its outcome has come meanwhile, in another thread
            self.there.discard(early)
            over.discard(early)
        for launch in handed.keys() - over:
            if launch > early or programs.get(handed.get(launch, 0), _UNKNOWN)[0] != record.host:
                continue  # another host may not have begun it
            over.add(launch)
            if launch not in handed:  # looked at behind the entry: its outcome takes away what it finds
                over.discard(launch)

    def ended(self, launch: int) -> None:
        """A launch has its outcome."""
        if self.handed.pop(launch, None) is not None:
            self.there.discard(launch)
            self.over.discard(launch)
            if self._left:
                self._left.discard(launch)
            if self._carrying:
                self._carrying.discard(launch)

    def allowed(self, host: int, allowed: bool) -> None:
        """A host takes calls from now on, or takes no more."""
        (self.hosts.add if allowed else self.hosts.discard)(host)

    def not_handed(self, launch: int) -> None:
        """The host of a call took nothing when it was to be handed over."""
        if launch in self.handed:  # else it has its outcome
            self._left.add(launch)

    def refused(self, launch: int) -> None:
        """A host has left a call to its scheduler."""
        program = self.handed.get(launch, 0)
        if not program:  # it has its outcome
            return
        self._left.add(launch)
        if program not in self._programs:  # it is called no more
            return
        self._refused[program] += 1
        if self._refused[program] > MAX_REFUSED:
            self._given_up[program] = 0

    def _is_given_up(self, program: int, calls: int = 0) -> bool:
        """Whether hosts have refused too many calls of a program, of which so many further ones are made. Behind some
        it is handed over again, until a host takes one, which ends this, or refuses one."""
        before = self._given_up.get(program)
        if before is None:
            return False
        if calls:
            self._given_up[program] = before + calls
        return before + 1 < ASKED_AGAIN
