"""Processes of the runtime killed or stopped under load: every launch has one outcome, in time, and serving goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("hosts_per_island", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.timeout(180)
def test_killed_hosts_fail_their_launches_and_come_back(python: Any, hosts_per_island: int) -> None:
    """1. Launches on both islands and across them are under way. 2. A host gets SIGKILL. 3. Each launch ends in the
    right value, or in HostLost or BufferLost. 4. The same programs run again by themselves. 5. And, for islands of one
    host, once more."""
    out = python.run(
        "faults_under_load",
        str(hosts_per_island),
        str(3 - hosts_per_island),
        "SIGKILL",
        str(hosts_per_island),
        timeout=170,
    )
    print(out)
    assert "left: 0" in out


@pytest.mark.long
@pytest.mark.parametrize("hosts_per_island", [1, 2])
@pytest.mark.timeout(180)
def test_a_stopped_host_is_taken_for_dead(python: Any, hosts_per_island: int) -> None:
    """A host that stops answering is killed after eight seconds and comes back."""
    out = python.run("faults_under_load", str(hosts_per_island), "1", "SIGSTOP", "3", timeout=170)
    print(out)
    assert "left: 0" in out


TOKENS = ("the token of one tenant", "the token of another tenant")


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("hosts_per_island", [1, 2])
def test_a_hundred_strikes_under_two_tenants(python: Any, hosts_per_island: int, tmp_path: Path) -> None:
    """Hosts, schedulers and the resource manager are killed or stopped, the controller is killed; after each strike all
    programs of both tenants run again, without a hang or a wrong value, and what fails says so within 10 s but for one
    in a hundred."""
    arguments = (str(tmp_path / "tenants.json"), ",".join(TOKENS), str(hosts_per_island), "100", "11")
    out = python.run("faults_two_tenants", *arguments, timeout=2900)
    print(out)
    found = json.loads(next(line for line in out.splitlines() if line.startswith('{"struck"')))
    assert (found["wrong"], found["hung"], found["left"]) == (0, 0, 0)
    assert found["to_error"]["p99"] <= 10.0
    assert found["to_error"]["max"] <= 20.0


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_hundred_changes_of_islands_under_two_tenants(python: Any, tmp_path: Path) -> None:
    """Islands are added, drained and removed, slices moved: no launch is lost or wrong, and what lies on a slice goes
    along with it."""
    arguments = (str(tmp_path / "tenants.json"), ",".join(TOKENS), "100", "7")
    out = python.run("changes_two_tenants", *arguments, timeout=1400)
    print(out)
    found = json.loads(next(line for line in out.splitlines() if line.startswith('{"changes"')))
    assert sum(found["changes"].values()) == 100
    assert min(found["changes"].values()) >= 5
    assert (found["wrong"], found["lost"], found["left"], found["sessions"]) == (0, 0, 0, len(TOKENS))


@pytest.mark.timeout(180)
def test_a_lost_host_is_passed_and_scheduler_and_controller_come_back(python: Any) -> None:
    """On one cluster, one after the other: launches of one session on other islands pass those that wait for a host;
    a scheduler and the controller fail the launches under way, and serve again."""
    out = python.run("faults_control_plane", "HostExecutor:SIGKILL", "IslandScheduler:SIGKILL", "Controller:SIGKILL")
    print(out)
    assert "ready before: [False, False]" in out
    assert "ready after: [1.0, 2.0]" in out
    assert out.count("serving in") == 2
    python.assert_none_left()


@pytest.mark.long
def test_a_stopped_scheduler_comes_back(python: Any) -> None:
    out = python.run("faults_control_plane", "IslandScheduler:SIGSTOP")
    print(out)
    assert out.count("serving in") == 1
    python.assert_none_left()
