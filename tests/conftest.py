"""Settings for all tests: plain JAX, which results are compared with, runs on the CPU of this process."""

import gc
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# How this terminal shows texts, and where a runtime or a Ray of who runs the tests is: commands would heed both, here
# and in processes that tests start.
for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "LINES", "RAY_ADDRESS"):
    os.environ.pop(name, None)
for name in ("PATHWAYS_URL", "PATHWAYS_TOKEN", "PATHWAYS_TOKEN_FILE", "PATHWAYS_TENANTS", "PATHWAYS_CA"):
    os.environ.pop(name, None)

# Read when jax and ray are imported, which no module does before this one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Clusters of tests have CPU devices, on machines with GPUs too; `tests/gpu` shows those to its own.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# Who waits for something and is not woken hangs, here and in all processes that tests start.
os.environ.setdefault("PATHWAYS_LONG_WAITS", "slices")

# What hosts compile is kept for the next run, and not in the user's home. So is what this process compiles.
os.environ.setdefault("PATHWAYS_COMPILATION_CACHE", str(Path(__file__).parents[1] / ".pytest_cache" / "compiled"))

# What tests serve, with connections and threads, stays until the process of the tests ends.
_, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most_files, 1 << 16), most_files))

# Tests send Ctrl-C to processes they start. Those of a shell's background job, or under nohup, would inherit that it is
# ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine that is busy with clusters may take any time for one example. Each run has the same examples, so that what
# fails fails again.
settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


def pytest_configure() -> None:
    """Has this process take what it, another worker or an earlier run has compiled."""
    from pathways_ray.executor.compile import disk_cache

    disk_cache.use(alike=False)


def pytest_collection_finish() -> None:
    """Modules and collected tests live to the end: a collection of garbage need not look at them again each time, nor
    so often. A module that has JAX make devices as it is imported would decide their number for all others."""
    from pathways_ray.compat import made_backends

    if made := made_backends():
        raise pytest.UsageError(f"a test module has JAX make its devices ({', '.join(made)}) as it is imported")
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


MANY_FILES = 200
"""Open files that tests may leave to the next collection of garbage, which with these thresholds comes late."""

_open_files = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Closes the files of sessions that earlier tests have left behind: each is part of a cycle."""
    global _open_files
    os.close(now := os.dup(2))  # the lowest number that is free
    if now > _open_files + MANY_FILES:
        gc.collect()
        os.close(_open_files := os.dup(2))
