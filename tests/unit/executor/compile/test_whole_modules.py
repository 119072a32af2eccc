"""Modules for several devices that say which arguments XLA may take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_ray.executor.compile.whole_modules import WholeModule

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more


@pytest.mark.parametrize("donated", [(), (0,), (1,), (0, 1)])
def test_only_what_was_donated_to_a_launch_is_taken(donated: tuple[int, ...]) -> None:
    devices = jax.devices()[:2]
    assert len(devices) == 2
    rows = NamedSharding(Mesh(np.array(devices), "x"), PartitionSpec("x"))
    function = jax.jit(lambda v, w: (v + 1, w * 2), donate_argnums=(0, 1), in_shardings=rows, out_shardings=rows)
    kind = jax.ShapeDtypeStruct((8,), jnp.float32)
    module = export.export(function)(kind, kind).mlir_module_serialized
    compiled = WholeModule(module, devices, donated, [(kind, rows)] * 2, [(kind, rows)] * 2)
    given = [jax.device_put(np.arange(8, dtype=np.float32) + k, rows) for k in range(2)]
    first, second, _ = compiled(*given)
    assert [first[7], second[7]] == [8, 16]
    assert [k for k in range(2) if given[k].is_deleted()] == list(donated)
    assert all(given[k][7] == 7 + k for k in range(2) if k not in donated)
