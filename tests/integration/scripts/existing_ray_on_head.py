"""A runtime on the Ray cluster that is there: it computes on two islands, and ends."""

from __future__ import annotations

import json

import ray

import pathways_ray as pw
from tests.integration.scripts.existing_ray import across

with pw.init(islands=2, devices_per_host=2, address="auto") as session:
    there = ray.get_runtime_context().gcs_address
    islands = pw.islands()
    print(json.dumps({"address": there, "right": across(0, 1, 0), "islands": len(islands)}))
assert not ray.is_initialized()
