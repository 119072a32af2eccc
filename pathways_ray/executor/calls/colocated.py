"""Functions of `jax.experimental.colocated_python`, called as host functions are.

Such a function takes and gives JAX's arrays. So the process in which it runs makes JAX have as many CPU devices as the
client has, lays its arguments out on them as they lie on the slice, and takes whole arrays from its results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_TEXT_BYTES = 1 << 18
"""Of a result that is a text. JAX has the first call of a function say the types of its results in one, of some hundred
bytes for each."""

_TEXT, _REST = 1 << 3 | 2, 15 << 3 | 2
"""Tags of fields with bytes: of the only field of `StringArrayContents`, and of one that it does not have."""


@dataclass(frozen=True)
class Colocated:
    """A function as JAX's client has pickled it, with the types of what it takes and gives.

    Args:
        devices: those that the client has, whose numbers the pickled types use.
        wide: whether arrays have 64 bits.
    """

    pickled: bytes
    devices: int
    wide: bool

    def __call__(self, *values: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], ...]:
        """The results, whole.

        Raises:
            TypeError: the function gave another tree than it should.
        """
        import jax

        function, taken, inputs, given = self._read()
        with jax.enable_x64(self.wide):
            arrays = [jax.device_put(value, kind.sharding) for value, kind in zip(values, inputs, strict=True)]
            args, kwargs = jax.tree.unflatten(taken, arrays)
            results, tree = jax.tree.flatten(function(*args, **kwargs))
            if tree != given:
                raise TypeError(f"the function gave {tree}, and its results are {given}")
            return tuple(_whole(result) for result in results)

    def _read(self) -> tuple[Any, Any, Any, Any]:
        found: tuple[Any, Any, Any, Any] | None = _KNOWN.get(self.pickled)
        if found is None:
            import jax
            from jax.experimental.colocated_python import serialization

            if not _KNOWN:
                jax.config.update("jax_num_cpu_devices", self.devices)
            function, taken, inputs, given, _, _ = serialization._deserialize(self.pickled)
            found = _KNOWN[self.pickled] = function, taken, inputs, given
        return found


_KNOWN: dict[bytes, tuple[Any, Any, Any, Any]] = {}
"""Functions that were called here: objects of a client live in them until its session ends."""


def _whole(result: Any) -> np.ndarray[Any, Any]:
    value = np.asarray(result)
    return text_array(str(value.item()).encode()) if value.dtype.kind == "T" else value


def text_array(text: bytes) -> np.ndarray[Any, Any]:
    """A text in as many bytes as every one has: as IFRT writes an array of one text, and a field to be skipped.

    Raises:
        ValueError: it is too long.
    """
    head = bytes((_TEXT, *_number(len(text)), *text, _REST))
    left = MAX_TEXT_BYTES - len(head) - _NUMBER_BYTES
    if left < 0:
        raise ValueError(f"a text of {len(text)} bytes; {MAX_TEXT_BYTES} are the limit, with what is around it")
    return np.frombuffer(head + _number(left) + bytes(left), np.uint8)


_NUMBER_BYTES = 4


def _number(value: int) -> bytes:
    """A number in protobuf's form, in four bytes."""
    return bytes((value >> 7 * k) & 0x7F | (0x80 if k < _NUMBER_BYTES - 1 else 0) for k in range(_NUMBER_BYTES))
