"""A program made ready on a simulated host: computations on numbers, edges that follow the real exchange of pieces."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.parts import Computation, HostFunction, Keeps, Store, first_failure
from pathways_ray.executor.run.prepared import PreparedProgram, RunnableStep
from pathways_ray.executor.run.steps import Slots
from pathways_ray.ir.exchange import exchange
from pathways_ray.ir.graph import functions_in
from pathways_ray.ir.plan import Bundle, Execute, IslandPlan, PlacedSlice, Regroup, Reshard, Step, transfer_id
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.observe.computations import Computation as Analysis
from pathways_ray.simulation.calls import SimulatedCalls
from pathways_ray.simulation.devices import Devices, Identity, Work
from pathways_ray.simulation.transfer import Piece, Transfer
from pathways_ray.simulation.values import (
    ENDLESS,
    LOOP,
    POISON,
    Future,
    agreed,
    flaw_of,
    is_divergent,
    is_poisoned,
    named,
    run_recipe,
    value_in,
    when_all_ready,
)

_PLAN = msgspec.msgpack.Decoder(IslandPlan)

SHORTEST_S, LONGEST_S = 0.0002, 0.004
"""Device time of a gang, by its function; one with `LOOP` in its name is as short as can be."""


@functools.lru_cache(maxsize=256)
def decoded(plan: bytes) -> IslandPlan:
    """All hosts of an island get the same bytes; they share the frozen result."""
    return _PLAN.decode(plan)


def functions_on(plan: IslandPlan, host: int) -> tuple[str, ...]:
    """The functions that a host compiles of a plan; it may lack the others."""
    here = [one for one in plan.executables if host in plan.placed(one.slice).hosts]
    return tuple(part.function for one in here for part in functions_in(one.recipe.parts))


class SimulatedProgram(PreparedProgram):
    """Notes which launch is being enqueued: devices want to know, and real computations need not."""

    parts: SimulatedParts

    def _prepare(self, step: Step) -> RunnableStep:
        if isinstance(step, Execute):
            self.parts.node = step.node
        elif isinstance(step, Reshard):
            self.parts.node = -1 - step.bundle
        return super()._prepare(step)

    def run(self, slots: Slots, first: int, last: int) -> None:
        self.parts.launch = slots.launch.sequence
        super().run(slots, first, last)

    def finish(self, slots: Slots) -> list[Any]:
        launch = slots.launch
        for slot, number in self.plan.results:
            self.parts.made(launch.session, launch.results + number, slots.values[slot])
        return super().finish(slots)


class SimulatedParts:
    """The `Parts` of a plan on one simulated host."""

    temporary_bytes = 0
    queues = True
    keeps = Keeps.BRIEFLY

    def __init__(
        self,
        plan: IslandPlan,
        devices: Devices,
        transfer: Transfer,
        calls: SimulatedCalls,
        made: Callable[[int, int, Any], None],
    ) -> None:
        self.plan = plan
        self.calls = calls
        self.made = made
        self.host = devices.host
        self.devices = devices
        self.transfer = transfer
        self.node = 0
        self.launch = 0

    def program(self, plan: HostPlan, store: Store) -> SimulatedProgram:
        return SimulatedProgram(plan, self, store, self.transfer)

    def agreed(self, number: int) -> None:
        return None

    def executable(self, number: int) -> Computation | None:
        executable = self.plan.executables[number]
        if self.host not in self.plan.placed(executable.slice).hosts:
            return None
        recipe = executable.recipe
        function = next(functions_in(recipe.parts)).function
        digest = named(function)
        seconds = SHORTEST_S + (LONGEST_S - SHORTEST_S) * (digest % 1000) / 1000
        if LOOP in function:
            seconds = SHORTEST_S
        if flaw_of(recipe) == ENDLESS:
            seconds = math.inf

        def compute(inputs: list[int]) -> list[int] | Failure:
            return Failure("ExecutionError", POISON) if is_poisoned(recipe) else [*run_recipe(recipe, inputs), 0]

        placed = self.plan.placed(executable.slice)
        missing = is_divergent(recipe) and self.host == placed.hosts[-1]
        outputs = len(executable.outputs) + 1  # and the end
        return self._computation(placed, outputs, executable.donated, compute, seconds, missing)

    def analyses(self, runs: Mapping[int, int], text: bool) -> tuple[Analysis, ...]:
        return tuple(Analysis(k, str(k), times) for k, times in runs.items() if self.executable(k) is not None)

    def host_function(self, number: int) -> HostFunction:
        executable = self.plan.executables[number]
        return self.calls.function(executable, self.plan.placed(executable.slice))

    def reshard(self, bundle: int) -> Computation:
        made = self.plan.bundles[bundle]
        source = self.plan.placed(made.source)
        return self._computation(source, len(made.edges), (), lambda inputs: inputs, SHORTEST_S)

    def argument(self, kind: ArrayType, layout: Layout) -> Callable[[bytes], Future]:
        here = [device.index for device in self.plan.placed(layout.slice).devices if device.host == self.host]
        return lambda data: Future.of(dict.fromkeys(here, value_in(data)))

    def regroup(self, step: Regroup) -> Computation:
        target = self.plan.placed(step.layout.slice).devices
        taken = [(d.index, number) for d, (number, _) in zip(target, step.shards, strict=True) if d.host == self.host]

        def made(*arrays: Any) -> Future:
            if any(arrays[number].deleted for _, number in taken):
                raise RuntimeError("Array has been deleted")
            found = Future()
            sources = [arrays[number] for _, number in taken]

            def settle() -> None:
                failure = next((array.error for array in sources if array.error is not None), None)
                shards = {device: arrays[number].memory().get(device, 0) for device, number in taken}
                found.settle({} if failure is not None else shards, failure)

            when_all_ready(sources, settle)
            return found

        return made

    def refusal(self) -> str:
        """The reason for which this host does not compile the plan; "" if it does."""
        last = (e for e in self.plan.executables if self.host == self.plan.placed(e.slice).hosts[-1])
        return "a device may miss its collectives" if any(is_divergent(e.recipe) for e in last) else ""

    @property
    def flaw(self) -> str:
        """The flaw of the functions that this host compiles; "" if they have none."""
        here = (e for e in self.plan.executables if self.host in self.plan.placed(e.slice).hosts)
        return next((flaw for executable in here if (flaw := flaw_of(executable.recipe))), "")

    def _computation(
        self,
        placed: PlacedSlice,
        outputs: int,
        donated: tuple[int, ...],
        compute: Callable[[list[int]], list[int] | Failure],
        seconds: float,
        missing: bool = False,
    ) -> Computation:
        """A gang's part here; one that is `missing` from its collective runs by itself."""
        node = self.node
        local = tuple(d.index for d in placed.devices if d.host == self.host)
        clique = tuple(d.host * 64 + d.index for d in placed.devices)
        hosts = (self.host,) if missing else placed.hosts

        def run(*inputs: Any) -> list[Future]:
            for value in inputs:
                if not isinstance(value, Future):
                    raise TypeError(f"no array: {value}")
                if value.deleted:
                    raise RuntimeError("Array has been deleted")
                if value.misfit:
                    raise TypeError("the computation was compiled for another type")
            for k in donated:
                inputs[k].deleted = True
            made = [Future() for _ in range(outputs)]
            gang: Identity = (self.launch, node)
            work = Work(gang, clique, hosts, local, inputs, made, donated, compute, seconds, self.devices)
            self.devices.enqueue(work)
            return made

        return run

    def copies(self, bundles: Sequence[int]) -> Computation | None:
        """As `jax_parts` has it: each device takes the shard of the one in its place."""
        places: list[dict[int, int]] = []
        for number in bundles:
            bundle, source, target = self._ends(number)
            if not all(_exchange(edge, source, target).is_copy(source, target) for edge in bundle.edges):
                return None
            taken = {to.index: of.index for of, to in zip(source.devices, target.devices, strict=True)}
            places += [taken] * len(bundle.edges)

        def run(*arrays: Any) -> list[Future]:
            for value in arrays:
                if not isinstance(value, Future):
                    raise TypeError(f"no array: {value}")
                if value.deleted:
                    raise RuntimeError("Array has been deleted")
            return [array.copied(taken) for array, taken in zip(arrays, places, strict=True)]

        return run

    def outgoing(self, bundle: int) -> SimulatedOutgoing:
        return SimulatedOutgoing(bundle, self.host, *self._ends(bundle))

    def incoming(self, bundle: int) -> SimulatedIncoming:
        return SimulatedIncoming(bundle, self.host, *self._ends(bundle))

    def _ends(self, bundle: int) -> tuple[Bundle, PlacedSlice, PlacedSlice]:
        made = self.plan.bundles[bundle]
        return made, self.plan.placed(made.source), self.plan.placed(made.target)


