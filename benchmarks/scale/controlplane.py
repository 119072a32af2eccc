"""A control plane without processes: real decisions, real messages, simulated hosts.

The controller's `Launches` and the schedulers' `SchedulerCore` are those of the runtime, and so are the outboxes and
the bytes between them. Links end in lists here, and hosts answer at once that they have the inputs of a gang and that a
launch is done. Between two readings of the clock runs the work of one process for one batch, so the CPU time in between
is that process's.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pathways_ray import limits
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.programs import PlannedProgram, plan_program
from pathways_ray.controller.state import SendIsland
from pathways_ray.ir.graph import Argument, Compute, Graph, Node, Part, Recipe, Ref, Result
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.scheduler.events import ControllerMessage, Event, HostConnected, HostMessage, ToController, ToHosts
from pathways_ray.transport import batcher, outboxes
from pathways_ray.transport.links import AsyncLink
from pathways_ray.transport.messages import (
    FROM_HOST,
    FROM_ISLAND,
    TO_CONTROLLER,
    TO_HOST,
    TO_ISLAND,
    BarrierReached,
    BarrierReleased,
    Done,
    HostUp,
    IslandLaunch,
    Launch,
    Message,
    Put,
    Ready,
    encode,
)

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


def chain(slices: list[PlacedSlice]) -> Graph:
    """A vector that is sharded over all devices, and one computation on each slice after the other."""
    array = ArrayType((slices[0].mesh.size,), "float32")
    cut = (("x",),)
    layouts = [Layout(placed.mesh.id, cut) for placed in slices]
    nodes: list[Node] = [Argument(0, array, layouts[0])]
    for place, layout in enumerate(layouts):
        nodes.append(Compute("add", 0, layout.slice, (Ref(place),), (layout,), (array,), (layout,)))
    recipe = Recipe((Part("add", "add", (Ref(-1),)),), (Ref(0),))
    return Graph("chain", tuple(p.mesh for p in slices), (recipe,), (*nodes, Result((Ref(len(slices)),))))


def planned(key: int, slices: list[PlacedSlice]) -> PlannedProgram:
    """A chain over these slices, planned by the controller."""
    return plan_program(key, SESSION, chain(slices), {"add": b""}, {s.mesh.id: s for s in slices}, fusion=False)


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
    """One island's scheduler as `scheduler/actor.py` runs it, between lists."""

    def __init__(self, shape: Shape, island: int) -> None:
        first = island * shape.per_island
        self.island, self.hosts = island, range(first, first + shape.per_island)
        self.core = SchedulerCore(island, self.hosts, limits.ISLAND_WINDOW)
        depth = self.core.order.outstanding.__len__
        self.fan = outboxes.FanOut(depth)
        self.sinks = {host: Sink() for host in self.hosts}
        self.controller, self.up = outboxes.AsyncOutbox(depth), Sink()
        self.carriers = [carrying(self.fan.open(h), self.sinks[h]) for h in self.hosts]
        self.carriers.append(carrying(self.controller, self.up))

    def do(self, event: Event) -> None:
        for command in self.core.handle(event, time.monotonic()):
            match command:
                case ToHosts(message):
                    self.fan.send(message)
                case ToController(message):
                    self.controller.send(message)

    def from_controller(self, batches: list[bytes]) -> None:
        for data in batches:
            for message in TO_ISLAND.decode_batch(data):
                self.do(ControllerMessage(message))

    def from_host(self, host: int, data: bytes) -> None:
        for message in FROM_HOST.decode_batch(data):
            self.do(HostMessage(host, 1, message))


