"""Remains of sessions that have ended, and circles in orders: what the checker looks for in a whole cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from pathways_ray.resource_manager.islands import KeptIslands
from pathways_ray.simulation.client import SimulatedClient
from pathways_ray.simulation.clock import Clock
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.devices import Identity
from pathways_ray.simulation.host import SimulatedHost
from pathways_ray.simulation.manager import SimulatedManager
from pathways_ray.simulation.network import Network
from pathways_ray.simulation.scheduler import SimulatedScheduler
from pathways_ray.simulation.settings import Settings


class Cluster(Protocol):
    """The whole run, as the checker sees it.

    `islands` has the hosts of each island, `kept` the resource manager's list of them, which it may have lost once.
    `losses` counts processes that were lost, `disturbed_until` is the end of the last fault, and the cluster has been
    whole since `quiet_since`. From `freeing_since` on no session can come back to another controller.
    """

    settings: Settings
    clock: Clock
    network: Network
    manager: SimulatedManager
    controller: SimulatedController
    schedulers: dict[str, SimulatedScheduler]
    hosts: dict[int, SimulatedHost]
    clients: list[SimulatedClient]
    islands: dict[int, list[int]]
    kept: KeptIslands
    drained: set[int]
    deadlines: dict[int, float]
    losses: int
    disturbed_until: float
    quiet_since: float
    freeing_since: float
    touched: set[str]

    def gone(self) -> set[int]:
        """The hosts of islands of which a machine has vanished, and is not back."""


def deaf_islands(world: Cluster) -> set[int]:
    """The islands whose hosts hear of nothing that is over: their scheduler waits until all of them are there, or is
    stopped until it is killed, which takes a minute where the controller died that would have missed it."""
    alive = [scheduler for scheduler in world.schedulers.values() if scheduler.process.alive]
    return {scheduler.island for scheduler in alive if scheduler.process.paused or scheduler.core.members.apart}


def gathered_at(world: Cluster) -> float:
    """The time at which the controller knew all that it may hear of launches from before; now, if it does not yet."""
    takeover = world.controller.core.takeover
    if takeover is None:
        return 0.0
    return world.clock.now if takeover.open_since is None else takeover.open_since


def users(world: Cluster, island: int) -> Iterable[int]:
    """Yields the sessions whose clients count on a slice of an island. What a suspended one had begun to ask for again
    went with the controller that it had asked."""
    for client in world.clients:
        session = world.controller.launches.sessions.get(client.session)
        if session is None or client.over:
            continue
        held = {placed.mesh.id for placed in client.slices if placed.island == island} - client.mover.away
        if held & session.slices.keys() if session.suspended else held:
            yield session.id


def waiting(world: Cluster) -> Iterable[str]:
    """Yields who still waits when the run is over."""
    for host in world.hosts.values():
        if host.process.alive and host.under_epoch and any(host.devices.queues.values()):
            yield f"a device of host {host.host}"
        if host.process.alive and len(host.early):
            yield f"what became of {len(host.early)} early launches at host {host.host}"
        if host.process.alive and host.answers:
            yield f"the answer to {len(host.answers)} calls that host {host.host} was asked for"
    gone = world.gone()
    for client in world.clients:
        fetches = client.data.fetches if client.session and client.process.alive and not client.over else ()
        for fetch in fetches:
            if any(host in world.hosts and host not in gone for host in fetch.waiting):
                yield f"session {client.session}, for buffer {fetch.handle.number} from hosts {sorted(fetch.waiting)},"
    for client in () if gone else world.clients:  # there may be no room before a machine is back
        if client.process.alive and not client.over and client.mover.gives_way:
            yield f"session {client.session}, which gave way and does not come back,"


def remains(world: Cluster, session: int, programs: bool) -> Iterable[tuple[str, str]]:
    """Yields what is left of a session that has ended, behind the place where it is; with `programs`, also those that
    the controller does not know, of any session."""
    launches = world.controller.launches
    if session in launches.sessions:
        yield "the controller", "the session"
    if any(program.session == session for program in launches.programs.values()):
        yield "the controller", "a program"
    if any(record.session == session for record in launches.in_flight.values()):
        yield "the controller", "a launch in flight"
    if any(key[0] == session for key in world.manager.core.inventory.slices):
        yield "the resource manager", "a slice"
    if any(queued == session for queued, _ in launches.admission.window.queued):
        yield "the controller", "a place in the queue for islands"
    for scheduler in world.schedulers.values():
        if scheduler.process.alive:
            order = scheduler.core.order
            if session in order.waiting:
                yield f"scheduler {scheduler.island}", "launches that wait"
            if any(record.launch.session == session for record in order.outstanding.values()):
                yield f"scheduler {scheduler.island}", "a launch with its hosts"
            if session in order.sessions:
                yield f"scheduler {scheduler.island}", "its queue"
            if session in order.ledger.tenant_of:
                yield f"scheduler {scheduler.island}", "its account"
            if programs and (stray := order.programs.keys() - launches.programs.keys()):
                yield f"scheduler {scheduler.island}", f"programs {sorted(stray)[:4]}"
    gone = world.gone()
    for host in world.hosts.values():
        if not host.process.alive or not host.under_epoch or (host.process.paused and host.host in gone):
            continue
        if session in host.store.sessions:
            yield f"host {host.host}", f"a table of {len(host.store.sessions[session])} buffers"
        if programs and (stray := (host.core.wanted | host.core.programs.keys()) - launches.programs.keys()):
            yield f"host {host.host}", f"programs {sorted(stray)[:4]}"
        if any(active.launch.session == session for active in host.core.active.values()):
            yield f"host {host.host}", "a launch that is not over"
        if session in host.core.producers.sessions:
            yield f"host {host.host}", "results to come"
        if any(one == session for one, _ in host.core.early.taken):
            yield f"host {host.host}", "early launches"


def disagreements(world: Cluster) -> Iterable[str]:
    """Yields what the resource manager knows otherwise than the controller, while no call between them is under way."""
    controller, manager = world.controller, world.manager
    if not (controller.process.alive and manager.process.alive) or controller.calling or manager.core.uninformed:
        return
    calls = controller.core.manager_calls
    if calls.is_behind or calls.again or calls.unanswered or calls.incarnation != str(manager.process.number):
        return
    inventory, launches = manager.core.inventory, controller.launches
    found = {key: record.placed for key, record in inventory.slices.items()}
    held = {(s.id, n): placed for s in launches.sessions.values() for n, placed in s.slices.items()}
    # Sessions that may come back keep their slices, unless they had ended before.
    unclaimed = {(number, n): one for number, known in launches.tables.unclaimed.items() for n, one in known.items()}
    held |= {key: one.placed for key, one in unclaimed.items() if key in found}
    there = {key: placed for key, placed in held.items() if placed.island in manager.core.islands}
    # A new slice that an older one was moved to from a removed island is there until its client gives it back.
    for key in (found.keys() & held.keys()) - there.keys():
        older = (one for (session, number), one in there.items() if session == key[0] and number < key[1])
        if any(one.devices == found[key].devices for one in older):
            del found[key]
    if found != there:
        yield f"sessions have slices {sorted(there)}, and the resource manager knows {sorted(found)}"
    for host in launches.hosts.values():
        record = inventory.hosts.get(host.host)
        up = host.down_since is None and host.island in manager.core.islands
        if up and (record is None or not record.up or record.epoch < host.epoch):
            yield f"host {host.host} serves under epoch {host.epoch}, and the resource manager knows {record}"


def cycle(orders: Sequence[Sequence[Identity]]) -> list[Identity]:
    """Gangs that these orders put into a circle; empty when one order agrees with all of them."""
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
