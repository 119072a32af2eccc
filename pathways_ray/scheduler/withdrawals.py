"""Launches that are taken out of a scheduler's queues: their session ended, they failed elsewhere, they were cancelled.

A launch of this island only is gone at once. A cross-island one keeps its place: another island may have started its
part, which would wait for this one for ever. It computes nothing, and ends as soon as it comes to the devices. Only one
that has ended on the other islands leaves the queue as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pathways_ray.errors import Failure
from pathways_ray.scheduler.events import Command, ToController, ToHosts
from pathways_ray.scheduler.queues import Queues
from pathways_ray.scheduler.state import SessionQueue
from pathways_ray.transport import messages as wire


def end_session(queues: Queues, message: wire.DropSession, now: float) -> list[Command]:
    """A session ends: its launches of this island only are taken out of the queue."""
    commands: list[Command] = [ToHosts(message)]
    queue = queues.sessions.pop(message.session, None)
    queues.ledger.close(message.session)
    if queue is None or not queue.items:
        return commands
    ended = Failure("SessionClosed", "the session ended before the launch ran")
    dropped: set[int] = set()
    kept: deque[wire.IslandLaunch | wire.Drop | wire.DropProgram] = deque()
    for item in queue.items:
        if isinstance(item, wire.IslandLaunch) and not queues.program_of(item).cross_island:
            if item.first == 0:
                dropped.add(item.sequence)
                queues.ledger.leave(queue.usage)
        elif isinstance(item, wire.IslandLaunch):
            kept.append(msgspec.structs.replace(item, cancelled=ended))
        elif not isinstance(item, wire.Drop):
            kept.append(item)
    queue.items = kept
    if any(isinstance(item, wire.IslandLaunch) for item in kept):
        queues.sessions[message.session] = queue
        queue.ended = True
    commands += [ToController(wire.IslandLaunchFailed(sequence, ended)) for sequence in sorted(dropped)]
    queues.flush(queue, commands, now)
    return commands


def abort(queues: Queues, message: wire.Abort, now: float) -> list[Command]:
    """Launches have ended on other islands: those that wait here are taken out, and are over; hosts hear of the others.
    They end there soon, on the failure, and leave their place in the window then."""
    commands: list[Command] = [ToHosts(message)]
    ended = {sequence for sequence, _ in message.launches}
    for sequence, session in [waiting for waiting in queues.cross_island if waiting[0] in ended]:
        _take_out(queues, queues.sessions[session], sequence, commands, now)
        commands.append(ToController(wire.IslandLaunchFailed(sequence, message.failure)))
    return commands


def parts(queues: Queues, now: float) -> list[Command]:
    """The controller is gone: parts of launches are taken out that only it knew the rest of."""
    commands: list[Command] = []
    for queue in list(queues.waiting.values()):
        launches = [i for i in queue.items if isinstance(i, wire.IslandLaunch) and i.first == 0]
        for launch in launches:
            inside = not launch.launch or any(number < 0 for number in launch.arguments)
            if launch.gangs or inside:
                _take_out(queues, queue, launch.sequence, commands, now)
    return commands


def _take_out(queues: Queues, queue: SessionQueue, sequence: int, commands: list[Command], now: float) -> None:
    """Takes a launch that waits out of its queue, with further gangs of it."""
    if (sequence, queue.session) in queues.cross_island:
        queues.cross_island.remove((sequence, queue.session))
    head = queue.head
    queue.items = deque(i for i in queue.items if not (isinstance(i, wire.IslandLaunch) and i.sequence == sequence))
    queue.ranks.pop(sequence, None)
    queues.ledger.leave(queue.usage)
    if head.sequence == sequence:
        queues.flush(queue, commands, now)


def cancel(queues: Queues, message: wire.CancelLaunch, now: float) -> list[Command]:
    """Ends a launch that waits here. One that is not here is over, or lost with the hosts."""
    sequence = message.sequence
    if sequence in queues.outstanding:
        return [ToController(wire.Begun(sequence))]
    for queue in queues.waiting.values():
        found = [i for i in queue.items if isinstance(i, wire.IslandLaunch) and i.sequence == sequence]
        if not found:
            continue
        if queues.program_of(found[0]).cross_island:
            for item in found:
                place = queue.items.index(item)
                queue.items[place] = msgspec.structs.replace(item, cancelled=message.failure)
            return []
        commands: list[Command] = [ToController(wire.IslandLaunchFailed(sequence, message.failure))]
        if covers := found[0].covers:  # hosts have begun these, and hear nothing of this one
            commands.append(ToHosts(wire.Drop(found[0].session, covers)))
        _take_out(queues, queue, sequence, commands, now)
        return commands
    return []


WITHDRAWALS: dict[type, Callable[[Queues, Any, float], list[Command]]] = {
    wire.DropSession: end_session,
    wire.Abort: abort,
    wire.CancelLaunch: cancel,
}
"""By message of the controller, what takes launches out of the queues; each returns what hosts and controller get."""
