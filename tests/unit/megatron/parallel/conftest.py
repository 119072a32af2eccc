"""Some tests compile for 4 CPU devices of this process."""

from collections.abc import Iterator

import jax
import pytest

from tests.unit.client.local import LocalSession, opened

jax.config.update("jax_num_cpu_devices", 8)  # before a backend starts, which no test module does when it is imported


@pytest.fixture(autouse=True)
def compiled_quickly(quick_compilation: None) -> None:
    """All of them."""


@pytest.fixture
def session() -> Iterator[LocalSession]:
    """A session in this process, for float64."""
    made = opened()
    jax.config.update("jax_enable_x64", True)
    yield made
    jax.config.update("jax_enable_x64", False)
    made.close()
