"""Clients that die, and programs that kill: what they held is free, and nobody else notices."""

from __future__ import annotations

import time

import pytest

from tests.integration.conftest import Cluster, Scripts

FREE_WITHIN_S = 10.0


def assert_killed_clients_leave_nothing(python: Scripts, cluster: Cluster, rounds: int, at_once: int) -> None:
    start = time.monotonic()
    while (before := cluster.tables())["sessions"] > 1 or before["programs"]:  # of clients that have just ended
        assert time.monotonic() - start < FREE_WITHIN_S, before
    slowest = 0.0
    for number in range(rounds):
        doomed = [python.start("ownership_client", cluster.url, cluster.token) for _ in range(at_once)]
        for client in doomed:
            assert client.stdout is not None
            assert client.stdout.readline().strip() == "ready"
        time.sleep(0.05 + 0.37 * (number % 5))
        busy = cluster.tables()
        assert busy["sessions"] == at_once + 1
        assert busy["bytes"] > 0
        for client in doomed:
            client.kill()
        start = time.monotonic()
        while (now := cluster.tables()) != before:
            assert time.monotonic() - start < FREE_WITHIN_S, (
                f"left after {FREE_WITHIN_S:.0f} s: {now}, before: {before}"
            )
            time.sleep(0.05)
        slowest = max(slowest, time.monotonic() - start)
    print(f"{rounds * at_once} clients killed; all was free after {slowest:.2f} s at most")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_clients_leave_nothing_on_the_hosts(python: Scripts, pairs: Cluster) -> None:
    """They are killed in the middle of uploads, launches over both islands, and waiting. The hosts' own tables, the
    controller's, slices and programs are as before, and no host's process was ended for it."""
    assert_killed_clients_leave_nothing(python, pairs, rounds=1, at_once=3)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hosts_per_island", [1, 2])
def test_a_hundred_killed_clients_leave_nothing(python: Scripts, hosts_per_island: int) -> None:
    options = {"islands": 2, "hosts_per_island": hosts_per_island, "devices_per_host": 2, "policy": "share"}
    cluster = Cluster(python, options)
    assert_killed_clients_leave_nothing(python, cluster, rounds=17, at_once=3)
    cluster.end()


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_program_without_end_is_ended_and_after_three_times_refused(python: Scripts) -> None:
    assert "refused" in python.run("ownership_endless_program", timeout=110)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_program_under_which_hosts_die_three_times_is_refused_and_others_are_not(python: Scripts) -> None:
    assert "refused" in python.run("ownership_deadly_program", timeout=110)
