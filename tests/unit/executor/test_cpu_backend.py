"""Which computations XLA's CPU client would run in the thread that enqueues them, and how they are kept from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_ray.executor.compile.cpu_backend import Apart, counted_as_long, holds_up


def compiled(run: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(run).lower(*(jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in arguments)).compile()


def add_one(x: jax.Array) -> tuple[jax.Array]:
    return (x + 1,)


def turns(n: jax.Array, x: jax.Array) -> tuple[jax.Array]:
    """A loop of a length that is known when it runs."""
    return (jax.lax.fori_loop(0, n, lambda _, x: x * x + x, x),)


def few_turns(x: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.fori_loop(0, 5, lambda _, x: x * x + x, x),)


def transposed(x: jax.Array) -> tuple[jax.Array]:
    return (x.T,)


def factored(x: jax.Array) -> tuple[jax.Array]:
    return (jnp.linalg.cholesky(x),)


def squared(x: jax.Array) -> tuple[jax.Array]:
    return (x @ x,)


SMALL, EIGHT, BIG = np.full((2, 2), -0.5, np.float32), np.eye(8, dtype=np.float32), np.zeros((1024, 1024), np.float32)


@pytest.mark.parametrize(
    ("run", "arguments", "expected"),
    [
        (add_one, (SMALL,), False),  # cheap and short: another thread would take longer
        (few_turns, (SMALL,), False),
        (turns, (np.int32(3), SMALL), True),
        (transposed, (SMALL,), False),
        (transposed, (BIG,), True),  # no operation, but 8 MiB
        (factored, (EIGHT,), True),  # LAPACK's are not counted
        (squared, (BIG,), False),  # XLA knows that it is long
    ],
)
def test_what_is_counted_as_cheap_but_may_be_long_is_found(
    run: Callable[..., Any], arguments: tuple[Any, ...], expected: bool
) -> None:
    assert holds_up(compiled(run, *arguments)) is expected


@pytest.mark.parametrize(
    ("run", "arguments"), [(turns, (np.int32(30), SMALL)), (transposed, (BIG,)), (factored, (EIGHT,))]
)
def test_counted_as_long_it_gives_the_same_bits_and_holds_nothing_up(
    run: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    plain, longer = compiled(run, *arguments), compiled(counted_as_long(run), *arguments)
    assert not holds_up(longer)
    outputs = Apart(longer)(*arguments)
    assert len(outputs) == 1
    assert np.asarray(outputs[0]).tobytes() == np.asarray(plain(*arguments)[0]).tobytes()


def test_what_never_runs_takes_next_to_no_memory() -> None:
    plain, longer = compiled(turns, np.int32(3), SMALL), Apart(compiled(counted_as_long(turns), np.int32(3), SMALL))
    more = longer.memory_analysis().temp_size_in_bytes - plain.memory_analysis().temp_size_in_bytes
    assert more <= 16 << 10
