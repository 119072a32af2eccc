"""What must hold in every run, whatever happens: the invariants of the design, checked from outside.

It sees more than anybody in the run: what each result should be, which processes were lost, what lies where. It never
changes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pathways_ray.errors import Failure
from pathways_ray.simulation.devices import Devices, Identity
from pathways_ray.simulation.values import Future, Outcome
from pathways_ray.transport.messages import HostUp

if TYPE_CHECKING:
    from pathways_ray.simulation.client import SimulatedClient
    from pathways_ray.simulation.controller import SimulatedController
    from pathways_ray.simulation.host import SimulatedHost
    from pathways_ray.simulation.network import Process
    from pathways_ray.simulation.scheduler import SimulatedScheduler
    from pathways_ray.simulation.world import World

OUTCOME_LIMIT_S = 75.0
"""A launch has its outcome within this time after it was made and the last fault was over: a host may be waited for for
30 s, and the hosts of an island may need 30 s to find out that one of them is not coming."""

FREED_LIMIT_S = 10.0
"""After a session's end all it held is free within this time, or after the last fault when that is later."""

SETTLED_S = 1.0
"""When nothing happened for this long, nothing is on its way any more."""

OF_LOSSES = {"HostLost", "BufferLost", "ControllerLost", "ProgramRefused"}
"""Failures that only a lost process explains."""

VALIDATE_EVERY = 16
"""The costly checks of whole tables run on each so-manieth event."""


@dataclass(eq=False)
class Launched:
    """A launch as its client made it; `fails` when a call that it depends on is poisoned, `may_fail` when it takes
    another result of such a launch."""

    made: float
    fails: bool
    may_fail: bool
    strange: bool = False
    ended: float = -1.0


