"""A client in a process without Ray."""

from __future__ import annotations

import sys

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

with (
    pw.connect(sys.argv[1], sys.argv[2], name="visitor"),
    pw.virtual_slice((4,), ("x",), island=0) as here,
    pw.virtual_slice((2,), ("x",), island=1) as there,
):
    inc = pw.compiled(lambda v: v + 1, slice=here, in_specs=P("x"), out_specs=P("x"))
    double = pw.compiled(lambda v: v * 2, slice=there, in_specs=P("x"), out_specs=P("x"))
    x = pw.put(np.arange(8.0), slice=here, spec=P("x"))
    print(np.asarray(pw.program(lambda v: double(inc(v)))(x)).tolist())
    assert len(pw.devices()) == 8
    assert len(pw.islands()) == 2
assert "ray" not in sys.modules, "a client loads no Ray"
try:
    pw.islands()
except pw.errors.NotInitialized:
    print("gone")
