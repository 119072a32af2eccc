"""Arrays of JAX by their shards."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pathways_ray.jax_arrays import joiner, shards_by_device, shards_of

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec()], ids=["sharded", "replicated"])
def test_a_joined_array_has_the_shards_that_it_was_made_of(order: tuple[int, ...], spec: PartitionSpec) -> None:
    """1. They are those that JAX finds, by device and by value.
    2. The array is like one that JAX made: another computation takes it.
    3. Once its memory is gone, so is theirs."""
    devices = [jax.local_devices()[k] for k in order]
    lies = NamedSharding(Mesh(np.array(devices), ("x",)), spec)
    whole = np.arange(8, dtype=np.float32)
    pieces = [whole[where] for where in lies.devices_indices_map((8,)).values()]
    shards = [jax.device_put(piece, SingleDeviceSharding(one)) for piece, one in zip(pieces, devices, strict=True)]
    array = joiner((8,), np.float32, lies)(shards)
    assert all(mine is given for mine, given in zip(shards_of(array), shards, strict=True))
    assert {one.device: np.asarray(one.data).tobytes() for one in array.addressable_shards} == {
        device: np.asarray(shard).tobytes() for device, shard in shards_by_device(array).items()
    }
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda v: v + 1)(array)), whole + 1)
    jax.jit(lambda v: v + 1, donate_argnums=0)(array).block_until_ready()
    assert array.is_deleted()
    assert all(shard.is_deleted() for shard in shards_of(array))
