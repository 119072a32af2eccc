"""A control plane without processes: real decisions, real messages, simulated hosts.

The `ControllerCore` and the `SchedulerCore`s are those of the runtime, and so are the outboxes and
the bytes between them. Links end in lists here, and hosts answer at once that they have the inputs of a gang and that a
launch is done. Between two readings of the clock runs the work of one process for one batch, so the CPU time in between
is that process's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from pathways_ray import limits
from pathways_ray.controller import events as to_controller
from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.clients import Clients
from pathways_ray.controller.core import ControllerCore
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.planning import answer
from pathways_ray.controller.programs import PlannedProgram, plan_program
from pathways_ray.controller.state import SendClient, SendIsland
from pathways_ray.controller.tenants import Tenant
from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Part, Recipe, Ref, Result
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from pathways_ray.scheduler import events as to_scheduler
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.transport import batcher, outboxes
from pathways_ray.transport import messages as wire
from pathways_ray.transport.links import AsyncLink

SESSION = 1
PAUSED_S = 2 * batcher.LONG_GATHER_S
"""After this time no stream pauses any more: a message leaves at once."""

STEPS = 5
"""Steps of an event loop that bring a message to the far end of its stream."""


@dataclass(frozen=True)
class Shape:
    """A cluster of equal islands, and which of them a launch runs on: one after the other in turn, or all of them."""

    hosts: int
    per_island: int
    devices_per_host: int = 8
    cross_island: bool = False

    @property
    def islands(self) -> int:
        return self.hosts // self.per_island

    def slice(self, island: int) -> PlacedSlice:
        """All devices of an island, on one axis; its number is that of the island, counted from 1."""
        first = island * self.per_island
        devices = [Device(first + h, k) for h in range(self.per_island) for k in range(self.devices_per_host)]
        return PlacedSlice.on(SliceType(island + 1, (len(devices),), ("x",)), island, devices)


def chain(name: str, slices: Sequence[PlacedSlice], array: ArrayType, layouts: Sequence[Layout]) -> Graph:
    """One computation on each slice after the other, of an array with a layout on each."""
    nodes: list[Node] = [Argument(0, array, layouts[0])]
    for place, layout in enumerate(layouts):
        nodes.append(Compute("add", 0, layout.slice, (Ref(place),), (layout,), (array,), (layout,)))
    recipe = Recipe((Part("add", "add", (Ref(-1),)),), (Ref(0),))
    return Graph(name, tuple(p.mesh for p in slices), (recipe,), (*nodes, Result((Ref(len(slices)),))))


def over(slices: Sequence[PlacedSlice]) -> Graph:
    """A chain on a vector that is sharded over all devices of each slice."""
    layouts = [Layout(placed.mesh.id, (("x",),)) for placed in slices]
    return chain("chain", slices, ArrayType((slices[0].mesh.size,), "float32"), layouts)


def planned(graph: Graph, slices: Sequence[PlacedSlice], fusion: bool = False) -> PlannedProgram:
    """A graph, planned as the controller does it."""
    return plan_program(1, SESSION, graph, {"add": b""}, {s.mesh.id: s for s in slices}, fusion=fusion)


class Sink:
    """The far end of a link: keeps batches until the next process reads them. It always has room."""

    full = False

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    def put(self, batch: bytes) -> None:
        self.batches.append(batch)

    def read(self) -> list[bytes]:
        batches, self.batches = self.batches, []
        return batches


def carrying(outbox: outboxes.Branch | outboxes.AsyncOutbox, sink: Sink) -> asyncio.Future[None]:
    """Carries the messages of an outbox to a sink, as to a link."""
    return asyncio.ensure_future(outbox.carry(cast(AsyncLink, sink)))


class Costs:
    """CPU seconds by process and bytes by link, of some launches."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.bytes: Counter[str] = Counter()

    @contextmanager
    def of(self, process: str) -> Iterator[None]:
        """Counts the CPU time of this thread meanwhile for a process."""
        before = time.thread_time()
        yield
        self.seconds[process] += time.thread_time() - before

    async def written(self, process: str) -> None:
        """Lets the messages of a process leave by its streams, and counts that; then waits until no stream pauses."""
        with self.of(process):
            for _ in range(STEPS):
                await asyncio.sleep(0)
        await asyncio.sleep(PAUSED_S)

    def note(self, link: str, batches: list[bytes]) -> list[bytes]:
        self.bytes[link] += sum(map(len, batches))
        return batches


