"""Addresses of the nodes of a Ray cluster, as JSON."""

from __future__ import annotations

import json
import sys

import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps({node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}))
