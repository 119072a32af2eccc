"""A cluster with the options of `pw.init` given as JSON, islands by number or as a list of `pw.Island`'s fields; it
prints its tables for each line of its input."""

from __future__ import annotations

import json
import sys

import ray

import pathways_ray as pw

options = json.loads(sys.argv[1])
if isinstance(options.get("islands"), list):
    options["islands"] = [pw.Island(**one) for one in options["islands"]]
with pw.init(**options) as session:
    print(session.url, session.token, flush=True)
    for _ in sys.stdin:
        hosts = ray.get([h.statistics.remote() for h in session.cluster.hosts.values()])
        status = session.status()
        print(
            json.dumps(
                {
                    "host_buffers": sum(h["buffers"] for h in hosts),
                    "active": sum(h["active"] for h in hosts),
                    "programs": sum(h["programs"] for h in hosts),
                    "pids": [h["pid"] for h in hosts],
                    "sessions": len(status["sessions"]),
                    "slices": len(status["slices"]),
                    "buffers": status["buffers"],
                    "in_flight": status["in_flight"],
                    "bytes": sum(t["device_bytes"] for t in status["tenants"]),
                }
            ),
            flush=True,
        )
