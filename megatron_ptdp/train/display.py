"""What a person sees of a run: a bar where there is a terminal, else a line from time to time."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Seen(NamedTuple):
    """One step, as it is shown and recorded."""

    loss: float
    norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    mfu: float
    hardware_flops_utilization: float


class Display:
    """A context manager; `step` is told of every step.

    Args:
        done, steps: of the run
        bubble: what to say of the bubble
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

    def __enter__(self) -> Display:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def step(self, number: int, seen: Seen) -> None:
        """Shows a step that is done."""
        status = (
            f"loss {seen.loss:.4f}, {seen.tokens_per_second:,.0f} tokens/s, bubble {self.bubble}, "
            f"MFU {seen.mfu:.1%} (hardware {seen.hardware_flops_utilization:.1%})"
        )
        if self._progress and self._line is not None:
            self._progress.update(self._line, completed=number, status=status)
        elif number % self.every == 0 or number == self.steps:
            self.say(f"step {number}/{self.steps}: {status}")

    def say(self, text: str) -> None:
        """Prints a line, above the bar."""
        self.console.print(text, markup=False, soft_wrap=True)
