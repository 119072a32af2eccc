"""Calls that a host serves: computed for their values alone."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.run.driver import MAX_LONG_AT_ONCE
from pathways_ray.executor.run.instructions import Called
from pathways_ray.executor.run.reports import Reports
from pathways_ray.executor.run.watchers import LONG_S
from pathways_ray.ir.types import ArrayType
from pathways_ray.limits import MAX_DEVICE_COMPUTATIONS, MAX_EARLY_BYTES
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import (
    AllowEarly,
    Drop,
    DropProgram,
    DropSession,
    IslandLaunchFailed,
    Message,
    ServeCall,
    Served,
    ServedCalls,
)
from tests.unit.executor.run.test_core import host_with_barrier, host_with_call, run
from tests.unit.executor.run.test_early import host_that_takes_calls
from tests.unit.helpers import VECTOR, Sketch

MARK = tenant_mark("")


def called(*arguments: int, number: int = 1, session: int = 1, tenant: str = MARK, **how: Any) -> Called:
    given: dict[str, Any] = {"program": 1, "requests": (7,), "devices": ((0,),)} | how
    return Called(session, tenant, ServeCall(arguments=arguments, **given), number)


def test_a_call_is_computed_and_nothing_of_it_is_kept() -> None:
    host = host_that_takes_calls()
    kept, sent = host.buffers(), list(host.messages)
    host.handle(called(1), called(500, number=2))
    assert host.enqueued == ["f(x)", "f(f(x))"]
    assert host.served == [(1, -1, ["f(x)"]), (2, -2, ["f(f(x))"])]
    assert (host.left, host.buffers(), host.messages) == ([], kept, sent)
    assert (host.core.early.taken, host.core.active, host.driver.running) == ({}, {}, {})
    assert (host.core.early.calls, host.core.early.count) == (2, 2)


def test_a_call_takes_the_values_that_come_along() -> None:
    host = host_that_takes_calls()
    host.handle(called(0, inline=((0, bytes(VECTOR.nbytes)),)))
    assert (len(host.served), host.left) == (1, [])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(called(1, program=9), id="no such program"),
        pytest.param(called(1, tenant="another"), id="another tenant"),
        pytest.param(called(2), id="an argument is not there"),
        pytest.param(called(1, session=2), id="an argument of another session"),
        pytest.param(called(0), id="an argument is nowhere"),
        pytest.param(called(), id="too few arguments"),
        pytest.param(called(1, 1), id="too many arguments"),
        pytest.param(called(1, requests=(7, 8), devices=((0,), (0,))), id="asks for more results than there are"),
        pytest.param(called(1, requests=(7, 8)), id="asks for one of them nowhere"),
        pytest.param(called(0, inline=((0, b"short"),)), id="too few bytes come along"),
        pytest.param(called(1, inline=((0, bytes(VECTOR.nbytes)),)), id="bytes come along that nobody takes"),
    ],
)
def test_a_call_that_does_not_fit_is_left_to_be_launched(call: Called) -> None:
    host = host_that_takes_calls()
    host.handle(call)
    assert (host.served, host.left, host.enqueued) == ([], [1], [])


@pytest.mark.parametrize("gone", [Drop(1, (1,)), DropSession(1), DropProgram(1, 1), AllowEarly("")])
def test_a_call_is_left_once_its_ground_is_gone(gone: Any) -> None:
    host = host_that_takes_calls()
    host.handle(gone, called(1))
    assert (host.served, host.left) == ([], [1])


def test_a_call_like_one_that_was_served_is_looked_at_as_well() -> None:
    """What comes along may be too short, and what was there may be gone."""
    host, bytes_of_one = host_that_takes_calls(), bytes(VECTOR.nbytes)
    host.handle(
        called(0, inline=((0, bytes_of_one),)), called(0, number=2, inline=((0, b"short"),)), called(0, number=3)
    )
    host.handle(called(1, number=4), called(1, number=5), Drop(1, (1,)), called(1, number=6))
    host.handle(called(0, number=7, inline=((0, bytes_of_one),)))
    assert ([number for number, *_ in host.served], host.left) == ([1, 4, 5, 7], [2, 3, 6])


def test_a_call_is_left_before_its_program_was_launched_once() -> None:
    """Nobody has compared its arguments yet with what was compiled."""
    host = host_with_call()
    host.handle(AllowEarly(MARK), called(1), run(5, 1), called(1, number=2))
    assert (host.left, [number for number, *_ in host.served]) == ([1], [2])


def test_a_call_is_left_where_a_launch_stands() -> None:
    """It waits for a value, and this call might have come behind it."""
    host = host_with_barrier()
    host.handle(AllowEarly(MARK), run(5, 1), run(6, 1, program=2), called(1))
    assert host.left == [1]


def test_a_call_is_left_on_an_island_of_several_hosts() -> None:
    host = host_with_call(multi_host=True)
    host.handle(AllowEarly(MARK), run(5, 1), called(1))
    assert host.left == [1]


def test_a_call_is_left_behind_much_that_is_under_way() -> None:
    host = host_that_takes_calls()
    host.computations = MAX_DEVICE_COMPUTATIONS
    host.handle(called(1))
    host.computations = MAX_DEVICE_COMPUTATIONS - 1
    host.handle(called(1, number=2))
    assert (host.left, len(host.served)) == ([1], 1)
    host.driver.programs[1].seconds = 2 * LONG_S
    host.busy = MAX_LONG_AT_ONCE + 1
    host.handle(called(1, number=3))
    host.busy = MAX_LONG_AT_ONCE
    host.handle(called(1, number=4))
    assert (host.left, len(host.served)) == ([1, 3], 2)


def test_a_call_is_left_that_makes_much() -> None:
    host, sketch = host_that_takes_calls(), Sketch()
    here = sketch.slice("0.0", "0.1")
    large = ArrayType((MAX_EARLY_BYTES,), "float32")
    host.program(2, sketch, sketch.call("f", sketch.argument(here, type=large), slice=here, outputs=(large,)))
    host.handle(run(6, 1, program=2), called(1, program=2))
    assert host.left == [1]


def test_what_calls_took_is_said_for_all_that_were_served() -> None:
    """Not of the one that has failed: it is launched, and charged as that is."""
    sent: queue.SimpleQueue[Message] = queue.SimpleQueue()
    reports = Reports(sent.put)
    reports.say_served(3)
    for number, (session, key) in enumerate([(1, 4), (1, 4), (2, 4)], 1):
        reports.serving(-number, called(session=session, program=key))
    assert (reports.sequence_of(-1), reports.sequence_of(-9)) == (0, -9)
    reports.done(-1, 20, behind=0)
    reports.failed(IslandLaunchFailed(-2, Failure("ExecutionError", "it broke"), ()))
    reports.done(-3, 5, behind=0)
    assert sent.empty()
    reports.say_served(3)
    assert sent.get_nowait() == ServedCalls(3, (Served(1, 4, 1, 20), Served(2, 4, 1, 5)))
    reports.say_served(3)
    assert (sent.empty(), len(reports.early), reports.served) == (True, 0, 2)
