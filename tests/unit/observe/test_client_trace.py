"""The client's part of a trace: calls and outcomes of the launches that are made while it is there."""

from __future__ import annotations

from pathways_ray.client.buffer import Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.observe.client_trace import ClientTrace
from pathways_ray.observe.timeline import Interval
from pathways_ray.transport.messages import Completed


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
