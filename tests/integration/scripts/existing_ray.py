"""Programs and questions that the scripts for existing Ray clusters share."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw


def across(*islands: int) -> bool:
    """Adds 1 on each of these islands in turn, in one program; True when the sum is right."""
    v = np.arange(8.0)
    steps = [
        pw.compiled(lambda v: v + 1.0, slice=pw.virtual_slice((2,), island=island), in_specs=P("x"), out_specs=P("x"))
        for island in islands
    ]

    @pw.program
    def hops(v: Any) -> Any:
        for step in steps:
            v = step(v)
        return v

    return bool(np.asarray(hops(v)).tolist() == (v + len(steps)).tolist())


def idle() -> bool:
    """Whether nothing of the Ray cluster is in use."""
    groups = ray.util.placement_group_table().values()
    held = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0)
    return all(group["state"] == "REMOVED" for group in groups) and abs(held) < 1e-6
