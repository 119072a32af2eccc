"""Values of 64 bits in a client with jax_enable_x64."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

assert jnp.zeros(1).dtype == np.float64
with pw.connect(sys.argv[1], sys.argv[2]) as session:
    here = session.virtual_slice((4,), ("x",), island=0)
    there = session.virtual_slice((2,), ("x",), island=1)
    f = pw.compiled(lambda v: v * 3 + 1, slice=here, in_specs=P("x"), out_specs=P("x"))
    g = pw.compiled(lambda v: v - 1, slice=there, in_specs=P("x"), out_specs=P("x"))
    for value in (np.arange(8.0) / 7, np.arange(8) + 2**40, np.arange(8) / 7 * 1j, np.arange(8, dtype=np.float32)):
        expected = jax.jit(lambda v: v - 1)(jax.jit(lambda v: v * 3 + 1)(value))
        result = np.asarray(pw.program(lambda v: g(f(v)))(value))
        assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
        assert result.tobytes() == np.asarray(expected).tobytes(), (result, expected)
    for scalar in (2**40, 1e300, np.float64(1e300), 1e300j):
        result, expected = np.asarray(pw.put(scalar, slice=here)), np.asarray(jnp.asarray(scalar))
        assert (result.dtype, result.tobytes()) == (expected.dtype, expected.tobytes()), scalar
    assert pw.put(np.float32(1), slice=here).dtype == np.float32
    print("all equal")
