"""A client that finds its runtime by the environment."""

from __future__ import annotations

import os

import numpy as np

import pathways_ray as pw

with pw.connect(os.environ["PATHWAYS_URL"], os.environ["PATHWAYS_TOKEN"], ca=os.environ.get("PATHWAYS_CA")) as session:
    f = pw.compiled(lambda v: v * 2)
    print("computed", np.asarray(f(np.arange(4.0))).tolist(), len(pw.islands()))