@dataclass(eq=False)
class Checker:
    """`violations` has what does not hold, in words."""

    world: World
    violations: list[str] = field(default_factory=list)
    launches: dict[tuple[int, int], Launched] = field(default_factory=dict)
    expected: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    doubtful: set[tuple[int, int]] = field(default_factory=set)
    clients: dict[int, SimulatedClient] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)
    served: dict[tuple[int, int], list[Devices]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    checked_values: int = 0
    outcomes: int = 0
    failed: int = 0
    events: int = 0

    def report(self, what: str) -> None:
        self.violations.append(f"at {self.world.clock.now:.6f} s: {what}")

    # --- one outcome --------------------------------------------------------------------------------------------------

    def launched(self, client: SimulatedClient, launch: int, fails: bool, doubtful: bool) -> None:
        self.launches[client.session, launch] = Launched(self.world.clock.now, fails, doubtful)

    def trespassed(self, client: SimulatedClient, launch: int) -> None:
        """A launch that names a buffer its session does not have."""
        self.launches[client.session, launch] = Launched(self.world.clock.now, True, True, strange=True)

    def donated(self, client: SimulatedClient, launch: int) -> None:
        """A result of a launch was donated to a later one. If it is a failure, who waits for it may find it deleted and
        take the launch for successful; the later one fails."""
        record = self.launches.get((client.session, launch))
        if record is not None:
            record.fails = False

    def outcome(self, client: SimulatedClient, launch: int, failure: Failure | None, by_client: bool = False) -> None:
        name = f"launch {launch} of session {client.session}"
        record = self.launches.get((client.session, launch))
        if record is None:
            self.report(f"{name} has an outcome and was never made")
            return
        if record.ended >= 0:
            self.report(f"{name} has a second outcome: {failure or 'success'}")
            return
        record.ended = self.world.clock.now
        self.outcomes += 1
        self.failed += failure is not None
        if not by_client:
            self._check_outcome(name, record, failure)

    def _check_outcome(self, name: str, record: Launched, failure: Failure | None) -> None:
        late = record.ended - max(record.made, self.world.disturbed_until)
        if late > OUTCOME_LIMIT_S:
            self.report(f"{name} took {late:.0f} s")
        if failure is None:
            if record.strange:
                self.report(f"{name} named a buffer that its session does not have, and succeeded")
            elif record.fails:
                self.report(f"{name} succeeded, and a call it depends on fails")
        elif failure.kind == "ExecutionError" and "transferring" not in failure.message:
            if not record.may_fail:
                self.report(f"{name} failed, and nothing it depends on does: {failure}")
        elif failure.kind == "BufferDeleted" and record.strange:
            pass
        elif failure.kind not in OF_LOSSES and failure.kind != "ExecutionError":
            self.report(f"{name} failed with what should not happen: {failure}")
        elif not self._something_was_lost():
            self.report(f"{name} failed as if a process was lost, and none was: {failure}")

    def _something_was_lost(self) -> bool:
        """Whether a process ended, or a stream broke, which is the same to those at its ends."""
        return self.world.losses > 0 or self.world.network.broken > 0

    # --- values -------------------------------------------------------------------------------------------------------

    def expect(self, session: int, buffer: int, outcome: Outcome, doubtful: bool) -> None:
        self.expected[session, buffer] = outcome
        if doubtful:
            self.doubtful.add((session, buffer))

    def result(self, host: SimulatedHost, session: int, buffer: int, value: Any) -> None:
        """A host has put a launch's result into its store; it is looked at when it is ready."""
        if isinstance(value, Future):
            value.when_ready(lambda: self._result(f"host {host.host}", session, buffer, value))

    def _result(self, where: str, session: int, buffer: int, value: Future) -> None:
        if value.error is not None:
            return
        expected = self.expected.get((session, buffer))
        if expected is None:
            self.report(f"{where} made buffer {buffer} of session {session}, which nobody asked for")
        elif any(shard != expected for shard in value.shards.values()):
            self.report(f"{where} has a wrong value in buffer {buffer} of session {session}")
        self.checked_values += 1

    def looked(
        self, client: SimulatedClient, buffer: int, expected: Outcome, shards: dict[tuple[int, int], int]
    ) -> None:
        self.checked_values += 1
        if any(shard != expected for shard in shards.values()):
            self.report(f"session {client.session} sees a wrong value in buffer {buffer}")

    def look_failed(self, client: SimulatedClient, buffer: int, failure: Failure) -> None:
        expected = self.expected.get((client.session, buffer))
        doubtful = (client.session, buffer) in self.doubtful or failure.kind == "BufferDeleted"
        if not isinstance(expected, Failure) and not self._something_was_lost() and not doubtful:
            self.report(f"session {client.session} cannot look at buffer {buffer}: {failure}")

    # --- one order ----------------------------------------------------------------------------------------------------

    def host_serves(self, host: SimulatedHost) -> None:
        self.served.setdefault((host.island, host.epoch), []).append(host.devices)
        if host.epoch <= self.newest.get(host.host, 0):
            self.report(f"host {host.host} serves under epoch {host.epoch}, not above {self.newest[host.host]}")
        self.newest[host.host] = max(host.epoch, self.newest.get(host.host, 0))

    def host_accepted(self, scheduler: SimulatedScheduler, host: int, epoch: int) -> None:
        """A scheduler took a host in."""
        if epoch <= scheduler.accepted.get(host, 0):
            self.report(f"scheduler {scheduler.island} took in host {host} under epoch {epoch}, which is over")

    def host_known(self, controller: SimulatedController, hello: HostUp) -> None:
        """The controller learns of a host that serves."""
        known = controller.launches.hosts.get(hello.host)
        if known is not None and hello.epoch <= known.epoch:
            self.report(f"the controller hears of host {hello.host} under epoch {hello.epoch} after {known.epoch}")

    def silence_noticed(self, process: Process, controller: SimulatedController) -> None:
        """A process that the controller watched has been silent for long."""
        if process.paused and process.alive and controller.process.alive:
            self.report(f"{process} is silent, and the controller did not have it killed")

    def heard_from(self, scheduler: SimulatedScheduler, host: int, epoch: int) -> None:
        """A scheduler acted on a message that a host sent under an epoch."""
        if epoch < scheduler.core.members.epochs.get(host, 0):
            self.report(f"scheduler {scheduler.island} took a message of epoch {epoch} of host {host}, which is over")

    def _check_orders(self) -> None:
        for (island, epoch), members in self.served.items():
            orders = [order for devices in members for order in devices.order.values()]
            for order in orders:
                if len(set(order)) < len(order):
                    self.report(f"a device of island {island} got a gang twice under epoch {epoch}")
                    return
            stuck = _cycle(orders)
            if stuck:
                self.report(f"devices of island {island} have different orders under epoch {epoch}: {stuck[:4]}")

    # --- bounds -------------------------------------------------------------------------------------------------------

    def host_bounded(self, host: SimulatedHost) -> None:
        if len(host.core.active) > self.world.settings.window:
            self.report(f"host {host.host} has {len(host.core.active)} launches at once")

    def scheduler_bounded(self, scheduler: SimulatedScheduler) -> None:
        if len(scheduler.core.order.outstanding) > self.world.settings.window:
            self.report(
                f"scheduler {scheduler.island} has {len(scheduler.core.order.outstanding)} launches with its hosts"
            )
        self.events += 1
        if self.events % VALIDATE_EVERY == 0:
            self._validate(scheduler.core.order.validate)

    def controller_bounded(self, controller: SimulatedController) -> None:
        self.events += 1
        if self.events % VALIDATE_EVERY:
            return
        for session in controller.launches.sessions.values():
            if session.in_flight > self.world.settings.max_in_flight:
                self.report(f"session {session.id} has {session.in_flight} launches in flight")
        for island, count in controller.launches.cross_island.under_way.items():
            if count > self.world.settings.crossing_window:
                self.report(f"island {island} has {count} launches over several islands")
        self._validate(controller.launches.validate)

    def _validate(self, validate: Any) -> None:
        try:
            validate()
        except (AssertionError, IndexError, KeyError) as error:
            self.report(f"tables disagree: {type(error).__name__}: {error}")

    # --- ownership ----------------------------------------------------------------------------------------------------

    def session_opened(self, client: SimulatedClient) -> None:
        self.clients[client.session] = client

    def session_ended(self, client: SimulatedClient, why: str) -> None:
        """A client left, or died, or lost its session: from now on the clock runs for what it held."""
        if client.session and client.session not in self.gone:
            self.gone[client.session] = self.world.clock.now

    def check_kept(self, client: SimulatedClient) -> None:
        """A client has nothing under way, and all is quiet: hosts hold what it has handles to, and no more."""
        if self.world.clock.now - max(self.world.quiet_since, client.last_drop) < SETTLED_S:
            return
        for host in self.world.hosts.values():
            kept = host.store.sessions.get(client.session, {}).keys() - client.handles.keys()
            if kept:
                self.report(f"host {host.host} keeps buffers {sorted(kept)[:4]} of session {client.session} for nobody")

    def check_freed(self) -> None:
        """Looks at the sessions that ended long enough ago."""
        now = self.world.clock.now
        for session, ended in self.gone.items():
            if session in self.freed or now - max(ended, self.world.quiet_since) < FREED_LIMIT_S:
                continue
            self.freed.add(session)
            for place, what in self._remains(session):
                self.report(f"session {session} ended at {ended:.3f} s, and {place} still has {what}")

    def _remains(self, session: int) -> Iterable[tuple[str, str]]:
        world = self.world
        if world.controller is not None:
            launches = world.controller.launches
            if session in launches.sessions:
                yield "the controller", "the session"
            if any(program.session == session for program in launches.programs.values()):
                yield "the controller", "a program"
            if any(record.session == session for record in launches.in_flight.values()):
                yield "the controller", "a launch in flight"
        if any(key[0] == session for key in world.manager.core.inventory.slices):
            yield "the resource manager", "a slice"
        for scheduler in world.schedulers.values():
            if scheduler.process.alive:
                if session in scheduler.core.order.waiting:
                    yield f"scheduler {scheduler.island}", "launches that wait"
                if any(record.launch.session == session for record in scheduler.core.order.outstanding.values()):
                    yield f"scheduler {scheduler.island}", "a launch with its hosts"
        for host in world.hosts.values():
            if not host.process.alive or not host.under_epoch:
                continue
            if host.store.sessions.get(session):
                yield f"host {host.host}", f"{len(host.store.sessions[session])} buffers"
            if any(active.launch.session == session for active in host.core.active.values()):
                yield f"host {host.host}", "a launch that is not over"
            if session in host.core.producers:
                yield f"host {host.host}", "results to come"

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The run is over: nothing may be left that waits."""
        for (session, launch), record in self.launches.items():
            client = self.clients[session]
            if record.ended < 0 and client.process.alive and not client.over:
                self.report(f"launch {launch} of session {session}, made at {record.made:.3f} s, has no outcome")
        for session in self.gone:
            if session not in self.freed:
                self.report(f"session {session} ended, and the cluster never came to rest")
        for host in self.world.hosts.values():
            if host.process.alive and host.under_epoch and any(host.devices.queues.values()):
                self.report(f"a device of host {host.host} waits for ever")
        self._check_orders()


def _cycle(orders: Sequence[Sequence[Identity]]) -> list[Identity]:
    """Gangs that no order can hold which all of these agree with; empty when there is such an order."""
    after: dict[Identity, set[Identity]] = {}
    before: dict[Identity, int] = {}
    for order in orders:
        for gang in order:
            before.setdefault(gang, 0)
        for first, second in itertools.pairwise(order):
            if second not in after.setdefault(first, set()):
                after[first].add(second)
                before[second] += 1
    free = [gang for gang, count in before.items() if not count]
    left = len(before)
    while free:
        gang = free.pop()
        left -= 1
        for second in after.get(gang, ()):
            before[second] -= 1
            if not before[second]:
                free.append(second)
    return sorted(gang for gang, count in before.items() if count > 0) if left else []
