"""Orbax's handler of arrays, and what it does with those on slices. Loaded where a program has loaded Orbax.

Hosts write and read what they have, where the operator trusts the tenant and they see the checkpoint's folder. Else
values go through the client.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.serialization import tensorstore_utils

from pathways_ray.client import checkpoints_on_hosts
from pathways_ray.client.array import Array
from pathways_ray.client.checkpoint_leaves import Leaf
from pathways_ray.client.placement import put_at
from pathways_ray.client.shown import Work
from pathways_ray.client.slices import slice_of
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import UsageError
from pathways_ray.ir.regions import shard_shape


class Handler(type_handlers.ArrayHandler):
    """Orbax's handler of arrays, and what it does with those on slices."""

    def __init__(self) -> None:
        super().__init__()
        self._values = type_handlers.NumpyHandler()

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        args = args or [type_handlers.SaveArgs()] * len(values)
        mine = [k for k, value in enumerate(values) if isinstance(value, Array)]
        for k in mine:
            if values[k]._type.extended is not None:
                raise UsageError(
                    f"{infos[k].name} has typed keys, which Orbax does not write: save jax.random.key_data of it"
                )
        others = [k for k in range(len(values)) if k not in mine]
        futures: list[Any] = []
        if others:
            futures += await super().serialize(*_at(others, values, infos, args))
        on_hosts = await self._seen_by_hosts({k: values[k].slice for k in mine}, infos)
        by_client = [k for k in mine if not any(k in numbers for numbers in on_hosts.values())]
        work = Work("hosts write a checkpoint", sum(values[k].nbytes for k in mine if k not in by_client))
        for where, numbers in on_hosts.items():
            leaves = [self._written(values[k], infos[k], args[k]) for k in numbers]
            futures.append(_Written(checkpoints_on_hosts.save(where, [values[k] for k in numbers], leaves), work))
        if by_client:
            fetched = await asyncio.to_thread(_fetched, [values[k] for k in by_client])
            futures += await self._values.serialize(fetched, *_at(by_client, infos, args))
        return futures

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        places = [_target_of(one) for one in args or [None] * len(infos)]
        mine = {k: place for k, place in enumerate(places) if place is not None}
        others = [k for k, place in enumerate(places) if place is None]
        found: dict[int, Any] = {}
        if others:
            found.update(zip(others, await super().deserialize(*_at(others, infos, args)), strict=True))
        on_hosts = await self._seen_by_hosts({k: where for k, (where, _) in mine.items()}, infos)
        for where, numbers in on_hosts.items():
            specs = [mine[k][1] for k in numbers]
            stores = [await self._read(infos[k], args[k]) for k in numbers]
            for k, (_, store) in zip(numbers, stores, strict=True):
                _check_shape(infos[k].name, tuple(store.shape), args[k])
            leaves = [
                checkpoints_on_hosts.leaf_of(described, _context(infos[k]), tuple(store.shape), where, spec)
                for k, (described, store), spec in zip(numbers, stores, specs, strict=True)
            ]
            dtypes = [store.dtype.numpy_dtype for _, store in stores]
            arrays = await asyncio.to_thread(checkpoints_on_hosts.restore, where, leaves, specs, dtypes)
            found.update(zip(numbers, arrays, strict=True))
        by_client = [k for k in mine if k not in found]
        if by_client:
            plain = [type_handlers.RestoreArgs(restore_type=np.ndarray, dtype=args[k].dtype) for k in by_client]
            values = await self._values.deserialize([infos[k] for k in by_client], plain)
            for k, value in zip(by_client, values, strict=True):
                _check_shape(infos[k].name, value.shape, args[k])
                found[k] = put_at(value, *mine[k])
        return [found[k] for k in range(len(infos))]

    async def _seen_by_hosts(self, places: dict[int, Any], infos: Sequence[Any]) -> dict[Any, list[int]]:
        """The leaves that hosts may write and read, by slice."""
        found: dict[Any, list[int]] = {}
        for k, where in places.items():
            if where.session.trusted:
                await infos[k].await_path_creation()
                found.setdefault(where, []).append(k)
        for where, numbers in list(found.items()):
            folder = infos[numbers[0]].parent_dir.as_posix()
            if not await asyncio.to_thread(checkpoints_on_hosts.all_see, folder, where):
                del found[where]
        return found

    def _written(self, value: Array, info: Any, args: Any) -> Leaf:
        """A leaf that is to be written, in chunks that are its shards."""
        kind, where, spec = value._type.array, value.slice, value._type.spec
        described = tensorstore_utils.build_array_write_spec(
            info,
            args,
            global_shape=kind.shape,
            local_shape=shard_shape(kind, spec, where.type),
            dtype=np.dtype(value.dtype),
            use_ocdbt=info.is_ocdbt_checkpoint,
            process_index="0" if info.is_ocdbt_checkpoint else None,
        )
        return checkpoints_on_hosts.leaf_of(described.json, _context(info), kind.shape, where, spec)

    async def _read(self, info: Any, args: Any) -> tuple[dict[str, Any], Any]:
        """TensorStore's description of a leaf that is to be read, and the leaf, opened."""
        described = tensorstore_utils.build_array_read_spec(
            info, use_ocdbt=info.is_ocdbt_checkpoint, target_dtype=args.dtype
        )
        return described.json, await ts.open(ts.Spec(described.json), open=True, context=info.ts_context)


def _target_of(argument: Any) -> Any:
    """The slice and the spec of a leaf to be restored; None where it goes to no slice."""
    sharding: Any = getattr(argument, "sharding", None)
    where = slice_of(sharding.mesh) if isinstance(sharding, NamedSharding) else None
    return None if where is None else (where, spec_from_user(sharding.spec, where.axes))


def _at(numbers: Sequence[int], *columns: Sequence[Any]) -> list[list[Any]]:
    """The entries at these places."""
    return [[column[k] for k in numbers] for column in columns]


def _context(info: Any) -> dict[str, Any]:
    found: dict[str, Any] = info.ts_context.spec.to_json()
    return found


class _Written:
    """Something for Orbax to wait for: hosts write.

    Args:
        parts: for each call what says that it has written, and its bytes.
    """

    def __init__(self, parts: Sequence[tuple[Array, int]], work: Work) -> None:
        self._parts, self._work = deque(parts), work

    def result(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._work.shown():
            while self._parts:
                done, size = self._parts[0]
                done.block_until_ready(None if deadline is None else max(0.0, deadline - time.monotonic()))
                self._parts.popleft()
                self._work.done += size


def _fetched(arrays: Sequence[Array]) -> list[np.ndarray[Any, Any]]:
    """The values of arrays that the client writes."""
    work = Work("the arrays of a checkpoint are fetched", sum(array.nbytes for array in arrays))
    found = []
    with work.shown():
        for array in arrays:
            found.append(np.asarray(array))
            work.done += array.nbytes
    return found


def _check_shape(name: str, shape: tuple[int, ...], argument: Any) -> None:
    asked = getattr(argument, "global_shape", None) or getattr(argument, "shape", None)
    if asked is not None and tuple(asked) != shape:
        raise ValueError(f"{name} has shape {shape} in the checkpoint, and is to be restored as {tuple(asked)}")
