"""What a host takes over of the variables that it finds."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import jax, numpy
from pathways_ray.executor.compile.backend import adopt_environment

adopt_environment()
numbers = jax.device_put(numpy.float32([0, -1]))
print(jax.config.jax_disable_jit, jax.jit(jax.numpy.log)(numbers), jax.numpy.asarray(numpy.ones(1))[0])
"""


def test_variables_for_debugging_are_not_for_hosts() -> None:
    guards = dict.fromkeys(("JAX_TRANSFER_GUARD", "JAX_TRANSFER_GUARD_HOST_TO_DEVICE"), "disallow_explicit")
    given = dict.fromkeys(("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DEBUG_INFS"), "1") | guards
    env = os.environ | given | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False [-inf  nan] 1.0\n"
