"""A session without a cluster: programs are planned and run by the executor's own parts, in this process, at once.

So a proxy can be tested with JAX's own client and no Ray: everything but the control plane is what ships.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array import Array
from pathways_ray.client.array_pieces import ArrayPipe, Given
from pathways_ray.client.buffer import DELETED, READY, Buffer, BufferRecord
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import Failure, PathwaysError, Unschedulable, from_failure
from pathways_ray.executor.calls.calls import HostCalls
from pathways_ray.executor.compile.compiler import Compiler, dtype_of
from pathways_ray.executor.compile.jax_parts import CompiledParts
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.passes import lower
from pathways_ray.ir.passes.plan_islands import plan_islands
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import SliceType
from pathways_ray.transport.local_sockets import NotLocal
from pathways_ray.transport.messages import Explained, IslandLaunch
from pathways_ray.transport.pipes import HostPipe
from pathways_ray.transport.shared_memory import SharedFile, aligned

SESSION = 1


class Transfers:
    """What steps ask of a host's peers, of which there are none."""

    def own(self, array: Any) -> Any:
        return array

    def copy(self, array: Any) -> Any:
        return jax.numpy.copy(array)

    def is_consumed(self, array: Any) -> bool:
        return isinstance(array, jax.Array) and array.is_deleted()


