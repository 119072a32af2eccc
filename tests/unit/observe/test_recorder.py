"""The controller's records of launches that have ended."""

from __future__ import annotations

import pytest

from pathways_ray.controller import status
from pathways_ray.errors import Failure
from pathways_ray.observe import recorder
from pathways_ray.observe.recorder import OTHERS, Recorder
from pathways_ray.observe.ring import Ring
from tests.unit.controller.harness import Harness, program_over


def test_a_launch_is_recorded_with_its_outcome() -> None:
    """One that ends in a value after 2 s, one that fails."""
    front = Harness(sessions=(1,))
    front.register(program_over(1, key=7), 1)
    front.put(1)
    front.launch(1, (1,), 100)
    front.launch(2, (1,), 200)
    front.launches.tables.now = 2.0
    front.done(0, 1)
    front.failed(0, 2, Failure("ExecutionError", "boom"))
    found = front.launches.tables.recorder
    assert found.ring.records() == [(1, 1, 7, 0.0, 2.0, 1), (2, 1, 7, 0.0, 2.0, -2)]
    assert found.failures == {"ExecutionError": 1}
    assert found.latencies()["session 1"].total == 4.0
    assert found.latencies()["session 1"].total == 4.0, "each is counted once"


def test_sessions_of_the_operator_share_a_histogram() -> None:
    """Metrics would else have one more with each session that comes and goes."""
    front = Harness(sessions=(1, 2))
    for session in (1, 2):
        front.launches.tables.recorder.ring.add(session, session, 7, 0.0, 1.0, 1)
    found = status.of_launches(front.launches, status.Report(), {})["latencies"]
    assert {name: one["sum"] for name, one in found.items()} == {"the operator": 2.0}


def test_tenants_beyond_the_limit_share_a_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_TENANTS", 2)
    made = Recorder()
    for k in range(5):
        made.opened(k, f"tenant {k}")
        made.ring.add(k, k, 1, 0.0, 1.0, 1)
    assert {name: one.total for name, one in made.latencies().items()} == {
        "tenant 0": 1.0,
        "tenant 1": 1.0,
        OTHERS: 3.0,
    }


def test_of_a_long_burst_the_last_are_counted() -> None:
    made = Recorder()
    made.ring = Ring("qqqddq", 8)
    made.opened(1, "alice")
    for k in range(20):
        made.ring.add(k, 1, 1, 0.0, 1.0, k)
    assert made.latencies()["alice"].total == 8.0
    made.ring.add(20, 1, 1, 0.0, 1.0, 20)
    assert made.latencies()["alice"].total == 9.0


def test_sessions_of_which_nothing_is_known_any_more_count_under_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open one is known however many have come and gone since it opened."""
    monkeypatch.setattr(recorder, "MAX_SESSIONS", 1)
    made = Recorder()
    for session, tenant in enumerate(("carol", "alice", "bob")):
        made.opened(session, tenant)
    for session in (1, 2):
        made.closed(session)
    for session in (0, 1, 2):
        made.ring.add(1, session, 1, 0.0, 1.0, 1)
    assert set(made.latencies()) == {OTHERS, "bob", "carol"}
    assert made.tenants() == {0: "carol", 2: "bob"}
