"""Keeps computations that may take long out of the thread that enqueues them.

XLA's CPU client runs what it takes for cheap at once, within the call that should only enqueue it: fewer than 1,000
floating point operations by its count. It counts a loop of unknown length as one turn, a LAPACK call as nothing, and a
copy of a gigabyte as nothing. While such a computation runs, nothing else of the host is enqueued: four slices of one
device would take turns. So these get operations to count that never run, and then have a thread of XLA's to themselves.
What is short as well as cheap stays as it is; handing it to another thread takes longer than the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

CHEAP_OPERATIONS = 1000
"""XLA's limit (`PjRtCpuExecutable`), by its own count."""

SHORT_BYTES = 1 << 20
"""What a computation may read and write to count as short: some tenths of a millisecond of copying."""

COUNTED = 2 * CHEAP_OPERATIONS


def holds_up(compiled: Any) -> bool:
    """Whether a compiled computation for one CPU device would run in the thread that enqueues it, and may take long."""
    cost = compiled.cost_analysis() or {}
    if cost.get("flops", 0.0) >= CHEAP_OPERATIONS:
        return False
    if cost.get("bytes accessed", 0.0) >= SHORT_BYTES:
        return True
    lines = (compiled.as_text() or "").splitlines()
    return any(" custom-call(" in line or (" while(" in line and "known_trip_count" not in line) for line in lines)


def counted_as_long(run: Callable[..., Sequence[jax.Array]]) -> Callable[..., tuple[jax.Array, ...]]:
    """The function, with a last output that XLA counts as many operations, and that takes none: it is 0.0. The rest of
    the computation is what it was."""

    def longer(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        # Behind a barrier, or XLA would do at once what depends on nothing.
        never, zero = jax.lax.optimization_barrier((False, jnp.float32(0)))
        counted = jax.lax.cond(
            never, lambda zero: jnp.sum(zero * jax.lax.iota(jnp.float32, COUNTED)), lambda zero: zero, zero
        )
        return (*run(*arguments), counted)

    return longer


class Apart:
    """A compiled computation `counted_as_long`, without its last output."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        outputs: Sequence[Any] = self._compiled(*arguments)[:-1]
        return outputs

    def memory_analysis(self) -> Any:
        return self._compiled.memory_analysis()
