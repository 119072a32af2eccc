"""The invariants of the design, which must hold in every run, checked from outside.

The checker sees more than any process of the run: the values that results should have, the processes that were lost,
the contents of all tables. It never changes anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pathways_ray.controller.circuit_breaker import MAX_DEATHS
from pathways_ray.controller.launches import Launches
from pathways_ray.errors import Failure
from pathways_ray.executor.run.core import GROUP_LIMIT_S, HostCore
from pathways_ray.ir.plan import PlacedSlice, launch_of
from pathways_ray.limits import HOST_ABSENCE_LIMIT_S
from pathways_ray.resource_manager.core import MAX_REJOIN_S
from pathways_ray.scheduler.core import SchedulerCore
from pathways_ray.simulation import tables
from pathways_ray.simulation.devices import Devices
from pathways_ray.simulation.network import Process
from pathways_ray.simulation.placing import misplaced
from pathways_ray.simulation.remains import Cluster, cycle, deaf_islands, gathered_at, remains, users, waiting
from pathways_ray.simulation.values import Future, Outcome, is_flawed
from pathways_ray.transport.messages import HostDown, HostUp

OUTCOME_LIMIT_S = MAX_REJOIN_S + GROUP_LIMIT_S + HOST_ABSENCE_LIMIT_S
"""A launch has its outcome within this time after it was made and the last fault was over: a host that does not join
its new scheduler is killed, the others of its island find out as late that it does not come, and a launch waits."""

OVER_LIMIT_S = 10.0
"""A launch that has its outcome leaves the hosts within this time, and so does what it offered to others."""

FREED_LIMIT_S = 10.0
"""After a session's end, or after the last fault when that is later, all of its memory is free within this time."""

SETTLED_S = 1.0
"""Once nothing has happened for this long, no message is on its way."""

OF_LOSSES = {"HostLost", "BufferLost", "ControllerLost", "ProgramRefused"}
"""Failures that only a lost process explains."""

OF_UPLOADS = {"BufferLost", "WireError"}
"""Failures of a launch whose arguments were not uploaded as its client said."""

OF_FLAWS = {"LaunchTimeout", "CompileError"}
"""Failures that only a flawed program explains, the first one also to others on its island."""

MOST_COMPILED = 2 * MAX_DEATHS + 3
"""Compilations without an end of one program on a host: some deaths have several candidates, or two count as one."""

VALIDATE_EVERY = 16
"""The costly checks of whole tables run once in this many events."""


@dataclass(eq=False)
class Launched:
    """A launch as its client made it; `fails` when a call that it depends on is poisoned, `may_fail` when it takes
    another result of such a launch."""

    made: float
    fails: bool
    may_fail: bool
    strange: bool = False
    amiss: bool = False
    ended: float = -1.0


