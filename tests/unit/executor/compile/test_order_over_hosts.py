"""The order in which a host runs what it computes with others, on devices of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_ray.executor.compile.order_over_hosts import OrderOverHosts


def computation(devices: int, rounds: int) -> tuple[Any, jax.Array]:
    """A computation on the first devices that takes a while for each round, and its argument."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    spread, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())

    def run(v: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = jax.lax.fori_loop(0, rounds, lambda _, m: m @ m / 300, jnp.ones((300, 300), jnp.float32))
        return v * turned[0, 0], jnp.float32(0)

    start = jax.device_put(np.ones(4 * devices, np.float32), spread)
    compiled = jax.jit(run, out_shardings=(spread, whole)).lower(start).compile()
    return compiled, start


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 4), pytest.param(4, 1, marks=pytest.mark.slow), (4, 4)])
def test_what_two_threads_enqueue_runs_in_their_order(first: int, second: int) -> None:
    order = OrderOverHosts()
    (slow, a), (quick, b) = computation(first, 300), computation(second, 2)
    slow, quick = order.in_order(slow, first), order.in_order(quick, second)
    quick(b)[-1].block_until_ready()
    for _ in range(5):
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            before, _ = one.submit(slow, a).result()
            behind, _ = other.submit(quick, b).result()
        behind.block_until_ready()
        assert before.is_ready()


def test_one_that_failed_does_not_stop_the_next() -> None:
    order = OrderOverHosts()
    quick, argument = computation(4, 2)

    class Failed:
        def is_ready(self) -> bool:
            return False

        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("it failed")

    order.in_order(lambda: [Failed()], 1)()
    *_, end = order.in_order(quick, 4)(argument)
    assert float(end) == 0.0


def test_one_that_cannot_be_enqueued_is_none() -> None:
    order = OrderOverHosts()
    quick, argument = computation(1, 2)

    def refused() -> Any:
        raise ValueError("no array")

    with pytest.raises(ValueError, match="no array"):
        order.in_order(refused, 4)()
    assert float(order.in_order(quick, 1)(argument)[-1]) == 0.0