_exchange = functools.lru_cache(maxsize=512)(exchange)


class SimulatedOutgoing:
    """Cuts and serves the pieces that `exchange` names, those of all edges of a bundle at once."""

    def __init__(self, number: int, host: int, bundle: Bundle, source: PlacedSlice, target: PlacedSlice) -> None:
        self.number, self.host = number, host
        self.lists: dict[int, list[tuple[int, int, bool]]] = {}
        for place, edge in enumerate(bundle.edges):
            made = _exchange(edge, source, target)
            for (sender, receiver), parcels in made.parcels.items():
                for parcel in parcels if sender == host else ():
                    stays = source.devices[parcel.source] == target.devices[parcel.landing]
                    whole = parcel.box == made.source_boxes[parcel.source] and (receiver != host or stays)
                    device = source.devices[parcel.source].index
                    self.lists.setdefault(receiver, []).append((place, device, whole))
        self.lends = {place for pieces in self.lists.values() for place, _, whole in pieces if whole}

    def send(self, values: Sequence[Any] | Failure, launch: int, transfer: Transfer) -> list[Any] | Failure:
        reached = [to for to in self.lists if to == self.host or transfer.reaches(to, launch)]
        if isinstance(values, Failure) or any(isinstance(value, Failure) for value in values):
            failed = first_failure(values)
            for receiver in reached:
                if receiver != self.host:
                    transfer.serve(transfer_id(launch, self.number, receiver), failed)
            return failed
        if any(value.deleted for value in values):
            raise RuntimeError("Array has been deleted")
        local: list[Any] = []
        for receiver in reached:
            parcels = self.lists[receiver]
            pieces = [Piece(values[place], device, whole) for place, device, whole in parcels]
            for place in self.lends:
                values[place].lent = True
            if receiver == self.host:
                local = list(pieces)
                continue
            transfer.serve(transfer_id(launch, self.number, receiver), list(pieces))
        return local

    def take_back(self, launch: int, failure: Failure, transfer: Transfer) -> None:
        for receiver in self.lists:
            if receiver != self.host:
                transfer.serve(transfer_id(launch, self.number, receiver), failure)


