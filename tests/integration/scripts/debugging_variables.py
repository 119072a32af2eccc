"""A runtime that is started with variables that debug JAX: hosts run what clients traced, the client goes by them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

with pw.init(islands=1, devices_per_host=2, platform="cpu"):
    a = pw.virtual_slice((2,), ("x",))
    f = pw.program(pw.compiled(lambda v: jnp.log(v), slice=a, in_specs=P("x"), out_specs=P("x")))
    with jax.debug_nans(False), jax.debug_infs(False):
        found = np.asarray(f(np.array([-1, 0, 1, 1], np.float32)))
    assert np.array_equal(found, [np.nan, -np.inf, 0, 0], equal_nan=True), found
    try:
        f(np.array([-1, 1, 1, 1], np.float32))
    except FloatingPointError as error:
        print(error)
