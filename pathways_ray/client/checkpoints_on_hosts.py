"""Leaves of an Orbax checkpoint, written and read by the hosts that have them, for tenants that the operator trusts.

What the client does is Orbax's: the folder, the names, TensorStore's description of each leaf. The bytes go from each
host to the file system by a host function, and come by one; so the folder has to be one that all hosts see, as Orbax
asks of programs on several machines.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pathways_ray.client.array import Array
from pathways_ray.client.checkpoint_leaves import Leaf, digest_of, looker, reader, writer
from pathways_ray.client.host_functions import host
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import HostFunctionError
from pathways_ray.ir.regions import Box, block_of, shard_boxes
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_types import partition_spec

LIMIT_S = 1800.0
"""Seconds for the leaves of one slice."""

FOLDER_LIMIT_S = 30.0
"""A save waits this long for the checkpoint's folder."""

PART_BYTES = 1 << 26
"""Bytes of the arrays that one call writes, as far as they are cut: by these calls is known how much is written."""

TELLING = ("_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA", "../_CHECKPOINT_METADATA")
"""Files by which checkpoints differ, as far as one has them: its tree, its values, and when it was written."""

_COUNT = jax.ShapeDtypeStruct((), np.int32)


def leaf_of(
    store: dict[str, Any], context: dict[str, Any], shape: tuple[int, ...], where: VirtualSlice, spec: Spec
) -> Leaf:
    """A leaf that lies on a slice in the layout `spec`."""
    sizes = [math.prod(where.type.axis_size(axis) for axis in axes) for axes in spec]
    return Leaf(store, context, shape, (*sizes, *(1,) * (len(shape) - len(sizes))))


def in_blocks(where: VirtualSlice, spec: Spec) -> bool:
    """Whether each host of a slice has one block of what lies there in this layout: a host function takes no other."""
    counts = ArrayType(leaf_of({}, {}, (), where, spec).blocks, "int32")
    boxes: dict[int, list[Box]] = {}
    for box, device in zip(shard_boxes(counts, spec, where.type), where.placed.devices, strict=True):
        boxes.setdefault(device.host, []).append(box)
    return all(block_of(mine) is not None for mine in boxes.values())


def all_see_new(folder: str, where: VirtualSlice) -> bool:
    """Whether all hosts of a slice see the folder of a save, once it is there: a thread of Orbax makes it. A folder of
    that name may be a host's own: a file goes there for a moment that no other has."""
    deadline = time.monotonic() + FOLDER_LIMIT_S
    while not Path(folder).is_dir() and time.monotonic() < deadline:
        time.sleep(0.005)
    mark = Path(folder, f".seen-{secrets.token_hex(16)}")
    try:
        mark.write_text(mark.name)
        return _all_have([mark], where)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            mark.unlink()


def all_see_old(folder: str, where: VirtualSlice) -> bool:
    """Whether all hosts of a slice see the folder of a restore, and no older one of that name: with the same files in
    `TELLING`."""
    files = [path for name in TELLING if (path := Path(folder, name)).is_file()]
    return bool(files) and _all_have(files, where)


def _all_have(files: Sequence[Path], where: VirtualSlice) -> bool:
    digests = {path.as_posix(): digest_of(path.as_posix()) for path in files}
    try:
        host(looker(digests), slice=where, result=_COUNT)(np.int32(0)).block_until_ready()
    except HostFunctionError:
        return False
    return True


def save(where: VirtualSlice, arrays: Sequence[Array], leaves: Sequence[Leaf]) -> list[tuple[Array, int]]:
    """Has the hosts of a slice write their parts, behind what makes the arrays, and before anything takes their memory.

    Returns:
        For each call a number that is there when it has written its arrays, and their bytes.
    """
    found = []
    for group in groups([array.nbytes for array in arrays]):
        mine = arrays[group.start : group.stop]
        found.append((_saved(where, mine, leaves[group.start : group.stop]), sum(array.nbytes for array in mine)))
    return found


def groups(sizes: Sequence[int]) -> Iterator[range]:
    """Places of arrays that one call writes, one behind the other: until they have `PART_BYTES`, or none is left."""
    begin = size = 0
    for end, more in enumerate(sizes, 1):
        size += more
        if size >= PART_BYTES or end == len(sizes):
            yield range(begin, end)
            begin, size = end, 0


def _saved(where: VirtualSlice, arrays: Sequence[Array], leaves: Sequence[Leaf]) -> Array:
    """A number that is there when the arrays are written, by one call of each host."""
    specs = [array._type.spec for array in arrays]
    in_specs = ([partition_spec(spec) for spec in specs], _specs_of_numbers(leaves, specs))
    run = host(writer(leaves), slice=where, in_specs=in_specs, result=_COUNT, limit_s=LIMIT_S)
    done: Array = run(list(arrays), [_numbers(leaf) for leaf in leaves])
    return done


def restore(where: VirtualSlice, leaves: Sequence[Leaf], specs: Sequence[Spec], dtypes: Sequence[Any]) -> list[Array]:
    """Has the hosts of a slice read their parts."""
    run: Callable[..., list[Array]] = host(
        reader(leaves, dtypes),
        slice=where,
        in_specs=(_specs_of_numbers(leaves, specs),),
        out_specs=[partition_spec(spec) for spec in specs],
        result=[jax.ShapeDtypeStruct(leaf.shape, dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)],
        limit_s=LIMIT_S,
    )
    return run([_numbers(leaf) for leaf in leaves])


def _numbers(leaf: Leaf) -> list[np.ndarray[Any, Any]]:
    """The numbers of the blocks along each dimension that has several: partitioned as the array is, each host gets
    those that it has."""
    return [np.arange(count, dtype=np.int32) for count in leaf.blocks if count > 1]


def _specs_of_numbers(leaves: Sequence[Leaf], specs: Sequence[Spec]) -> list[list[P]]:
    return [
        [partition_spec((axes,)) for axes, count in zip(spec, leaf.blocks, strict=False) if count > 1]
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