class SimulatedIncoming:
    """Pulls the pieces of a bundle and puts shards together from them."""

    def __init__(self, number: int, host: int, bundle: Bundle, source: PlacedSlice, target: PlacedSlice) -> None:
        self.number, self.host = number, host
        self.wanted: dict[int, int] = {}
        self.shards: list[dict[int, list[tuple[int, int]]]] = []
        before: dict[int, int] = {}
        for edge in bundle.edges:
            made = _exchange(edge, source, target)
            self.shards.append(
                {
                    device.index: [(s, before.get(s, 0) + number) for s, number, _ in made.assembly.get(k, [])]
                    for k, device in enumerate(target.devices)
                    if device.host == host
                }
            )
            for (sender, receiver), parcels in made.parcels.items():
                if receiver == host:
                    before[sender] = before.get(sender, 0) + len(parcels)
        self.wanted = {sender: count for sender, count in before.items() if sender != host}

    def post(self, launch: int, transfer: Transfer) -> dict[int, list[Any] | Failure]:
        name = transfer_id(launch, self.number, self.host)
        return {sender: transfer.pull(sender, name, count) for sender, count in self.wanted.items()}

    def assemble(self, pulled: dict[int, list[Any] | Failure], local: list[Any] | Failure | None) -> Any:
        sources: dict[int, list[Any]] = {}
        for sender, pieces in (*pulled.items(), (self.host, local)):
            if isinstance(pieces, Failure):
                return pieces
            if pieces is not None:
                sources[sender] = pieces
        return [self._assembled(shards, sources) for shards in self.shards]

    def _assembled(self, shards: dict[int, list[tuple[int, int]]], sources: dict[int, list[Any]]) -> Future:
        made = Future()
        needed = list(dict.fromkeys(key for shard in shards.values() for key in shard))
        # What lies here already may still be computed here; only what comes from others has to be there by now.
        made.remote = any(not sources[s][n].ready for s, n in needed if s != self.host)
        parts = [sources[sender][number] for sender, number in needed]
        arrays = [piece.array if isinstance(piece, Piece) else piece for piece in parts]
        if any(isinstance(piece, Piece) and piece.whole and piece.array.deleted for piece in parts):
            raise RuntimeError("Array has been deleted")

        def value_of(piece: Any) -> int:
            return piece.read() if isinstance(piece, Piece) else piece.shards[0]

        def settle() -> None:
            failure = next((array.error for array in arrays if array.error is not None), None)
            if failure is not None:
                made.settle({}, failure)
                return
            made.settle(
                {
                    device: agreed(value_of(sources[sender][number]) for sender, number in shard)
                    for device, shard in shards.items()
                }
            )

        when_all_ready(arrays, settle)
        return made
