"""Clients that die, and programs that kill: what they held is free, and nobody else notices."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

FREE_WITHIN_S = 10.0


def ask(cluster: Any) -> dict[str, Any]:
    cluster.stdin.write("\n")
    cluster.stdin.flush()
    found: dict[str, Any] = json.loads(cluster.stdout.readline())
    return found


def clients_are_killed(python: Any, hosts_per_island: int, rounds: int, at_once: int) -> None:
    cluster = python.start("ownership_cluster", str(hosts_per_island))
    url, token = cluster.stdout.readline().split()
    before = ask(cluster)
    slowest = 0.0
    for number in range(rounds):
        doomed = [python.start("ownership_client", url, token) for _ in range(at_once)]
        for client in doomed:
            assert client.stdout.readline().strip() == "ready"
        time.sleep(0.05 + 0.37 * (number % 5))
        busy = ask(cluster)
        assert busy["sessions"] == at_once + 1
        assert busy["bytes"] > 0
        for client in doomed:
            client.kill()
        start = time.monotonic()
        while (now := ask(cluster)) != before:
            assert time.monotonic() - start < FREE_WITHIN_S, (
                f"left after {FREE_WITHIN_S:.0f} s: {now}, before: {before}"
            )
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - start)
    print(f"{rounds * at_once} clients killed; all was free after {slowest:.2f} s at most")
    python.finish(cluster)


@pytest.mark.timeout(180)
def test_killed_clients_leave_nothing_on_the_hosts(python: Any) -> None:
    """They are killed in the middle of uploads, launches over both islands, and waiting. The hosts' own tables, the
    controller's, slices and programs are as before, and no host's process was ended for it."""
    clients_are_killed(python, 1, rounds=2, at_once=3)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hosts_per_island", [1, 2])
def test_a_hundred_killed_clients(python: Any, hosts_per_island: int) -> None:
    clients_are_killed(python, hosts_per_island, rounds=17, at_once=3)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_program_without_end_is_ended_and_after_three_times_refused(python: Any) -> None:
    assert "refused" in python.run("ownership_endless_program", timeout=110)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_program_under_which_hosts_die_three_times_is_refused_and_others_are_not(python: Any) -> None:
    assert "refused" in python.run("ownership_deadly_program", timeout=110)
