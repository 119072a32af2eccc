"""A cluster of two hosts, its Ray address and token, printed; then what is left in the environment after its end."""

import json
import os

import ray

import pathways_ray as pw

RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")

with pw.init(hosts_per_island=2):
    address = ray.get_runtime_context().gcs_address
    print(json.dumps([address, {name: os.environ.get(name) for name in RAY}]), flush=True)
    input()
print(json.dumps({name: os.environ.get(name) for name in RAY}))
