"""Several clients at once on two islands of two hosts each: programs with collectives, interleaved on all devices.

Every value must have the bits that it has when its client is alone. Without the islands' order it must not work, or the
order would be good for nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.integration.conftest import ROOT, Cluster, Scripts

CLIENTS = 4

DISORDERED = os.pathsep.join([str(ROOT / "tests" / "integration" / "disordered"), str(ROOT)])
"""A path from which the processes of a cluster import `sitecustomize`, which has its hosts ignore the order."""


def tell(client: subprocess.Popen[str], word: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{word}\n")
    client.stdin.flush()


def together(python: Scripts, cluster: Cluster, launches: int, *until: str) -> list[dict[str, Any]]:
    """What each of four clients says after `launches` launches at the same time as the others, or with `until` "first"
    at its first wrong outcome."""
    given = cluster.url, cluster.token
    clients = [python.start("gangs_client", *given, str(k), str(launches), *until) for k in range(CLIENTS)]
    for client in clients:
        assert client.stdout is not None
        # One after the other: what each computes first, it computes alone.
        tell(client, "alone")
        if client.stdout.readline().strip() != "ready":
            python.finish(client)  # fails, and says why
    for client in clients:
        tell(client, "go")
    found = [json.loads(client.stdout.readline()) for client in clients if client.stdout is not None]
    for client in clients:
        python.finish(client)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "launches", [25, pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.long)]
)
def test_launches_of_four_clients_together_give_the_bits_of_each_alone(
    python: Scripts, pairs: Cluster, launches: int
) -> None:
    """With the order of every host compared as well: one digest, one order."""
    for found in together(python, pairs, launches):
        assert found == {"wrong": 0, "errors": [], "example": ""}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_islands_of_two_hosts(python: Scripts, pairs: Cluster) -> None:
    out = python.run("islands_of_two_hosts", pairs.url, pairs.token, timeout=220)
    assert out.splitlines() == ["layouts ok", "sums ok", "scatter refused", "both ok", "readers ok"]


def disordered(python: Scripts, *until: str, **options: Any) -> list[dict[str, Any]]:
    """The same on a cluster of its own, whose hosts ignore the order."""
    shape = {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2, "policy": "share"}
    cluster = Cluster(python, {**shape, **options}, PYTHONPATH=DISORDERED)
    found = together(python, cluster, 200, *until)
    cluster.end()
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_one_order_collectives_corrupt_each_other_or_hang(python: Scripts) -> None:
    """Hosts that ignore the order. What hangs is ended by the limit of a launch, and each client leaves at the first
    wrong outcome: a hang costs seconds and a restart, and none is needed after that."""
    found = disordered(python, "first", check_order=False, launch_limit_s=5.0)
    assert sum(client["wrong"] for client in found) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_hosts_that_differ_are_found_and_the_two_launches_named(python: Scripts) -> None:
    found = disordered(python, check_order=True, launch_limit_s=60.0)
    examples = " ".join(client["example"] for client in found)
    assert "OrderMismatch" in examples
    assert "enqueued gangs in different orders: host" in examples


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_array_that_one_host_never_got_fails_its_launch_alone(python: Scripts) -> None:
    """A client says that an array is there, and gave one of two hosts nothing. The host's own word counts, so no host
    enters a collective in which it would wait for the other one."""
    out = python.run("gangs_half_an_array")
    print(out)
    assert "BufferLost after" in out
    assert "has not come to host 1 in 20 s" in out
    assert "serving after" in out
