"""DualPipe-V: two chunks in a V, and a forward of one beside a backward of the other as one step.

Source: DualPipe of DeepSeek-V3 (arXiv:2412.19437, section 3.2.1) in its form "cut in half" for p instead of 2p devices.
The pair lets the computation of one hide the messages of the other (expert parallelism, above all).
"""

from __future__ import annotations

from collections import deque

from megatron_ptdp.schedules.actions import Action, Entry, Kind, Overlap, Schedule, vee
from megatron_ptdp.schedules.rules import Rules

DUALPIPE_V = Rules("dualpipe-v", chunks=2, fills_stages=True, splits_backward=True, v_placement=True)


def dualpipe_v(devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Eight phases on each device. Bubble (p-1)(pair + B - 3W), where `pair` is the time of a forward and a backward.

    That is exact if F = I, W takes at most F and the pair takes F + B; a much shorter pair leaves more. Holds 2p + 1
    stashes of chunks.

    Raises:
        ScheduleError: there are fewer microbatches than stages.
    """
    DUALPIPE_V.require(devices, microbatches, chunks)
    rows = [_Device(device, devices).row(microbatches) for device in range(devices)]
    return Schedule.of("dualpipe-v", microbatches, vee(devices), rows)


class _Device:
    """Writes the row of one device. Each chunk counts its forwards and backwards; a W that is put off waits in line."""

    def __init__(self, device: int, devices: int) -> None:
        self.device, self.devices = device, devices
        self.there, self.back = device, 2 * devices - 1 - device
        self.order: list[Entry] = []
        self.done: dict[tuple[int, Kind], int] = {}
        self.put_off: deque[Action] = deque()

    def row(self, microbatches: int) -> list[Entry]:
        r, rest = self.device, self.devices - 1 - self.device
        there, back = self.there, self.back
        for _ in range(2 * rest):
            self._forward(there)
        for _ in range(r + 1):
            self._forward(there)
            self._forward(back)
        for _ in range(rest):
            self._input_gradient(back)
            self._weight_gradient()
            self._forward(back)
        for step in range(microbatches - 2 * self.devices + r + 1):
            if step == 0 and rest == 0:  # at the turn of the V the backward waits for the forward just before it
                self._forward(there)
                self._backward(back)
            else:
                self._pair(there, back)
            self._pair(back, there)
        for _ in range(rest):
            self._backward(back)
            self._pair(back, there)
        self._drain()
        for _ in range(rest):
            self._weight_gradient()
            self._input_gradient(there)
        for _ in range(r + 1):
            self._weight_gradient()
        return self.order

    def _drain(self) -> None:
        """r + 1 backwards of each chunk; those of the second half leave their W for later."""
        backwards = [self.back, self.there] * (self.device + 1)
        for number, stage in enumerate(backwards):
            if number < self.device + 1:
                self._backward(stage)
            else:
                self._input_gradient(stage)

    def _next(self, stage: int, kind: Kind) -> Action:
        """The stage's next forward, or its next backward of whatever kind."""
        counted: Kind = "F" if kind == "F" else "B"
        k = self.done.get((stage, counted), 0)
        self.done[stage, counted] = k + 1
        return Action(stage, kind, k)

    def _forward(self, stage: int) -> None:
        self.order.append(self._next(stage, "F"))

    def _backward(self, stage: int) -> None:
        self.order.append(self._next(stage, "B"))

    def _input_gradient(self, stage: int) -> None:
        action = self._next(stage, "I")
        self.order.append(action)
        self.put_off.append(Action(stage, "W", action.microbatch))

    def _weight_gradient(self) -> None:
        self.order.append(self.put_off.popleft())

    def _pair(self, forward: int, backward: int) -> None:
        self.order.append(Overlap(self._next(forward, "F"), self._next(backward, "B")))
