"""Training of a small network over all devices, in plain JAX: nothing here knows of this project.

`docs/jax_programs.md` runs it on local devices, through a proxy, and as two tenants at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS, BATCH, WIDTH, RATE = 20, 64, 32, 0.05


def loss(parameters: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error of a network with one hidden layer; inputs [BATCH, WIDTH], targets [BATCH]."""
    hidden = jnp.tanh(inputs @ parameters["in"] + parameters["bias"])
    return jnp.mean((hidden @ parameters["out"] - targets) ** 2)


@jax.jit
def step(parameters: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(parameters, inputs, targets)
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients), value


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("batch",))
    rows, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    first, second, data = jax.random.split(jax.random.key(0), 3)
    parameters = {
        "in": jax.random.normal(first, (WIDTH, WIDTH)) / WIDTH**0.5,
        "bias": jnp.zeros(WIDTH),
        "out": jax.random.normal(second, (WIDTH,)) / WIDTH**0.5,
    }
    parameters = jax.device_put(parameters, everywhere)
    inputs = jax.device_put(jax.random.normal(data, (BATCH, WIDTH)), rows)
    targets = jax.device_put(jnp.sin(inputs.sum(1)), rows)
    losses = []
    for _ in range(STEPS):
        parameters, value = step(parameters, inputs, targets)
        losses.append(value)
    print(f"{len(jax.devices())} devices, losses {losses[0]:.9f} to {losses[-1]:.9f}")


if __name__ == "__main__":
    main()
