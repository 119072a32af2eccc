"""The JAX side of a prepared program on one host: its computations compiled, its edges cut and joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.calls.calls import HostCalls
from pathways_ray.executor.compile.analysis import MAX_REPORT_TEXT, analysis
from pathways_ray.executor.compile.by_device import ByDevice
from pathways_ray.executor.compile.compiler import Compiler, dtype_of, name_of
from pathways_ray.executor.data.edges import Incoming, Outgoing, copied_to
from pathways_ray.executor.data.shared_shards import joined, share
from pathways_ray.executor.run.parts import Computation as RunComputation
from pathways_ray.executor.run.parts import HostFunction, Keeps
from pathways_ray.ir.graph import host_part
from pathways_ray.ir.plan import Executable, IslandPlan, PlacedSlice, Regroup
from pathways_ray.ir.regions import box_shape, shard_boxes
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.jax_arrays import array_maker, copier, joiner, shards_of
from pathways_ray.observe.computations import Computation


class CompiledParts:
    """The `Parts` (see `prepared`) of a plan on the host of `compiler`.

    Raises:
        CompileError: from the constructor and every method.
        ProgramRefused: from the constructor, for what a tenant may not run.
    """

    def __init__(
        self,
        plan: IslandPlan,
        functions: Mapping[str, bytes],
        compiler: Compiler,
        calls: HostCalls,
        trusted: bool = False,
    ) -> None:
        self.plan = plan
        self.compiler = compiler
        self.calls = calls
        self.trusted = trusted
        self.temporary_bytes = 0
        self.queues = False
        self.keeps = compiler.backend.moving if plan.bundles else Keeps.BRIEFLY
        self._executables: list[Any] = []
        for executable in plan.executables:
            placed = plan.placed(executable.slice)
            here = compiler.host in placed.hosts
            if host_part(executable.recipe) is not None:
                self._executables.append(self._host_function(executable, functions) if here else None)
                continue
            compiled = compiler.executable(executable, placed, functions, trusted) if here else None
            self._executables.append(compiled)
            if compiled is not None:
                analysis = compiled.memory_analysis()
                self.temporary_bytes = max(self.temporary_bytes, getattr(analysis, "temp_size_in_bytes", 0) or 0)
                self.queues |= compiler.queues(compiled, placed)
                self.keeps = max(self.keeps, compiler.keeps(compiled, placed))

    def executable(self, number: int) -> RunComputation | None:
        compiled = self._executables[number]
        placed = self.plan.placed(self.plan.executables[number].slice)
        return self.compiler.called(compiled, placed) if compiled is not None else None

    def agreed(self, number: int) -> Callable[[int, int], None] | None:
        compiled = self._executables[number]
        over = compiled.over if isinstance(compiled, ByDevice) else None
        return over.agreement.at if over is not None else None

    def host_function(self, number: int) -> HostFunction:
        function: HostFunction = self._executables[number]
        return function

    def analyses(self, runs: Mapping[int, int], text: bool) -> tuple[Computation, ...]:
        found: list[Computation] = []
        room = MAX_REPORT_TEXT
        for number, (executable, compiled) in enumerate(zip(self.plan.executables, self._executables, strict=True)):
            if compiled is None or host_part(executable.recipe) is not None:
                continue
            name, cost = name_of(executable), self.compiler.cost_of(compiled)
            found.append(analysis(compiled, number, name, runs.get(number, 0), text, cost, room))
            room = max(0, room - len(found[-1].text))
        return tuple(found)

    def _host_function(self, executable: Executable, functions: Mapping[str, bytes]) -> HostFunction:
        part = host_part(executable.recipe)
        assert part is not None
        if not self.trusted:
            raise ProgramRefused(f"{part.name} is a host function, which only tenants that the operator trusts may run")
        placed = self.plan.placed(executable.slice)
        shardings = [self.compiler.sharding(placed, layout.spec) for layout in executable.output_layouts]
        devices = [self.compiler.devices[d.index] for d in placed.devices if d.host == self.compiler.host]
        return self.calls.function(executable, part, placed, functions[part.function], shardings, devices)

    def argument(self, kind: ArrayType, layout: Layout) -> Callable[[bytes], Any]:
        placed = self.plan.placed(layout.slice)
        boxes = shard_boxes(kind, layout.spec, placed.mesh)
        here = [(box, d.index) for box, d in zip(boxes, placed.devices, strict=True) if d.host == self.compiler.host]
        cuts = [tuple(slice(start, stop) for start, stop in box) for box, _ in here]
        devices = [self.compiler.devices[index] for _, index in here]
        dtype = dtype_of(kind.dtype)
        make = array_maker(kind.shape, dtype, self.compiler.sharding(placed, layout.spec), devices)
        is_cut = any(box_shape(box) != kind.shape for box, _ in here)

        def made(data: bytes) -> jax.Array:
            whole = np.ndarray(kind.shape, dtype, data)
            if not is_cut:
                return make([whole] * len(devices))
            return make([np.ascontiguousarray(whole[cut]).reshape(whole[cut].shape) for cut in cuts])

        return made

    def reshard(self, bundle: int) -> Any:
        return self.compiler.reshard(self.plan.bundles[bundle].edges, *self._ends(bundle))

    def regroup(self, step: Regroup) -> Callable[..., Any]:
        plan, host = self.plan, self.compiler.host
        target = plan.placed(step.layout.slice)
        taken = []
        for (number, place), device in zip(step.shards, target.devices, strict=True):
            if device.host == host:
                source = plan.placed(plan.slots[step.sources[number]])
                taken.append((number, sum(d.host == host for d in source.devices[:place])))
        sharding = self.compiler.sharding(target, step.layout.spec)
        join = joiner(step.type.shape, dtype_of(step.type.dtype), sharding)

        def made(*arrays: jax.Array) -> jax.Array:
            shards = [shards_of(arrays[number])[place] for number, place in taken]
            for (number, _), shard in zip(taken, shards, strict=True):
                share(shard, arrays[number])
            return joined(join(shards), shards)

        return made

    def copies(self, bundles: Sequence[int]) -> RunComputation | None:
        shardings = []
        for number in bundles:
            found = copied_to(self.plan.bundles[number], *self._ends(number), self.compiler.host, self.compiler)
            if found is None:
                return None
            shardings += found
        return copier(shardings)

    def outgoing(self, bundle: int) -> Outgoing:
        return Outgoing(self.plan.bundles[bundle], bundle, *self._ends(bundle), self.compiler.host, self.compiler)

    def incoming(self, bundle: int) -> Incoming:
        return Incoming(self.plan.bundles[bundle], bundle, *self._ends(bundle), self.compiler.host, self.compiler)

    def _ends(self, bundle: int) -> tuple[PlacedSlice, PlacedSlice]:
        made = self.plan.bundles[bundle]
        return self.plan.placed(made.source), self.plan.placed(made.target)
