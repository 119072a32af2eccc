"""The client's part of a trace: calls and outcomes of the launches that are made while it is there."""

from __future__ import annotations

import pytest

from pathways_ray.client.buffer import Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.errors import Failure
from pathways_ray.observe import client_trace
from pathways_ray.observe.client_trace import ClientTrace
from pathways_ray.observe.timeline import Interval
from pathways_ray.transport.messages import Completed, LaunchFailed


def test_a_launch_is_noted_from_its_call_to_its_outcome_also_behind_an_upload() -> None:
    core = ClientCore(7, 100)
    before, sent, first, second = core.new_buffers(4)
    core.launch(1, [], [before])
    core.trace = ClientTrace()
    sent.upload = Upload({2})
    core.trace.now = 1.0
    core.launch(1, [sent], [first])
    core.trace.now = 2.0
    core.launch(1, [], [second])
    core.handle(Completed((1, 2)), 5.0)
    assert core.trace.intervals() == [Interval(2, 1.0, 5.0)]
    core.handle(Completed((3,)), 6.0)
    assert core.trace.intervals() == [Interval(2, 1.0, 5.0), Interval(3, 2.0, 6.0)]


def test_a_launch_that_fails_ends_as_well() -> None:
    core = ClientCore(7, 100)
    (result,) = core.new_buffers(1)
    core.trace = ClientTrace()
    core.launch(1, [], [result])
    core.handle(LaunchFailed(1, Failure("ExecutionError", "boom")), 5.0)
    assert core.trace.intervals() == [Interval(1, 0.0, 5.0)]


def test_a_long_trace_has_the_last_launches_and_no_ends_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_trace, "MAX_LAUNCHES", 4)
    trace = ClientTrace()
    trace.ended((8, 9), 0.5)
    for launch in range(10, 20):
        trace.called(launch)
        trace.ended((launch - 1,), 1.0)
    trace.ended((19, 13), 2.0)
    assert [found.sequence for found in trace.intervals()] == [16, 17, 18, 19]
    assert len(trace.calls) == len(trace.ends) == 4
