"""Schedules for tests: sizes that fit each of them, and an interpreter that runs their lists one action at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import strategies as st

from megatron_ptdp.schedules import Action, Lowered, Receive, Reduce, Schedule, Send, Tie, build

BUILT_IN = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v")
ONE_CHUNK = {"gpipe", "1f1b", "zb-h1"}
TWO_CHUNKS = {"zb-v", "dualpipe-v"}
GROUPED = {"interleaved", "interleaved-zb"}

Value = tuple[int, ...]
"""The stages that an activation or a gradient went through."""


class Sizes(NamedTuple):
    name: str
    devices: int
    microbatches: int
    chunks: int

    def build(self) -> Schedule:
        return build(*self)


def fits(name: str, devices: int, microbatches: int) -> bool:
    """The rules of the schedules, written down a second time."""
    if name == "dualpipe-v":
        return microbatches >= 2 * devices
    return name not in GROUPED or microbatches % max(1, microbatches // devices) == 0


@st.composite
def sizes(draw: st.DrawFn, names: tuple[str, ...] = BUILT_IN, most_devices: int = 8, most: int = 24) -> Sizes:
    name = draw(st.sampled_from(names))
    devices = draw(st.integers(1, most_devices))
    microbatches = draw(st.sampled_from([m for m in range(1, max(most, 2 * devices) + 1) if fits(name, devices, m)]))
    chunks = 1 if name in ONE_CHUNK else 2 if name in TWO_CHUNKS else draw(st.integers(1, 4))
    return Sizes(name, devices, microbatches, chunks)


class Stuck(Exception):
    """The lists cannot be run to their ends."""


class Pipeline:
    """Runs the lists of all devices with values. Receives block, sends do not.

    Attributes:
        gradients: for each stage the microbatches whose gradient of the weights is there, in the order of adding.
        reduced: the stages in the order in which their gradients were reduced.
        tied: the pairs of stages whose gradients were exchanged, seen from each.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.stages, self.microbatches = lowered.schedule.stages, lowered.schedule.microbatches
        self.values: dict[tuple[int, str, int], Value] = {}  # what a stage has made; by its number, F or B, microbatch
        self.mail: dict[tuple[int, str, int], Value] = {}
        self.inbox: dict[tuple[int, str, int], Value] = {}
        self.gradients: dict[int, list[int]] = {stage: [] for stage in range(self.stages)}
        self.reduced: list[int] = []
        self.tied: list[tuple[int, int]] = []

    def run(self) -> Pipeline:
        """
        Raises:
            Stuck: a list waits for what never comes.
            AssertionError: an action gets a wrong value, or none.
        """
        machines = [self._device(device) for device in range(self.lowered.schedule.devices)]
        left = list(machines)
        while left:
            waiting = []
            moved = False
            for machine in left:
                for went in machine:
                    if not went:
                        waiting.append(machine)
                        break
                    moved = True
                else:
                    moved = True
            if not moved:
                raise Stuck
            left = waiting
        assert not self.mail, "something was sent to nobody"
        assert not self.inbox, "something was received for nothing"
        return self

    def _device(self, device: int) -> Iterator[bool]:
        """Yields True after each instruction, and False for as long as it waits."""
        for instruction in self.lowered.rows[device]:
            match instruction:
                case Send(stage, value, k, _):
                    self.mail[stage, value, k] = self.values.pop((stage, value, k))
                case Receive(stage, value, k, _):
                    sender = stage - 1 if value == "F" else stage + 1
                    while (sender, value, k) not in self.mail:
                        yield False
                    self.inbox[stage, value, k] = self.mail.pop((sender, value, k))
                case Reduce(stage):
                    assert sorted(self.gradients[stage]) == list(range(self.microbatches))
                    self.reduced.append(stage)
                case Tie(stage, other, _):
                    self.tied.append((stage, other))
                case _:
                    for part in instruction.parts:
                        while not self._has_input(part):
                            yield False
                        self._act(part)
            yield True

    def _has_input(self, action: Action) -> bool:
        stage, kind, k = action
        if kind == "W" or (stage == 0 if kind == "F" else stage == self.stages - 1):
            return True
        key, sender = ("F", stage - 1) if kind == "F" else ("B", stage + 1)
        return (stage, key, k) in self.inbox or (sender, key, k) in self.values

    def _act(self, action: Action) -> None:
        stage, kind, k = action
        if kind == "F":
            before = self._take(stage, "F", k, stage - 1) if stage else ()
            assert before == tuple(range(stage))
            if stage < self.stages - 1:
                self.values[stage, "F", k] = (*before, stage)
        elif kind in "BI":
            after = self._take(stage, "B", k, stage + 1) if stage < self.stages - 1 else ()
            assert after == tuple(range(self.stages - 1, stage, -1))
            if stage:
                self.values[stage, "B", k] = (*after, stage)
        if kind in "BW":
            self.gradients[stage].append(k)

    def _take(self, stage: int, key: str, k: int, sender: int) -> Value:
        """From the inbox, or from the neighbouring stage on the same device."""
        return self.inbox.pop((stage, key, k), None) or self.values.pop((sender, key, k))
