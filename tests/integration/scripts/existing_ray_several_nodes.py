"""A Ray cluster of several nodes, and a runtime of three islands spread over them."""

from __future__ import annotations

import json
import sys

import ray
from ray.cluster_utils import Cluster

import pathways_ray as pw
from tests.integration.scripts.existing_ray import across

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
