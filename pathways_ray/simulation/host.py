"""A simulated host: the driver of the real `HostCore`, with devices, peers and clients under a virtual clock."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from pathways_ray import limits
from pathways_ray.errors import Failure, ProgramRefused
from pathways_ray.executor.compile.queue import FairQueue
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run.core import GROUP_LIMIT_S, HEARTBEAT_S, HostCore
from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.executor.run.early import EarlyReports
from pathways_ray.executor.run.following import FollowingLaunches
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.executor.run.instructions import Event, Handed, InputsArrived, Joined, SchedulerFound
from pathways_ray.executor.run.journal import Said
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.executor.run.rejoining import with_uploads
from pathways_ray.executor.run.watchers import UnderWay
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.simulation.calls import SimulatedCalls
from pathways_ray.simulation.devices import Devices, Group
from pathways_ray.simulation.environment import Environment
from pathways_ray.simulation.leading import LogLinks
from pathways_ray.simulation.manager import SimulatedManager, info_of
from pathways_ray.simulation.network import End, Process
from pathways_ray.simulation.parts import SimulatedParts, decoded, functions_on
from pathways_ray.simulation.programs import ARRAY
from pathways_ray.simulation.serving_host import ServingHost
from pathways_ray.simulation.transfer import Transfer
from pathways_ray.simulation.values import DEADLY, UNCOMPILED, Future, agreed, failure_of, when_all_ready
from pathways_ray.transport.messages import (
    Decided,
    Done,
    FromLeader,
    Holds,
    HostUp,
    IslandLaunchFailed,
    JoinReply,
    Message,
    Peer,
    Put,
    Stored,
)

LOOK_S = 1.0
"""Longest time between two looks of a host for the successor of its scheduler: each comes at a time of its own."""

PASS_S = 0.00005
"""From the arrival of inputs until the dispatcher thread knows of it."""

COMPILE_S = (0.002, 0.02, 0.1, 0.4)
"""Times that a program takes to compile."""


class Flawed(BaseException):
    """A compiler that does not come to an end."""

    def __init__(self, flaw: str) -> None:
        self.flaw = flaw


class HostEnvironment(Environment, Protocol):
    """The environment of a host.

    `hosts` are those that were started last, `servers` has the transfer servers by address, `slowness` the factor of a
    slow host's device times, `crashes` the signals of which hosts died.
    """

    hosts: dict[int, SimulatedHost]
    manager: SimulatedManager
    islands: dict[int, list[int]]
    servers: dict[str, tuple[Process, Transfer]]
    slowness: dict[int, float]
    crashes: dict[int, str]

    def connect_to_scheduler(self, address: str, near: End) -> bool:
        """Opens a stream to a scheduler; false when it is gone."""

    def server_at(self, address: str) -> tuple[Process, Transfer] | None:
        """The transfer server at an address, None when its process has ended."""

    def group(self, island: int, epoch: int) -> Group:
        """The hosts of an island under one epoch."""

    def form_group(self, island: int, epoch: int, process: Process, formed: Callable[[], None]) -> None:
        """Waits for the other hosts of the island, then calls `formed` on each of them."""


class SimulatedHost(ServingHost):
    """One incarnation of a host process."""

    def __init__(self, world: HostEnvironment, island: int, host: int) -> None:
        super().__init__()
        self.world = world
        self.island, self.host = island, host
        self.members = world.islands[self.island]
        self.process = world.network.process(f"host{host}", f"host{host}")
        self.epoch = 0
        self.under_epoch = False
        self.store = BufferStore()
        self.heard = True
        self.said = Said()
        self.uploads: deque[Stored] = deque(maxlen=limits.MAX_REMEMBERED_UPLOADS)
        self.to_compile: FairQueue[Callable[[], Event]] = FairQueue()
        self.compilers = limits.COMPILE_WORKERS
        self.watched: dict[Any, deque[tuple[int, list[Any], PreparedProgram, float, tuple[int, ...]]]] = {}
        self.last_done = 0.0
        self.early: EarlyReports[Done | IslandLaunchFailed] = EarlyReports()
        self.log = LogLinks(world, self, lambda other: world.hosts[other])
        world.manager.join(self.process, island, host, self._joined)

    def _joined(self, reply: JoinReply) -> None:
        """The resource manager's answer: the island has come together under an epoch."""
        if not reply.epoch:
            self.world.kill(self.process, "its island did not come together")
            return
        self.epoch = reply.epoch
        self.scheduler = reply.scheduler_address
        if len(self.members) == 1:
            self._linked()
            return
        self.world.network.after(self.process, GROUP_LIMIT_S, self._group_failed)
        self.world.form_group(self.island, self.epoch, self.process, self._linked)

    def _group_failed(self) -> None:
        if not self.under_epoch:
            self.world.kill(self.process, "its group did not form")

    def _linked(self) -> None:
        """The group stands: joins the scheduler and serves."""
        world, network = self.world, self.world.network
        self.under_epoch = True
        address = f"{self.host}/{self.epoch}"
        self.transfer = Transfer(network, self.process, self.host, world.server_at)
        world.servers[address] = (self.process, self.transfer)
        group = world.group(self.island, self.epoch)
        self.devices = Devices(
            network, self.process, self.host, group, lambda: world.slowness.get(self.host, world.settings.slow)
        )
        world.checker.host_serves(self.island, self.host, self.epoch, self.devices)
        self.calls = SimulatedCalls(network, self.process, self.host)
        self.core = HostCore(self.host, tuple(self.members))
        hand = functools.partial(network.after, self.process, 0.0, self._happened)
        self.following = FollowingLaunches(self.host, self.core.early, self.transfer, self.store.ended, hand)
        self.transfer.on_handed = self.following.take
        self.driver = HostDriver(self.core, self.store, self.transfer, self, decoded)
        self._happened(Joined(self.epoch))
        self.end = self.found = End(network, self.process, self._received, self._scheduler_gone)
        if not world.connect_to_scheduler(self.scheduler, self.end):
            world.kill(self.process, "its scheduler is gone")
            return
        self.crash = world.crashes.pop(self.host, "")
        self._join_scheduler()
        self._beat()

    def _join_scheduler(self, holds: Holds | None = None) -> None:
        settings, address = self.world.settings, f"{self.host}/{self.epoch}"
        info = info_of(settings, self.island, self.members, self.host, self.process)
        where = (address, address, settings.devices, self.process.number)
        self.end.send(HostUp(self.host, self.epoch, *where, self.crash, settings.memory, info=info, holds=holds))

    def _beat(self) -> None:
        self.say_leads()
        self.world.network.after(self.process, HEARTBEAT_S, self._beat)

    def say_leads(self) -> None:
        beat = self.devices.heartbeat(self.world.machine_slowness, self.early.sequence_of)
        self.end.send(msgspec.structs.replace(beat, leads=self.log.leads))

    def _received(self, batch: list[Any]) -> None:
        self.heard = True
        self.driver.handle_batch(batch, self.world.clock.now)
        self.world.checker.host_bounded(self.core)

    def _happened(self, event: Event) -> None:
        self.driver.handle(event, self.world.clock.now)

    def _scheduler_gone(self) -> None:
        """Looks for the successor, and joins it with all that is here, unless the next one does not take it."""
        if not self.heard and self.found.peer.owner.alive:
            self.world.kill(self.process, "its scheduler's stream ended")
            return
        if self.heard:
            self.alone_since = self.world.clock.now
        self._look_for_scheduler()

    def _look_for_scheduler(self) -> None:
        if self.found.open:
            return
        if self.world.clock.now - self.alone_since > limits.ORPHAN_LIMIT_S:
            self.world.kill(self.process, "there is no scheduler")
            return
        self.world.manager.lookup(self.process, f"scheduler-{self.island}", self._found_scheduler)
        self.world.network.after(self.process, LOOK_S * self.world.random.random(), self._look_for_scheduler)

    def _found_scheduler(self, address: str) -> None:
        if self.found.open:
            return
        end = End(self.world.network, self.process, self._received, self._scheduler_gone)
        if self.world.connect_to_scheduler(address, end):
            self.found, self.heard = end, False
            self._happened(SchedulerFound())

    def rejoin(self, holds: Holds) -> None:
        self.end = self.found  # from here on: as from a real host, what was said before goes nowhere
        self._join_scheduler(with_uploads(holds, self.uploads))
        for once_more in self.said.again(holds):
            self.end.send(once_more)

    def end_process(self, reason: str) -> None:
        self.world.kill(self.process, reason)

    # --- HostIO -------------------------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        self.said.note(message)
        self.end.send(message)

    def set_peers(self, peers: tuple[Peer, ...]) -> None:
        self.transfer.set_peers(peers)
        self.log.set_peers(peers)

    def tell(self, entry: FromLeader) -> None:
        self.log.tell(entry)

    def compile(self, plan: HostPlan, functions: Mapping[str, bytes], trusted: bool) -> PreparedProgram:
        names = functions_on(plan.plan, self.host)
        assert functions.keys() >= set(names)  # a real host would compile them
        parts = SimulatedParts(plan.plan, self.devices, self.transfer, self.calls, self._made)
        if refusal := parts.refusal():
            raise ProgramRefused(refusal)
        if parts.flaw in (UNCOMPILED, DEADLY):
            self.world.checker.compiles(self.host, plan.plan.name, names)
            raise Flawed(parts.flaw)
        return parts.program(plan, self.store)

    def in_background(self, tenant: str, work: Callable[[], Event]) -> None:
        self.to_compile.add(tenant, work)
        self._compile_next()

    def _made(self, session: int, buffer: int, value: Any) -> None:
        if buffer >= 0 and isinstance(value, Future) and isinstance(self.store.get(session, buffer), Future):
            self.world.checker.report(f"host {self.host} makes buffer {buffer} of session {session} a second time")
        self.world.checker.result(self.host, session, buffer, value)

    def _compile_next(self) -> None:
        """Has a compiler begin, if one is free. What it makes is there at once, and known when its time is over."""
        if not self.compilers or not self.to_compile:
            return
        self.compilers -= 1
        try:
            event = self.to_compile.take()()
        except Flawed as flawed:
            if flawed.flaw == DEADLY:
                self.world.network.after(self.process, self.world.random.choice(COMPILE_S), self._crash)
            return
        self.world.network.after(self.process, self.world.random.choice(COMPILE_S), self._compiled, event)

    def _compiled(self, event: Event) -> None:
        self._happened(event)
        self.compilers += 1
        self._compile_next()

    def _crash(self) -> None:
        """Of a signal, which leaves a note, or for want of memory."""
        if self.world.random.random() < 0.5:
            self.world.crashes[self.host] = "Segmentation fault"
        self.world.kill(self.process, "its compiler crashed")

    def await_inputs(self, sequence: int, barrier: int, values: list[Any]) -> InputsArrived | None:
        if all(isinstance(value, Failure) or value.ready for value in values):
            return InputsArrived(sequence, barrier, failure_of(values))
        when_all_ready(values, lambda: self.process.run(self._arrived, sequence, barrier, values))
        return None

    def end_calls(self, session: int) -> None:
        self.calls.end(session)

    def abandon(self, sequence: int) -> None:
        """Nothing to do: values that still arrive find no launch that waits."""

    def _arrived(self, sequence: int, barrier: int, values: list[Any]) -> None:
        event = InputsArrived(sequence, barrier, failure_of(values))
        self.world.network.after(self.process, PASS_S, self._happened, event)

    def measure(self, sequence: int, values: list[Any], program: PreparedProgram) -> None:
        """Devices of the simulator say themselves how long they take."""

    def watch(
        self,
        sequence: int,
        values: list[Any],
        program: PreparedProgram,
        consumed: tuple[int, ...],
        asked: bool,
        later: Sequence[Callable[[], None]],
    ) -> None:
        key = program.plan.watched_with
        queue = self.watched.setdefault(key, deque())
        queue.append((sequence, values, program, self.world.clock.now, consumed))
        if len(queue) == 1:
            self._watch_first(key)

    def _watch_first(self, key: Any) -> None:
        when_all_ready(self.watched[key][0][1], lambda: self.process.run(self._complete, key))

    def _complete(self, key: Any) -> None:
        queue = self.watched[key]
        sequence, values, program, enqueued, consumed = queue.popleft()
        now = self.world.clock.now
        seconds, self.last_done = now - max(enqueued, self.last_done), now
        failed = next((k for k, value in enumerate(values) if failure_of([value]) is not None), -1)
        failure = failure_of(values)
        if failure is None:
            if count := len(program.plan.decides):
                found = tuple(agreed(value.memory().values()) for value in values[-count:])
                self.following.decided(sequence, found[0])
                self.send(Decided(sequence, found))
            self._report(sequence, Done((sequence,), (round(seconds * 1e6),)))
        else:
            self.core.early.undecided(sequence)
            self._report(sequence, program.plan.failed(sequence, failure, failed, consumed))
        if queue:
            self._watch_first(key)

    def _report(self, number: int, report: Done | IslandLaunchFailed) -> None:
        if number < 0 and (self.was_served(number, report) or not (number := self.early.ended(number, report))):
            return
        self.send(_numbered(report, number))

    # --- early launches -----------------------------------------------------------------------------------------------

    def kind_of(self, value: Any) -> Any:
        return value.misfit if isinstance(value, Future) else None

    def under_way(self) -> UnderWay:
        watched = sum(map(len, self.watched.values()))
        return UnderWay(watched, watched)

    def confirm(self, number: int, sequence: int, others: Sequence[int]) -> None:
        self.early.sent_with(others)
        if (report := self.early.sent(number, sequence)) is not None and sequence:
            self.send(_numbered(report, sequence))

    def refuse_early(self, handed: Handed) -> None:
        """Nothing to do: what was handed over is sent without delay."""

    def say_allowed(self, tenant: str) -> None:
        """Nothing to do: clients hand over whatever they may, and hosts refuse what is not allowed."""

    # --- clients' arrays ----------------------------------------------------------------------------------------------

    def put(self, session: int, message: Put, value: int, placed: PlacedSlice, answer: Callable[[], None]) -> None:
        """A client brings an array; one of another type than programs of the simulator take fits none of them."""
        shards = {device.index: value for device in placed.devices if device.host == self.host}
        array = Future.of(shards)
        array.misfit = message.type != ARRAY
        if self.store.add(session, message.buffer, array):
            where = message.slice, message.type, message.spec
            shared = {0: value.to_bytes(8)} if len(placed.hosts) > 1 else {}
            self.uploads.append(Stored(self.host, session, message.buffer, *where, shared))
            self.send(self.uploads[-1])
            answer()

    def fetch(self, session: int, buffer: int, answer: Callable[[dict[int, int] | Failure], None]) -> None:
        """A client asks for the shards of a buffer; it is answered once they are there."""

        def present(_: Any) -> None:
            value = self.store.get(session, buffer)
            if value is None:
                answer(Failure("BufferDeleted", f"buffer {buffer} was dropped", host=self.host))
            elif isinstance(value, Failure):
                answer(value)
            else:
                value.when_ready(lambda: self.process.run(self._fetched, value, answer))

        self.store.when_present(session, buffer, present)

    def _fetched(self, value: Future, answer: Callable[[dict[int, int] | Failure], None]) -> None:
        if value.deleted:
            answer(Failure("BufferDeleted", "it was donated", host=self.host))
        else:
            answer(value.error if value.error is not None else value.memory())


def _numbered(report: Done | IslandLaunchFailed, sequence: int) -> Done | IslandLaunchFailed:
    """A report of one launch, under another number."""
    if isinstance(report, Done):
        return msgspec.structs.replace(report, sequences=(sequence,))
    return msgspec.structs.replace(report, sequence=sequence)
