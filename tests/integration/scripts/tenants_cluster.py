"""A cluster with a table of tenants; it prints the statistics of its hosts for each line of its input."""

from __future__ import annotations

import json
import sys

import ray

import pathways_ray as pw

with pw.init(islands=2, devices_per_host=4, tenants=sys.argv[1]) as session:
    lookup = session.cluster.resource_manager.lookup
    links = [ray.get(lookup.remote(name)) for name in ("controller", "scheduler-0", "scheduler-1")]
    print(json.dumps({"url": session.url, "token": session.token, "links": links}), flush=True)
    for _line in sys.stdin:
        found = ray.get([host.statistics.remote() for host in session.cluster.hosts.values()])
        print(json.dumps(found), flush=True)
