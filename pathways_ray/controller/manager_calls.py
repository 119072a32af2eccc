"""Calls of the resource manager that are made again, and news for one that has taken the place of another.

Each resource manager that the controller meets is told once what there is: hosts, schedulers, slices (`Holdings`). So
is one of whom some news did not get through. Questions that did not get through are asked again once it answers
reports, for as long as somebody may wait for the reply. What says that slices are given back, or whose they are, is
never given up: a resource manager that was out of reach and lives on would keep them for ever. What a question given
up was to change may have been made there: it hears which slices the session has. A slice that it may have made is given
back by the number of the call; one that is asked for again is the one that it has made.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from pathways_ray.controller import events
from pathways_ray.controller.state import Session, Tables
from pathways_ray.transport.messages import HeldSlice, HeldSlices, Holdings, KnownHost, encode

QUESTION_LIMIT_S = 60.0
"""A question that does not get through for this long is not asked again, and what waits for its answer fails: a
resource manager that Ray starts again is there within seconds, on a busy machine within a minute."""

MAX_UNANSWERED = 1 << 14
"""Calls without an answer that are made again, the last ones: each session that ends leaves one."""

NEWS = frozenset({"publish", "withdraw", "serves", "leave", "kill_host"})
"""Calls that say what `Holdings` say as well, or are made again by others."""

CHANGES = frozenset({"exchange_slices", "release_session"})
"""Questions that are answered before the controller makes the change that they ask for."""

FENCED_CALLS = frozenset(
    {
        "create_slice",
        "release_slice",
        "exchange_slices",
        "hold_slices",
        "release_session",
        "drain_island",
        "undrain_island",
        "end_island",
    }
)
"""Calls with a fencing token, the time at which the controller's process began: of one that has a successor they do
nothing."""


class ManagerCalls:
    """Calls of the resource manager that have to be made again.

    `schedulers` has for each island that is connected the address at which its scheduler serves hosts, `changing` the
    sessions of which one of `CHANGES` has no answer, `slicing` those of which a question for a slice has none.
    """

    def __init__(self, tables: Tables, changing: Container[int] = (), slicing: Container[int] = ()) -> None:
        self.tables = tables
        self.schedulers: dict[int, str] = {}
        self.changing, self.slicing = changing, slicing
        self.incarnation = ""
        self.is_behind = True
        self.told = 0
        self.again: list[events.CallManager] = []
        self.unanswered: dict[tuple[Any, ...], events.CallManager] = {}
        """Those that nobody waits for, one of each."""

    def knows(self, event: events.ManagerKnows) -> list[events.Command]:
        """Answers a resource manager that can be reached; it may be another one than before, which knows of nothing."""
        commands: list[events.Command] = []
        if self.is_behind or event.incarnation != self.incarnation:
            self.is_behind, self.incarnation = False, event.incarnation
            self.told += 1
            commands.append(events.TellManager(holdings(self.tables, self.schedulers, self.told)))
        # Nobody knows whether an exchange was made, and of what: where slices are here comes before it.
        for call in [*self.unanswered.values(), *self.again]:
            if call.method == "exchange_slices" or self._is_over(call):
                self._keep(_hold(call))
        asked = {call.arguments[0] for call in self.again if call.method in CHANGES}
        # A change that may have been made there, and is not known here yet, would be undone: that waits for its answer.
        later = {
            key: call
            for key, call in self.unanswered.items()
            if call.arguments[0] not in asked
            and (
                call.arguments[0] in self.changing
                or (call.method == "hold_slices" and call.arguments[0] in self.slicing)
            )
        }
        now = [call for key, call in self.unanswered.items() if key not in later]
        # The slices that sessions have by now come before what gives them back; questions in the order of their calls.
        again = sorted([*now, *self.again], key=lambda call: (call.method != "hold_slices", call.call))
        self.again, self.unanswered = [], later
        return [*commands, *(self._anew(call) for call in again if not self._is_over(call))]

    def _is_over(self, call: events.CallManager) -> bool:
        """Whether a release that nobody waits for is of a slice that has come back since, by an exchange."""
        if call.method != "release_slice" or call.call:
            return False
        session = self.tables.sessions.get(call.arguments[0])
        return session is not None and call.arguments[1] in session.slices

    def _anew(self, call: events.CallManager) -> events.CallManager:
        """A call that is made again: a session has the slices that it has by now."""
        if call.method != "hold_slices":
            return call
        number = call.arguments[0]
        session = self.tables.sessions.get(number)
        found = HeldSlices(() if session is None else held_by(session), self.tables.last_slice)
        return msgspec.structs.replace(call, arguments=(number, encode(found)))

    def missed(self, event: events.ManagerMissed, now: float) -> None:
        """A call did not get through, or its answer did not."""
        call = event.command
        if isinstance(call, events.TellManager) or call.method in NEWS:
            self.is_behind = True
        elif not call.call:  # an exchange takes another one back, which the slices that the session has say too
            self._keep(_hold(call) if call.method == "exchange_slices" else call)
        else:
            self.again.append(msgspec.structs.replace(call, since=now if call.since is None else call.since))

    def overdue(self, now: float) -> list[events.CallManager]:
        """The questions that are not asked again, since it has been away for too long."""
        over = [call for call in self.again if call.since is not None and now - call.since >= QUESTION_LIMIT_S]
        self.again = [call for call in self.again if call not in over]
        for call in over:
            if call.method == "release_slice":  # the controller has done so already
                self._keep(msgspec.structs.replace(call, call=0, since=None))
            elif call.method == "create_slice":  # what may have been made for it is nobody's
                self._keep(events.CallManager("release_slice", (call.arguments[0], -call.call)))
            elif call.method in CHANGES:  # the controller has not, and the resource manager may have
                self._keep(_hold(call))
        return over

    def _keep(self, call: events.CallManager) -> None:
        key = call.method, *(call.arguments[:1] if call.method == "hold_slices" else call.arguments)
        self.unanswered.pop(key, None)
        self.unanswered[key] = call
        if len(self.unanswered) > MAX_UNANSWERED:
            del self.unanswered[next(iter(self.unanswered))]


def _hold(call: events.CallManager) -> events.CallManager:
    """The call that says which slices the session of another call has; with what it has when that leaves."""
    return events.CallManager("hold_slices", (call.arguments[0], b""))


def holdings(tables: Tables, schedulers: Mapping[int, str], number: int) -> Holdings:
    """All that the controller knows and a resource manager has to know."""
    return Holdings(
        tuple(KnownHost(h.info, h.epoch, h.down_since is None) for h in tables.hosts.values() if h.info is not None),
        tuple(sorted(schedulers.items())),
        tuple(one for session in tables.sessions.values() for one in held_by(session))
        + tuple(one for slices in tables.unclaimed.values() for one in slices.values()),
        tables.last_slice,
        number,
    )


def held_by(session: Session) -> tuple[HeldSlice, ...]:
    """The slices of a session."""
    return tuple(
        HeldSlice(session.id, placed, session.names.get(number, ""), session.parts.get(number, 0))
        for number, placed in session.slices.items()
    )
