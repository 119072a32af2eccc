"""The models run on a mesh of 8 CPU devices in this process, in float64 unless a test says otherwise."""

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # before a backend starts, which no test module does when it is imported


@pytest.fixture(autouse=True)
def double_precision(quick_compilation: None) -> Iterator[None]:
    with jax.enable_x64(True):
        yield
