"""A client that holds Python's lock for twelve seconds."""

from __future__ import annotations

import ctypes
import sys

import numpy as np

import pathways_ray as pw

session = pw.connect(sys.argv[1], sys.argv[2], name="busy")
where = session.virtual_slice((2,), ("x",), island=1)
inc = pw.compiled(lambda v: v + 1, slice=where)
x = inc(np.arange(8.0))
np.asarray(x)
print("busy", flush=True)
ctypes.PyDLL(None).sleep(12)  # and nothing else of Python runs meanwhile
print(np.asarray(inc(x)).tolist(), flush=True)
session.close()
