"""The runtime on Ray clusters that others started: it comes, computes, goes, and leaves the cluster as it was.

Each Ray cluster has its files in a folder and a token of its own, so that clusters of others on this machine are not
found and not disturbed. Its processes are known by their environment, and end with the test.
"""

from __future__ import annotations

import ipaddress
import json
import time
import uuid
from typing import Any

import psutil
import pytest

OURS = ("HostExecutor", "IslandScheduler", "Controller", "ResourceManager")


def last_line(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def actors_of_ours(python) -> list[str]:
    """Names of the processes of our actors that live."""
    found = []
    for process in python.alive():
        try:
            found += [name for name in OURS if f"ray::{name}" in " ".join(process.cmdline())]
        except psutil.Error:
            continue
    return found


def assert_our_actors_are_gone(python, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while (left := actors_of_ours(python)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.slow
def test_beside_ray_start(python, apart, head) -> None:
    """1. Somebody starts Ray, with a token. 2. A driver without that token is refused. 3. One that has it runs the
    runtime there, and ends. 4. The cluster is as it was, and works."""
    impatient = {"RAY_NUM_REDIS_GET_RETRIES": "2"}  # tries of a wrong token, once a second
    other = {**apart, "RAY_AUTH_TOKEN": uuid.uuid4().hex, **impatient}
    kind, message = last_line(python.run("existing_ray_refused", "auto", **other))
    assert kind == "AuthenticationError"
    assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in message

    found = last_line(python.run("existing_ray_on_head", **apart))
    assert found == {"address": head, "right": True, "islands": 2}
    assert_our_actors_are_gone(python)
    assert last_line(python.run("existing_ray_after", **apart)) == {"nodes": 1, "idle": True, "answer": 42}


@pytest.mark.long
@pytest.mark.parametrize(
    "addresses",
    [pytest.param(["", "", ""], marks=pytest.mark.long), ["127.0.0.2", "127.0.0.3", "127.0.0.4"]],
    ids=["nodes at one address", "each node at its own"],
)
def test_hosts_are_spread_over_nodes(python, apart, addresses: list[str]) -> None:
    script = python.start("existing_ray_several_nodes", *addresses, **apart)
    first = script.stdout.readline()
    assert first, script.communicate()[1]
    found = json.loads(first)
    assert found["right"] is True
    assert len(set(found["nodes"])) == 3
    for address, pid in found["serves"]:
        assert served_by(pid) == {"127.0.0.1" if not addresses[0] else address}
    _, err = script.communicate("end\n", timeout=60.0)
    assert script.returncode == 0, err
    python.assert_none_left()


def served_by(pid: int) -> set[str]:
    """The addresses at which a host listens; Ray's own servers in it listen everywhere and are left out."""
    listening = [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    addresses = [ipaddress.ip_address(c.laddr.ip) for c in listening]
    return {str(getattr(a, "ipv4_mapped", None) or a) for a in addresses if not a.is_unspecified}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_ray_at_the_address(python, apart, within, address: str) -> None:
    environment = {**apart, "RAY_ADDRESS": "127.0.0.1:1"}  # "auto" looks there first
    with within(15.0):
        kind, message = last_line(python.run("existing_ray_refused", address, **environment))
    assert kind == "UsageError"
    assert f"no Ray cluster at '{address}'" in message
    assert message.endswith("start one with 'ray start --head'")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_islands_follow_nodes_that_come_are_drained_and_go(python, apart) -> None:
    """1. A node that comes gives an island. 2. One that Ray drains loses its slices to others before its deadline, and
    status says why. 3. One that is lost takes its island along. 4. In a runtime with islands of the operator's, another
    island takes the place of one whose node is drained. 5. A node comes, and islands are spread on request."""
    found = last_line(python.run("following_nodes", timeout=380.0, **apart))
    print(found)
    assert found["lost"] is True
    assert found["spread"] == 2
    assert_our_actors_are_gone(python)
    python.assert_none_left()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_up_waits_for_the_machines_that_it_is_asked_to(python, apart) -> None:
    """Without that, both islands would lie on the node that was there first."""
    found = last_line(python.run("awaited_nodes", timeout=220.0, **apart))
    assert len(set(found["nodes"])) == 2
    assert found["refused"] == 1
    assert "has 1 node(s) after 1 s, and 2 are waited for" in found["said"]
    assert_our_actors_are_gone(python)
    python.assert_none_left()
