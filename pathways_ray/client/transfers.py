"""`pw.transfer_bytes`: the bytes that an array moves between two slices, from its layouts alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from pathways_ray.client import prng
from pathways_ray.client.argument_types import extended_dtype
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import UsageError
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.plan import Edge
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import ArrayType, Layout, check_layout, item_bytes


@dataclass(frozen=True)
class TransferBytes:
    """Bytes of one transfer; of several, with `+`.

        moved = pw.transfer_bytes(x, a, b, P("x"), P())
        print(moved)

    Attributes:
        to_devices: sum of the shards that the devices of the target get
        between_hosts: the part of them that crosses from host to host. A host gets each piece once, and copies it to
            all of its devices that need it.
    """

    to_devices: int = 0
    between_hosts: int = 0

    def __add__(self, other: TransferBytes) -> TransferBytes:
        return TransferBytes(self.to_devices + other.to_devices, self.between_hosts + other.between_hosts)


def transfer_bytes(
    array: Any,
    source: VirtualSlice,
    target: VirtualSlice,
    spec: PartitionSpec | None = None,
    target_spec: PartitionSpec | None = None,
) -> TransferBytes:
    """The bytes that programs move when an array on one slice is used on another, or with another layout.

        print(pw.transfer_bytes(x, a, b, P("x"), P()))

    Args:
        array: anything with a shape and a dtype, such as a `jax.ShapeDtypeStruct`
        source, target: slices; the same one for a reshard
        spec: of the array on `source`; None: replicated
        target_spec: of the array on `target`; None: as `spec`

    Raises:
        SpecError: a spec has an unknown axis, or its parts do not divide the array.
        GraphError: there is no such dtype.
        UsageError: something else in the place of an array, or of a slice.
    """
    for where in (source, target):
        if not isinstance(where, VirtualSlice):
            raise UsageError(f"pw.transfer_bytes takes two slices, as pw.virtual_slice returns them; not {where!r}")
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise UsageError(f"pw.transfer_bytes takes what has a shape and a dtype, not {array!r}")
    if extended_dtype(array) is not None:  # typed keys: what lies on devices
        array = prng.data_type(array)
    kind = ArrayType(tuple(array.shape), np.dtype(array.dtype).name)
    here = spec_from_user(spec, source.axes)
    there = spec_from_user(spec if target_spec is None else target_spec, target.axes)
    check_layout(kind, here, source.type, "the array on the source")
    check_layout(kind, there, target.type, "the array on the target")
    if source is target and here == there:
        return TransferBytes()
    item = item_bytes(kind.dtype)
    edge = Edge(kind, Layout(source.id, here), Layout(target.id, there))
    shard = math.prod(shard_shape(kind, there, target.type)) * item
    return TransferBytes(shard * target.size, exchange(edge, source.placed, target.placed).bytes_between_hosts(item))