class Scheduler:
    """One island's scheduler as `scheduler/actor.py` runs it, but for its streams.

    Args:
        report: sends a message to the controller.
    """

    def __init__(self, island: int, hosts: range, report: Callable[[wire.Message], None]) -> None:
        self.island, self.hosts, self.report = island, hosts, report
        self.core = SchedulerCore(island, hosts, limits.ISLAND_WINDOW)
        self.fan = outboxes.FanOut(self.core.order.outstanding.__len__)

    def do(self, event: to_scheduler.Event) -> None:
        for command in self.core.handle(event, time.monotonic()):
            match command:
                case to_scheduler.ToHosts(message):
                    self.fan.send(message)
                case to_scheduler.ToController(message):
                    self.report(message)

    def from_controller(self, messages: Sequence[wire.ToIsland]) -> None:
        for message in messages:
            self.do(to_scheduler.ControllerMessage(message))

    def from_host(self, host: int, data: bytes) -> None:
        for message in wire.FROM_HOST.decode_batch(data):
            self.do(to_scheduler.HostMessage(host, 1, message))


class Island:
    """A scheduler between lists: its links to the controller and to its hosts end there."""

    def __init__(self, number: int, hosts: range, in_flight: Callable[[], int]) -> None:
        self.up, self.down = Sink(), Sink()
        self.scheduler = Scheduler(number, hosts, lambda message: self.reports.send(message))
        self.reports = outboxes.AsyncOutbox(self.scheduler.core.order.outstanding.__len__)
        self.orders = outboxes.AsyncOutbox(in_flight)
        self.sinks = {host: Sink() for host in hosts}
        self.carriers = [carrying(self.scheduler.fan.open(host), sink) for host, sink in self.sinks.items()]
        self.carriers += [carrying(self.reports, self.up), carrying(self.orders, self.down)]


