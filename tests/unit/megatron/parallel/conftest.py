"""Some tests compile for 4 CPU devices of this process.

What they compile runs once, if at all. So XLA's backend does not optimise it: what tests look at is compared within
bounds or counted before that, and no time is measured.
"""

from collections.abc import Iterator

import jax
import pytest

from tests.unit.client.local import LocalSession, opened

jax.config.update("jax_num_cpu_devices", 8)  # before a backend starts, which no test module does when it is imported


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def session() -> Iterator[LocalSession]:
    """A session in this process, for float64."""
    made = opened()
    jax.config.update("jax_enable_x64", True)
    yield made
    jax.config.update("jax_enable_x64", False)
    made.close()
