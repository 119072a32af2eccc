"""Turns: messages of clients that have come and wait, so that no client has the controller's loop for long.

A session's messages are worked off for `TURN_WORK` at a time; the rest of a batch waits here, and the session is not
read meanwhile. A session may also be held: until its program is planned, until its backlog is shorter, or until an
island takes programs again. The order of a session's messages is kept throughout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from pathways_ray.transport.messages import (
    Cancel,
    Free,
    Launch,
    PrioritizedLaunch,
    Put,
    Register,
    ToController,
    Unregister,
)

TURN_WORK = 256
"""Units of work in one turn: less than 5 ms. A launch of a few buffers is one, and takes 10 to 15 us."""

PROGRAM_WORK = TURN_WORK // 2
"""The units of a program that is planned at once."""

CANCEL_WORK = TURN_WORK // 8
"""The units of a cancelled launch: it is looked for among all that wait or run."""

UNREGISTER_WORK = TURN_WORK // 32
"""The units of a program that is dropped: what islands hold of it is counted."""

PASSING_WORK = TURN_WORK // 16
"""The units of a launch with a priority, or behind one: it looks for its place among those that wait."""

LOOKS_PER_UNIT = 8
"""Calls that such a launch looks at, for one further unit of work."""

NUMBERS_PER_UNIT = 16
"""Buffers that a message names, or results that it makes, for one further unit of work."""


class Hold(StrEnum):
    """Reasons for which the messages of a session wait: until this is so."""

    PLANNING = "its program is planned"
    BACKLOG = "its backlog is shorter"
    ISLAND = "an island takes programs again"


def work_of_launch(message: Launch, results: int, looks: int) -> int:
    """Units of work that a launch makes; `results` are those of its program, `looks` the calls that it may pass."""
    work = PASSING_WORK + looks // LOOKS_PER_UNIT if looks or type(message) is PrioritizedLaunch else 1
    return work + (len(message.arguments) + results) // NUMBERS_PER_UNIT


def work_of(message: ToController) -> int:
    """Units of work that another message makes."""
    if isinstance(message, Free):
        return 1 + len(message.buffers) // NUMBERS_PER_UNIT
    if isinstance(message, Unregister):
        return UNREGISTER_WORK + len(message.functions) // NUMBERS_PER_UNIT
    if isinstance(message, Cancel):
        return CANCEL_WORK
    return PROGRAM_WORK if isinstance(message, Register) else 1


class Turns:
    """The messages that wait, by session, and the order of the sessions that may go on."""

    def __init__(self) -> None:
        self.inboxes: dict[int, deque[ToController]] = {}
        self.held: dict[int, Hold] = {}
        self.order: deque[int] = deque()
        self.called = False
        """Whether a turn has been asked for that has not come."""

    def put(self, session: int, messages: Sequence[ToController]) -> bool:
        """Keeps messages that came while others of their session wait; False when none do."""
        inbox = self.inboxes.get(session)
        if inbox is None:
            return False
        inbox.extend(messages)
        return True

    def wait(self, session: int, messages: deque[ToController], hold: Hold | None) -> None:
        """Messages of a session whose turn is over wait for the next one, or for what holds them."""
        self.inboxes[session] = messages
        if hold is not None:
            self.held[session] = hold
        else:
            self.order.append(session)

    def release(self, session: int, hold: Hold) -> None:
        """Lets a session go on that is held for this reason."""
        if self.held.get(session) is hold:
            del self.held[session]
            self.order.append(session)

    def release_all(self, hold: Hold) -> None:
        """Lets all sessions go on that are held for this reason."""
        for session in [session for session, why in self.held.items() if why is hold]:
            self.release(session, hold)

    def next(self) -> tuple[int, deque[ToController]] | None:
        """Takes out the messages of the session whose turn it is."""
        while self.order:
            session = self.order.popleft()
            inbox = self.inboxes.pop(session, None)
            if inbox is not None:
                return session, inbox
        return None

    def uploads(self) -> dict[int, set[int]]:
        """The buffers of which the messages that wait say that they are uploaded, by session."""
        found = {session: {m.buffer for m in inbox if isinstance(m, Put)} for session, inbox in self.inboxes.items()}
        return {session: buffers for session, buffers in found.items() if buffers}

    def forget(self, session: int) -> None:
        """The session is closed."""
        self.inboxes.pop(session, None)
        self.held.pop(session, None)

    def call(self) -> bool:
        """Whether a turn has to be asked for."""
        if self.called or not self.order:
            return False
        self.called = True
        return True
