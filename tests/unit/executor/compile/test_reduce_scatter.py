"""Modules without reduce-scatters: the same values, from other collectives."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pathways_ray.compat import compiled_module
from pathways_ray.executor.compile.reduce_scatter import without_reduce_scatter

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more


def rows(v: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(v, "x", scatter_dimension=0, tiled=True)


def columns(v: jax.Array) -> jax.Array:
    return jax.lax.psum_scatter(jax.lax.psum_scatter(v, "y", scatter_dimension=1, tiled=True) * 2, "x", tiled=True)


def looped(v: jax.Array) -> jax.Array:
    def body(_: object, w: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jax.lax.psum_scatter(w, ("y", "x"), tiled=True), ("y", "x"), tiled=True) / 4

    return jax.lax.fori_loop(0, 3, body, v)


@pytest.mark.parametrize("function", [rows, columns, looped])
def test_a_module_gives_the_same_without_its_reduce_scatters(function: Callable[[jax.Array], jax.Array]) -> None:
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=devices, axis_types=(AxisType.Auto,) * 2)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False))
    value = np.random.default_rng(3).integers(0, 9, (16, 16)).astype(np.float32)
    array = jax.device_put(value, jax.NamedSharding(mesh, P("x", "y")))
    module = bytes(export.export(mapped)(array).mlir_module_serialized)
    changed = without_reduce_scatter(module)
    before, after = (compiled_module(one, devices) for one in (module, changed))
    assert "reduce-scatter(" in before.get_hlo_text()
    assert "reduce-scatter(" not in after.get_hlo_text()
    found, expected = (
        [np.asarray(shard) for shard in one.execute_sharded([array]).disassemble_into_single_device_arrays()[0]]
        for one in (after, before)
    )
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_module_that_has_none_stays_as_it_is() -> None:
    module = bytes(
        export.export(jax.jit(lambda v: v + 1))(jax.ShapeDtypeStruct((2,), np.float32)).mlir_module_serialized
    )
    assert without_reduce_scatter(module) is module
