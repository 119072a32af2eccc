"""An open Pathways on Ray: one controller, many islands of accelerators, programs of JAX functions.

    import numpy as np
    import pathways_ray as pw
    from jax.sharding import PartitionSpec as P

    with pw.init(islands=2, devices_per_host=4):
        s = pw.virtual_slice((4,), ("x",))

        @pw.compiled(slice=s, in_specs=P("x"), out_specs=P("x"))
        def double(v):
            return v * 2

        @pw.program
        def f(v):
            return double(double(v))

        print(np.asarray(f(np.arange(8.0))))

Names are loaded when first used: the processes of the control plane import parts of this package and must not load JAX,
and clients must not load Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathways_ray import errors as errors
    from pathways_ray.client.api import connect as connect
    from pathways_ray.client.api import devices as devices
    from pathways_ray.client.api import islands as islands
    from pathways_ray.client.api import recording as recording
    from pathways_ray.client.api import shutdown as shutdown
    from pathways_ray.client.api import trace as trace
    from pathways_ray.client.api import virtual_slice as virtual_slice
    from pathways_ray.client.array import Array as Array
    from pathways_ray.client.compiled import compiled as compiled
    from pathways_ray.client.completion import as_completed as as_completed
    from pathways_ray.client.completion import wait as wait
    from pathways_ray.client.control import cond as cond
    from pathways_ray.client.control import fori_loop as fori_loop
    from pathways_ray.client.control import scan as scan
    from pathways_ray.client.control import switch as switch
    from pathways_ray.client.control import while_loop as while_loop
    from pathways_ray.client.derivatives import differentiable as differentiable
    from pathways_ray.client.elastic import elastic as elastic
    from pathways_ray.client.host_functions import host as host
    from pathways_ray.client.jit import jit as jit
    from pathways_ray.client.padding import padded as padded
    from pathways_ray.client.placement import put as put
    from pathways_ray.client.placement import reshard as reshard
    from pathways_ray.client.priorities import priority as priority
    from pathways_ray.client.program import program as program
    from pathways_ray.client.progress import progress as progress
    from pathways_ray.client.retrying import retry as retry
    from pathways_ray.client.routing import combine as combine
    from pathways_ray.client.routing import route as route
    from pathways_ray.client.session import Session as Session
    from pathways_ray.client.slices import VirtualSlice as VirtualSlice
    from pathways_ray.client.snapshots import snapshot as snapshot
    from pathways_ray.client.transfers import TransferBytes as TransferBytes
    from pathways_ray.client.transfers import transfer_bytes as transfer_bytes
    from pathways_ray.client.utilization import utilization as utilization
    from pathways_ray.client.versioned import versioned as versioned
    from pathways_ray.client.warmup import like as like
    from pathways_ray.client.warmup import warmup as warmup
    from pathways_ray.deployment.init import init as init
    from pathways_ray.deployment.topology import Island as Island

__version__ = "0.1.0"

_HOMES = {
    "Array": "client.array",
    "Island": "deployment.topology",
    "Session": "client.session",
    "TransferBytes": "client.transfers",
    "VirtualSlice": "client.slices",
    "as_completed": "client.completion",
    "combine": "client.routing",
    "compiled": "client.compiled",
    "cond": "client.control",
    "connect": "client.api",
    "devices": "client.api",
    "elastic": "client.elastic",
    "fori_loop": "client.control",
    "differentiable": "client.derivatives",
    "host": "client.host_functions",
    "init": "deployment.init",
    "islands": "client.api",
    "jit": "client.jit",
    "like": "client.warmup",
    "padded": "client.padding",
    "priority": "client.priorities",
    "program": "client.program",
    "progress": "client.progress",
    "put": "client.placement",
    "recording": "client.api",
    "reshard": "client.placement",
    "route": "client.routing",
    "retry": "client.retrying",
    "scan": "client.control",
    "shutdown": "client.api",
    "snapshot": "client.snapshots",
    "switch": "client.control",
    "trace": "client.api",
    "transfer_bytes": "client.transfers",
    "utilization": "client.utilization",
    "versioned": "client.versioned",
    "virtual_slice": "client.api",
    "wait": "client.completion",
    "warmup": "client.warmup",
    "while_loop": "client.control",
}

__all__ = [*sorted(_HOMES), "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("pathways_ray.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'pathways_ray' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pathways_ray.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
