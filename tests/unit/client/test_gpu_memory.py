"""A client leaves the memory of GPUs to hosts on its machine, unless somebody has said otherwise."""

from __future__ import annotations

import os
import warnings

import pytest

from pathways_ray.client import gpu_memory
from pathways_ray.client.gpu_memory import ALLOCATOR, PREALLOCATE, GpuMemoryTaken, leave_gpu_memory


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PREALLOCATE, ALLOCATOR):
        monkeypatch.setenv(name, "")


def test_jax_is_told_before_it_makes_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in ((), ("cpu",)):
        monkeypatch.setenv(PREALLOCATE, "")
        monkeypatch.setattr(gpu_memory, "made_backends", lambda made=made: made)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            leave_gpu_memory()
        assert os.environ[PREALLOCATE] == "false"


def test_memory_that_is_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "made_backends", lambda: ("cpu", "cuda"))
    with pytest.warns(GpuMemoryTaken, match="three quarters of a GPU's memory for this process"):
        leave_gpu_memory()
    assert not os.environ[PREALLOCATE]


@pytest.mark.parametrize(("name", "value"), [(PREALLOCATE, "true"), (PREALLOCATE, "false"), (ALLOCATOR, "platform")])
def test_what_somebody_has_said_stays(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "made_backends", lambda: ("cuda",))
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leave_gpu_memory()
    assert os.environ[name] == value
