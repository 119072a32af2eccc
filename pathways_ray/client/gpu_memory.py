"""The memory of GPUs, which a client leaves to hosts on its machine."""

from __future__ import annotations

import os
import warnings

from pathways_ray.compat import made_backends

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


class GpuMemoryTaken(UserWarning):
    """JAX has taken most of a GPU's memory for this process, and hosts on this machine lack it."""


def leave_gpu_memory() -> None:
    """Has JAX take memory of a GPU as it needs it, and not, as by default, three quarters as soon as it makes its
    devices: what a client sends is run by hosts. Warns where it has made them. Does nothing where one of the variables
    is set."""
    if os.environ.get(PREALLOCATE) or os.environ.get(ALLOCATOR):
        return
    if "cuda" not in made_backends():
        os.environ[PREALLOCATE] = "false"
        return
    text = (
        "JAX has taken three quarters of a GPU's memory for this process, which hosts of the runtime on this machine "
        f"lack: start it with {PREALLOCATE}=false, or with JAX_PLATFORMS=cpu if it computes nothing on GPUs by itself, "
        "or call pw.init or pw.connect before JAX is first used"
    )
    warnings.warn(text, GpuMemoryTaken, stacklevel=2)
