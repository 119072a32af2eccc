"""Arrays that several sessions of one tenant have uploaded alike: a host keeps one of them for all.

Processes that serve one model upload its weights once each. With a copy for each of them, what one caller's request
reads is never in the caches that the last one's has filled, and the memory of the machine holds the model as often as
it has processes. Arrays do not change, so one will do; but for a launch that takes the memory of its argument, and
which then gets a copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray.executor.data.upload import Upload
from pathways_ray.jax_arrays import shards_by_device

LEAST_BYTES = 1 << 12
"""Smaller uploads are kept as they come."""

LOOKS = 64
"""Bytes of each part of an array that say whether it may be equal to another one."""

COMPARED_BYTES = 1 << 20
"""Bytes that are compared at a time: what is not equal costs no more to find out, and no memory."""

MAX_SESSIONS = 1 << 10
"""Sessions of an array that are remembered: behind so many, one of them may be given it once more."""


class _Kept:
    """An array that was uploaded first, by a session; `shared` counts the times that another one has it as well, or
    may once its bytes are compared. `sessions` are those that have it."""

    __slots__ = ("array", "key", "sessions", "shared")

    def __init__(
        self, key: tuple[Any, ...], session: int, array: jax.Array, gone: Callable[[weakref.ref[jax.Array]], None]
    ) -> None:
        self.key, self.sessions, self.array, self.shared = key, {session}, weakref.ref(array, gone), 0


class EqualUploads:
    """The uploads of a host that others may be equal to, as long as somebody has them. Any thread may ask.

    Args:
        devices: those of the host, whose memory is its own.
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._by_key: dict[tuple[Any, ...], _Kept] = {}
        self._by_array: dict[int, _Kept] = {}
        self._giving = threading.Lock()

    @property
    def shared(self) -> int:
        """Arrays that several sessions have, or have had."""
        return sum(kept.shared > 0 for kept in list(self._by_array.values()))

    def one_of(self, tenant: str, session: int, upload: Upload, array: jax.Array) -> jax.Array:
        """Returns the array to keep for an upload: one that another session of the tenant has uploaded and that has
        the same bytes, layout and devices, once for each session; or else `array`, to which it has come."""
        if not tenant or upload.size < LEAST_BYTES:
            return array
        looks = tuple(data[:: (len(data) // LOOKS) | 1].tobytes() for data in upload.buffers)
        key = tenant, array.sharding, array.shape, array.dtype, looks
        kept = self._by_key.get(key)
        other = kept.array() if kept is not None else None
        if kept is None or other is None:
            self._keep(key, session, array)
            return array
        with self._giving:  # several threads read the uploads of a session
            if session in kept.sessions:  # it may be about to have both overwritten, as a step of training does
                return array
            if len(kept.sessions) >= MAX_SESSIONS:
                kept.sessions.clear()
            kept.sessions.add(session)
            kept.shared += 1
        # A launch that takes its memory looks at `shared` once it has taken it out: one of the two sees the other.
        if self._by_key.get(key) is kept and _has_bytes(other, upload, self._devices):
            return other
        with self._giving:
            kept.sessions.discard(session)
            kept.shared -= 1
        return array

    def take_out(self, array: Any) -> bool:
        """Has an array be given to nobody any more, since a launch takes its memory; returns whether another session
        may have it."""
        kept = self._by_array.get(id(array))
        if kept is None:
            return False
        if self._by_key.get(kept.key) is kept:
            self._by_key.pop(kept.key, None)
        return kept.shared > 0

    def _keep(self, key: tuple[Any, ...], session: int, array: jax.Array) -> None:
        number = id(array)

        def gone(_: weakref.ref[jax.Array]) -> None:
            if self._by_key.get(key) is self._by_array.pop(number):
                self._by_key.pop(key, None)

        self._by_array[number] = self._by_key[key] = _Kept(key, session, array, gone)


def _has_bytes(array: jax.Array, upload: Upload, devices: Sequence[jax.Device]) -> bool:
    """Whether the shards of an array are what was uploaded, bit for bit."""
    shards, where = shards_by_device(array), dict(upload.plan.local)
    parts = zip(upload.plan.boxes, upload.buffers, strict=True)
    return all(
        _are_equal(np.asarray(shards[devices[where[box]]]).reshape(-1).view(np.uint8), data) for box, data in parts
    )


def _are_equal(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> bool:
    starts = range(0, len(first), COMPARED_BYTES)
    return all(np.array_equal(first[n : n + COMPARED_BYTES], second[n : n + COMPARED_BYTES]) for n in starts)
