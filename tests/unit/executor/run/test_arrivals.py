"""Waiting for values of other hosts: one thread, however many of them never come."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.calls.calls import Pending
from pathways_ray.executor.run.arrivals import LONGEST_PAUSE_S, Arrivals, is_there


class Value:
    """A value that arrives when the test says so."""

    def __init__(self) -> None:
        self.ready = False
        self.looks = 0

    def is_ready(self) -> bool:
        self.looks += 1
        return self.ready


class Announced(Value):
    """One that has its launch looked at when it is there."""

    looks_called = True


class Deleted:
    def is_ready(self) -> bool:
        raise RuntimeError("Array has been deleted")


def looking() -> tuple[Arrivals, queue.SimpleQueue[tuple[int, int, list[Any]]]]:
    found: queue.SimpleQueue[tuple[int, int, list[Any]]] = queue.SimpleQueue()
    arrivals = Arrivals(lambda *arrived: found.put(arrived))
    threading.Thread(target=arrivals.run, daemon=True).start()
    return arrivals, found


def test_a_launch_goes_on_when_all_its_values_are_there() -> None:
    arrivals, found = looking()
    values = [Value(), Value()]
    arrivals.add(7, 2, values)
    values[1].ready = True
    time.sleep(0.02)
    assert found.empty()
    values[0].ready = True
    assert found.get(timeout=10) == (7, 2, values)


def test_what_has_announced_its_end_before_it_was_waited_for_is_there() -> None:
    found: list[tuple[int, int, list[Any]]] = []
    values = [Announced()]
    values[0].ready = True
    Arrivals(lambda *arrived: found.append(arrived)).add(7, 2, values)
    assert found == [(7, 2, values)]


def test_nobody_looks_at_what_announces_its_end_before_it_does() -> None:
    """
    1. A launch waits for such a value, and for one that does not. The latter is looked at, comes, and no more looks
       follow.
    2. The former comes, and says so.
    """
    arrivals, found = looking()
    announced, other = Announced(), Value()
    arrivals.add(7, 2, [announced, other])
    other.ready = True
    while not announced.looks:
        time.sleep(LONGEST_PAUSE_S)
    looks = announced.looks
    time.sleep(20 * LONGEST_PAUSE_S)
    assert announced.looks <= looks + 1
    assert found.empty()
    announced.ready = True
    arrivals.look()
    assert found.get(timeout=10)[0] == 7


@pytest.mark.parametrize("came", [[], Failure("HostLost", "gone")])
def test_a_call_that_is_over_has_its_launch_go_on(came: list[Any] | Failure) -> None:
    arrivals, found = looking()
    call = Pending(arrivals.look)
    arrivals.add(7, 2, [call])
    time.sleep(0.02)
    assert found.empty()
    call.finish(came)
    assert found.get(timeout=10) == (7, 2, [call])


def test_waits_for_python_are_noted_apart_from_those_for_data() -> None:
    arrivals, found = looking()
    arrivals.add(7, 2, [np.zeros(1)])
    call = Pending()
    call.finish([])
    arrivals.add(8, 2, [call])
    assert {found.get(timeout=10)[0], found.get(timeout=10)[0]} == {7, 8}
    assert [[one[0] for one in ring.records()] for ring in (arrivals.waits, arrivals.python)] == [[7], [8]]


def test_values_that_never_come_hold_up_no_others_and_take_no_threads() -> None:
    """
    1. A thousand launches wait for peers that are silent. Another one's values come: it goes on.
    2. The thousand are given up: nobody looks at their values any more.
    """
    before = set(threading.enumerate())
    arrivals, found = looking()
    silent = [Value() for _ in range(1000)]
    for sequence, value in enumerate(silent):
        arrivals.add(sequence, 0, [value])
    value = Value()
    arrivals.add(5000, 0, [value])
    value.ready = True
    assert found.get(timeout=10)[0] == 5000
    assert len(set(threading.enumerate()) - before) < 10  # one of its own; a test before may have left others
    for sequence in range(1000):
        arrivals.drop(sequence)
    value = Value()
    value.ready = True
    arrivals.add(5001, 0, [value])
    assert found.get(timeout=10)[0] == 5001
    looks = sum(value.looks for value in silent)
    time.sleep(20 * LONGEST_PAUSE_S)
    assert sum(value.looks for value in silent) == looks


def test_what_counts_as_there() -> None:
    assert is_there(Failure("HostLost", "gone"))
    assert is_there(Deleted())
    assert not is_there(Value())
