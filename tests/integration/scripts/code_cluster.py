"""An island of two hosts with a table of tenants; it runs until its input ends."""

from __future__ import annotations

import json
import sys

import pathways_ray as pw

with pw.init(1, 2, 1, launch_limit_s=20.0, tenants=sys.argv[1]) as session:
    print(json.dumps({"url": session.url, "token": session.token}), flush=True)
    sys.stdin.read()
