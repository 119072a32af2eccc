"""Shards of a host, written to files in memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_ray.errors import WireError
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.shard_reader import ShardReader
from pathways_ray.transport.shared_memory import SharedFile

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

VALUE = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_shards_go_to_their_places_in_a_file_of_the_array_and_a_lone_one_fills_a_file_of_its_size() -> None:
    devices = jax.devices("cpu")[:2]
    value = jax.device_put(VALUE, NamedSharding(Mesh(np.array(devices), "x"), PartitionSpec(None, "x")))
    reader = ShardReader(0, devices, BufferStore())
    whole, second, lone, wrong = (SharedFile.create(size) for size in (32, 32, 16, 24))
    assert reader.write(value, (0, 1), whole)
    assert reader.write(value, (1,), second)
    assert reader.write(value, (1,), lone)
    np.testing.assert_array_equal(whole.bytes(32).view(np.float32).reshape(2, 4), VALUE)
    np.testing.assert_array_equal(second.bytes(32).view(np.float32).reshape(2, 4)[:, 2:], VALUE[:, 2:])
    np.testing.assert_array_equal(lone.bytes(16).view(np.float32).reshape(2, 2), VALUE[:, 2:])
    with pytest.raises(WireError, match="24 bytes came for an array of 32"):
        reader.write(value, (1,), wrong)
