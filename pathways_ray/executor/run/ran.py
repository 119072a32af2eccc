"""The launches that were on a host's devices, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pathways_ray.observe.ring import Ring

MAX_EARLY = 1024
"""Early launches of which it is remembered when they ran until they are sent."""


class RanLaunches(Ring):
    """Number, start and end of each; of early launches the number of what they were sent as. Of two that end at once on
    different devices one may be missing, and one that left as part of another and ended behind that is.

    Args:
        sequence_of: the number that an early launch was sent under; its own, below 0, while it was not.
    """

    def __init__(self, sequence_of: Callable[[int], int]) -> None:
        super().__init__("qdd")
        self._sequence_of = sequence_of
        self._early: dict[int, tuple[float, float]] = {}

    def ended(self, number: int, start: float, end: float) -> None:
        """A launch is over, early or not."""
        if number >= 0:
            self.add(number, start, end)
            return
        self._early[number] = start, end
        if (sequence := self._sequence_of(number)) >= 0:
            self.sent((number,), sequence)
        if len(self._early) > MAX_EARLY:  # some are never sent
            self._early.pop(next(iter(self._early), 0), None)

    def sent(self, numbers: Sequence[int], sequence: int) -> None:
        """Early launches were sent as this one, or, with 0, never will be. Those that are not over yet are noted then:
        whichever comes second finds the other."""
        for number in numbers if sequence >= 0 else ():
            if (ran := self._early.pop(number, None)) is not None and sequence:
                self.add(sequence, *ran)
