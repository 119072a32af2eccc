"""Handovers: launches of an island whose controller has died, or that had another scheduler before."""

from __future__ import annotations

from collections.abc import Mapping

from pathways_ray.errors import Failure
from pathways_ray.scheduler.events import Command, ToHosts
from pathways_ray.scheduler.order import IslandOrder
from pathways_ray.scheduler.policies import Usage
from pathways_ray.scheduler.state import Outstanding, ProgramState
from pathways_ray.scheduler.withdrawals import parts
from pathways_ray.transport import messages as wire


def outcomes(order: IslandOrder) -> tuple[wire.IslandOutcome, ...]:
    """The outcomes of launches under the controller before, and those that are here."""
    found = [
        wire.IslandOutcome(session, launch, sequence, program, islands, False, failure)
        for session, launch, sequence, program, islands, failure in order.ended
    ]
    here = [(one.launch, one.program.islands) for one in order.outstanding.values()]
    here += [(launch, order.queues.program_of(launch).islands) for launch in order.queues.launches()]
    for one, islands in here:
        numbers = one.session, one.launch, one.sequence, one.program
        found.append(wire.IslandOutcome(*numbers, islands, True))
    return tuple(outcome for outcome in found if outcome.islands)


def adopt(order: IslandOrder, launches: Mapping[int, tuple[wire.IslandLaunch, set[int]]]) -> None:
    """Takes over launches that another scheduler has sent to the hosts, by number, in their order, with the hosts
    on which they may not be over. Nobody waits for them, and no tenant is charged."""
    usage, program = Usage("launches of a scheduler that died"), ProgramState("unknown", cross_island=True)
    for sequence, (launch, hosts) in launches.items():
        order.ledger.enter(usage)
        order.outstanding[sequence] = Outstanding(hosts, launch, program, usage, 0.0, at=order.now)
    order.last_sequence = max([order.last_sequence, *launches])


def let_go(order: IslandOrder, failure: Failure) -> list[Command]:
    """There is no controller. Launches go on: its successor asks what they came to. Those are forgotten, or end on
    a failure, that are parts of what only the controller knew, and those whose further gangs nobody sends."""
    commands = parts(order.queues, order.now)
    waiting = {item.program for q in order.waiting.values() for item in q.items if isinstance(item, wire.IslandLaunch)}
    for program in order.programs.keys() - waiting:  # the next controller gives them other numbers
        del order.programs[program]
    order.left |= order.programs.keys()
    for queue in order.waiting.values():
        queue.ended = True  # unless the next controller knows the session, and says whose it is
    for session in [session for session in order.ledger.tenant_of if session not in order.waiting]:
        order.sessions.pop(session, None)
        order.ledger.close(session)
    ended = tuple((s, one.launch.program) for s, one in order.outstanding.items() if one.launch.gangs)
    commands += order.early.forget()
    return [*commands, ToHosts(wire.Abort(ended, failure))] if ended else commands
