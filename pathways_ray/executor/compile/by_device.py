"""Small computations of several devices of a host, called on each of them by itself.

XLA's CPU client hands the part of each device to a thread of its own and waits for all of them, also where none needs
another: 140 us on four devices, 250 where its threads have slept. One device's computation runs in the thread that
calls it; four of them take 31 and 87. Formulas are element-wise: where all arrays lie alike, each device makes its
shards of the results from its shards of the arguments, by the same operations, and with the same bits. Functions that
were written for each device come taken apart at their sums (`sections`); what is summed goes by the host's memory, and
from one host of a machine to the other where they agree on that (`agreement`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from pathways_ray.errors import Failure
from pathways_ray.executor.compile.agreement import RESTS, Agreement
from pathways_ray.executor.compile.backend import Function
from pathways_ray.executor.compile.compiled_sections import CompiledSection, Values
from pathways_ray.executor.compile.composition import Calls
from pathways_ray.executor.compile.divisions import without_divisions_by_zero
from pathways_ray.executor.compile.sections import Section, Sections
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.formulas.formula import BROADCAST, CONSTRAIN
from pathways_ray.ir.graph import Part
from pathways_ray.ir.plan import Executable
from pathways_ray.ir.types import REPLICATED, Spec, canonical_spec
from pathways_ray.jax_arrays import array_maker, copier, joiner, shards_of
from pathways_ray.jax_types import partition_spec
from pathways_ray.joint_exports import only_called

ARGUMENTS_LIMIT_S = 0.001
"""Time for which a call that sums over hosts waits for arguments that are still computed."""


def of_one_device(executable: Executable, calls: Calls, mesh: Mesh, most: int) -> Calls | None:
    """The functions of a computation as each device runs them on its shards. None where devices may exchange values,
    where it takes the memory of arguments, or where a device makes `most` elements or more."""
    if not most:
        return None
    found: dict[str, FormulaCall] = {}
    for name, call in calls.items():
        if not isinstance(call, FormulaCall):
            return None
        found[name] = call
    parts = executable.recipe.parts
    layouts = _layouts(executable, found)
    if executable.donated or not executable.inputs or not executable.outputs or len(layouts) > 1:
        return None
    lies = NamedSharding(mesh, partition_spec(next(iter(layouts), REPLICATED)))
    shapes = {call.formula.shape for call in found.values()}
    shard = {shape: lies.shard_shape(shape) if shape else shape for shape in shapes}
    shards = {name: call.on_shards(shard[call.formula.shape]) for name, call in found.items()}
    elements = 0
    for part in parts:
        if not isinstance(part, Part):  # a loop, of any length
            return None
        elements += _elements(shards[part.function])
    return shards if elements < most else None


def _layouts(executable: Executable, calls: dict[str, FormulaCall]) -> set[Spec]:
    """The layouts of all arrays with dimensions: arguments, results, and what formulas say of values in between."""
    types = [*zip(executable.inputs, executable.input_layouts, strict=True)]
    types += zip(executable.outputs, executable.output_layouts, strict=True)
    found = {canonical_spec(layout.spec) for kind, layout in types if kind.shape}
    for call in calls.values():
        first = len(call.kinds) - len(call.formula.operations)
        for operation, kind in zip(call.formula.operations, call.kinds[first:], strict=True):
            if operation.name == CONSTRAIN and kind.is_array and call.formula.shape:
                found.add(canonical_spec(operation.spec))
    return found


def _elements(call: FormulaCall) -> int:
    """The elements that a formula's operations make."""
    size = math.prod(call.formula.shape)
    first = len(call.kinds) - len(call.formula.operations)
    made = zip(call.formula.operations, call.kinds[first:], strict=True)
    return sum(size if kind.is_array else 1 for one, kind in made if one.name not in (BROADCAST, CONSTRAIN))


def one_section(function: Function, arguments: Sequence[jax.ShapeDtypeStruct], device: jax.Device) -> Sections:
    """A function of the shards of one device as a section.

    Args:
        arguments: the types of whole arrays, with their shardings.
    """
    lies = SingleDeviceSharding(device)
    shards = [jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype, sharding=lies) for a in arguments]
    lowered = jax.jit(function, out_shardings=lies, keep_unused=True).lower(*shards)
    lowered = without_divisions_by_zero(only_called(lowered))
    count, types = len(arguments), tuple(jax.tree.leaves(lowered.out_info))
    gives = tuple(range(count, count + len(types)))
    return Sections((Section((), tuple(range(count)), gives, types, lowered.compiler_ir("stablehlo")),), gives)


class OverHosts(NamedTuple):
    """The hosts of a computation that has one device on each: their `agreement`, the place of this host's device in the
    slice, and for each device there the place of its host among the hosts."""

    agreement: Agreement
    place: int
    hosts: tuple[int, ...]


