"""Lowers actions to instructions of each device: messages, and the points where gradients are complete.

    0F0 0F1 0B0 ...  ->  0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 ...

The rules:

- A send follows the action that makes the value, and does not wait.
- A receive is posted by need: just before the action that takes the value, or `ahead` steps of the device earlier, in
  the order of the needs. A receive that is posted as early as possible would stand at the head of its queue, and hold
  up what arrives before it.
- A value between two stages of one device is no message.
- The gradients of a stage are complete after its last B or W. There they may be reduced, beside what follows.
- Tied embeddings are two gradients of one array. Each of the two stages gives its own when it is complete, and takes
  the other's at the end of the list: waiting at once could wait for ever, as other chunks of the device come later.

So no list waits that would not wait without messages: lowering a schedule that `check` takes makes no deadlock.
Messages go by name: stage, kind and microbatch. Between two devices they may be taken in another order than they were
sent in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from megatron_ptdp.schedules.actions import Entry, Schedule, ScheduleError
from megatron_ptdp.schedules.flow import Flow

Value: TypeAlias = Literal["F", "B"]
"""The value of a message: the activation of a forward, or the gradient of a backward."""


class Send(NamedTuple):
    """The stage gives its output to a neighbouring stage, which is on device `target`."""

    stage: int
    value: Value
    microbatch: int
    target: int

    def __str__(self) -> str:
        return f"{self.stage}SEND_{self.value}{self.microbatch}"


class Receive(NamedTuple):
    """The stage takes its input: the activation of stage - 1, or the gradient of stage + 1, which is on `source`."""

    stage: int
    value: Value
    microbatch: int
    source: int

    def __str__(self) -> str:
        return f"{self.stage}RECV_{self.value}{self.microbatch}"


class Reduce(NamedTuple):
    """The gradients of the stage are complete: sum them over the data-parallel replicas."""

    stage: int

    def __str__(self) -> str:
        return f"{self.stage}REDUCE_GRAD"


class Tie(NamedTuple):
    """The gradient of an array that the stage shares with `other` is complete: sum it with the other's."""

    stage: int
    other: int
    device: int  # of the other stage

    def __str__(self) -> str:
        return f"{self.stage}TIE_GRAD{self.other}"


Instruction: TypeAlias = Entry | Send | Receive | Reduce | Tie


@dataclass(frozen=True)
class Lowered:
    """A schedule with its messages: for each device what it does, in order."""

    schedule: Schedule
    rows: tuple[tuple[Instruction, ...], ...]

    def texts(self) -> list[list[str]]:
        return [[str(instruction) for instruction in row] for row in self.rows]

    def as_text(self) -> str:
        """One line for each device."""
        return "\n".join(" ".join(row) for row in self.texts())


def lower(schedule: Schedule, ahead: int = 0, tied: tuple[int, int] | None = None) -> Lowered:
    """Derives the messages and the reductions.

    Args:
        schedule: as `check` takes it
        ahead: how many steps before its need a receive is posted, so that the message runs beside them
        tied: two stages that share an array, as first and last stage share the embedding

    Raises:
        ScheduleError: the schedule cannot run, or `ahead` or `tied` name nothing.
    """
    if ahead < 0:
        raise ScheduleError(f"receives can be posted 0 or more steps ahead, not {ahead}")
    if tied and not (0 <= min(tied) < max(tied) < schedule.stages):
        raise ScheduleError(f"tied are two different stages of 0..{schedule.stages - 1}, not {tied[0]} and {tied[1]}")
    Flow.of(schedule).order()
    rows = []
    for device, row in enumerate(schedule.rows):
        posted: list[list[Receive]] = [[] for _ in row]
        for step, entry in enumerate(row):
            posted[max(0, step - ahead)] += _receives(schedule, entry, device)
        last = {part.stage: step for step, entry in enumerate(row) for part in entry.parts}
        lowered: list[Instruction] = []
        for step, entry in enumerate(row):
            lowered += [*posted[step], entry, *_sends(schedule, entry, device)]
            for stage in [part.stage for part in entry.parts if last[part.stage] == step]:
                lowered += _completed(schedule, stage, tied)
        rows.append(tuple(lowered))
    return Lowered(schedule, tuple(rows))


def _receives(schedule: Schedule, entry: Entry, device: int) -> list[Receive]:
    found = []
    for stage, kind, k in entry.parts:
        source = _neighbour(schedule, stage, -1 if kind == "F" else 1)
        if kind != "W" and source is not None and source != device:
            found.append(Receive(stage, "F" if kind == "F" else "B", k, source))
    return found


def _sends(schedule: Schedule, entry: Entry, device: int) -> list[Send]:
    found = []
    for stage, kind, k in entry.parts:
        target = _neighbour(schedule, stage, 1 if kind == "F" else -1)
        if kind != "W" and target is not None and target != device:
            found.append(Send(stage, "F" if kind == "F" else "B", k, target))
    return found


def _neighbour(schedule: Schedule, stage: int, step: int) -> int | None:
    """The device of the next stage in that direction; None at the end of the model."""
    return schedule.placement[stage + step] if 0 <= stage + step < schedule.stages else None


def _completed(schedule: Schedule, stage: int, tied: tuple[int, int] | None) -> list[Instruction]:
    done: list[Instruction] = [Reduce(stage)]
    if tied and stage in tied:
        other = tied[0] if stage == tied[1] else tied[1]
        done.append(Tie(stage, other, schedule.placement[other]))
    return done
