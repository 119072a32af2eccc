"""The order of an island of several hosts in which early launches begin. Pure.

All hosts of an island enqueue the same launches in the same order, which is that of their scheduler's messages. What a
client hands over has no place among these. So one host, the *leader*, gives it one: it takes early launches as the only
host of an island does, between messages of the scheduler, and writes down where (`Led`). The others, its *followers*,
handle a message of the scheduler only once the leader has (`Passed`), and a launch that it has taken between the same
two messages as it did.

They do so in a *term*, which a message of the scheduler begins (`AllowEarly`) and the next such one ends: messages are
counted from there. Outside of terms nobody waits for the leader. When the scheduler dies, hosts may have heard a
different number of its messages, and come to one point by those that they count (`journal`). So the leader says that
its log is complete (`LogClosed`); what it has taken behind messages that a follower lacks stands there behind the same
number of counted ones, and comes up as the follower catches up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pathways_ray.executor.run import instructions as do
from pathways_ray.executor.run.journal import Journal
from pathways_ray.transport import messages as wire

FAREWELL_S = 1.0
"""A host whose link to the leader, or to a follower, has ended is itself at its end so long after: it may lack entries.
Before that its scheduler has seen who was lost, where one was, and restarts the island."""

MOST_WAITED = 12
"""The last launches, more or less, by which it is judged whether somebody waits for each."""

WAITED = 8
NOT_WAITED = 3
"""So many of them are waited for where a term pays, and no more than so many where it does not: in a stream of launches
nobody waits for one, and followers would wait for the leader's word behind each batch of messages."""


class Leader:
    """The host that takes early launches for all hosts of its island.

    `linked` is set once all followers hear it. `leads` says whether a term would pay.
    """

    def __init__(self, journal: Journal) -> None:
        self.linked = False
        self._journal = journal
        self._term = self._place = 0
        self._waited, self._pays = 0, False

    @property
    def leads(self) -> bool:
        return self.linked and self._pays

    def announce(self, events: Sequence[do.Event]) -> list[do.Instruction]:
        """Lets followers go on up to what is handled next, before it is: a collective ends on all hosts or on none."""
        if not self._term and wire.AllowEarly not in map(type, events):
            return []
        told: list[do.Instruction] = []
        announced = self._place
        for event in events:
            if not isinstance(event, wire.Message):
                continue
            self._place += 1
            if type(event) is wire.AllowEarly:
                if self._term:
                    told.append(do.Tell(wire.Passed(self._term, self._place)))
                self._term, self._place, announced = event.term, 0, 0
        if self._term and self._place > announced:
            told.append(do.Tell(wire.Passed(self._term, self._place)))
        return told

    def led(self, launch: wire.IslandLaunch) -> do.Instruction:
        """Followers hear of an early launch before it is enqueued here."""
        return do.Tell(wire.Led(self._term, self._place, self._journal.count, launch))

    def close(self) -> list[do.Instruction]:
        """The scheduler has died, and nothing more comes from it."""
        self._term = self._place = 0
        if not self.linked:  # so there was no term
            return []
        self._journal.closed += 1
        return [do.Tell(wire.LogClosed())]

    def completed(self, waited: bool) -> bool:
        """A launch is enqueued: one that a client has handed over, or `waited` for where it could have. Returns whether
        `leads` has changed."""
        paid = self._pays
        self._waited = min(self._waited + 1, MOST_WAITED) if waited else max(self._waited - 1, 0)
        if self._waited >= WAITED:
            self._pays = True
        elif self._waited <= NOT_WAITED:
            self._pays = False
        return self.linked and self._pays is not paid


_IN_ORDER = (wire.Message, do.SchedulerFound, do.CatchingUp, do.Next)
"""Events that have a place in the order of an island."""

_TURNS = {
    wire.AllowEarly,
    wire.CatchUp,
    wire.Led,
    wire.Passed,
    wire.LogClosed,
    do.SchedulerFound,
    do.CatchingUp,
    do.Next,
}
"""Those after which others may have to wait, or may go on."""


