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

from tests.integration.conftest import ROOT, Scripts

CLIENTS = 4

DISORDERED = os.pathsep.join([str(ROOT / "tests" / "integration" / "disordered"), str(ROOT)])
"""A path from which the processes of a cluster import `sitecustomize`, which has its hosts ignore the order."""


def tell(client: subprocess.Popen[str], word: str) -> None:
    assert client.stdin is not None
    client.stdin.write(f"{word}\n")
    client.stdin.flush()


def together(
    python: Scripts, launches: int, check: str, policy: str, limit: float, **environment: Any
) -> list[dict[str, Any]]:
    """What each of four clients says after `launches` launches at the same time as the others."""
    cluster = python.start("gangs_cluster", check, policy, str(limit), **environment)
    assert cluster.stdout is not None
    url, token = cluster.stdout.readline().split()
    clients = [python.start("gangs_client", url, token, str(seed), str(launches)) for seed in range(CLIENTS)]
    for client in clients:
        assert client.stdout is not None
        # One after the other: what each computes first, it computes alone.
        tell(client, "alone")
        if client.stdout.readline().strip() != "ready":
            python.finish(client)  # fails, and says why
    for client in clients:
        tell(client, "go")
    found = [json.loads(client.stdout.readline()) for client in clients if client.stdout is not None]
    for process in [*clients, cluster]:
        python.finish(process)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["share"])
def test_two_thousand_launches_of_four_clients_give_the_bits_of_each_alone(python: Scripts, policy: str) -> None:
    """With the order of every host compared as well: one digest, one order."""
    for found in together(python, 500, "checked", policy, 60.0):
        assert found == {"wrong": 0, "errors": [], "example": ""}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_without_one_order_collectives_corrupt_each_other_or_hang(python: Scripts) -> None:
    """Hosts that ignore the order. What hangs is ended by the limit of a launch."""
    found = together(python, 200, "unchecked", "share", 5.0, PYTHONPATH=DISORDERED)
    assert sum(client["wrong"] for client in found) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_hosts_that_differ_are_found_and_the_two_launches_named(python: Scripts) -> None:
    found = together(python, 200, "checked", "share", 60.0, PYTHONPATH=DISORDERED)
    examples = " ".join(client["example"] for client in found)
    assert "OrderMismatch" in examples
    assert "enqueued gangs in different orders: one had gang" in examples


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_gang_that_one_host_cannot_enter_ends_on_the_others(python: Scripts) -> None:
    """A client says that an array is there, and gave one of two hosts nothing: the other one waits in a collective."""
    out = python.run("gangs_half_an_array")
    print(out)
    assert "HostLost after" in out
    assert "host 0 waits in it" in out
    assert "serving after" in out
