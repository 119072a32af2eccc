"""A runtime started before all of its machines have joined Ray; prints the nodes that its islands are on, as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

from ray.cluster_utils import Cluster

SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}

cluster = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
pathways = [sys.executable, "-m", "pathways_ray.cli"]
words = ["--address", cluster.address, "--nodes", "2", "--islands", "2", "--placement", "spread", "--json"]


def up(*limit: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*pathways, "up", *words, *limit], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


try:
    too_few = up("--wait", "1")
    said = too_few.communicate(timeout=60.0)[1]
    starting = up("--wait", "60")
    cluster.add_node(**SMALL)
    made = json.loads(starting.communicate(timeout=120.0)[0])
    status = [*pathways, "status", "--url", made["url"], "--token", made["token"], "--json"]
    islands = json.loads(subprocess.run(status, check=True, capture_output=True, text=True).stdout)["islands"]
    nodes = [host["node"] for island in islands for host in island["hosts"]]
    subprocess.run([*pathways, "down", "--address", cluster.address], check=True, stdout=sys.stderr)
    print(json.dumps({"nodes": nodes, "said": said, "refused": too_few.returncode}))
finally:
    cluster.shutdown()