class Follower:
    """A host that keeps the leader's order: `held` messages of the scheduler wait for entries of its `log`, and the
    other way round. `late` are launches of a scheduler that has died, which wait for what this host has yet to hear.

    While a term is `_open`, this host has handled `_place` messages of it, and the leader `_passed`. `_over` says that
    the leader has closed its log, and that there are messages of the scheduler before that this host has not handled:
    a term that begins among these is over as well.
    """

    def __init__(self, journal: Journal) -> None:
        self.held: deque[do.Event] = deque()
        self.log: deque[wire.FromLeader] = deque()
        self.late: deque[wire.Led] = deque()
        self._journal = journal
        self._open = self._over = False
        self._term = self._place = self._passed = 0

    @property
    def has_more(self) -> bool:
        """Whether something waits, which may be handled next."""
        return bool(self.held or self.log or self.late)

    def lets_pass(self, event: do.Event) -> bool:
        """Whether an event is handled as it comes: it has no place in the order, or nothing in it waits."""
        if not isinstance(event, _IN_ORDER):
            return True
        return type(event) not in _TURNS and not (self._open or self.held or self.log)

    def take(self, event: do.Event) -> do.Event | None:
        """Takes a message of the scheduler, its end, an entry of the log, or that there may be more to do. Returns what
        is to be handled next, if it may be yet."""
        if isinstance(event, do.CatchingUp):
            return event
        if isinstance(event, wire.FromLeader):
            self.log.append(event)
        elif type(event) is not do.Next:
            self.held.append(event)
        while True:
            if self.late and (late := self.next_late()) is not None:
                return late
            entry = self.log[0] if self.log else None
            if entry is not None and self._note(entry):
                self.log.popleft()
                continue
            if isinstance(entry, wire.Led) and self._open and (entry.term, entry.place) == (self._term, self._place):
                self.log.popleft()
                return entry
            if not self.held:
                return None
            event = self.held[0]
            if self._lacks_log(event) or (self._open and type(event) is do.SchedulerFound):
                if not self._close():
                    return None
                continue
            if self._open and self._place >= self._passed:
                return None
            return self._taken()

    def next_late(self) -> wire.Led | None:
        """The next launch of a scheduler that has died, if this host has heard of all that stands before it."""
        return self.late.popleft() if self.late and self.late[0].count <= self._journal.count else None

    def _note(self, entry: wire.FromLeader) -> bool:
        """Notes how far messages may be handled; whether that is all that an entry says."""
        if isinstance(entry, wire.LogClosed):
            lacked = bool(self.held) and self._lacks_log(self.held[0])
            if not lacked and do.SchedulerFound not in map(type, self.held):
                return False  # more may come of what the scheduler has said before
            self._open, self._over = False, not lacked
            self._journal.closed += 1
            return True
        if self._open and entry.term == self._term:
            self._passed = max(self._passed, entry.place)
            return isinstance(entry, wire.Passed)
        return isinstance(entry, wire.Passed) and entry.term <= self._term

    def _lacks_log(self, event: do.Event) -> bool:
        """Whether the next event is behind the end of a log that has not come."""
        return isinstance(event, wire.CatchUp) and self._journal.closed < event.closed

    def _close(self) -> bool:
        """Takes the log up to where it was closed, if it was: this host lacks messages between which entries stand."""
        closing = next((k for k, entry in enumerate(self.log) if isinstance(entry, wire.LogClosed)), None)
        if closing is None:
            return False
        for _ in range(closing):
            entry = self.log.popleft()
            if isinstance(entry, wire.Led):
                self.late.append(entry)
        return self._note(self.log.popleft())

    def _taken(self) -> do.Event:
        event = self.held.popleft()
        if self._open:
            self._place += 1
        if isinstance(event, wire.AllowEarly):
            self._term, self._open = event.term or self._term, bool(event.term) and not self._over
            self._place = self._passed = 0
        elif type(event) is do.SchedulerFound:
            self._over = False
        return event