class ControlPlane:
    """A controller, its schedulers, and one session with a program for each island, or one over all.

    Make it inside a running event loop.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        # One session stands for as many as it takes to keep all islands busy.
        self.launches = Launches(parallel=True, max_in_flight=limits.MAX_LAUNCHES_IN_FLIGHT * shape.islands)
        self.schedulers = [Scheduler(shape, island) for island in range(shape.islands)]
        self.islands = [outboxes.AsyncOutbox(self.launches.in_flight.__len__) for _ in self.schedulers]
        self.down = [Sink() for _ in self.schedulers]
        self.client, self.completed = outboxes.AsyncOutbox(self.launches.in_flight.__len__), Sink()
        self.carriers = [carrying(outbox, sink) for outbox, sink in zip(self.islands, self.down, strict=True)]
        self.carriers.append(carrying(self.client, self.completed))
        self.made = 0
        self.joining_s, self.joining_bytes = self._join()
        self._register()

    def _join(self) -> tuple[float, int]:
        """Brings all hosts up; returns the controller's CPU seconds for the last of them, and the bytes it sent."""
        spent, commands = 0.0, list[Any]()
        for scheduler in self.schedulers:
            for host in scheduler.hosts:
                hello = HostUp(host, 1, "10.0.0.1:40000", "10.0.0.1:40001", self.shape.devices_per_host, 1)
                scheduler.core.handle(HostConnected(hello), time.monotonic())
                before = time.thread_time()
                commands = self.launches.host_up(scheduler.island, hello)
                spent = time.thread_time() - before
        return spent, sum(len(encode([command.message])) for command in commands)

    def _register(self) -> None:
        self.launches.open_session(SESSION)
        slices = [self.shape.slice(island) for island in range(self.shape.islands)]
        programs = [slices] if self.shape.cross_island else [[placed] for placed in slices]
        for placed in slices:
            self.launches.add_slice(SESSION, placed)
        self.programs = len(programs)
        for number, over in enumerate(programs):
            program = planned(number, over)
            commands = self.launches.register(SESSION, number, program)
            for command in commands:
                assert isinstance(command, SendIsland)
                scheduler = self.schedulers[command.island]
                scheduler.core.handle(ControllerMessage(command.message), time.monotonic())
            for host in program.hosts:
                self.launches.ready(Ready(host, number, 0))
            # Buffer k is the argument of program k.
            self.launches.from_client(SESSION, Put(number, over[0].mesh.id, program.arguments[0].type, (("x",),)))

    async def launch(self, count: int) -> Costs:
        """Takes `count` launches from the client's messages to its outcomes, and returns what each process spent."""
        costs = Costs()
        await self._admit(count, costs)
        await self._schedule(costs)
        while answers := self._hosts(costs):
            for scheduler in self.schedulers:
                with costs.of("scheduler"):
                    for host in scheduler.hosts:
                        for data in answers.get(host, ()):
                            scheduler.from_host(host, data)
            await costs.written("scheduler")
        with costs.of("controller"):
            for scheduler in self.schedulers:
                for data in costs.note("island to controller", scheduler.up.read()):
                    for message in FROM_ISLAND.decode_batch(data):
                        assert isinstance(message, Done), message
                        self._do(self.launches.done(scheduler.island, message))
        await costs.written("controller")
        costs.note("controller to client", self.completed.read())
        assert not self.launches.in_flight, "a launch has no outcome"
        return costs

    async def _admit(self, count: int, costs: Costs) -> None:
        first = self.made
        self.made += count
        wanted = [Launch(k, k % self.programs, (k % self.programs,), 1 << 20 | k) for k in range(first, first + count)]
        data = encode(wanted)
        costs.note("client to controller", [data])
        with costs.of("controller"):
            for message in TO_CONTROLLER.decode_batch(data):
                assert isinstance(message, Launch)
                self._do(self.launches.from_client(SESSION, message))
        await costs.written("controller")

    def _do(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, SendIsland):
                self.islands[command.island].send(command.message)
            else:
                self.client.send(command.message)

    async def _schedule(self, costs: Costs) -> None:
        for scheduler, sink in zip(self.schedulers, self.down, strict=True):
            data = costs.note("controller to island", sink.read())
            with costs.of("scheduler"):
                scheduler.from_controller(data)
        await costs.written("scheduler")

    def _hosts(self, costs: Costs) -> dict[int, list[bytes]]:
        """The answers of all hosts to their messages; decoding and encoding are counted, all hosts in one."""
        answers: dict[int, list[bytes]] = {}
        for scheduler in self.schedulers:
            for host, sink in scheduler.sinks.items():
                batches = costs.note("island to host", sink.read())
                if not batches:
                    continue
                with costs.of("hosts"):
                    messages = [message for data in batches for message in TO_HOST.decode_batch(data)]
                    answer = self._answer(host, scheduler.island, messages)
                    if answer:
                        answers[host] = costs.note("host to island", [encode(answer)])
        return answers

    def _answer(self, host: int, island: int, messages: list[Any]) -> list[Message]:
        """In a program over all islands, every gang but the first waits for another island before it runs."""
        waiting = self.shape.cross_island and island > 0
        begun = [m.sequence for m in messages if isinstance(m, IslandLaunch)]
        if waiting:
            done = [m.sequence for m in messages if isinstance(m, BarrierReleased)]
            waits: list[Message] = [BarrierReached(host, sequence, island) for sequence in begun]
        else:
            done, waits = begun, []
        if not done:
            return waits
        # What a gang took differs from host to host, by a little.
        return [*waits, Done(tuple(done), tuple(100 + (host + sequence) % 7 for sequence in done))]

    def close(self) -> None:
        for carrier in [*self.carriers, *(one for scheduler in self.schedulers for one in scheduler.carriers)]:
            carrier.cancel()
