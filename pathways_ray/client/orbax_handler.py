"""Orbax's handler of arrays, and what it does with those on slices. Loaded where a program has loaded Orbax.

Hosts write and read what they have, where the operator trusts the tenant, they see the checkpoint's folder, and what
each of them has is one block. Else values go through the client, as do those of less than a byte, which no host
function takes.

Typed keys are written as Orbax writes those of plain JAX: their data, and in its metadata of arrays what makes keys of
it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint._src.metadata.array_metadata import RANDOM_KEY_IMPL
from orbax.checkpoint._src.serialization import tensorstore_utils

from pathways_ray.client import checkpoints_on_hosts, prng
from pathways_ray.client.array import Array
from pathways_ray.client.host_functions import bits
from pathways_ray.client.placement import put_all_at
from pathways_ray.client.shown import Work
from pathways_ray.client.slices import slice_of
from pathways_ray.client.specs import spec_from_user
from pathways_ray.ir.regions import shard_shape


class Handler(type_handlers.ArrayHandler):
    """Orbax's handler of arrays, and what it does with those on slices."""

    def __init__(self) -> None:
        self._metadata = array_metadata_store.Store()
        super().__init__(array_metadata_store=self._metadata)
        self._values = type_handlers.NumpyHandler()

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        args = args or [type_handlers.SaveArgs()] * len(values)
        arrays = {k: prng.to_data(value) for k, value in enumerate(values) if isinstance(value, Array)}
        others = [k for k in range(len(values)) if k not in arrays]
        for k, array in arrays.items():
            _check_has_elements(array, infos[k])
        described = {k: _described(array, infos[k], args[k]) for k, array in arrays.items()}
        futures: list[Any] = []
        if others:
            futures += await super().serialize(*_at(others, values, infos, args))
        whole = {k: (array.slice, array._type.spec) for k, array in arrays.items() if bits(array.dtype) >= 8}
        on_hosts = await self._seen_by_hosts(whole, infos, checkpoints_on_hosts.all_see_new)
        by_client = [k for k in arrays if not any(k in numbers for numbers in on_hosts.values())]
        work = Work("hosts write a checkpoint", sum(arrays[k].nbytes for k in arrays if k not in by_client))
        for where, numbers in on_hosts.items():
            mine = [arrays[k] for k in numbers]
            leaves = [
                checkpoints_on_hosts.leaf_of(
                    described[k].json, _context(infos[k]), arrays[k].shape, where, arrays[k]._type.spec
                )
                for k in numbers
            ]
            futures.append(_Written(checkpoints_on_hosts.save(where, mine, leaves), work))
        if by_client:
            fetched = await asyncio.to_thread(_fetched, [arrays[k] for k in by_client])
            futures += await self._values.serialize(fetched, *_at(by_client, infos, args))
        if arrays:
            notes = self._notes({k: values[k] for k in arrays}, described, infos)
            futures.append(_Noted(notes, list(futures)))
        return futures

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        places = [_target_of(one) for one in args or [None] * len(infos)]
        mine = {k: place for k, place in enumerate(places) if place is not None}
        others = [k for k, place in enumerate(places) if place is None]
        found: dict[int, Any] = {}
        if others:
            found.update(zip(others, await super().deserialize(*_at(others, infos, args)), strict=True))
        on_hosts = await self._seen_by_hosts(mine, infos, checkpoints_on_hosts.all_see_old)
        for where, seen in on_hosts.items():
            read = {k: await self._read(infos[k], args[k]) for k in seen}
            numbers = [k for k in seen if bits(read[k][1].dtype.numpy_dtype) >= 8]
            if not numbers:
                continue
            specs, stores = [mine[k][1] for k in numbers], [read[k] for k in numbers]
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
            plain = [_as_numpy(args[k]) for k in by_client]
            values = await self._values.deserialize([infos[k] for k in by_client], plain)
            for k, value in zip(by_client, values, strict=True):
                _check_shape(infos[k].name, value.shape, args[k])
            found.update(zip(by_client, put_all_at(values, [mine[k] for k in by_client]), strict=True))
        implementations = await self._implementations(infos) if mine else {}
        for k in mine:
            found[k] = _as_asked(found[k], infos[k].name, implementations.get(infos[k].name), args[k].dtype)
        return [found[k] for k in range(len(infos))]

    async def _notes(self, values: dict[int, Array], described: dict[int, Any], infos: Sequence[Any]) -> None:
        """Writes what Orbax keeps of arrays beside their values."""
        made = []
        for k, value in values.items():
            how = {RANDOM_KEY_IMPL: str(jax.random.key_impl(value))} if prng.is_key(value) else None
            made.append(dataclasses.replace(described[k].metadata, ext_metadata=how))
        folder = infos[next(iter(values))].parent_dir
        await self._metadata.write(checkpoint_dir=folder, array_metadatas=made, process_index=0)
        if len(values) < len(infos):  # the shardings of others are in a file that has to name all
            noted = ts.Transaction()
            for k in values:
                entry = tensorstore_utils.get_sharding_tensorstore_spec(folder.as_posix(), infos[k].name)
                store = await ts.open(entry, open=True, context=infos[k].ts_context)
                await store.with_transaction(noted).write("")
            await noted.commit_async()

    async def _implementations(self, infos: Sequence[Any]) -> dict[str, str]:
        """The implementation of the keys of each leaf that has keys; older checkpoints do not say."""
        found: Any = await self._metadata.read(checkpoint_dir=infos[0].parent_dir)
        leaves: list[Any] = next(iter(found.values()), []) if found else []
        said = {leaf.param_name: (leaf.ext_metadata or {}).get(RANDOM_KEY_IMPL) for leaf in leaves}
        return {name: str(how) for name, how in said.items() if how}

    async def _seen_by_hosts(
        self, places: dict[int, Any], infos: Sequence[Any], all_see: Callable[[str, Any], bool]
    ) -> dict[Any, list[int]]:
        """The leaves that hosts may write and read, by slice: `places` has the slice and the spec of each."""
        found: dict[Any, list[int]] = {}
        for k, (where, spec) in places.items():
            if where.session.trusted and checkpoints_on_hosts.in_blocks(where, spec):
                await infos[k].await_path_creation()
                found.setdefault(where, []).append(k)
        for where, numbers in list(found.items()):
            folder = infos[numbers[0]].parent_dir.as_posix()
            if not await asyncio.to_thread(all_see, folder, where):
                del found[where]
        return found

    async def _read(self, info: Any, args: Any) -> tuple[dict[str, Any], Any]:
        """TensorStore's description of a leaf that is to be read, and the leaf, opened."""
        described = tensorstore_utils.build_array_read_spec(
            info, use_ocdbt=info.is_ocdbt_checkpoint, target_dtype=args.dtype
        )
        return described.json, await ts.open(ts.Spec(described.json), open=True, context=info.ts_context)


