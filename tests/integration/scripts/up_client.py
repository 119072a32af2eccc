"""A client without Ray that computes on every island of a runtime."""

from __future__ import annotations

import sys

import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

with pw.connect(*sys.argv[1:3]) as session:
    islands = [island["island"] for island in pw.islands()]
    v = np.arange(8.0)
    for island in islands:
        where = pw.virtual_slice((2,), island=island)
        double = pw.compiled(lambda v: v * 2, slice=where, in_specs=P("x"), out_specs=P("x"))
        assert np.asarray(double(v)).tolist() == (v * 2).tolist()
    print(len(islands))
assert "ray" not in sys.modules
