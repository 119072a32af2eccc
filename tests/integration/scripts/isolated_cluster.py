"""A cluster whose tenants have processes of their own; each line of its input kills the actor that starts them."""

from __future__ import annotations

import json
import sys

import ray

import pathways_ray as pw

with pw.init(devices_per_host=2, tenants=sys.argv[1], isolation="process") as session:
    starter = ray.get_actor(f"{session.cluster.runtime}-tenant-islands", "pathways")
    print(json.dumps({"url": session.url, "token": session.token}), flush=True)
    for _line in sys.stdin:
        ray.kill(starter, no_restart=False)
        print("killed", flush=True)
