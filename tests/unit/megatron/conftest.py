"""Tests of the trainer compile whole models for CPU devices of this process."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """Has XLA's backend optimise nothing, for tests that run what they compile once or twice, if at all: they take a
    third less. What they look at is compared within bounds or counted before that, and no time is measured."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
