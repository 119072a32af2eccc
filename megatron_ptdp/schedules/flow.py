"""A schedule as numbered steps with the needs between them; `check`, `lower` and `simulate` walk over it.

The needs follow from the actions:

    sFk        needs (s-1)Fk
    sBk, sIk   need sFk, and (s+1)Bk or (s+1)Ik
    sWk        needs sIk

Each device runs its list strictly in order. A step waits for its needs, never for a free link; sends do not wait.
Every function here takes time in proportion to the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from megatron_ptdp.schedules.actions import KINDS, Action, Entry, Overlap, Schedule, ScheduleError

_ABSENT = -1


@dataclass(frozen=True)
class Flow:
    """Steps are numbered device by device, each device's in its order.

    Attributes:
        entries: what each step does.
        device: of each step.
        starts: the number of the first step of each device, and at the end the number of steps.
        needs: for each step, the steps of neighbouring stages whose outputs it takes: none, one, or two for a pair.
            Needs inside a stage are left out: the order of the device keeps them.
        hops: on which way each of these outputs comes: 2s for the activation of stage s, which goes to s + 1, and
            2s + 1 for the gradient that comes back from s + 1 to s.
    """

    entries: tuple[Entry, ...]
    device: tuple[int, ...]
    starts: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    hops: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(schedule: Schedule) -> Flow:
        """Numbers the steps, and makes sure that each action is there once, on the device of its stage, in order.

        Raises:
            ScheduleError: an action is missing, there twice, elsewhere, or before what it needs of its own stage; or
                there is something else than actions.
        """
        _check_form(schedule)
        return Flow._numbered(schedule)

    @staticmethod
    @lru_cache(maxsize=4)  # a schedule is made, checked, and then simulated on one set of costs after the other
    def _numbered(schedule: Schedule) -> Flow:
        _check_sizes(schedule)
        index = _Index(schedule)
        entries: list[Entry] = []
        device: list[int] = []
        starts = [0]
        for at, row in enumerate(schedule.rows):
            for entry in row:
                for part in entry.parts:
                    index.add(part, at, len(entries))
                entries.append(entry)
                device.append(at)
            starts.append(len(entries))
        index.check_complete()
        taken = [index.needs(entry) for entry in entries]
        needs, hops = (tuple([tuple([pair[of] for pair in pairs]) for pairs in taken]) for of in (0, 1))
        return Flow(tuple(entries), tuple(device), tuple(starts), needs, hops)

    @cached_property
    def takers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each step the steps that take its output, each with the hop on which it comes: `needs` the other way."""
        takers: list[list[tuple[int, int]]] = [[] for _ in self.entries]
        for step, (needs, hops) in enumerate(zip(self.needs, self.hops, strict=True)):
            for need, hop in zip(needs, hops, strict=True):
                takers[need].append((step, hop))
        return tuple(map(tuple, takers))

    def order(self) -> list[int]:
        """All steps in an order in which each comes after its needs and after the one before it on its device.

        Raises:
            ScheduleError: the devices wait for each other. The message names the cycle.
        """
        head = list(self.starts[:-1])
        waiting: list[list[int]] = [[] for _ in head]  # the devices whose next step needs the next step of this one
        order: list[int] = []
        ready = list(range(len(head)))
        while ready:
            at = ready.pop()
            end = self.starts[at + 1]
            while head[at] < end:
                step = head[at]
                behind = next((need for need in self.needs[step] if need >= head[self.device[need]]), None)
                if behind is not None:
                    waiting[self.device[behind]].append(at)
                    break
                order.append(step)
                head[at] += 1
                if waiting[at]:
                    ready += waiting[at]
                    waiting[at] = []
        if len(order) < len(self.entries):
            raise ScheduleError(self._deadlock(head))
        return order

    def _deadlock(self, head: list[int]) -> str:
        """The circle of devices, each of which stands at a step that needs a later step of the next one."""
        at = next(at for at, step in enumerate(head) if step < self.starts[at + 1])
        path: list[int] = []
        blocked: dict[int, int] = {}
        while at not in blocked:
            path.append(at)
            blocked[at] = next(need for need in self.needs[head[at]] if need >= head[self.device[need]])
            at = self.device[blocked[at]]
        stories = []
        for waiter in path[path.index(at) :]:
            need, giver = blocked[waiter], self.device[blocked[waiter]]
            place = (
                "which waits itself" if need == head[giver] else f"which comes after {self.entries[head[giver]]} there"
            )
            there = f"device {waiter} is at {self.entries[head[waiter]]}"
            stories.append(f"{there} and needs {self.entries[need]} of device {giver}, {place}")
        return "deadlock: " + "; ".join(stories)


