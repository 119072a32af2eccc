"""Views of launches at the controller, for questions why they wait. Reads the tables, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pathways_ray.controller.backlog import Backlog, WaitingLaunch
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.lifecycle import LaunchState
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import InFlight, Session
from pathways_ray.controller.turns import Turns
from pathways_ray.observe.views import Lacking, LaunchView, Upload
from pathways_ray.transport.messages import Launch, Register


def launch_view(launches: Launches, turns: Turns, session: int, number: int) -> LaunchView | None:
    """A launch without an outcome.

    Args:
        turns: the messages of clients that wait.
        session: with it `number` is the client's; 0: that of the cluster.
    """
    if not session:
        record = launches.in_flight.get(number)
    else:
        mine = (r for r in launches.in_flight.values() if r.session == session and r.launch == number)
        record = next(mine, None)
    if record is not None:
        return _in_flight(launches, record)
    state = launches.sessions.get(session)
    if state is None:
        return None
    backlog = launches.admission.backlogs[session]
    for call in backlog.launches():
        if call.message.launch == number:
            return _waiting(launches, state, backlog, call)
    return _in_inbox(turns, state, number)


def oldest(launches: Launches, turns: Turns, session: int) -> LaunchView | None:
    """The launch of a session that waits for longest."""
    flying = next((record for record in launches.in_flight.values() if record.session == session), None)
    if flying is not None:
        return _in_flight(launches, flying)
    backlog = launches.admission.backlogs.get(session)
    waiting = backlog.launches() if backlog is not None else []
    if waiting:
        return launch_view(launches, turns, session, waiting[0].message.launch)
    inbox = turns.inboxes.get(session, ())
    first = next((message for message in inbox if isinstance(message, Launch)), None)
    return launch_view(launches, turns, session, first.launch) if first is not None else None


def _in_flight(launches: Launches, record: InFlight) -> LaunchView:
    session = launches.sessions.get(record.session)
    return LaunchView(
        record.session,
        session.tenant.name if session is not None else record.usage.tenant,
        record.launch,
        record.sequence,
        record.program.name,
        record.program.key,
        str(record.state),
        launches.tables.now - record.at,
        tuple(sorted(record.pending)),
        tuple(p for p in record.producers if p in launches.in_flight),
        failure=record.failure.message if record.failure is not None else "",
    )


def _waiting(launches: Launches, session: Session, backlog: Backlog, call: WaitingLaunch) -> LaunchView:
    message, tables = call.message, launches.tables
    program = session.programs.get(message.program)
    name, key = (program.name, program.key) if program is not None else ("", 0)
    islands = tuple(program.islands) if program is not None else ()
    causes = _causes(launches, session, backlog, call, program)
    age_s = tables.now - call.since
    tenant = session.tenant.name
    return LaunchView(session.id, tenant, message.launch, 0, name, key, str(call.state), age_s, islands, **causes)


def _causes(
    launches: Launches, session: Session, backlog: Backlog, call: WaitingLaunch, program: PlannedProgram | None
) -> dict[str, Any]:
    """The reasons for which a launch is not admitted, as fields of its view."""
    before = _before(backlog, call)
    if call in backlog.waiting and before:
        # What it waits for itself shows once it is first.
        return {"before": len(before), "behind": before[0].message.launch}
    if program is None:
        return {}
    uploads = [n for n in call.message.arguments if n in session.arriving]
    lacking = _lacking(launches, session, program) if call.state is LaunchState.WAITING_FOR_MEMORY else None
    full = session.in_flight >= launches.admission.max_in_flight
    first = next((r.sequence for r in launches.in_flight.values() if r.session == session.id), 0) if full else 0
    return {
        "absent": tuple(host.host for host in launches.membership.away(program)),
        "unready": tuple(sorted(program.unready)),
        "uploads": tuple(
            Upload(n, tuple(sorted(session.arriving[n].hosts)), session.buffers[n].type.array_bytes) for n in uploads
        ),
        "lacking": lacking,
        "before": len(before),
        "behind": before[0].message.launch if before else 0,
        "flying": session.in_flight if full else 0,
        "producers": (first,) if first else (),
        "parts": tuple(whole.flying) if (whole := call.whole) is not None else (),
        "rounds": whole.course.rounds if whole is not None else 0,
    }


def _lacking(launches: Launches, session: Session, program: PlannedProgram) -> Lacking | None:
    """The first pool without room for a launch."""
    memory = launches.admission.memory
    capacity, temporaries = memory.capacity(), memory.temporaries()
    held, own = memory.held(launches.sessions.values()), memory.held([session])
    for pool, need in memory.needs(program).items():
        taken = held.get(pool, 0) + max(temporaries.get(pool, 0), need.temporaries)
        if need.results > max(capacity[pool] - taken, 0) or taken > capacity[pool]:
            wanted, way = need.results + need.temporaries, launches.preemption.for_session(session.id)
            return Lacking(pool, wanted, capacity[pool], held.get(pool, 0), own.get(pool, 0), way)
    return None


def _before(backlog: Backlog, call: WaitingLaunch) -> list[WaitingLaunch]:
    """The launches of its session that stand before one that waits, and may have to do with it."""
    found = []
    for other in backlog.launches():
        if other is call:
            break
        found.append(other)
    return found if call in backlog.waiting else []


def _in_inbox(turns: Turns, session: Session, number: int) -> LaunchView | None:
    """A launch among messages that have not been worked off."""
    for before, message in enumerate(_messages(turns, session.id)):
        if isinstance(message, Launch) and message.launch == number:
            program = session.programs.get(message.program)
            hold = turns.held.get(session.id)
            state = f"among messages that wait until {hold}" if hold is not None else "waiting for its session's turn"
            name = program.name if program is not None else _name_of(turns, session.id, message.program)
            return LaunchView(
                session.id,
                session.tenant.name,
                number,
                0,
                name,
                program.key if program is not None else 0,
                f"{state}, behind {before} messages",
            )
    return None


def _messages(turns: Turns, session: int) -> Iterator[object]:
    yield from turns.inboxes.get(session, ())


def _name_of(turns: Turns, session: int, program: int) -> str:
    registered = any(isinstance(m, Register) and m.program == program for m in _messages(turns, session))
    return "" if not registered else f"number {program}, which is not planned yet"
