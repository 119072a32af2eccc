"""Shards of a host, written to files in memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pathways_ray import limits
from pathways_ray.errors import WireError
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.data.shard_reader import SMALL_BYTES, ShardReader
from pathways_ray.transport.messages import Fetch, FetchPart, FetchShards
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


@pytest.mark.parametrize("count", [1, 2])
def test_no_more_comes_along_with_an_answer_than_a_client_asks_for(count: int) -> None:
    """What each device has counts, as it is sent."""
    devices = jax.devices("cpu")[:count]
    store = BufferStore()
    reader = ShardReader(0, devices, store)
    everywhere = NamedSharding(Mesh(np.array(devices), "x"), PartitionSpec())
    for buffer in range(1, limits.MAX_SIBLINGS + 1):
        store.put(1, buffer, jax.device_put(np.zeros(SMALL_BYTES, np.int8), everywhere).block_until_ready())
    also = tuple((100 + buffer, buffer) for buffer in range(1, limits.MAX_SIBLINGS + 1))
    found = reader.siblings(1, Fetch(1, 1, tuple(range(count)), also))
    assert all(isinstance(part, FetchPart) for part in found)
    assert sum(len(part.data) for part in found if isinstance(part, FetchPart)) == limits.MAX_SIBLINGS_BYTES


@pytest.mark.parametrize("columns", [8, 4096])
def test_several_small_shards_are_one_answer(columns: int) -> None:
    devices = jax.devices("cpu")[:2]
    reader = ShardReader(0, devices, BufferStore())
    array = np.arange(2 * columns, dtype=np.float32).reshape(2, columns)
    value = jax.device_put(array, NamedSharding(Mesh(np.array(devices), "x"), PartitionSpec("x")))
    shards = [row.tobytes() for row in array]
    if columns == 8:
        assert reader.parts(3, value, (1, 0)) == [FetchShards(3, shards[1] + shards[0])]
    else:
        parts = [FetchPart(3, k, 0, len(shards[k]), shards[k]) for k in (1, 0)]
        assert reader.parts(3, value, (1, 0)) == parts
    assert reader.parts(3, value, (1,)) == [FetchPart(3, 1, 0, len(shards[1]), shards[1])]
