"""Refusals of a launch, as named predicates: each looks at one rule and returns a `Failure`, or None.

Admission asks them in the order of `REFUSALS`; a further rule is one more function there. That a launch's hosts have
been away for too long is asked last, by `hosts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

from pathways_ray.controller import quotas
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import EarlyLaunch, InlineArgument, Launch, inline_of

Refusal: TypeAlias = Callable[[Tables, Session, PlannedProgram, Launch], Failure | None]


def program_failed(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The program could not be planned or compiled."""
    return program.failure


def circuit_open(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The program ended hosts, several times."""
    return tables.circuit_breaker.refusal(program.culprit)


def arguments_unfit(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """An argument does not exist, has failed, or is not of the program's type. A session names only its own buffers."""
    arguments, types, inline = launch.arguments, program.arguments, inline_of(launch)
    if len(arguments) != len(types):
        return Failure(
            "GraphError",
            f"program {program.name!r} takes {len(types)} buffers, the launch gives {len(arguments)}",
        )
    carries = bool(inline) or (type(launch) is EarlyLaunch and 0 in arguments)
    if carries and (failure := _inline_unfit(program, launch, inline)) is not None:
        return failure
    buffers = session.buffers
    for number, expected in zip(arguments, types, strict=True):
        if carries and not number:
            continue
        buffer = buffers.get(number)
        if buffer is None:
            refused = session.why_refused(number)
            return refused or Failure("BufferDeleted", f"buffer {number} of this session does not exist (deleted?)")
        if buffer.failure is not None:
            return buffer.failure
        given = buffer.type
        if given is not expected and given != expected:
            return Failure(
                "GraphError",
                f"program {program.name!r} takes {expected.type} on slice {expected.slice}; buffer {number} is "
                f"{given.type} on slice {given.slice}",
            )
    return None


def donated_twice(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The memory of an argument is taken that the launch names once more: hosts would find an array that is gone. Not
    of a part of a launch, whose values may be equal."""
    if not program.donated or program.key < 0 or len(set(launch.arguments)) == len(launch.arguments):
        return None
    times = Counter(launch.arguments)
    number = next((n for n in (launch.arguments[k] for k in program.donated) if times[n] > 1), None)
    if number is None:
        return None
    text = f"takes the memory of buffer {number}, which launch {launch.launch} gives it a second time"
    return Failure("GraphError", f"program {program.name!r} {text}")


def _inline_unfit(program: PlannedProgram, launch: Launch, inline: tuple[InlineArgument, ...]) -> Failure | None:
    """The values that a launch carries are not those that are missing among its arguments. Of an early one its host may
    have them, all or none."""
    what = f"launch {launch.launch} of program {program.name!r} carries"
    missing = [place for place, number in enumerate(launch.arguments) if not number]
    places = [place for place, _ in inline] if inline else missing
    if places != missing:
        return Failure("WireError", f"{what} arguments {places}, and does not name arguments {missing}")
    if program.script is not None or not set(program.donated).isdisjoint(places):
        why = "a program that decides needs buffers" if program.script is not None else "buffers alone are donated"
        return Failure("WireError", f"{what} arguments {places}; {why}")
    for place, data in inline:
        expected = program.arguments[place]
        if len(data) != expected.array_bytes:
            text = f"{what} {len(data)} bytes as argument {place}, which is {expected.type}: {expected.array_bytes}"
            return Failure("GraphError", text)
    return None


def failed_argument(session: Session, launch: Launch) -> Failure | None:
    """The failure of an argument, if one has failed. It stays so, whatever the launches before this one do: nobody need
    wait for them."""
    found = (session.buffers.get(number) for number in launch.arguments)
    return next((buffer.failure for buffer in found if buffer is not None and buffer.failure is not None), None)


def results_taken(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """A number stands for one buffer, and 0 for none: another one under it would be on hosts without being counted."""
    if not launch.results and program.results:
        return Failure("WireError", f"launch {launch.launch} gives its result number 0, which stands for no buffer")
    for number in range(launch.results, launch.results + len(program.results)):
        if session.lives(number):
            return Failure("WireError", f"launch {launch.launch} gives its result number {number}, which is taken")
    return None


def over_buffers(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The session, or the controller, has as many buffers as it may."""
    return quotas.buffers(session, tables.buffers, len(program.results), program.name)


def over_device_bytes(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The results do not fit into the tenant's quota of memory on devices, beside what the launch does not give up."""
    if session.tenant.quota.device_bytes is None:
        return None
    carried = quotas.carried_bytes(program, launch)
    purpose = f"the results of program {program.name!r}" + (" and arguments of its launch" if carried else "")
    asked = quotas.taken_bytes(program, launch) + carried
    return quotas.device_bytes(session, tables.sessions.values(), asked, purpose)


def session_suspended(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The session has given its memory to others. A client that keeps to that calls nothing meanwhile."""
    return quotas.while_suspended(session)


REFUSALS: tuple[Refusal, ...] = (
    session_suspended,
    program_failed,
    circuit_open,
    arguments_unfit,
    donated_twice,
    results_taken,
    over_buffers,
    over_device_bytes,
)
"""Refusals in the order in which a user should learn of them."""
