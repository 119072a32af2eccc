"""Diagnosis: each kind of finding out of a snapshot that has it, and none out of one that is healthy."""

from __future__ import annotations

import math

import msgspec
import pytest

from pathways_ray.observe import views
from pathways_ray.observe.diagnosis import diagnosis, findings
from tests.unit.observe.snapshots import host, island, snapshot, view


def kinds(found) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in findings(found)]


def test_a_healthy_runtime_has_no_finding() -> None:
    assert diagnosis(snapshot()) == {"healthy": True, "findings": []}


def test_no_hosts_are_an_error_and_no_table_without_a_word() -> None:
    assert ("error", "no-hosts") in kinds(snapshot(islands=[]))
    down = [island(0, host(0, up=False), state="away"), island(1, host(1, up=False), state="lost")]
    assert kinds(snapshot(islands=down)) == [("error", "no-hosts")]


def test_a_host_that_is_down_is_named_with_its_island() -> None:
    (finding,) = findings(snapshot(islands=[island(0, host(0)), island(1, host(1, up=False), host(2), state="away")]))
    assert finding.what == "island 1 is away: host 1 of 2 is down"


def test_a_scheduler_that_does_not_answer_is_an_error() -> None:
    found = snapshot()
    del found["islands"]["1"]
    assert kinds(found) == [("error", "scheduler-silent")]


def test_a_launch_near_its_limit_and_a_long_queue_are_warnings() -> None:
    found = snapshot()
    sent = views.Dispatched(640, 2, "bob", "step", 50.0, (0,), ("0.0",))
    queue = views.Queue(1, "alice", 2, 641, "double", 45.0)
    compiles = views.Compiling(1, 7, "big", 90.0)
    found["islands"]["0"] = view(
        island=0, hosts=(0,), dispatched=(sent,), queues=(queue,), running=(views.Running(0, 640, 40.0),)
    )  # fmt: skip
    found["islands"]["1"] = view(island=1, hosts=(1,), compiling=(compiles,))
    assert kinds(found) == [("warning", "launch-long"), ("warning", "queue-long"), ("warning", "compile-long")]
    text = [finding.what for finding in findings(found)]
    assert text[0] == "launch 640 of 'step' (bob) has kept host 0 for 40 s; the limit is 60 s"
    assert diagnosis(found)["healthy"]
    found["status"]["tenants"][1]["launch_limit_s"] = 600.0
    assert ("warning", "launch-long") not in kinds(found)
    found["status"]["compile_limit_s"] = 600.0
    assert ("warning", "compile-long") not in kinds(found)


def test_a_runtime_without_limits_has_nothing_that_takes_long() -> None:
    """JSON has no infinity; a tenant may have a limit all the same."""
    found = snapshot()
    about = {"launch_limit_s": math.inf, "compile_limit_s": math.inf}
    found["status"] |= msgspec.json.decode(msgspec.json.encode(about))
    sent = views.Dispatched(640, 2, "bob", "step", 5e5, (0,), ("0.0",))
    compiles = views.Compiling(1, 7, "big", 5e5)
    found["islands"]["0"] = view(
        island=0, hosts=(0,), dispatched=(sent,), running=(views.Running(0, 640, 4e5),), compiling=(compiles,)
    )  # fmt: skip
    assert kinds(found) == []
    found["status"]["tenants"][1]["launch_limit_s"] = 600.0
    assert kinds(found) == [("warning", "launch-long")]


def test_a_tenant_is_told_of_its_own_launches() -> None:
    """Those of others have no number that it could ask about, or cancel."""
    found = snapshot()
    sent = views.Dispatched(0, 0, "another tenant", "", 50.0, (0,), ("0.0",))
    queue = views.Queue(0, "another tenant", 2, 0, "", 45.0)
    found["islands"]["0"] = view(
        island=0, hosts=(0,), dispatched=(sent,), queues=(queue,), running=(views.Running(0, 0, 40.0),)
    )  # fmt: skip
    assert kinds(found) == []


def test_python_beside_the_devices_that_takes_long_is_a_warning() -> None:
    found = snapshot()
    sent = views.Dispatched(640, 2, "bob", "step", 45.0, (0,), ("0.0",))
    stands = views.StoppedOn(0, views.Stopped(640, "AT_BARRIER", calls=("reward",)))
    data = views.StoppedOn(0, views.Stopped(641, "AT_BARRIER", (), (5,)))
    found["islands"]["0"] = view(island=0, hosts=(0,), dispatched=(sent,), stopped=(stands, data))
    (finding,) = findings(found)
    assert (finding.kind, finding.what) == (
        "python-long",
        "launch 640 of 'step' (bob) waits on host 0 for Python, 'reward'; it was sent there 45 s ago",
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ({"tenants_file": {"problem": "line 3"}}, "tenants-file"),
        ({"refusals": [{"id": "a1", "tenant": "bob", "program": "bad"}]}, "program-refused"),
        ({"trusted_tenants": ["tom"]}, "trusted"),
        ({"memory": [{"pool": "0.0", "bytes": 100, "held": 99, "tenants": {"bob": 90, "a": 9}}]}, "memory-full"),
    ],
)
def test_what_the_status_says(status, kind) -> None:
    assert [finding.kind for finding in findings(snapshot(**status))] == [kind]


def test_recent_losses_are_told_and_old_ones_are_not() -> None:
    found = snapshot()
    lost = {"age_s": 30.0, "event": "host lost", "detail": "", "cause": "its process ended", "session": 0, "host": 2}
    found["overview"]["events"] = [lost, {**lost, "age_s": 3000.0}]
    (finding,) = findings(found)
    assert finding.what == "1 losses in the last 10 minutes, the last 30 s ago: host lost 2 (its process ended)"


def test_without_a_status_nothing_else_is_said() -> None:
    found: dict = {"status": None, "islands": {}, "overview": {}}
    assert kinds(found) == [("error", "no-status")]


def test_a_drain_that_is_late_and_one_that_cannot_be_are_warnings() -> None:
    held = [{"island": 1, "session": 1, "slice": 2}]
    islands = [island(0, host(0)), {**island(1, host(1), state="draining"), "drain_left_s": -5.0}]
    (finding,) = findings(snapshot(islands=islands, slices=held))
    assert (finding.kind, finding.what) == (
        "drain-late",
        "island 1 still has 1 slices 5 s after the deadline of its drain",
    )
    assert findings(snapshot(islands=islands)) == [], "it is empty"
    islands[1]["drain_left_s"] = None  # the resource manager has restarted, and does not know
    assert findings(snapshot(islands=islands, slices=held)) == []
    (finding,) = findings(snapshot(islands=[{**island(0, host(0)), "reason": "its node ends"}, island(1, host(1))]))
    assert (finding.kind, finding.what) == (
        "drain-refused",
        "island 0 is to be drained, and is the last one that takes slices: its node ends",
    )
