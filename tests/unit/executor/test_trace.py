"""What a trace keeps of the launches that ran while it was on."""

from __future__ import annotations

from pathways_ray.executor.profiling import launch_trace
from pathways_ray.executor.profiling.launch_trace import Ran, Trace
from pathways_ray.transport.messages import Drop, IslandLaunch


def run(session: int, sequence: int) -> IslandLaunch:
    return IslandLaunch(sequence, session, session, (), 0)


def test_launches_have_their_session() -> None:
    found = Trace()
    found.coming([run(7, 1), Drop(7, (3,)), run(8, 2), run(8, 3)])
    found.over(1, 0.1, 0.2)
    found.over(2, 0.2, 0.5)
    found.over(3, 0.5, 0.6)
    assert list(found.ran) == [Ran(1, 7, 0.1, 0.2), Ran(2, 8, 0.2, 0.5), Ran(3, 8, 0.5, 0.6)]
    assert not found.sessions


def test_a_launch_that_stops_at_a_gate_has_two_entries() -> None:
    found = Trace()
    found.coming([run(7, 1)])
    found.over(1, 0.1, 0.2, part=True)
    found.over(1, 0.4, 0.5)
    assert [(ran.start, ran.end) for ran in found.ran] == [(0.1, 0.2), (0.4, 0.5)]


def test_what_came_before_the_trace_is_left_out() -> None:
    found = Trace()
    found.over(1, 0.1, 0.2)
    assert not found.ran


def test_it_keeps_the_last_entries(monkeypatch) -> None:
    monkeypatch.setattr(launch_trace, "LONGEST", 2)
    found = Trace()
    found.coming([run(7, sequence) for sequence in (1, 2, 3)])
    for sequence in (1, 2, 3):
        found.over(sequence, 0.0, 0.0)
    assert [ran.sequence for ran in found.ran] == [2, 3]
