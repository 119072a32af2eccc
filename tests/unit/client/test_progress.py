"""`pw.progress()`: long waits are shown with their reason, short ones are not, and what is shown goes away."""

from __future__ import annotations

import contextlib
import io

from rich.console import Console

from pathways_ray.client import shown as state
from pathways_ray.client.progress import AFTER_S, Bar, Waits, progress
from pathways_ray.errors import UsageError
from pathways_ray.observe.why import Link, Why


class Line:
    """What is shown, "" for nothing."""

    def __init__(self) -> None:
        self.text, self.done = "", -1.0

    def show(self, text: str, done: float) -> None:
        self.text, self.done = text, done

    def clear(self) -> None:
        self.text = ""


def compiles() -> Why:
    return Why("array 1", (Link("array 1 is a result of launch 1.1"), Link("host 0 compiles 'step', for 9.0 s")))


def away() -> Why:
    raise UsageError("no cluster answers")


def test_the_last_reason_of_the_oldest_wait_is_shown_from_a_second_on() -> None:
    line, now = Line(), [0.0]
    waits = Waits(line, lambda: now[0])
    waits.look()
    assert line.text == ""
    with waits.waiting(compiles):
        waits.look()
        assert line.text == "", "it has only begun"
        now[0] = AFTER_S
        with waits.waiting(away):
            waits.look()
        assert line.text == "host 0 compiles 'step', for 9.0 s"
    waits.look()
    assert line.text == ""


def test_an_upload_says_how_much_is_there() -> None:
    line, now = Line(), [0.0]
    waits = Waits(line, lambda: now[0])
    arriving = Why("array 1", (Link("host 0 has 40.0 MiB of the 64.0 MiB of array 1", done=0.625),))
    with waits.waiting(lambda: arriving):
        now[0] = 2.0
        waits.look()
    assert line.done == 0.625


def test_a_controller_that_is_away_is_said() -> None:
    line, now = Line(), [0.0]
    waits = Waits(line, lambda: now[0])
    with waits.waiting(away):
        now[0] = 2.0
        waits.look()
    assert line.text == "no cluster answers"


def test_a_wait_that_fails_is_over() -> None:
    waits = Waits(Line())
    with contextlib.suppress(ValueError), waits.waiting(compiles):
        raise ValueError
    assert waits._there == {}


def test_the_block_has_the_waits_and_leaves_nothing() -> None:
    line = Line()
    with progress(line):
        assert state.waits is not None
        line.text = "something"
    assert state.waits is None
    assert line.text == ""


def test_a_terminal_gets_a_line_that_names_cannot_style() -> None:
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=100))
    bar.show("host 0 compiles '[red]step'", -1.0)
    bar.show("host 0 has half", 0.5)
    bar.clear()
    bar.clear()
    assert "[red]step" in out.getvalue()
