"""Shards of a host, said in answers and written to files in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pathways_ray import limits
from pathways_ray.errors import GraphError, WireError
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


TYPES = (
    *("bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32"),
    *("complex64", "float8_e4m3fn", "float8_e5m2"),
)


@pytest.mark.parametrize("columns", [0, 3])
@pytest.mark.parametrize("kind", TYPES)
def test_elements_of_any_type_are_said_as_numpy_says_them(kind: str, columns: int) -> None:
    devices = jax.devices("cpu")[:2]
    reader = ShardReader(0, devices, BufferStore())
    array = np.arange(2 * columns).reshape(2, columns).astype(jnp.dtype(kind))
    value = jax.device_put(array, NamedSharding(Mesh(np.array(devices), "x"), PartitionSpec("x")))
    assert reader.parts(3, value, (0, 1)) == [FetchShards(3, array.tobytes())]
    assert reader.parts(3, value, (1,)) == [FetchPart(3, 1, 0, array[1].nbytes, array[1].tobytes())]


def test_columns_in_memory_are_said_as_rows() -> None:
    (device,) = jax.devices("cpu")[:1]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    value = jax.device_put(array, Format(Layout((1, 0)), SingleDeviceSharding(device)))
    (part,) = ShardReader(0, [device], BufferStore()).parts(3, value, (0,))
    assert part == FetchPart(3, 0, 0, 24, array.tobytes())


def test_what_cannot_be_read_is_said_so() -> None:
    """And ends nothing: to read the memory of an array that has failed would end the process."""
    (device,) = jax.devices("cpu")[:1]
    reader = ShardReader(0, [device], BufferStore())
    value = jax.device_put(np.float32(1), device)
    with pytest.raises(GraphError, match="host 0 has 1 devices, no number 1"):
        reader.parts(3, value, (1,))
    failed = transfer.make_error_array(jax.ShapeDtypeStruct((), np.float32, sharding=value.sharding), "it did not work")
    with pytest.raises(jax.errors.JaxRuntimeError, match="it did not work"):
        reader.parts(3, failed, (0,))
    value.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        reader.parts(3, value, (0,))
