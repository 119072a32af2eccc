"""A cluster of two islands of two hosts, open until its input ends."""

from __future__ import annotations

import sys

import pathways_ray as pw

with pw.init(
    islands=2,
    hosts_per_island=2,
    devices_per_host=2,
    check_order=sys.argv[1] == "checked",
    policy=sys.argv[2],
    launch_limit_s=float(sys.argv[3]),
) as cluster:
    print(cluster.url, cluster.token, flush=True)
    sys.stdin.readline()
