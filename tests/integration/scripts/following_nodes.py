"""A Ray cluster whose nodes come, are drained and go, under a runtime whose islands follow them, or take others'
places; prints what was seen as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from click.testing import CliRunner
from jax.sharding import PartitionSpec as P
from ray.cluster_utils import Cluster

import pathways_ray as pw
from pathways_ray.cli import commands

SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}
LIMIT_S = 60.0

cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "num_cpus": 0, "include_dashboard": False})
ray_tool = [sys.executable, "-m", "ray.scripts.scripts"]


def pathways(*words: str) -> str:
    found = CliRunner().invoke(commands, [*words])
    assert found.exit_code == 0, (words, found.output, found.stderr, found.exception)
    return found.stdout


def drain(node: str, seconds: int) -> None:
    words = ["drain-node", "--address", cluster.address, "--node-id", node, "--reason-message", "test"]
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", str(seconds)]
    subprocess.run([*ray_tool, *words, *reason], check=True, stdout=sys.stderr)


def until(what: Callable[[], Any], text: str) -> float:
    """Seconds until something holds."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() - start < LIMIT_S, f"{text}: {session.status()['islands']}"
        time.sleep(0.1)
    return round(time.monotonic() - start, 1)


def islands() -> dict[int, Any]:
    return {one["island"]: one for one in session.status()["islands"]}


def up() -> set[int]:
    return {number for number, one in islands().items() if one["state"] == "up"}


def homes() -> list[str]:
    return [host["node"] for one in islands().values() for host in one["hosts"]]


def started(*words: str) -> Any:
    global session
    made = json.loads(pathways("up", "--json", "--address", cluster.address, *words))
    session = pw.connect(made["url"], made["token"])
    return made


def islands_follow_nodes() -> dict[str, Any]:
    made = started("--islands", "auto", "--devices-per-host", "2")
    assert len(made["islands"]) == 1
    s = session.virtual_slice((2,), ("x",))
    double = pw.compiled(lambda v: v * 2, slice=s, in_specs=P("x"), out_specs=P("x"))
    state = double(pw.put(np.arange(6.0), s, P("x")))
    found: dict[str, Any] = {}
    second = cluster.add_node(**SMALL)
    found["came"] = until(lambda: up() == {0, 1}, "no island for a node that came")
    drain(first.node_id, 40)
    found["told"] = until(lambda: islands()[0]["reason"].startswith("its node is drained by Ray"), "no drain")
    found["moved"] = until(lambda: s.island == 1, "the slice stayed")
    found["removed"] = until(lambda: set(islands()) == {1}, "the drained island stayed")
    np.testing.assert_array_equal(np.asarray(double(state)), np.arange(6.0) * 4)
    cluster.remove_node(first)
    third = cluster.add_node(**SMALL)
    until(lambda: up() == {1, 2}, "no island for another node")
    cluster.remove_node(second, allow_graceful=False)
    found["gone"] = until(lambda: set(islands()) == {2} and s.island == 2, "the island of a lost node stayed")
    np.testing.assert_array_equal(np.asarray(double(np.ones(6))), np.full(6, 2.0))
    try:
        np.asarray(state)
    except pw.errors.BufferLost:
        found["lost"] = True
    session.close()
    pathways("down", "--address", cluster.address)
    return {**found, "third": third.node_id}


def islands_take_others_places(node: str) -> dict[str, Any]:
    fourth = cluster.add_node(**SMALL)
    started("--islands", "2", "--devices-per-host", "1")
    s = session.virtual_slice((1,), ("x",), island=0)
    state = pw.put(np.arange(3.0), s)
    victim = next(host["node"] for host in islands()[0]["hosts"])
    drain(victim, 40)
    found = {"replaced": until(lambda: victim not in homes() and len(up()) == 2, "no island in place of the drained")}
    np.testing.assert_array_equal(np.asarray(state), np.arange(3.0))
    cluster.add_node(**SMALL)
    assert len(set(homes())) == 1, "both are on the only node that was left"
    print(pathways("island", "spread", "--address", cluster.address), file=sys.stderr)
    found["spread"] = len(set(homes()))
    np.testing.assert_array_equal(np.asarray(state), np.arange(3.0))
    session.close()
    pathways("down", "--address", cluster.address)
    return {**found, "nodes": len({node, fourth.node_id})}


first = cluster.add_node(**SMALL)
session: Any = None
try:
    followed = islands_follow_nodes()
    print(json.dumps({**followed, **islands_take_others_places(followed["third"])}), flush=True)
finally:
    cluster.shutdown()
