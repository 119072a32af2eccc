"""The view of an island, which its scheduler gives the controller that asks. Reads the core's tables only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from pathways_ray.ir.plan import Device
from pathways_ray.observe import views
from pathways_ray.scheduler.deadlines import Deadlines, has_succeeded
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.state import Outstanding, SessionQueue
from pathways_ray.story import Story
from pathways_ray.transport.messages import Heartbeat, IslandLaunch


def island_view(
    island: int,
    order: IslandOrder,
    deadlines: Deadlines,
    beats: Mapping[int, Heartbeat],
    story: Story,
    sequences: Iterable[int] = (),
) -> views.IslandView:
    """The island as it is now.

    Args:
        beats: the last heartbeat of each host.
        sequences: launches whose places and events are wanted.
    """
    members, now, asked = order.members, order.now, frozenset(sequences)
    said = [(host, beat) for host, beat in sorted(beats.items()) if host in members.present]
    ranked = sorted(order.waiting.values(), key=lambda queue: order.policy(queue.candidate, now))
    return views.IslandView(
        island,
        tuple(sorted(members.hosts)),
        tuple(sorted(members.hosts - members.present)),
        tuple(_dispatched(record, now) for record in order.outstanding.values()),
        tuple(_queue(order, queue) for queue in ranked[: views.MAX_SESSIONS]),
        _places(order, ranked, asked),
        tuple(
            views.Running(host, sequence, now - since)
            for host, found in sorted(deadlines.running.items())
            for sequence, since in found.items()
            if sequence in order.outstanding
            or not has_succeeded(sequence, order)  # hosts say so of it with their next heartbeat
        ),
        tuple(
            views.Compiling(host, key, program.name if (program := order.programs.get(key)) else "", seconds)
            for (host, key), seconds in deadlines.compiling.items()
        ),
        tuple(views.StoppedOn(host, one) for host, beat in said for one in beat.stopped),
        tuple(views.ArrivingAt(host, one) for host, beat in said for one in beat.uploads),
        tuple(line for sequence in asked for line in story.lines(now, launch=sequence)),
    )


def _dispatched(record: Outstanding, now: float) -> views.Dispatched:
    devices = record.program.devices.devices
    return views.Dispatched(
        record.launch.sequence,
        record.launch.session,
        record.usage.tenant,
        record.program.name,
        now - record.at,
        tuple(sorted(record.hosts)),
        _names(devices),
        max(0, len(devices) - views.MAX_DEVICES),
        record.failed.report.failure.message if record.failed is not None else "",
    )


def _queue(order: IslandOrder, queue: SessionQueue) -> views.Queue:
    program = order.programs.get(queue.head.program)
    return views.Queue(
        queue.session,
        queue.usage.tenant,
        sum(isinstance(item, IslandLaunch) and item.first == 0 for item in queue.items),
        queue.head.sequence,
        program.name if program is not None else "",
        order.now - queue.candidate.since,
        _names(program.devices.devices) if program is not None else (),
    )


def _names(devices: frozenset[Device]) -> tuple[str, ...]:
    return tuple(str(device) for device in islice(sorted(devices), views.MAX_DEVICES))


def _places(order: IslandOrder, ranked: list[SessionQueue], asked: frozenset[int]) -> tuple[views.Place, ...]:
    """The places of launches that wait. Of other sessions' queues those before it in rank count with their next launch:
    the policy looks again after each."""
    found = []
    for rank, queue in enumerate(ranked):
        launches = [item for item in queue.items if isinstance(item, IslandLaunch) and item.first == 0]
        for own, launch in enumerate(launches):
            if launch.sequence in asked:
                devices = _devices_of(order, launch)
                there = [
                    s for s, record in order.outstanding.items() if _meets(record.program.devices.devices, devices)
                ]
                earlier = [q for q in ranked[:rank] if _meets(_devices_of(order, q.head), devices)]
                first = own and launches[0].sequence
                behind = there[0] if there else earlier[0].head.sequence if earlier else first
                found.append(views.Place(launch.sequence, len(there) + len(earlier) + own, behind))
    return tuple(found)


def _devices_of(order: IslandOrder, launch: IslandLaunch) -> frozenset[Device]:
    program = order.programs.get(launch.program)
    return program.devices.devices if program is not None else frozenset()


def _meets(one: frozenset[Device], other: frozenset[Device]) -> bool:
    return not one.isdisjoint(other)