class _Index:
    """The steps of each forward, backward and weights' gradient, as flat lists over stages and microbatches."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        size = schedule.stages * schedule.microbatches
        self.forward = [_ABSENT] * size
        self.backward = [_ABSENT] * size  # B or I
        self.weights = [_ABSENT] * size  # B or W

    def add(self, action: Action, at: int, step: int) -> None:
        stage, kind, k = action
        if kind not in KINDS:
            raise ScheduleError(f"{action} on device {at} has kind {kind!r}; the kinds are {' '.join(KINDS)}")
        if not (0 <= stage < self.schedule.stages and 0 <= k < self.schedule.microbatches):
            raise ScheduleError(
                f"{action} on device {at}: there are {self.schedule.stages} stages "
                f"and {self.schedule.microbatches} microbatches, counted from 0"
            )
        if self.schedule.placement[stage] != at:
            raise ScheduleError(f"{action} is on device {at}, but stage {stage} is {self._place(stage)}")
        place = stage * self.schedule.microbatches + k
        if kind == "F":
            self._enter(self.forward, place, action, step)
            return
        if self.forward[place] == _ABSENT or self.forward[place] == step:
            raise ScheduleError(f"{action} on device {at} does not come after {stage}F{k}")
        if kind == "W":
            if self.backward[place] == _ABSENT:
                raise ScheduleError(f"{action} on device {at} does not come after {stage}I{k}")
        else:
            self._enter(self.backward, place, action, step)
        if kind != "I":
            self._enter(self.weights, place, action, step)

    def check_complete(self) -> None:
        for what, there in (("F", self.forward), ("B or I", self.backward), ("W", self.weights)):
            if _ABSENT in there:
                stage, k = divmod(there.index(_ABSENT), self.schedule.microbatches)
                raise ScheduleError(
                    f"no {what} of microbatch {k} on stage {stage} ({self._place(stage)}); "
                    f"{there.count(_ABSENT)} of {len(there)} are missing"
                )

    def needs(self, entry: Entry) -> list[tuple[int, int]]:
        """The steps whose outputs it takes, each with its hop."""
        found = []
        for stage, kind, k in entry.parts:
            if kind == "F" and stage > 0:
                found.append((self.forward[(stage - 1) * self.schedule.microbatches + k], 2 * stage - 2))
            elif kind in "BI" and stage < self.schedule.stages - 1:
                found.append((self.backward[(stage + 1) * self.schedule.microbatches + k], 2 * stage + 1))
        return found

    def _enter(self, table: list[int], place: int, action: Action, step: int) -> None:
        if table[place] != _ABSENT:
            what = "there twice" if action.kind in "FW" else "a second backward"
            raise ScheduleError(
                f"{action} is {what}: microbatch {action.microbatch} has been through this on stage {action.stage}"
            )
        table[place] = step

    def _place(self, stage: int) -> str:
        return f"on device {self.schedule.placement[stage]}"


def _check_form(schedule: Schedule) -> None:
    """Refuses values of wrong types in a schedule of a user's own, which no type checker may have seen."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"a schedule is a Schedule, as Schedule.of makes it, not {type(schedule).__name__}")
    if not isinstance(schedule.microbatches, int) or not all(isinstance(at, int) for at in schedule.placement):
        raise ScheduleError(
            f"microbatches and devices are whole numbers, not {schedule.microbatches!r} and {schedule.placement!r}"
        )
    for at, row in enumerate(schedule.rows):
        if not isinstance(row, tuple):
            raise ScheduleError(f"the actions of device {at} are a tuple, not {type(row).__name__}: use Schedule.of")
        for entry in row:
            if not isinstance(entry, Action | Overlap):
                raise ScheduleError(f"{entry!r} on device {at} is no action: write Action(stage, kind, microbatch)")


def _check_sizes(schedule: Schedule) -> None:
    if schedule.microbatches < 1 or schedule.stages < 1:
        raise ScheduleError(
            f"a schedule needs stages and microbatches; there are {schedule.stages} and {schedule.microbatches}"
        )
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.devices:
            raise ScheduleError(
                f"stage {stage} is on device {device}, but there are lists for {schedule.devices} devices"
            )
    for at, row in enumerate(schedule.rows):
        for entry in row:
            if len(entry.parts) == 2 and (entry.parts[0].kind != "F" or entry.parts[1].kind not in "BI"):
                raise ScheduleError(f"{entry} on device {at} is not a forward and a backward")
