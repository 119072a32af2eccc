"""Settings for all tests: plain JAX, which results are compared with, runs on the CPU of this process."""

import os

# Read when jax and ray are imported, which no module does before this one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
