"""The face that a `pw.Array` shows to JAX: a `jax.Array` whose shards no device of this process holds.

Operators and methods come from JAX itself (`jax_hooks.make_jax_value`), and become operations on the slice (`eager`).
Here is what JAX asks an array about itself, and what would need its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn, cast

import jax
import numpy as np
from jax.sharding import NamedSharding

from pathways_ray.client import indexing
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.errors import UsageError
from pathways_ray.ir.regions import shard_shape
from pathways_ray.ir.types import item_bytes
from pathways_ray.jax_types import partition_spec

_SHOWN_ELEMENTS = 1000
"""Elements of an array that `str` shows: from as many on NumPy leaves some out."""


class SliceArray(jax.Array):
    """A `jax.Array` on a virtual slice."""

    __slots__ = ("__weakref__", "_type")
    __array_priority__ = 1000  # above NumPy's and JAX's: `array + y` is left to `y`

    _type: ArgumentType

    @property
    def aval(self) -> Any:
        """The type that JAX traces with."""
        kind = self._type
        if kind.shaped is None:
            with jax.enable_x64(True):  # of 64 bits it is one wherever it is used, as in JAX
                kind.shaped = jax.typeof(kind.aval)
        return kind.shaped

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical array, as in all that follow."""
        return self._type.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its elements."""
        return self._type.aval.dtype

    @property
    def weak_type(self) -> bool:
        """Whether it takes the type of what it is computed with, as in JAX."""
        return self._type.weak

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._type.aval.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self._type.aval.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the logical array; replicas on devices are not counted."""
        return self._type.array.nbytes

    def on_device_size_in_bytes(self) -> int:
        """Bytes on all devices of the slice together, replicas included."""
        array, where = self._type.array, self.slice
        shard = shard_shape(array, self._type.spec, where.type)
        return int(where.size * math.prod(shard) * item_bytes(array.dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._type.aval.dtype.itemsize

    @property
    def sharding(self) -> NamedSharding:
        """Over the abstract mesh of the slice."""
        assert self._type.slice is not None
        return NamedSharding(self._type.slice.mesh, partition_spec(self._type.spec))

    @property
    def slice(self) -> Any:
        """The `pw.VirtualSlice` that the array lies on."""
        return self._type.slice

    @property
    def committed(self) -> bool:
        """True: computations with it run on its slice."""
        return True

    _committed = committed

    @property
    def is_fully_addressable(self) -> bool:
        """False: no device of this process has a part of it."""
        return False

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device of the slice has all of it."""
        return not self._type.spec

    def _not_here(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} of a pw.Array is not in this process: its shards lie on {self._type.where()}. np.asarray(y) "
            "fetches the value, y.slice.devices says where it is"
        )

    def devices(self) -> NoReturn:
        """Raises `UsageError`: the devices are those of hosts. `y.slice.devices` names them."""
        self._not_here("a set of jax.Devices")

    @property
    def device(self) -> NoReturn:
        """Raises `UsageError`, as `devices()`."""
        self._not_here("the jax.Device")

    @property
    def addressable_shards(self) -> NoReturn:
        """Raises `UsageError`: shards are with the hosts. `np.asarray(y)` fetches the value."""
        self._not_here("a shard")

    @property
    def global_shards(self) -> NoReturn:
        """Raises `UsageError`, as `addressable_shards`."""
        self._not_here("a shard")

    def addressable_data(self, index: int) -> NoReturn:
        """Raises `UsageError`, as `addressable_shards`."""
        self._not_here("a shard")

    def unsafe_buffer_pointer(self) -> NoReturn:
        """Raises `UsageError`: the memory is that of hosts."""
        self._not_here("a pointer to the memory")

    def __dlpack__(self, **_: Any) -> NoReturn:
        self._not_here("the memory")

    def copy_to_host_async(self) -> None:
        """Does nothing: a fetch asks the hosts at once, and they send when the value is there."""

    def item(self, *index: int) -> Any:
        """The value of one element, as a Python scalar: of an array of one element, or at an index."""
        return (self.__array__()).item(*index)

    def tolist(self) -> Any:
        """The values as Python scalars, in nested lists."""
        return self.__array__().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        """The values as bytes, in C order or in that of Fortran."""
        return self.__array__().tobytes(cast(Any, order))

    def argsort(
        self,
        axis: int | None = -1,
        *,
        kind: Any = None,
        order: Any = None,
        stable: Any = True,
        descending: bool = False,
    ) -> jax.Array:
        """As `jax.numpy.argsort`, on its slice. `np.argsort` has None for what JAX has True."""
        is_stable = stable is None or stable
        return jax.numpy.argsort(self, axis, kind=kind, order=order, stable=is_stable, descending=descending)

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def __str__(self) -> str:
        """The value, as NumPy shows it: `print(loss)`, `f"{loss}"`. Of more than 1,000 elements, or of keys, it is
        `repr`, which fetches nothing."""
        if self.size > _SHOWN_ELEMENTS or self._type.extended is not None or self.is_deleted():
            return repr(self)
        return str(self.__array__())

    def __format__(self, spec: str) -> str:
        """Formats the value, as in `f"{loss:.4f}"`; without a format it is that of the scalar, else `str`."""
        is_shown = self.shape or self._type.extended is not None or self.is_deleted()
        return str(self) if is_shown and not spec else format(self.__array__()[()], spec)

    def _scalar(self, what: str) -> Any:
        """The value of an array of one element. Others are refused before they are fetched."""
        if self.size != 1:
            raise TypeError(f"{what} of an array takes one of one element; this one has shape {self.shape}")
        return self.__array__()

    def __float__(self) -> float:
        return float(self._scalar("float()"))

    def __int__(self) -> int:
        return int(self._scalar("int()"))

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                f"the truth of an array of shape {self.shape} is not clear; write y.any() or y.all(), or size"
            )
        return bool(self.__array__())

    def __complex__(self) -> complex:
        return complex(self._scalar("complex()"))

    def _is_index(self) -> bool:
        return not self.shape and jax.numpy.issubdtype(self.dtype, np.integer)

    def __index__(self) -> int:
        if not self._is_index():
            raise TypeError(f"only a whole number is an index, not {self._type.array}")
        return int(self.__array__())

    def __bytes__(self) -> bytes:
        """The values, as NumPy has them. Without it Python makes a byte of each number; of a whole number without
        dimensions it makes that many zeros, here as in JAX."""
        return bytes(self.__index__()) if self._is_index() else self.tobytes()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dimensions")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """The part of the array, on its slice: one launch. An index of booleans is fetched, as shapes depend on it."""
        return indexing.take(self, index)

    def __iter__(self) -> Iterator[Any]:
        """The entries of the first dimension, on the slice of the array: one launch for many of them."""
        if not self.shape:  # at once, not at the first entry: by that, callers tell what can be iterated
            raise TypeError("iteration over a 0-d array")
        return indexing.entries(self)

    def __reversed__(self) -> Iterator[Any]:
        return iter(self[::-1]) if len(self) else iter(())
