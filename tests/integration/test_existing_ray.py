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

PRELUDE = """\
import json, os, sys
import numpy as np
import ray
import pathways_ray as pw
from jax.sharding import PartitionSpec as P

def across(*islands):
    "Adds 1 on each of these islands in turn, in one program; True when the sum is right."
    v = np.arange(8.0)
    steps = [
        pw.compiled(lambda v: v + 1.0, slice=pw.virtual_slice((2,), island=island), in_specs=P("x"), out_specs=P("x"))
        for island in islands
    ]

    @pw.program
    def hops(v):
        for step in steps:
            v = step(v)
        return v

    return np.asarray(hops(v)).tolist() == (v + len(steps)).tolist()

def idle():
    "Whether nobody holds anything on the Ray cluster."
    groups = ray.util.placement_group_table().values()
    held = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
    return all(group["state"] == "REMOVED" for group in groups) and abs(held) < 1e-6
"""

ON_A_HEAD = """
with pw.init(islands=2, devices_per_host=2, address="auto") as session:
    there = ray.get_runtime_context().gcs_address
    islands = pw.islands()
    print(json.dumps({"address": there, "right": across(0, 1, 0), "islands": len(islands)}))
assert not ray.is_initialized()
"""

AFTERWARDS = """
import time
ray.init(address="auto", log_to_driver=False)
deadline = time.monotonic() + 30
while not idle() and time.monotonic() < deadline:
    time.sleep(0.1)
found = {"nodes": len([n for n in ray.nodes() if n["Alive"]]), "idle": idle()}
print(json.dumps({**found, "answer": ray.get(ray.remote(lambda: 42).remote())}))
"""

REFUSED = """
try:
    pw.init(address=sys.argv[1])
except pw.errors.PathwaysError as error:
    print(json.dumps([type(error).__name__, str(error)]))
assert not ray.is_initialized()
"""

ON_SEVERAL_NODES = """
from ray.cluster_utils import Cluster

places = [{"node_ip_address": address} if address else {} for address in sys.argv[1:]]
small = {"num_cpus": 1, "object_store_memory": 100 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **small, **places[0]})
for place in places[1:]:
    cluster.add_node(**small, **place)
try:
    with pw.init(islands=3, devices_per_host=2, address=cluster.address) as session:
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        hosts = [host for island in pw.islands() for host in island["hosts"]]
        found = {"right": across(0, 1, 2, 0, 2), "nodes": [host["node"] for host in hosts]}
        print(json.dumps({**found, "serves": [[known[host["node"]], host["pid"]] for host in hosts]}), flush=True)
        sys.stdin.readline()
    assert not ray.is_initialized()
finally:
    ray.shutdown()
    cluster.shutdown()
"""


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


def test_beside_ray_start(python, apart, head) -> None:
    """1. Somebody starts Ray, with a token. 2. A driver without that token is refused. 3. One that has it runs the
    runtime there, and ends. 4. The cluster is as it was, and works."""
    impatient = {"RAY_NUM_REDIS_GET_RETRIES": "2"}  # Ray tries a wrong token so many times, once a second
    stranger = {**apart, "RAY_AUTH_TOKEN": uuid.uuid4().hex, **impatient}
    kind, message = last_line(python.run(PRELUDE + REFUSED, "auto", **stranger))
    assert kind == "AuthenticationError"
    assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in message

    found = last_line(python.run(PRELUDE + ON_A_HEAD, **apart))
    assert found == {"address": head, "right": True, "islands": 2}
    assert_our_actors_are_gone(python)
    assert last_line(python.run(PRELUDE + AFTERWARDS, **apart)) == {"nodes": 1, "idle": True, "answer": 42}


@pytest.mark.long
@pytest.mark.parametrize(
    "addresses",
    [pytest.param(["", "", ""], marks=pytest.mark.long), ["127.0.0.2", "127.0.0.3", "127.0.0.4"]],
    ids=["nodes at one address", "each node at its own"],
)
def test_hosts_are_spread_over_nodes(python, apart, addresses: list[str]) -> None:
    script = python.start(PRELUDE + ON_SEVERAL_NODES, *addresses, **apart)
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
        kind, message = last_line(python.run(PRELUDE + REFUSED, address, **environment))
    assert kind == "UsageError"
    assert f"no Ray cluster at '{address}'" in message
    assert message.endswith("start one with 'ray start --head'")
