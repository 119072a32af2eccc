"""Options that are refused beyond loopback, then an encrypted cluster, open until its input ends."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import ray

import pathways_ray as pw

certificate, key, tenants, address = sys.argv[1:]
refused = []
wrong: tuple[dict[str, Any], ...] = (
    {"bind": address},
    {"bind": address, "tls": (certificate, key)},
    {"bind": address, "tenants": tenants},
    {"bind": "0.0.0.0", "tls": (certificate, key), "tenants": tenants},
    {"tls": (certificate, certificate)},
    {"tls": (certificate,)},
    {"tenants": certificate},
    {"tenants": tenants + ".none"},
)
for options in wrong:
    try:
        pw.init(**options).close()
    except pw.errors.UsageError as error:
        refused.append(str(error))
with pw.init(
    islands=2, hosts_per_island=1, devices_per_host=2, bind=address, tls=(certificate, key), tenants=tenants
) as session:
    steps = [pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((2,), island=k)) for k in (0, 1)]
    right = np.asarray(pw.program(lambda v: steps[1](steps[0](v)))(np.arange(4.0))).tolist()
    lookup = session.cluster.resource_manager.lookup
    links = [ray.get(lookup.remote(name)) for name in ("controller", "scheduler-0", "scheduler-1")]
    pids = [host["pid"] for island in pw.islands() for host in island["hosts"]]
    found = {"url": session.url, "links": links, "pids": pids, "right": right, "refused": refused}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