class ControlPlane:
    """A controller, its schedulers, and one session with a program for each island, or one over all.

    Make it inside a running event loop.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        # One session stands for as many as it takes to keep all islands busy.
        launches = Launches(parallel=True, max_in_flight=limits.MAX_LAUNCHES_IN_FLIGHT * shape.islands)
        clients = Clients(launches, fusion=False, check=lambda functions: None)
        self.controller, self.in_flight = ControllerCore(launches, clients), launches.in_flight
        hosts = [range(k * shape.per_island, (k + 1) * shape.per_island) for k in range(shape.islands)]
        self.islands = [Island(k, its, self.in_flight.__len__) for k, its in enumerate(hosts)]
        self.client, self.outcomes = outboxes.AsyncOutbox(self.in_flight.__len__), Sink()
        self.carrier = carrying(self.client, self.outcomes)
        self.made = 0
        self.joining_s, self.joining_bytes = self._join()
        self._register()

    def _handle(self, event: to_controller.Event) -> list[to_controller.Command]:
        return self.controller.handle(event, time.monotonic())

    def _join(self) -> tuple[float, int]:
        """Brings all hosts up; returns the controller's CPU seconds for the last of them, and the bytes it sent."""
        spent, commands = 0.0, list[to_controller.Command]()
        for island, end in enumerate(self.islands):
            self._handle(to_controller.IslandConnected(island, wire.IslandUp(island, "10.0.0.1:40002")))
            for host in end.sinks:
                hello = wire.HostUp(host, 1, "10.0.0.1:40000", "10.0.0.1:40001", self.shape.devices_per_host, 1)
                end.scheduler.core.handle(to_scheduler.HostConnected(hello), time.monotonic())
                before = time.thread_time()
                commands = self._handle(to_controller.IslandMessages(island, island, [hello]))
                spent = time.thread_time() - before
        return spent, sum(
            len(wire.encode([command.message])) for command in commands if isinstance(command, SendIsland)
        )

    def _register(self) -> None:
        clients, launches = self.controller.clients, self.controller.launches
        clients.open("scale", Tenant("scale"), "", "", time.monotonic())
        self._handle(to_controller.StreamOpened(SESSION))
        slices = [self.shape.slice(island) for island in range(self.shape.islands)]
        for placed in slices:
            launches.add_slice(SESSION, placed)
        programs = [slices] if self.shape.cross_island else [[placed] for placed in slices]
        self.programs = len(programs)
        for number, chained in enumerate(programs):
            graph = over(chained)
            for command in self._from_client(wire.Register(number, wire.encode(graph), {"add": b""})):
                if isinstance(command, SendIsland):
                    scheduler = self.islands[command.island].scheduler
                    scheduler.core.handle(to_scheduler.ControllerMessage(command.message), time.monotonic())
            program = launches.sessions[SESSION].programs[number]
            assert program.failure is None, program.failure
            for host in program.hosts:
                launches.ready(wire.Ready(host, program.key, 0))
            # Buffer k is the argument of program k.
            where, kind, spec = chained[0], program.arguments[0].type, (("x",),)
            self._from_client(wire.Put(number, where.mesh.id, kind, spec))
            for host in where.hosts:
                launches.stored(wire.Stored(host, SESSION, number, where.mesh.id, kind, spec))

    def _from_client(self, *messages: wire.ToController) -> list[to_controller.Command]:
        commands = self._handle(to_controller.ClientMessages(SESSION, Carrier.STREAM, 0, list(messages)))
        for command in commands:  # and those that follow
            if isinstance(command, to_controller.Plan):  # a program of many islands is planned beside the controller
                commands += self._handle(to_controller.Planned(command.call, answer(command.request)))
            elif isinstance(command, to_controller.TakeTurn):
                commands += self._handle(to_controller.Turn())
        return commands

    async def launch(self, count: int) -> Costs:
        """Takes `count` launches from the client's messages to its outcomes, and returns what each process spent."""
        costs = Costs()
        await self._admit(count, costs)
        for island in self.islands:
            batches = costs.note("controller to island", island.down.read())
            with costs.of("scheduler"):
                for data in batches:
                    island.scheduler.from_controller(wire.TO_ISLAND.decode_batch(data))
        await costs.written("scheduler")
        while answers := self._hosts(costs):
            for island in self.islands:
                with costs.of("scheduler"):
                    for host in island.sinks:
                        for data in answers.get(host, ()):
                            island.scheduler.from_host(host, data)
            await costs.written("scheduler")
        with costs.of("controller"):
            for number, island in enumerate(self.islands):
                for data in costs.note("island to controller", island.up.read()):
                    self._do(to_controller.IslandMessages(number, number, wire.FROM_ISLAND.decode_batch(data)))
        await costs.written("controller")
        costs.note("controller to client", self.outcomes.read())
        assert not self.in_flight, "a launch has no outcome"
        return costs

    async def admit(self, count: int) -> None:
        """Has launches in flight; no host answers."""
        await self._admit(count, Costs())

    async def _admit(self, count: int, costs: Costs) -> None:
        first = self.made
        self.made += count
        wanted = [
            wire.Launch(k, k % self.programs, (k % self.programs,), 1 << 20 | k) for k in range(first, first + count)
        ]
        data = wire.encode(wanted)
        costs.note("client to controller", [data])
        with costs.of("controller"):
            self._do(
                to_controller.ClientMessages(SESSION, Carrier.STREAM, len(data), wire.TO_CONTROLLER.decode_batch(data))
            )
        await costs.written("controller")

    def _do(self, event: to_controller.Event) -> None:
        for command in self._handle(event):
            match command:
                case SendIsland(island, message):
                    self.islands[island].orders.send(message)
                case SendClient(_, message):
                    self.client.send(message)

    def _hosts(self, costs: Costs) -> dict[int, list[bytes]]:
        """The answers of all hosts to their messages; decoding and encoding are counted, all hosts in one."""
        answers: dict[int, list[bytes]] = {}
        for number, island in enumerate(self.islands):
            for host, sink in island.sinks.items():
                batches = costs.note("island to host", sink.read())
                if not batches:
                    continue
                with costs.of("hosts"):
                    messages = [message for data in batches for message in wire.TO_HOST.decode_batch(data)]
                    answer = self._answer(host, number, messages)
                    if answer:
                        answers[host] = costs.note("host to island", [wire.encode(answer)])
        return answers

    def _answer(self, host: int, island: int, messages: Sequence[wire.Message]) -> list[wire.Message]:
        """In a program over all islands, every gang but the first waits for another island before it runs."""
        done = begun = [message.sequence for message in messages if isinstance(message, wire.IslandLaunch)]
        waits: list[wire.Message] = []
        if self.shape.cross_island and island > 0:
            waits = [wire.BarrierReached(host, sequence, island) for sequence in begun]
            done = [message.sequence for message in messages if isinstance(message, wire.BarrierReleased)]
        if not done:
            return waits
        # What a gang took differs from host to host, by a little.
        return [*waits, wire.Done(tuple(done), tuple(100 + (host + sequence) % 7 for sequence in done))]

    def close(self) -> None:
        for carrier in [self.carrier, *(one for island in self.islands for one in island.carriers)]:
            carrier.cancel()
