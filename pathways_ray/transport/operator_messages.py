"""Calls of the operator to the controller: logs, refusals, islands. The answer of most is `Accepted`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pathways_ray.transport.message import Message


class ReadLog(Message, tag=193):
    """The operator asks for a part of the log of a process, such as "host 3", wherever it lies: a `LogPart`.

    Args:
        node: Ray's id of the node on which it lies, for a process that does not answer; status has it.
        offset: of the first byte; -1 is the beginning of the last part.
        file: the one that the offset is in, as the `LogPart` before named it; 0 is the oldest one.
    """

    session: int
    process: str
    node: str = ""
    offset: int = -1
    file: Annotated[int, msgspec.Meta(ge=0)] = 0


class LogPart(Message, tag=194):
    """Whole lines of a log, and the place behind them: the offset in a file, and the file's number, which it keeps when
    it is rolled. Of a log that is not there, nothing and zeros."""

    text: str
    offset: int
    file: int = 0


class LiftRefusal(Message, tag=170):
    """The operator lets a program run again that the circuit breaker refuses; status has the ids."""

    session: int
    refusal: str


class DrainIsland(Message, tag=195):
    """The operator has an island get no slices any more; those that it has may stay for `deadline_s`. `reason` is for
    who looks at the status."""

    session: int
    island: int
    deadline_s: float
    reason: str = ""


class UndrainIsland(Message, tag=210):
    """The operator takes a drain back."""

    session: int
    island: int


class RemoveIsland(Message, tag=196):
    """The operator ends an island for good."""

    session: int
    island: int
