"""A script that never calls `pw.shutdown`."""

from __future__ import annotations

import numpy as np

import pathways_ray as pw

pw.init(islands=1, devices_per_host=2)
y = pw.compiled(lambda v: v + 1)(np.arange(4.0))
print(np.asarray(y).tolist())
