"""Arrays of JAX by their shards. The public ways first find out what is known here, at several times the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, Sharding


def copier(shardings: Sequence[Sharding]) -> Callable[..., Sequence[jax.Array]]:
    """Makes what copies arrays to other devices of this process, each to as many as it is on, as one of the shardings
    says: each shard to the device in its place.

    `jax.device_put` does the same at four times the cost (34 us for a scalar): it finds out what is known here.
    """
    from jaxlib import _jax

    devices = [sharding._internal_device_list for sharding in shardings]
    wanted, semantics = list(shardings), [_jax.ArrayCopySemantics.ALWAYS_COPY] * len(shardings)

    def copy(*arrays: jax.Array) -> Sequence[jax.Array]:
        made: Sequence[jax.Array] = _jax.batched_copy_array_to_devices_with_sharding(
            list(arrays), devices, wanted, semantics
        )
        return made

    return copy


_SHARDS = "_pathways_shards"
"""The attribute of an array that was joined of shards here which has these."""


def shards_of(array: jax.Array) -> Sequence[jax.Array]:
    """The shards of an array on the devices of this process, in their order in its sharding.

    `addressable_shards` also finds out what part of the array each one is, at ten times the cost, and
    `addressable_data` gives the first copy of a replicated array for all of them.
    """
    shards: Sequence[jax.Array] | None = getattr(array, _SHARDS, None)
    return array._arrays if shards is None else shards  # type: ignore[attr-defined]


def shards_by_device(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """The shards of an array on the devices of this process, by device. To ask each one where it lies takes 2 us."""
    where = array.sharding._addressable_device_assignment
    return dict(zip(where, shards_of(array), strict=True))


def array_of(
    shape: tuple[int, ...],
    sharding: NamedSharding,
    shards: Sequence[np.ndarray[Any, Any]],
    devices: Sequence[jax.Device],
) -> jax.Array:
    """The array whose shards on these devices are those from the host, whose memory it keeps where a device can use it.

    The public way is a `jax.device_put` for each shard and an array of the results, at four times the cost or more (116
    us for a scalar).
    """
    return array_maker(shape, shards[0].dtype, sharding, devices)(shards)


def array_maker(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: NamedSharding, devices: Sequence[jax.Device]
) -> Callable[[Sequence[np.ndarray[Any, Any]]], jax.Array]:
    """Makes what makes such arrays of their shards, as `array_of` does: of many the type is found out once."""
    import jax
    from jaxlib import _jax

    kind, where, put = jax.core.ShapedArray(shape, dtype), list(devices), _jax.batched_device_put

    def made(shards: Sequence[np.ndarray[Any, Any]]) -> jax.Array:
        array: jax.Array = put(kind, sharding, list(shards), where, True, enable_x64=True)
        return array

    return made


def results_made(
    outputs: Sequence[tuple[jax.ShapeDtypeStruct, Sharding]],
) -> Callable[[Any], Sequence[Any]]:
    """Makes what turns the results of `execute_sharded` into arrays of these types and shardings."""
    from jax._src.interpreters import pxla
    from jax.core import ShapedArray

    avals = [ShapedArray(kind.shape, kind.dtype) for kind, _ in outputs]
    handlers = pxla.global_avals_to_results_handler(avals, [sharding for _, sharding in outputs], True).handlers

    def made(results: Any) -> Sequence[jax.Array]:
        arrays: Sequence[jax.Array] = results.consume_with_handlers(handlers)
        return arrays

    return made


def joiner(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Makes what joins the shards on the devices of this process, in their order in `sharding`, to an array.

    `jax.make_array_from_single_device_arrays` looks at each of them first, at four times the cost (11 us for four). The
    array keeps them for `shards_of`: JAX would make others (11 us again).
    """
    from jax._src.interpreters import pxla
    from jax.core import ShapedArray

    join: Callable[[Sequence[jax.Array]], jax.Array]
    join = pxla.global_aval_to_result_handler(ShapedArray(shape, dtype), sharding, True)

    def made(shards: Sequence[jax.Array]) -> jax.Array:
        array = join(shards)
        setattr(array, _SHARDS, shards)
        return array

    return made


def letting_go() -> Callable[[], None]:
    """A call that has JAX let go of the memory from the host that arrays have kept which are gone.

    A thread that drops an array may not have Python's lock, so JAX keeps that memory until something of it is called
    next. A host on which nothing is called would keep it for ever.
    """
    from jaxlib import _jax

    let_go: Callable[[], None] = _jax.collect_garbage
    return let_go
