"""`pw.progress()`: on a terminal, what a wait waits for, while it lasts: a compiler, an upload, a place in an order.

Waits tell it that they begin and end; a thread asks once a second why the oldest of them is not over (`y.why()`), and
shows the last reason, with a bar where the controller knows how much is done. Short waits are never asked about.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pathways_ray.client import shown as state
from pathways_ray.errors import PathwaysError
from pathways_ray.observe.why import Why

AFTER_S = 1.0
"""A wait is shown from this long on."""

EVERY_S = 1.0
"""Time between two questions."""

MAX_CHARACTERS = 100


class Shown(Protocol):
    """A line that is shown while something lasts."""

    def show(self, text: str, done: float) -> None:
        """Shows a text; `done` is the part that is over, 0 to 1, or -1 where that is unknown."""

    def clear(self) -> None:
        """Shows nothing."""


class Wait(NamedTuple):
    """A wait that lasts: when it began, and who says why."""

    began: float
    why: Callable[[], Why]


class Waits:
    """The waits of this process that last.

    Args:
        shown: the line.
        clock: seconds.
    """

    def __init__(self, shown: Shown, clock: Callable[[], float] = time.monotonic) -> None:
        self.shown, self.clock = shown, clock
        self._there: dict[int, Wait] = {}
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def waiting(self, why: Callable[[], Why]) -> Iterator[None]:
        """A wait, which lasts as long as the block."""
        number = next(self._numbers)
        self._there[number] = Wait(self.clock(), why)
        try:
            yield
        finally:
            del self._there[number]

    def look(self) -> None:
        """Shows why the oldest wait is not over; nothing for those that are new."""
        oldest = next(iter(list(self._there.values())), None)
        if oldest is None or self.clock() - oldest.began < AFTER_S:
            self.shown.clear()
            return
        try:
            links = oldest.why().links
        except PathwaysError as error:  # the wait itself will say what is wrong
            self.shown.show(str(error)[:MAX_CHARACTERS], -1.0)
            return
        if links:
            self.shown.show(links[-1].text[:MAX_CHARACTERS], links[-1].done)


class Bar:
    """A line on a terminal, which is gone afterwards."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("", total=None, visible=False)

    def show(self, text: str, done: float) -> None:
        if self._progress.tasks[0].visible is False:
            self._progress.reset(self._task)
            self._progress.start()
        known = done >= 0
        self._progress.update(
            self._task, description=text, visible=True, total=1.0 if known else None, completed=max(done, 0.0)
        )
        self._progress.refresh()

    def clear(self) -> None:
        if self._progress.tasks[0].visible:
            self._progress.update(self._task, visible=False)
            self._progress.stop()


@contextlib.contextmanager
def progress(shown: Shown | None = None) -> Iterator[None]:
    """Shows on stderr what waits inside the block wait for, from a second on: a compiler, an upload, another launch.

        with pw.progress():
            print(float(step(x)))

    Nothing is shown where stderr is no terminal. Short waits pay nothing but a look at a variable.

    Args:
        shown: takes the place of the terminal.
    """
    console = Console(stderr=True)
    if shown is None and not sys.stderr.isatty():
        yield
        return
    waits, before = Waits(shown or Bar(console)), state.waits
    over = threading.Event()

    def look_on() -> None:
        while not over.wait(EVERY_S):
            waits.look()

    thread = threading.Thread(target=look_on, name="progress", daemon=True)
    state.waits = waits
    thread.start()
    try:
        yield
    finally:
        state.waits = before
        over.set()
        thread.join()
        waits.shown.clear()
