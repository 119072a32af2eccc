"""The journal of a host among several: the talk with its scheduler, which may die in the middle of it.

A scheduler sends all hosts of an island the same launches, releases of barriers and aborts in the same order, so what
each of them has heard is the beginning of one sequence. Aborts count since a launch that waits goes on by one, as it
does by a release: hosts that heard the two in different orders would enqueue different gangs. When it dies, some have
heard more of it than others. What one lacks it gets from another one, and what hosts have reported of launches that
were under way they report again. So does any host of what it compiles: the successor ends what takes too long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from pathways_ray.executor.run.active_launch import ActiveLaunch
from pathways_ray.transport.messages import (
    Abort,
    BarrierReleased,
    Compiling,
    Done,
    Heard,
    Holds,
    IslandLaunch,
    IslandLaunchFailed,
    Message,
    Program,
    Ready,
)

MAX_HEARD = 512
"""Messages that are kept. A host lacks no more than the launches of a scheduler's window, which are 128, and for each
the release that it waits for."""

MAX_HEARD_BYTES = 64 << 20
"""Bytes of the plans among them. Where that is too few, the island starts again."""

MAX_OFFERED = 256
"""Launches that are remembered for what they offer to other hosts: more than may be under way."""

MAX_SAID = 1024
"""Reports that are kept: more than the launches in what is kept of the others, and those that were under way before."""


class Journal:
    """The last launches, releases and aborts that a host among several has heard of, with the programs between them;
    `count` in all. `last_sequence` is the highest number of a launch, which hosts by themselves note as well; those up
    to `since` were before this process, None while nobody has said so. The leader of the island has closed its log
    `closed` times: with a scheduler that had died. `offered` are the last launches that offer something to other hosts,
    and their programs: nobody says here when it has been taken."""

    def __init__(self) -> None:
        self.count = self.closed = 0
        self.last_sequence = 0
        self.since: int | None = None
        self.offered: deque[tuple[int, int]] = deque(maxlen=MAX_OFFERED)
        self.last: deque[IslandLaunch | BarrierReleased | Abort | Program] = deque()
        self._bytes = 0

    def add(self, message: IslandLaunch | BarrierReleased | Abort) -> None:
        """Notes a launch, a release or an abort."""
        self.count += 1
        self.last.append(message)
        if len(self.last) > MAX_HEARD:
            self._forget()

    def add_program(self, message: Program) -> None:
        """Notes a program: a host without a part in one, whom nobody waits for, may lack it before its launches. Such
        a host needs none of the functions."""
        self.last.append(msgspec.structs.replace(message, functions={}))
        self._bytes += len(message.plan)
        while self._bytes > MAX_HEARD_BYTES or len(self.last) > MAX_HEARD:
            self._forget()

    def _forget(self) -> None:
        oldest = self.last.popleft()
        if isinstance(oldest, Program):
            self._bytes -= len(oldest.plan)

    def heard(self, active: Mapping[int, ActiveLaunch]) -> Heard:
        """All that is kept, and the launches that are active."""
        return Heard(self.count, tuple(self.last), tuple(one.launch for one in active.values()), self.closed)


def is_counted(message: Message) -> bool:
    """Whether a message has a number in the sequence that all hosts of an island hear."""
    return not isinstance(message, Program)


class Said:
    """Messages that the successor of the scheduler has to hear, too: `messages`, the last reports of launches, and
    `compiling`, by program, those that the host has begun to compile, and not ended. Safe from any thread."""

    def __init__(self) -> None:
        self.messages: deque[Done | IslandLaunchFailed] = deque(maxlen=MAX_SAID)
        self.compiling: dict[int, Compiling] = {}

    def note(self, message: Message) -> None:
        """Notes a message that is about to be sent, if it is one of these, or ends one."""
        if isinstance(message, Done | IslandLaunchFailed):
            self.messages.append(message)
        elif isinstance(message, Compiling):
            self.compiling[message.program] = message
        elif isinstance(message, Ready):
            self.compiling.pop(message.program, None)

    def again(self, holds: Holds) -> list[Message]:
        """The messages to say again behind what the host holds. Reports only where hosts say what each has heard:
        otherwise launches have failed, or their scheduler is the same."""
        return [*self.compiling.values(), *(self.messages if holds.heard is not None else ())]
