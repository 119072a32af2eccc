"""Sections of a function of each device, compiled for some devices of this process, and the stacks of what is summed
between them.

A computation of some bytes takes less time than what is done around it, so that is found out beforehand: places of
values, arrays that are made once, and nothing for several devices where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pathways_ray.compat import compiled_for_each
from pathways_ray.executor.compile.sections import Section, Sum
from pathways_ray.executor.run.numbered import taker
from pathways_ray.jax_arrays import array_maker, results_made, shards_of
from pathways_ray.transport.shared_memory import aligned

Values = list[Sequence[Any]]
"""The values of a call by their numbers: of each the shards on the devices of this process."""


class Stacks:
    """The stacks of a sum: for some devices of a slice, which are at these `places`, the shards of all of their group,
    behind zeros.

    The arrays of them are made once, of memory that is filled for each call: to make an array of a few bytes takes a
    fourth of a call's time. That is right while nothing that was called before reads them. Computations as small as
    these are over within their calls; where one is not, its caller has other arrays made (`renew`). Where JAX copies
    that memory, they are made for each call.
    """

    def __init__(self, one: Sum, devices: Sequence[jax.Device], places: Sequence[int]) -> None:
        group_of = {place: number for number, group in enumerate(one.groups) for place in group}
        self._groups = one.groups
        self._where = [group_of[place] for place in places]
        self._shape, self._dtype = (1 + len(one.groups[0]), *one.type.shape), one.type.dtype
        self._zeros = math.prod(one.type.shape) * self._dtype.itemsize
        apart = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
        self._make = array_maker((len(devices) * self._shape[0], *one.type.shape), self._dtype, apart, devices)
        self.renew()

    def renew(self) -> None:
        """Has the next call be given arrays that nobody reads."""
        memory = [aligned(self._shape[0] * self._zeros) for _ in self._groups]
        for one in memory:
            one[: self._zeros] = 0
        self._rows = [one.data[self._zeros :] for one in memory]
        stacks = [one.view(self._dtype).reshape(self._shape) for one in memory]
        self._stacks = [stacks[number] for number in self._where]
        self._arrays = shards_of(self._make(self._stacks))
        lie = [array.unsafe_buffer_pointer() for array in self._arrays]
        self._are_filled = lie == [one.ctypes.data for one in self._stacks]

    def filled(self, shards: Sequence[Any]) -> Sequence[jax.Array]:
        """The stacks of these shards of the whole slice, which are arrays or bytes."""
        for row, group in zip(self._rows, self._groups, strict=True):
            row[:] = b"".join([shards[place] for place in group])
        return self._arrays if self._are_filled else shards_of(self._make([one.copy() for one in self._stacks]))


class CompiledSection:
    """A section on some devices of this process.

    Args:
        devices: in the order of the shards of values.
        options: the compiler's.
        places: those of the devices in their slice.
        hosts: of several hosts with one device each, the place of each device's host among them; else none.
    """

    def __init__(
        self,
        section: Section,
        devices: Sequence[jax.Device],
        options: dict[str, str | bool] | None,
        places: Sequence[int],
        hosts: Sequence[int] = (),
    ) -> None:
        sums = section.sums
        self.compiled = compiled_for_each(section.module, devices, options) if section.module is not None else []
        self.stacks = [Stacks(one, devices, places) for one in sums]
        self._summed, self._stacked = taker([one.value for one in sums]), [one.stack for one in sums]
        self._takes, self._gives, self._taken = section.takes, section.gives, taker(section.takes)
        makers = [results_made([(kind, SingleDeviceSharding(one)) for kind in section.types]) for one in devices]
        self._calls = [(one.execute_sharded, made) for one, made in zip(self.compiled, makers, strict=False)]
        self._cuts = _cuts(sums, hosts)
        runs = self._run_nothing, self._run_one, self._run_each
        self.run: Callable[[Values], bool] = runs[min(len(self._calls), 2)]
        """Makes the values that the section gives. Returns whether that is over."""

    def given(self, values: Values) -> bytes:
        """The values that are summed, as this host says them to others."""
        return b"".join(chain.from_iterable(self._summed(values)))

    def stack(self, values: Values) -> None:
        """Enters the stacks of what is summed over the devices of this process."""
        for number, stacks, shards in zip(self._stacked, self.stacks, self._summed(values), strict=True):
            values[number] = stacks.filled(shards)

    def stack_given(self, values: Values, every: bytes) -> None:
        """The same of what all hosts have said, in their order."""
        for number, stacks, cuts in zip(self._stacked, self.stacks, self._cuts, strict=True):
            values[number] = stacks.filled([every[cut] for cut in cuts])

    def _run_nothing(self, _: Values) -> bool:
        return True

    def _run_one(self, values: Values) -> bool:
        ((execute, made),) = self._calls
        arrays = made(execute([values[number][0] for number in self._takes]))
        for number, array in zip(self._gives, arrays, strict=True):
            values[number] = [array]
        return _is_over(arrays)

    def _run_each(self, values: Values) -> bool:
        shards: Iterable[Sequence[Any]] = zip(*self._taken(values), strict=False) if self._takes else repeat(())
        arrays = [made(execute(list(one))) for (execute, made), one in zip(self._calls, shards, strict=False)]
        for number, made_here in zip(self._gives, zip(*arrays, strict=True), strict=True):
            values[number] = made_here
        return len(self._gives) > 0 and all(made[0].is_ready() for made in arrays)


def _is_over(made: Sequence[Any]) -> bool:
    """Whether a computation that has made these is; not known of one that makes nothing."""
    return len(made) > 0 and bool(made[0].is_ready())


def _cuts(sums: Sequence[Sum], hosts: Sequence[int]) -> list[list[slice]]:
    """The places of the values of each sum, of each device, in what all hosts give: of each host in turn the values of
    each sum in turn."""
    sizes = [math.prod(one.type.shape) * one.type.dtype.itemsize for one in sums]
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    return [
        [slice(host * sum(sizes) + start, host * sum(sizes) + start + size) for host in hosts]
        for start, size in zip(starts, sizes, strict=True)
    ]
