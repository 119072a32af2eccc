"""A pipeline schedule as plain data, made once and never changed.

A model is cut into `stages`, numbered from the first layers to the last. Each stage lies on one pipeline `device`: one
accelerator, or the slice that holds the stage's shards. Several stages on one device are its `chunks`. A batch is cut
into microbatches. What a stage does with a microbatch is an action:

| kind | meaning                                                                       |
|------|-------------------------------------------------------------------------------|
| F    | forward                                                                       |
| B    | full backward: the gradient of the input and of the weights                   |
| I    | backward for the input only, which is what the stage before waits for         |
| W    | backward for the weights only                                                 |

`3F7` is the forward of microbatch 7 on stage 3, `(0F3;3B1)OVERLAP_F_B` a forward and a backward that run as one. This
is the notation of `torch.distributed.pipelining`. A schedule has, for each device, its actions in the order in which it
runs them. It has no messages: `lower` derives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast

Kind: TypeAlias = Literal["F", "B", "I", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OVERLAP = re.compile(rf"\(({_ACTION.pattern});({_ACTION.pattern})\)OVERLAP_F_B")


class ScheduleError(ValueError):
    """A schedule that is invalid: its sizes break its rule, or its actions do not fit together."""


class Action(NamedTuple):
    """The work of one stage on one microbatch; both are counted from 0."""

    stage: int
    kind: Kind
    microbatch: int

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self,)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """A forward and a backward of two microbatches that run together, as one step of the device.

    Both start when the inputs of both are there. They are issued in this order.
    """

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        return self

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Entry: TypeAlias = Action | Overlap
"""One entry in the list of a device."""


def parse(text: str) -> Entry:
    """The action or the pair that `text` stands for; the inverse of `str`.

    Raises:
        ScheduleError: it is no action.
    """
    if found := _ACTION.fullmatch(text):
        return Action(int(found[1]), cast(Kind, found[2]), int(found[3]))
    if found := _OVERLAP.fullmatch(text):
        forward, backward = (cast(Action, parse(found[group])) for group in (1, 5))
        return Overlap(forward, backward)
    raise ScheduleError(f"{text!r} is no action: write 3F7 (stage, one of {' '.join(KINDS)}, microbatch)")


def loop(devices: int, chunks: int = 1) -> tuple[int, ...]:
    """The device of each stage when the stages go round the devices: 0 1 2 0 1 2."""
    return tuple(range(devices)) * chunks


def vee(devices: int) -> tuple[int, ...]:
    """The device of each stage when they go there and back: 0 1 2 2 1 0. First and last stage share a device."""
    there = tuple(range(devices))
    return there + there[::-1]


class Updates(NamedTuple):
    """Updates of stages while microbatches are under way, and the versions that these see; `stale` has the rules.

    Attributes:
        every: backwards of a stage between two of its updates
        behind: updates by which a microbatch's version is before the one that its gradient is for; left out, it sees on
            each stage the newest there is
    """

    every: int
    behind: int | None = None

    def __str__(self) -> str:
        return f"an update every {self.every}" + (f", {self.behind} behind" if self.behind is not None else "")


@dataclass(frozen=True)
class Schedule:
    """The actions of one training step.

    Attributes:
        name: of the rule that made it.
        microbatches: how many there are in a step, on each stage.
        placement: the device of each stage; `loop` and `vee` are the usual ones.
        rows: for each device its actions, in order.
        updates: left out, one at the end
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    rows: tuple[tuple[Entry, ...], ...]
    updates: Updates | None = None

    @classmethod
    def of(
        cls, name: str, microbatches: int, placement: Sequence[int], rows: Iterable[Iterable[Entry | str]]
    ) -> Schedule:
        """A schedule from actions, or from their texts. `check` says whether it can run.

        Raises:
            ScheduleError: a text is no action.
        """
        read = tuple(tuple(parse(entry) if isinstance(entry, str) else entry for entry in row) for row in rows)
        return cls(name, microbatches, tuple(placement), read)

    def as_text(self) -> str:
        """A line about the whole, then a line of actions for each device."""
        places = " ".join(map(str, self.placement))
        header = f"{self.name}: {self.microbatches} microbatches, stages on devices {places}"
        if self.updates is not None:
            header += f"; {self.updates}"
        return "\n".join([header, *(" ".join(row) for row in self.texts())])

    def texts(self) -> list[list[str]]:
        """The actions of each device as texts: what `of` reads."""
        return [[str(entry) for entry in row] for row in self.rows]

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """The most stages that a device has."""
        return max((self.placement.count(device) for device in range(self.devices)), default=0)

    def chunk(self, stage: int) -> int:
        """The number of the stage among those of its device."""
        return self.placement[:stage].count(self.placement[stage])

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name}: {self.devices} devices, {self.stages} stages, {self.microbatches} microbatches, "
            f"{sum(map(len, self.rows))} actions>"
        )
