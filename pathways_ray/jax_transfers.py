"""Parts of JAX without a public name by which arrays of its own are read and put: where a proxy has them, its hosts may
do so by a shorter way.

Each entry says why the project needs it. Only processes whose devices a proxy has load this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

_BEGUN = "_copy_begun_ahead"
"""The attribute of an array whose copy JAX has begun."""


def arrays_read_by(takes: Callable[[jax.Array], bool], value: Callable[[jax.Array], Any], big_bytes: int) -> None:
    """Has JAX ask `value` for the NumPy array of those arrays of its own that `takes` takes; for None it reads as ever,
    and so it does where the user guards such transfers. Copies of big ones, from a size on, are not begun ahead: JAX
    would make them as ever. It does for smaller ones, many of which may be on their way at once, and reads those.

    What reads is a method of a class in jaxlib, with no seam.
    """
    from jax._src.array import ArrayImpl
    from jaxlib import _jax

    kind: Any = ArrayImpl
    guards: Any = _jax.guard_lib
    unguarded = None, guards.TransferGuardLevel.ALLOW
    read_by_jax, begin_by_jax = (
        kind._single_device_array_to_np_array_did_copy,
        kind._copy_single_device_array_to_host_async,
    )

    def read(array: Any) -> tuple[Any, bool]:
        if takes(array) and not getattr(array, _BEGUN, False):
            states = guards.thread_local_state(), guards.global_state()
            if all(state.device_to_host in unguarded for state in states) and (found := value(array)) is not None:
                return found, True
        both: tuple[Any, bool] = read_by_jax(array)
        return both

    def begin(array: Any) -> None:
        if array.nbytes < big_bytes or not takes(array):
            begin_by_jax(array)
            setattr(array, _BEGUN, True)

    kind._single_device_array_to_np_array_did_copy, kind._copy_single_device_array_to_host_async = read, begin


def arrays_put_by(put: Callable[[Any, Any], Any], big_bytes: int) -> None:
    """Has JAX ask `put` for the array that has the values of a NumPy array of C order, from a size on, on a device; for
    None it puts them as ever, and so it does where the user guards such transfers, asks for another memory than the
    device's own one, or has several devices.

    What puts is a function of jaxlib that JAX looks up at each call.
    """
    from jax._src.array import ArrayImpl
    from jaxlib import _jax, xla_client

    jaxlib: Any = xla_client
    guards: Any = _jax.guard_lib
    unguarded = None, guards.TransferGuardLevel.ALLOW
    put_by_jax = jaxlib.batched_device_put

    def shard(kind: Any, sharding: Any, values: Sequence[Any], devices: Sequence[Any]) -> Any:
        if len(devices) != 1 or sharding.memory_kind not in (None, devices[0].default_memory().kind):
            return None
        value = getattr(values[0], "val", values[0])  # JAX has some NumPy arrays as literals
        if type(value) is not np.ndarray or value.nbytes < big_bytes or not value.flags.c_contiguous:
            return None
        if (value.dtype, value.shape) != (kind.dtype, kind.shape) or value.dtype.kind not in "biufc":
            return None
        states = guards.thread_local_state(), guards.global_state()
        if any(state.host_to_device not in unguarded for state in states):
            return None
        return put(value, devices[0])

    def batched(
        kind: Any, sharding: Any, values: Any, devices: Any, committed: bool = True, *more: Any, **by: Any
    ) -> Any:
        if (found := shard(kind, sharding, values, devices)) is not None:
            return ArrayImpl(kind, sharding, [found], committed=committed, _skip_checks=True)
        return put_by_jax(kind, sharding, values, devices, committed, *more, **by)

    jaxlib.batched_device_put = batched


def memory_of_others_unknown() -> None:
    """Has `device.memory_stats()` be None, JAX's word for not known, where jaxlib raises since the device is not one of
    this process. Programs that print them go on."""
    from jax.errors import JaxRuntimeError
    from jaxlib import _jax

    kind: Any = _jax.Device
    by_jax = kind.memory_stats

    @functools.wraps(by_jax)
    def memory_stats(device: Any) -> Any:
        try:
            return by_jax(device)
        except JaxRuntimeError as error:
            if "only supported for addressable PjRt devices" in str(error):
                return None
            raise

    kind.memory_stats = memory_stats
