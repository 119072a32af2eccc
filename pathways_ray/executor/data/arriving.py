"""Arrays on their way from another host of this machine."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray.errors import Failure
from pathways_ray.jax_arrays import array_maker


@functools.lru_cache(maxsize=1024)
def _maker(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> Callable[[Sequence[Any]], jax.Array]:
    """Makes what makes an array of its bytes: those of a program are alike in each launch."""
    return array_maker(shape, dtype, sharding, list(sharding.device_set))


class Arriving:
    """Arrays that a host of this machine sends: ready once all are here, or a failure in their place. Whenever one has
    its end, `NearTransfer` says so."""

    __slots__ = ("_arrays", "_over", "failure", "sender", "types")
    looks_called = True

    def __init__(self, sender: int, types: Sequence[jax.ShapeDtypeStruct]) -> None:
        self.sender, self.types = sender, types
        self.failure: Failure | None = None
        self._arrays: list[jax.Array] = []
        self._over = threading.Event()

    def is_ready(self) -> bool:
        """Whether nothing more is waited for."""
        return self._over.is_set()

    def block_until_ready(self) -> Arriving:
        """Waits until it is."""
        self._over.wait()
        return self

    def arrays(self) -> list[jax.Array] | Failure:
        """The arrays, or the failure in their place."""
        return self._arrays if self.failure is None else self.failure

    def came(self, parts: Sequence[np.ndarray[Any, Any]]) -> None:
        """Makes the arrays of their bytes, whose memory they keep where a device can use it."""
        self._arrays = [
            _maker(kind.shape, kind.dtype, kind.sharding)([part.view(kind.dtype).reshape(kind.shape)])
            for kind, part in zip(self.types, parts, strict=True)
        ]
        self._over.set()

    def fail(self, failure: Failure) -> None:
        """Nothing comes."""
        self.failure = failure
        self._over.set()


def lost(sender: int) -> Failure:
    """The failure in place of what a host that has ended was to send."""
    return Failure("HostLost", f"host {sender}, which holds the data, was lost", host=sender)
