"""Shows a run: a progress bar where there is a terminal, else a line from time to time."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class StepFigures(NamedTuple):
    """One step, as it is shown and recorded."""

    loss: float
    norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    mfu: float
    hardware_flops_utilization: float


class Display:
    """A context manager; `step` shows each step. Speeds are means over the last `every` steps: single ones arrive
    in bursts, since some are in flight at once, and behind a checkpoint.

    Args:
        done, steps: of the run
        bubble: the bubble, in words
        every: steps between two lines where there is no terminal
    """

    def __init__(self, console: Console, done: int, steps: int, bubble: str, every: int) -> None:
        self.console, self.steps, self.every = console, steps, every
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._progress = Progress(*columns, console=console, expand=True) if console.is_terminal else None
        self._line = self._progress.add_task("", total=steps, completed=done, status="") if self._progress else None
        self.bubble = bubble
        self._last: deque[StepFigures] = deque(maxlen=every)
        self._held_out = ""

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def step(self, number: int, seen: StepFigures, held_out: float | None = None) -> None:
        """Shows a step that is done. `held_out`: the loss of the evaluation behind it, shown until the next one."""
        if held_out is not None:
            self._held_out = f" (held out {held_out:.4f} at step {number})"
        self._last.append(seen)
        speed, mfu, hardware = map(self._mean, ("tokens_per_second", "mfu", "hardware_flops_utilization"))
        utilization = f"MFU {mfu:.1%} (hardware {hardware:.1%})"
        status = f"loss {seen.loss:.4f}{self._held_out}, {speed:,.0f} tokens/s, bubble {self.bubble}, {utilization}"
        if self._progress and self._line is not None:
            self._progress.update(self._line, completed=number, status=status)
        elif number % self.every == 0 or number == self.steps or held_out is not None:
            self.say(f"step {number}/{self.steps}: {status}")

    def waits(self, what: str) -> None:
        """Shows beside the bar what is waited for; the next step takes its place."""
        if self._progress and self._line is not None:
            self._progress.update(self._line, status=what)

    def _mean(self, name: str) -> float:
        """The mean of a rate over the time of the last steps."""
        total: float = sum(getattr(seen, name) * seen.seconds for seen in self._last)
        return total / sum(seen.seconds for seen in self._last)

    def say(self, text: str) -> None:
        """Prints a line, above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)
