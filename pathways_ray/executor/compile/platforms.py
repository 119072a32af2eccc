"""The backend of each platform."""

from __future__ import annotations

from pathways_ray.executor.compile.backend import AcceleratorBackend, Backend
from pathways_ray.executor.compile.cpu_backend import CpuBackend


def backend_of(platform: str) -> Backend:
    """The backend of "cpu", "gpu" or "tpu"."""
    return CpuBackend() if platform == "cpu" else AcceleratorBackend()