def _check_has_elements(array: Array, info: Any) -> None:
    """Refuses what Orbax has no file for, in its own words."""
    if array.size == 0:
        raise ValueError(
            f"Cannot save arrays with zero size: ParamInfo: [name={info.name},value_typestr={info.value_typestr}]"
        )


def _described(value: Array, info: Any, args: Any) -> Any:
    """Orbax's description of an array that is to be written, in chunks that are its shards."""
    kind = value._type.array
    return tensorstore_utils.build_array_write_spec(
        info,
        args,
        global_shape=kind.shape,
        local_shape=shard_shape(kind, value._type.spec, value.slice.type),
        dtype=np.dtype(value.dtype),
        use_ocdbt=info.is_ocdbt_checkpoint,
        process_index="0" if info.is_ocdbt_checkpoint else None,
    )


def _as_asked(array: Array, name: str, implementation: str | None, asked: Any) -> Any:
    """An array that was read, as keys where keys were saved or are asked for."""
    wanted = asked if _of_keys(asked) else None
    if implementation is not None:
        keys = jax.random.wrap_key_data(array, impl=implementation)
        if wanted is not None and keys.dtype != wanted:
            raise ValueError(f"{name} has {keys.dtype} in the checkpoint, and is to be restored as {wanted}")
        return keys
    return array if wanted is None else prng.from_data(array, jax.ShapeDtypeStruct((), wanted))


def _as_numpy(args: Any) -> Any:
    """Orbax's arguments that have a leaf read as a NumPy array; of keys, their data."""
    return type_handlers.RestoreArgs(restore_type=np.ndarray, dtype=None if _of_keys(args.dtype) else args.dtype)


def _of_keys(dtype: Any) -> bool:
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


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
                done._wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
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


class _Noted:
    """Something for Orbax to wait for: notes, which go into files that `others` write to before, and into a folder that
    is there when they have."""

    def __init__(self, notes: Coroutine[Any, Any, None], others: Sequence[Any]) -> None:
        self._notes: Coroutine[Any, Any, None] | None = notes
        self._others = others

    def result(self, timeout: float | None = None) -> None:
        for other in self._others:
            other.result(timeout)
        notes, self._notes = self._notes, None
        if notes is not None:
            asyncio.run(notes)


def _check_shape(name: str, shape: tuple[int, ...], argument: Any) -> None:
    asked = getattr(argument, "global_shape", None) or getattr(argument, "shape", None)
    if asked is not None and tuple(asked) != shape:
        raise ValueError(f"{name} has shape {shape} in the checkpoint, and is to be restored as {tuple(asked)}")