class LocalSession:
    """Stands in for `Session`, on CPU devices of this process."""

    platforms = ("cpu",)
    trusted = True

    def __init__(self, devices: int, broken: Callable[[str], str] = lambda name: "") -> None:
        local = jax.local_devices(backend="cpu")[:devices]
        self.compiler = Compiler(0, local, {0: local})
        self.compiler.sandbox.check = lambda *_: None  # type: ignore[method-assign]
        self.store = BufferStore()
        self.broken = broken
        self.closed_because = ""
        self.near = True
        self.places: dict[int, PlacedSlice] = {}
        self.prepared: dict[int, PreparedProgram] = {}
        self.donations: list[int] = []
        self.calls = HostCalls(0)
        self._numbers = itertools.count(1)
        self._watchers: list[Callable[[], None]] = []
        self.watch = self._watchers.append
        self.answers = os.eventfd(0)  # which never has any

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.answers)

    def read_answers(self) -> None:
        """There are none."""

    def ask_for_shard(self, array: Array, place: int, done: Any) -> Any:
        """Answers at once for what is small and there; the rest is to be fetched."""
        if array._buffer.record.failure is not None or array._type.array.nbytes > 1 << 14:
            return None
        done(self.fetch_shard(array, place))
        return self

    def take_back(self, question: Any) -> bool:
        """Not possible: it was answered."""
        return False

    # --- slices -------------------------------------------------------------------------------------------------------

    def whole(self) -> VirtualSlice:
        return self._slice((len(self.compiler.devices),), ("x",), range(len(self.compiler.devices)))

    def wholes(self, islands: int) -> list[VirtualSlice]:
        """All devices, as slices of as many islands."""
        size = len(self.compiler.devices) // islands
        return [self._slice((size,), ("x",), range(k * size, (k + 1) * size)) for k in range(islands)]

    def part_of(
        self, whole: VirtualSlice, places: Sequence[int], shape: Sequence[int], axes: Sequence[str]
    ) -> VirtualSlice:
        return self._slice(tuple(shape), tuple(axes), [whole.placed.devices[place].index for place in places])

    def _slice(self, shape: tuple[int, ...], axes: tuple[str, ...], devices: Sequence[int]) -> VirtualSlice:
        number = next(self._numbers)
        if any(device >= len(self.compiler.devices) for device in devices):
            raise Unschedulable("no such device")
        placed = PlacedSlice.on(SliceType(number, shape, axes), 0, [Device(0, k) for k in devices])
        self.places[number] = placed
        return VirtualSlice(self, placed, "")  # type: ignore[arg-type]

    # --- arrays -------------------------------------------------------------------------------------------------------

    def _array(self, number: int, kind: ArgumentType, failure: Failure | None = None) -> Array:
        record = BufferRecord(number, READY)
        if failure is not None:
            record.fail(failure)
        return Array(Buffer(self, record), kind)  # type: ignore[arg-type]

    def takes_pipes(self, kind: ArgumentType) -> bool:
        return self.near

    def upload(self, array: Given, kind: ArgumentType) -> Array:
        assert kind.slice is not None
        if isinstance(array, ArrayPipe):
            if not self.near:
                raise NotLocal("the host is on another machine")
            whole = aligned(math.prod(array.shape) * array.dtype.itemsize)
            HostPipe(array.end).read([whole])
            array = whole.view(array.dtype).reshape(array.shape)
        array = array if isinstance(array, np.ndarray) else array.array()
        sharding = self.compiler.sharding(kind.slice.placed, kind.spec)
        stored = array.view(dtype_of(kind.array.dtype)) if array.size else array.astype(dtype_of(kind.array.dtype))
        number = next(self._numbers)
        self.store.put(SESSION, number, jax.device_put(np.array(stored), sharding))
        return self._array(number, kind)

    def fetch_shard(self, array: Array, place: int, into: SharedFile | None = None) -> np.ndarray[Any, Any]:
        record = array._buffer.record
        if record.failure is not None:
            raise from_failure(record.failure)
        shard = np.asarray(self.store.get(SESSION, record.id)._arrays[place])  # type: ignore[union-attr]
        if into is not None:
            into.check(shard.nbytes)
            into.write(shard, 0)
        return shard.view(array.dtype) if shard.size else shard.astype(array.dtype)

    def free(self, record: BufferRecord) -> None:
        self.store.drop(SESSION, (record.id,))

    # --- programs -----------------------------------------------------------------------------------------------------

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int:
        number = next(self._numbers)
        (plan,) = plan_islands(lower(graph), self.places)
        parts = CompiledParts(plan, functions, self.compiler, self.calls, trusted=True)
        self.prepared[number] = PreparedProgram(HostPlan(plan, 0, False), parts, self.store, Transfers())
        return number

    def explain(self, program: int, graph: bytes) -> Explained:
        return Explained("", "", {0: self.prepared[program].temporary_bytes})

    def launch(
        self,
        program: int,
        arguments: list[BufferRecord],
        results: tuple[ArgumentType, ...],
        donated: Sequence[BufferRecord] = (),
        why: str = "",
    ) -> list[Array]:
        if self.closed_because:
            raise PathwaysError(self.closed_because)
        prepared = self.prepared[program]
        first = next(self._numbers)
        for _ in results[1:]:
            next(self._numbers)
        self.donations.append(len(donated))
        launch = IslandLaunch(first, SESSION, program, tuple(record.id for record in arguments), first)
        slots = prepared.start(launch, ())
        first_step = 0
        for number, step in enumerate([*prepared.steps_of(launch), None]):
            if step is not None:
                continue
            if number > first_step:  # up to a barrier, or the end
                prepared.run(slots, first_step, number)
            first_step = number + 1
            for call in slots.calls.values():
                if not isinstance(call, Failure):
                    call.block_until_ready()
        values = prepared.finish(slots)
        name = prepared.plan.plan.name
        failure = next((value for value in values if isinstance(value, Failure)), None)
        if broken := self.broken(name):
            failure = Failure("HostLost", broken)
            for k in range(len(results)):
                self.store.put(SESSION, first + k, failure)
        for record in donated:
            record.state = DELETED
        return [self._array(first + k, kind, failure) for k, kind in enumerate(results)]

    def close(self) -> None:
        self.closed_because = self.closed_because or "it was closed"
        self.store.drop_session(SESSION)
        self.calls.end(SESSION)

    def end(self, reason: str) -> None:
        """Ends the session as the loss of the controller would."""
        self.closed_because = reason
        for watcher in self._watchers:
            watcher()