class ByDevice:
    """A computation of several devices of this process, called on each by itself, one section behind the other.

    Args:
        sections: those of the function of one device.
        devices: in their order in the shardings.
        outputs: the types of its results as whole arrays, with their shardings; one at least.
        options: the compiler's.
        whole: the same as one computation of all devices. It is called where arguments are not there yet, for which
            sums would wait, or have failed; None where there are no sums.
        over: the other hosts with which values are summed; None where all devices are of this process.
    """

    def __init__(
        self,
        sections: Sections,
        devices: Sequence[jax.Device],
        outputs: Sequence[jax.ShapeDtypeStruct],
        options: dict[str, str | bool] | None,
        whole: Any = None,
        over: OverHosts | None = None,
    ) -> None:
        self._whole, self.over = whole, over
        self._rests = 0
        self._are_same = sections.are_same
        join = functools.partial(spreader, devices=devices) if sections.are_same and len(devices) > 1 else joiner
        joins = [join(a.shape, a.dtype, a.sharding) for a in outputs]
        self._joins = [*zip(sections.results, joins, strict=True)]
        self._size = 1 + max(
            max((0, *section.gives, *(one.stack for one in section.sums))) for section in sections.sections
        )
        places = [over.place] if over is not None else range(len(devices))
        hosts = over.hosts if over is not None else ()
        self._sections = []
        for section in sections.sections:
            where = devices[:1] if sections.are_same and section is sections.sections[-1] else devices
            self._sections.append(CompiledSection(section, where, options, places[: len(where)], hosts))
        self._stacks = [stacks for section in self._sections for stacks in section.stacks]
        self._reads = False
        """Whether what was called before may yet read the stacks."""
        self._one = self._sections[-1].compiled[0]
        self._end = jax.device_put(np.float32(0), devices[0])
        self._copied = copier([SingleDeviceSharding(device) for device in devices])

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        over = self.over
        try:
            there = self._whole is None or all(map(_has_value, arrays)) or self._come(arrays)
            outputs = self._outputs(arrays) if there else None
        except Exception:
            if over is None:
                raise
            if over.agreement.has_begun:
                over.agreement.break_off()
                raise
            there, outputs = False, None  # XLA says the same, where the other hosts wait for this one
        if outputs is None:
            if over is not None and not there:
                over.agreement.leave()
            made: Sequence[Any] = self._whole(*arrays)
            return made
        if self._are_same or _has_value(outputs[0]):
            return [*outputs, self._end]
        # The arguments were not there. The results and a copy of one of them will be, or will have failed, at once.
        _, join = self._joins[0]
        return [*outputs, join(self._copied(*shards_of(outputs[0])))]

    def _come(self, arrays: Sequence[Any]) -> bool:
        """Waits a moment for arguments that are still computed: where one call follows the other, each as one would
        have the next be one as well. Returns whether they are there."""
        if self.over is None or self._rests:
            self._rests = max(0, self._rests - 1)
            return False
        until = time.perf_counter() + ARGUMENTS_LIMIT_S
        while not all(isinstance(array, Failure) or array.is_ready() for array in arrays):
            if time.perf_counter() > until:
                self._rests = RESTS
                return False
            time.sleep(ARGUMENTS_LIMIT_S / 32)
        return all(map(_has_value, arrays))

    def _outputs(self, arrays: Sequence[Any]) -> list[Any] | None:
        """The results; None where the hosts have agreed on one call."""
        agreement = self.over.agreement if self.over is not None else None
        values: Values = [*map(shards_of, arrays)]
        values += [()] * (self._size - len(values))
        if self._reads:
            for one in self._stacks:
                one.renew()
        exchanged, is_over, self._reads = False, True, bool(self._stacks)
        for section in self._sections:
            if not section.stacks:
                pass
            elif agreement is None:
                section.stack(values)
            else:
                mine = section.given(values)
                every = agreement.exchange(mine) if exchanged else agreement.agree(mine)
                if every is None:
                    self._reads = False
                    return None
                exchanged = True
                section.stack_given(values, every)
            is_over = section.run(values) and is_over
        self._reads = self._reads and not is_over
        return [join(values[number]) for number, join in self._joins]

    def as_text(self) -> str:
        return str(self._one.get_hlo_text() if self._whole is None else self._whole.as_text())

    def cost_analysis(self) -> Any:
        return (self._one if self._whole is None else self._whole).cost_analysis()

    def memory_analysis(self) -> Any:
        return self._one.get_compiled_memory_stats() if self._whole is None else self._whole.memory_analysis()


def _has_value(array: Any) -> bool:
    """Whether an array is computed, and did not fail. To read one that failed would end the process. What stands in the
    place of one has none."""
    if isinstance(array, Failure) or not array.is_ready():
        return False
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def spreader(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding, devices: Sequence[jax.Device]
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Makes what makes an array of which all devices have the same shard, of that of one."""
    make = array_maker(shape, dtype, sharding, devices)
    return lambda shards: make([np.asarray(shards[0])] * len(devices))
