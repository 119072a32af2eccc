"""The inbox of a dispatcher: who handles what comes, and in which order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from pathways_ray.executor.run.inbox import FromLog, FromScheduler, Inbox
from pathways_ray.transport.messages import Drop, DropProgram

ONE, TWO, THREE, FOUR = (DropProgram(1, number) for number in range(1, 5))
DROP = Drop(1, (1,))


@pytest.fixture
def seen() -> list[Any]:
    return []


@pytest.fixture
def inbox(seen: list[Any]) -> Inbox:
    def handle(batch: Sequence[Any]) -> None:
        seen.extend(batch)

    return Inbox(handle)


def test_a_lone_message_is_handled_by_who_reads_it(inbox: Inbox, seen: list[Any]) -> None:
    assert inbox.read([ONE])
    assert inbox.read([TWO])
    assert seen == [ONE, TWO]
    assert inbox.empty()


@pytest.mark.parametrize("batch", [[ONE, DROP], [DROP, ONE]])
def test_so_is_one_that_comes_with_a_drop(inbox: Inbox, seen: list[Any], batch: list[Any]) -> None:
    """As in a loop that moves an array in each turn, and drops that of the one before."""
    assert inbox.read(batch)
    assert not inbox.read([*batch, DROP])
    assert seen == batch


def test_entries_of_the_log_are_left_to_the_dispatcher(inbox: Inbox, seen: list[Any]) -> None:
    """The loop that reads them serves clients, too, and must not wait in a collective for other hosts."""
    assert not inbox.read([ONE], FromLog)
    assert seen == []
    inbox.handle(inbox.get_nowait())
    assert seen == [ONE]


def test_several_are_left_to_the_dispatcher(inbox: Inbox, seen: list[Any]) -> None:
    assert not inbox.read([ONE, TWO])
    assert seen == []
    inbox.handle(inbox.get_nowait())
    assert inbox.read([THREE])
    assert seen == [ONE, TWO, THREE]


def test_the_dispatcher_knows_when_a_batch_was_read(inbox: Inbox) -> None:
    times = [time.perf_counter()]
    for batch, source in (([ONE, TWO], FromScheduler), ([THREE], FromLog)):
        inbox.read(batch, source)
        times.append(time.perf_counter())
    read = [inbox.get_nowait(), inbox.get_nowait()]
    assert [list(batch) for batch in read] == [[ONE, TWO], [THREE]]
    assert times[0] <= read[0].at <= times[1] <= read[1].at <= times[2]  # type: ignore[attr-defined]


def test_no_message_passes_one_that_the_dispatcher_has_taken_out(inbox: Inbox, seen: list[Any]) -> None:
    """
    1. The dispatcher takes messages out, and has not begun with them: nothing waits, and nobody is at work.
    2. Another message is read, and waits behind them.
    3. A call that a client hands over has nothing to do with them, and does not wait.
    """
    inbox.read([ONE, TWO])
    taken = inbox.get_nowait()
    assert inbox.handles_here([FOUR])
    assert not inbox.read([THREE])
    assert seen == [FOUR]
    inbox.handle(taken)
    inbox.handle(inbox.get_nowait())
    assert seen == [FOUR, ONE, TWO, THREE]


def test_a_message_waits_while_somebody_has_the_turn(inbox: Inbox, seen: list[Any]) -> None:
    with inbox.turn:
        assert not inbox.read([ONE])
        assert not inbox.handles_here([TWO])
    assert seen == []
    inbox.handle(inbox.get_nowait())
    assert seen == [ONE]


def test_a_message_waits_behind_what_other_threads_have_put(inbox: Inbox, seen: list[Any]) -> None:
    inbox.put([ONE])
    assert not inbox.read([TWO])
    inbox.handle(inbox.get_nowait())
    assert not inbox.read([THREE])
    for _ in range(2):
        inbox.handle(inbox.get_nowait())
    assert seen == [ONE, TWO, THREE]
