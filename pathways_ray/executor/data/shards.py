"""Shards of a value on this host, as bytes for a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pathways_ray.errors import GraphError


def shard_bytes(value: Any, devices: Sequence[Any], device: int, host: int) -> memoryview[int]:
    """Waits for the shard on a device of this host and copies it to host memory, in C order."""
    if not 0 <= device < len(devices):
        raise GraphError(f"host {host} has {len(devices)} devices, no number {device}")
    wanted = devices[device]
    for shard in value.addressable_shards:
        if shard.device == wanted:
            shard.data.block_until_ready()  # raises for one that failed; NumPy would end the process over it
            array = np.ascontiguousarray(np.asarray(shard.data))
            return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
    raise GraphError(f"the buffer has no shard on device {device} of host {host}")


def is_computed(value: Any) -> bool:
    """Whether nothing of a value has to be waited for. Its memory may be gone, to a launch: reading it says so."""
    try:
        return bool(value.is_ready())
    except (RuntimeError, ValueError):
        return True
