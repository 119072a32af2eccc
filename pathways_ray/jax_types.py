"""JAX's names for the types of the IR. Clients, which trace, and hosts, which run, both need them."""

from __future__ import annotations

import functools
from operator import attrgetter
from typing import Any

import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec

from pathways_ray.ir.types import ArrayType, Spec


def dtype_named(name: str) -> np.dtype[Any]:
    """The NumPy dtype for a name, those of `ml_dtypes` included."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


name_of = functools.lru_cache(maxsize=256)(attrgetter("name"))
"""The names of dtypes, which NumPy makes each time."""


def array_type(value: Any) -> ArrayType:
    """The type of an array, or of what JAX says of one."""
    return ArrayType(value.shape, name_of(value.dtype))


def partition_spec(spec: Spec) -> PartitionSpec:
    """The `PartitionSpec` for a spec of the IR: one entry for each dimension."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec))
