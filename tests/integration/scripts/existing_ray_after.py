"""State of a Ray cluster once the runtime has left it: nodes, resources, and a task of its own."""

from __future__ import annotations

import json
import time

import ray

from tests.integration.scripts.existing_ray import idle

ray.init(address="auto", log_to_driver=False)
deadline = time.monotonic() + 30
while not idle() and time.monotonic() < deadline:
    time.sleep(0.1)
found = {"nodes": len([n for n in ray.nodes() if n["Alive"]]), "idle": idle()}
print(json.dumps({**found, "answer": ray.get(ray.remote(lambda: 42).remote())}))
