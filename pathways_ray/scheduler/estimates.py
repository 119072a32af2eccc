"""Estimates of what launches take, learned from those that have run."""

from __future__ import annotations

from dataclasses import dataclass

UNMEASURED_S = 0.005
"""Estimate for a program until its first launch has been measured."""

SHORTEST_S = 1e-6

WEIGHT = 0.1
"""Weight of the latest launch in the average: ten launches after a change, two thirds of it are in the estimate."""


@dataclass(slots=True)
class MovingAverage:
    """Exponential moving average of the time that launches of a program take, in seconds; 0 before the first one."""

    seconds: float = 0.0

    @property
    def estimate(self) -> float:
        """Seconds that the next launch is expected to take."""
        return self.seconds or UNMEASURED_S

    def measure(self, seconds: float) -> None:
        """Takes in what a launch took: something, since 0 stands for a program that nobody has measured."""
        before = self.seconds
        if seconds < SHORTEST_S:
            seconds = SHORTEST_S
        self.seconds = before + WEIGHT * (seconds - before) if before else seconds
