"""What the first host of a runtime has, as JSON."""

from __future__ import annotations

import json
import sys

import ray

from pathways_ray import names

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
host = ray.get_actor(names.host("pathways", 0), names.NAMESPACE)
print(json.dumps(ray.get(host.statistics.remote(), timeout=20)))
