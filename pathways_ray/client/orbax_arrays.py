"""Checkpoints by Orbax of trees with arrays on slices: `StandardCheckpointer().save(path, state)`, and restoring them.

Orbax looks up by type who writes and reads a leaf. The entry of `jax.Array` is replaced by one that knows arrays on
slices, and leaves all others to Orbax. A checkpoint is like any other: plain JAX reads it, and the other way round.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways_ray.client.array import Array
from pathways_ray.client.placement import put_at
from pathways_ray.client.slices import slice_of
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import UsageError

_registered: list[Any] = []


def register() -> None:
    """Has Orbax take arrays on slices, where the program has loaded Orbax."""
    if _registered or "orbax.checkpoint" not in sys.modules:
        return
    from orbax.checkpoint import type_handlers

    def target_of(argument: Any) -> Any:
        """The slice and the spec of a leaf to be restored; None where it goes to no slice."""
        sharding: Any = getattr(argument, "sharding", None)
        where = slice_of(sharding.mesh) if isinstance(sharding, NamedSharding) else None
        return None if where is None else (where, spec_from_user(sharding.spec, where.axes))

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
            if mine:
                fetched = await asyncio.to_thread(lambda: [np.asarray(values[k]) for k in mine])
                futures += await self._values.serialize(fetched, *_at(mine, infos, args))
            return futures

        async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
            places = [target_of(one) for one in args or [None] * len(infos)]
            mine = [k for k, place in enumerate(places) if place is not None]
            others = [k for k, place in enumerate(places) if place is None]
            found: dict[int, Any] = {}
            if others:
                found.update(zip(others, await super().deserialize(*_at(others, infos, args)), strict=True))
            if mine:
                plain = [type_handlers.RestoreArgs(restore_type=np.ndarray, dtype=args[k].dtype) for k in mine]
                values = await self._values.deserialize([infos[k] for k in mine], plain)
                for k, value in zip(mine, values, strict=True):
                    _check_shape(infos[k].name, value, args[k])
                    found[k] = put_at(value, *places[k])
            return [found[k] for k in range(len(infos))]

    handler = Handler()
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)  # it would warn of the entry that is replaced
    try:
        type_handlers.register_type_handler(jax.Array, handler, override=True)
    finally:
        log.setLevel(before)
    _registered.append(handler)


def _at(numbers: Sequence[int], *columns: Sequence[Any]) -> list[list[Any]]:
    """The entries at these places."""
    return [[column[k] for k in numbers] for column in columns]


def _check_shape(name: str, value: Any, argument: Any) -> None:
    asked = getattr(argument, "global_shape", None) or getattr(argument, "shape", None)
    if asked is not None and tuple(asked) != value.shape:
        raise ValueError(f"{name} has shape {value.shape} in the checkpoint, and is to be restored as {tuple(asked)}")
