"""The story of a process: a bounded record of its events, each with its time and cause.

Every core keeps one. Errors that name a limit or a loss carry the last entries that concern them, so that their reader
sees what led there. Launches are many and lifecycle events (hosts, sessions, programs, islands) are few, so each kind
has a ring of its own: a stream of launches must not push the loss of a host out of the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import Any, NamedTuple

LIFECYCLE_ENTRIES = 512
LAUNCH_ENTRIES = 512
"""Four windows of launches of an island. More would leave the processor's caches: 4,096 cost a launch 1.5 us."""

LAST_ENTRIES = 8
"""Entries that an error carries: as many as fit on a screen beside its message."""

NOTES_AT_ONCE = 128
"""A quarter of the lifecycle entries of a story."""

NOTE_S = 1.0
"""Seconds in which a tenant may have one more note. Three log files hold those of half a day."""

MAX_KNOWN = 1024
"""Tenants that are remembered beyond those which have had notes lately: each session of the operator is one."""


def log_name(process: str) -> str:
    """The name of the log file of a process, such as "host 3"."""
    return f"{process.replace(' ', '-')}.jsonl"


def printable(text: str) -> str:
    """The text with what is not printable escaped: programs and errors are named by users, and are shown to others."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Entry(NamedTuple):
    """One event. `at` is the process's own clock in seconds; 0 and -1 stand for "concerns none in particular". One that
    is `private` names what may be another tenant's than that of its session: a program, an error, a session."""

    at: float
    event: str
    detail: str = ""
    cause: str = ""
    session: int = 0
    launch: int = 0
    host: int = -1
    private: bool = False

    def text(self, now: float) -> str:
        """One line for people; the time is given as seconds before `now`."""
        where = "".join(
            f" {name} {number}"
            for name, number, missing in (
                ("session", self.session, 0),
                ("launch", self.launch, 0),
                ("host", self.host, -1),
            )
            if number != missing
        )
        detail = f": {printable(self.detail)}" if self.detail else ""
        cause = f" (because {printable(self.cause)})" if self.cause else ""
        return f"{now - self.at:.3f} s before: {self.event}{where}{detail}{cause}"


@dataclass
class Story:
    """The record of one process.

    Args:
        process: its name, such as "controller" or "host 3".
        sink: gets every lifecycle entry that is kept, as it is made; a shell writes them to a log.
        pace: the lifecycle entries to keep when one is made.
    """

    process: str
    sink: Callable[[Entry], None] | None = None
    lifecycle: deque[Entry] = field(default_factory=lambda: deque(maxlen=LIFECYCLE_ENTRIES))
    launches: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=LAUNCH_ENTRIES))
    counts: dict[str, int] = field(default_factory=dict)
    """Lifecycle events by their few fixed words, since the process began, also those that are not kept."""
    pace: Callable[[Entry], Sequence[Entry]] = lambda entry: (entry,)

    def note(self, entry: Entry) -> None:
        """Records a lifecycle event."""
        self.counts[entry.event] = self.counts.get(entry.event, 0) + 1
        for kept in self.pace(entry):
            self.lifecycle.append(kept)
            if self.sink is not None:
                self.sink(kept)

    def __post_init__(self) -> None:
        self.note_launch: Callable[[tuple[Any, ...]], None] = self.launches.append
        """Records a step of a launch, an `Entry` or its first fields; on the hot path, so it does nothing else."""

    def steps(self) -> list[Entry]:
        """The steps of launches."""
        return [Entry(*fields) for fields in self.launches]

    def entries(self) -> Iterator[Entry]:
        """All entries in the order of their times."""
        return merge(self.lifecycle, self.steps(), key=lambda entry: entry.at)

    def lines(
        self, now: float, *, session: int = 0, launch: int = 0, hosts: frozenset[int] = frozenset()
    ) -> tuple[str, ...]:
        """The last entries that concern a session, a launch or hosts, oldest first, as text after the process's name.

        An entry matters when it names the launch, one of the hosts, or, of lifecycle events, the session. What is on a
        host may be anybody's: of entries that only name a host, those of launches, and private ones, are left out.
        """
        found = [
            entry
            for entry in self.entries()
            if (launch and entry.launch == launch)
            or (entry.host in hosts and not entry.launch and not entry.private)
            or (session and entry.session == session and not entry.launch)
        ]
        return tuple(f"{self.process}: {entry.text(now)}" for entry in found[-LAST_ENTRIES:])


class NotePace:
    """Decides which notes about sessions are taken down: what one tenant does must not push what others did out of a
    story and its log.

    Args:
        tenant_of: the tenant of a session, or "" for one that is not known.
        kind: what that names, for the note of how many were left out.
    """

    def __init__(self, tenant_of: Callable[[int], str], kind: str = "tenant") -> None:
        self.tenant_of, self.kind = tenant_of, kind
        self.spent: dict[str, float] = {}
        """Until when the notes of each tenant are spoken for: `NOTE_S` more with each."""
        self.left_out: dict[str, int] = {}

    def paced(self, entry: Entry) -> Sequence[Entry]:
        """The notes to take down: the entry, behind how many were left out before it; or nothing."""
        tenant = self.tenant_of(entry.session) if entry.session else ""
        if not tenant:
            return (entry,)
        left = self.left_out.get(tenant, 0)
        until = max(self.spent.get(tenant, entry.at), entry.at) + (2 if left else 1) * NOTE_S
        if until - entry.at > NOTES_AT_ONCE * NOTE_S:
            self.left_out[tenant] = left + 1
            return ()
        if len(self.spent) >= MAX_KNOWN:
            self.spent = {name: at for name, at in self.spent.items() if at > entry.at}
            self.left_out = {name: count for name, count in self.left_out.items() if name in self.spent}
        self.spent[tenant] = until
        if not left:
            return (entry,)
        del self.left_out[tenant]
        return Entry(entry.at, "notes left out", f"{left} of {self.kind} {tenant}", session=entry.session), entry
