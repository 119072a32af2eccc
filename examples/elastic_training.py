"""A training that survives the loss of a host: `python -m examples.elastic_training`, with a loss that it rehearses.

In another terminal, `pathways drill --kill host:0 --every 5` kills the host again and again.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw


def train(steps: int) -> list[float]:
    """Fits a line by gradient descent on island 0; copies of the parameters lie on island 1. Returns the losses."""
    where = pw.virtual_slice((2,), ("x",), island=0)

    def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
        return ((x @ w - x.sum(1)) ** 2).mean()

    @pw.elastic(snapshot_every=10)
    @pw.compiled(slice=where, in_specs=(P(), P("x")), out_specs=P(), donate_argnums=(0,))
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(w, x)
        return w - 0.05 * gradient, loss

    w, losses, random = pw.put(jnp.zeros(16), where), [], np.random.default_rng(0)
    for _ in range(steps):
        w, loss = step(w, random.normal(size=(64, 16)).astype(np.float32))
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    pw.init(islands=2, devices_per_host=2)
    found = train(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
    print(f"{len(found)} steps, loss {found[0]:.4f} to {found[-1]:.2e}")