@dataclass(eq=False)
class Checker:
    """The `Observer` of a run. `violations` has each breach of an invariant, in words."""

    world: Cluster
    violations: list[str] = field(default_factory=list)
    launches: dict[tuple[int, int], Launched] = field(default_factory=dict)
    expected: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    doubtful: set[tuple[int, int]] = field(default_factory=set)
    gone: dict[int, float] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)
    over: dict[tuple[int, int], float] = field(default_factory=dict)
    served: dict[tuple[int, int], list[Devices]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    compiled: dict[tuple[str, int, str, tuple[str, ...]], int] = field(default_factory=dict)
    checked_values: int = 0
    last_outcome: float = -1.0
    outcomes: int = 0
    failed: int = 0
    events: int = 0

    def report(self, what: str) -> None:
        self.violations.append(f"at {self.world.clock.now:.6f} s: {what}")

    # --- one outcome --------------------------------------------------------------------------------------------------

    def launched(self, session: int, launch: int, fails: bool, doubtful: bool) -> None:
        self.launches[session, launch] = Launched(self.world.clock.now, fails, doubtful)

    def trespassed(self, session: int, launch: int) -> None:
        self.launches[session, launch] = Launched(self.world.clock.now, True, True, strange=True)

    def uploaded_amiss(self, session: int, launch: int) -> None:
        self.launches[session, launch] = Launched(self.world.clock.now, True, True, amiss=True)

    def outcome(self, session: int, launch: int, failure: Failure | None, by_client: bool = False) -> None:
        name = f"launch {launch} of session {session}"
        record = self.launches.get((session, launch))
        if record is None:
            self.report(f"{name} has an outcome and was never made")
            return
        if record.ended >= 0:
            self.report(f"{name} has a second outcome: {failure or 'success'}")
            return
        record.ended = self.last_outcome = self.world.clock.now
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
        elif self._is_expected(record, failure):
            pass
        elif failure.kind in OF_FLAWS:
            if not self.world.settings.flaws or (failure.kind == "CompileError" and not record.may_fail):
                self.report(f"{name} failed for a program that it has nothing to do with: {failure}")
        elif failure.kind == "Cancelled":
            if not self.world.settings.cancels:
                self.report(f"{name} was cancelled, and nobody did")
        elif failure.kind not in OF_LOSSES and failure.kind != "ExecutionError":
            self.report(f"{name} failed with what should not happen: {failure}")
        elif not self._something_was_lost():
            self.report(f"{name} failed as if a process was lost, and none was: {failure}")

    def _is_expected(self, record: Launched, failure: Failure) -> bool:
        """Whether this is what the launch was made for, by its client."""
        match failure.kind:
            case "BufferDeleted" if record.strange:
                return True
            case "BufferDeleted" if record.amiss:  # what was said of its upload may have gone to one that was dead
                return self.world.controller.core.takeover is not None
            case "ProgramRefused":
                return self.world.settings.divergent > 0 and record.may_fail
            case "OutOfMemory" if self.world.settings.memory:
                return "can never fit" in failure.message
        return failure.kind in OF_UPLOADS and record.amiss

    def _something_was_lost(self) -> bool:
        """Whether a process ended, or a stream broke, which is the same to those at its ends, or a drain is over."""
        drained = min(self.world.deadlines.values(), default=math.inf)
        return self.world.losses > 0 or self.world.network.broken > 0 or self.world.clock.now >= drained

    # --- values -------------------------------------------------------------------------------------------------------

    def expect(self, session: int, buffer: int, outcome: Outcome, doubtful: bool) -> None:
        self.expected[session, buffer] = outcome
        if doubtful:
            self.doubtful.add((session, buffer))

    def result(self, host: int, session: int, buffer: int, value: Future | Failure) -> None:
        if isinstance(value, Future):
            value.when_ready(lambda: self._result(f"host {host}", session, buffer, value))

    def _result(self, where: str, session: int, buffer: int, value: Future) -> None:
        if value.error is not None or buffer < 0:  # what lies between parts of a launch shows in its results
            return
        expected = self.expected.get((session, buffer))
        if expected is None:
            self.report(f"{where} made buffer {buffer} of session {session}, which no client made")
        elif any(shard != expected for shard in value.shards.values()):
            self.report(f"{where} has a wrong value in buffer {buffer} of session {session}")
        self.checked_values += 1

    def fetched(self, session: int, what: str, expected: Outcome, shards: dict[tuple[int, int], int]) -> None:
        self.checked_values += 1
        if any(shard != expected for shard in shards.values()):
            self.report(f"session {session} sees a wrong value in {what}")

    def fetch_failed(self, session: int, buffer: int, failure: Failure, revived: bool = False) -> None:
        if revived and failure.kind == "BufferDeleted":
            self.report(f"session {session} has buffer {buffer} back, and its memory was taken: {failure}")
        expected = self.expected.get((session, buffer))
        cancelled = failure.kind == "Cancelled" and self.world.settings.cancels > 0
        doubtful = (session, buffer) in self.doubtful or failure.kind == "BufferDeleted" or cancelled
        doubtful = doubtful or (self.world.settings.memory > 0 and "can never fit" in failure.message)
        if not isinstance(expected, Failure) and not self._something_was_lost() and not doubtful:
            self.report(f"session {session} cannot look at buffer {buffer}: {failure}")

    # --- one order ----------------------------------------------------------------------------------------------------

    def host_serves(self, island: int, host: int, epoch: int, devices: Devices) -> None:
        self.served.setdefault((island, epoch), []).append(devices)
        if epoch <= self.newest.get(host, 0):
            self.report(f"host {host} serves under epoch {epoch}, not above {self.newest[host]}")
        self.newest[host] = max(epoch, self.newest.get(host, 0))

    def host_accepted(self, island: int, host: int, epoch: int, last: int) -> None:
        if epoch <= last:
            self.report(f"scheduler {island} took in host {host} under epoch {epoch}, which is over")

    def host_known(self, launches: Launches, message: HostUp) -> None:
        known = launches.hosts.get(message.host)
        if known is not None and message.epoch <= known.epoch and message.holds is None:
            self.report(f"the controller hears of host {message.host} under epoch {message.epoch} after {known.epoch}")

    def silence_noticed(self, process: Process, controller: Process) -> None:
        """A process that the controller watched has been silent for long."""
        if process.paused and process.alive and controller.alive:
            self.report(f"{process} is silent, and the controller did not have it killed")

    def heard_from(self, core: SchedulerCore, host: int, epoch: int) -> None:
        if epoch < core.members.epochs.get(host, 0):
            self.report(f"scheduler {core.island} took a message of epoch {epoch} of host {host}, which is over")

    def _check_orders(self) -> None:
        for (island, epoch), members in self.served.items():
            orders = [order for devices in members for order in devices.order.values()]
            for order in orders:
                if len(set(order)) < len(order):
                    self.report(f"a device of island {island} got a gang twice under epoch {epoch}")
                    return
            stuck = cycle(orders)
            if stuck:
                self.report(f"devices of island {island} have different orders under epoch {epoch}: {stuck[:4]}")

    # --- bounds -------------------------------------------------------------------------------------------------------

    def host_bounded(self, core: HostCore) -> None:
        if len(core.active) > self.world.settings.window:
            self.report(f"host {core.host} has {len(core.active)} launches at once")

    def scheduler_bounded(self, core: SchedulerCore) -> None:
        if len(core.order.outstanding) > self.world.settings.window:
            self.report(f"scheduler {core.island} has {len(core.order.outstanding)} launches with its hosts")
        self.events += 1
        if self.events % VALIDATE_EVERY == 0:
            self._validate(tables.check_order, core.order)

    def controller_bounded(self, launches: Launches) -> None:
        self.events += 1
        if self.events % VALIDATE_EVERY:
            return
        for session in launches.sessions.values():
            if session.in_flight > self.world.settings.max_in_flight:
                self.report(f"session {session.id} has {session.in_flight} launches in flight")
        for island, count in launches.cross_island.under_way.items():
            if count > self.world.settings.cross_island_window:
                self.report(f"island {island} has {count} launches over several islands")
        self._validate(tables.check_launches, launches)
        self._check_refusals(launches)

    def _validate(self, check: Callable[[Any], None], of: Any) -> None:
        try:
            check(of)
        except (AssertionError, IndexError, KeyError) as error:
            self.report(f"tables disagree: {type(error).__name__}: {error}")

    # --- blame --------------------------------------------------------------------------------------------------------

    def compiles(self, host: int, program: str, functions: tuple[str, ...]) -> None:
        """A host begins to compile a program, or a branch of one, that it will not come to the end of."""
        key = (self.world.controller.incarnation, host, program, functions)
        self.compiled[key] = self.compiled.get(key, 0) + 1
        if self.compiled[key] == MOST_COMPILED + 1:
            self.report(f"host {host} compiles {program} once more, and never came to its end")

    def blamed(self, launches: Launches, message: HostDown) -> None:
        """The controller hears that a host was lost, and of what its scheduler ended it for."""
        if not message.decided:
            return
        found = [launches.in_flight[s].program for s in message.candidates if s in launches.in_flight]
        found += [launches.programs[key] for key in message.compiling if key in launches.programs]
        for program in found:
            if not is_flawed(program.name):
                self.report(f"{program.name} is blamed for the end of host {message.host}: {message.reason}")

    def _check_refusals(self, launches: Launches) -> None:
        for refusal in launches.circuit_breaker.refused.values():
            if not is_flawed(refusal.name):
                self.report(f"{refusal.name} is refused, and nothing is wrong with it: {refusal.failure.message}")

    # --- ownership ----------------------------------------------------------------------------------------------------

    def session_ended(self, session: int) -> None:
        """Notes the time from which the session's memory has to be freed."""
        if session:
            self.gone.setdefault(session, self.world.clock.now)

    def check_kept(self, session: int, handles: set[int], last_drop: float) -> None:
        """Once all is quiet, hosts have the buffers that the client has handles to, and no more."""
        if self.world.clock.now - max(self.world.quiet_since, last_drop) < SETTLED_S:
            return
        for host in self.world.hosts.values():
            kept = host.store.sessions.get(session, {}).keys() - handles
            if kept and host.process.alive:
                self.report(f"host {host.host} keeps buffers {sorted(kept)[:4]} of session {session} without a handle")

    def check_freed(self) -> None:
        """Looks at the sessions that ended long enough ago."""
        now = self.world.clock.now
        limit = FREED_LIMIT_S + (self.world.settings.launch_limit_s if self.world.settings.flaws else 0.0)
        for session, ended in self.gone.items():
            if session in self.freed or now - max(ended, self.world.freeing_since) < limit:
                continue
            self.freed.add(session)
            # Programs do not say whose they are: those of a session that has just ended are on their way out, and so
            # may be those that a client drops.
            quiet = not self.world.settings.replaces or all(client.over for client in self.world.clients)
            for place, what in remains(self.world, session, quiet and now - max(self.gone.values()) >= limit):
                self.report(f"session {session} ended at {ended:.3f} s, and {place} still has {what}")

    def check_over(self) -> None:
        """Looks for launches that have their outcome, and are still on a host, or have something offered there."""
        world, now = self.world, self.world.clock.now
        in_flight = tables.under_way(world.controller.launches)
        found: dict[tuple[int, int], str] = {}
        deaf = deaf_islands(world)
        for host in world.hosts.values():
            if host.process.alive and host.under_epoch and not host.process.paused and host.island not in deaf:
                offers = (name for name, offer in host.transfer.served.items() if not isinstance(offer, Failure))
                found.update({(host.process.number, launch_of(name)): "an offer" for name in offers})
                found.update(dict.fromkeys(((host.process.number, n) for n in host.core.active), "a part"))
        left = {key: what for key, what in found.items() if key[1] not in in_flight}
        since = max(world.disturbed_until, gathered_at(world))
        self.over = {key: max(self.over.get(key, now), since) for key in left}
        for key, since in self.over.items():
            if now - since > OVER_LIMIT_S:
                self.over[key] = math.inf  # said once
                self.report(f"launch {key[1]} has its outcome, and process {key[0]} still has {left[key]} of it")

    @property
    def has_doubts(self) -> bool:
        """Whether something may turn out to be left of a launch."""
        return any(since < math.inf for since in self.over.values())

    # --- healthy islands ----------------------------------------------------------------------------------------------

    def island_restarts(self, island: int, message: HostDown) -> None:
        """No launch that is not flawed may have an island restarted whose processes are well."""
        if self.world.settings.flaws:
            return
        blamed = message.kind != "HostLost" or "launch" in message.reason
        own = {f"scheduler{island}", *(f"host{host}" for host in self.world.islands[island])}
        if message.kind == "LaunchTimeout" or (blamed and not own & self.world.touched):
            self.report(f"island {island} is well, and restarts: {message.reason}")

    # --- islands that come and go -------------------------------------------------------------------------------------

    def slice_mapped(self, placed: PlacedSlice) -> None:
        """A session got a slice."""
        island = placed.island
        if island in self.world.drained or island not in self.world.islands:
            self.report(f"a slice is mapped to island {island}, which is drained or gone")
        elif fault := misplaced(placed, self.world.islands[island], self.world.settings):
            self.report(fault)

    def island_ends(self, island: int) -> None:
        """An island is about to be ended."""
        world = self.world
        if world.clock.now >= world.deadlines.get(island, math.inf):
            return
        for session in users(world, island):
            self.report(f"island {island} ends under session {session}")

    def _check_islands(self) -> None:
        """Nobody waits for the hosts of an island that was removed."""
        there = {host for hosts in self.world.islands.values() for host in hosts}
        there |= {host for hosts in self.world.kept.members.values() for host in hosts}
        for host in sorted(self.world.controller.launches.hosts.keys() - there):
            self.report(f"the controller still knows host {host}, whose island was removed")
        for host in sorted(self.world.manager.core.inventory.hosts.keys() - there):
            self.report(f"the resource manager still knows host {host}, whose island was removed")

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The run is over: no launch, session or device may still wait."""
        clients = {client.session: client for client in self.world.clients}
        for (session, launch), record in self.launches.items():
            client = clients[session]
            if record.ended < 0 and client.process.alive and not client.over:
                self.report(f"launch {launch} of session {session}, made at {record.made:.3f} s, has no outcome")
        for session in sorted(self.gone.keys() - self.freed):
            self.report(f"session {session} ended, and the cluster never came to rest")
        for what in waiting(self.world):
            self.report(f"{what} waits for ever")
        self._check_orders()
        self._check_islands()
