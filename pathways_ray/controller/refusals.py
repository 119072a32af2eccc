"""Refusals of a launch, as named predicates: each looks at one rule and returns a `Failure`, or None.

Admission asks them in the order of `refusal_of`; a further rule is one more line there. That a launch's hosts have
been away for too long is asked last, by `hosts`.
"""

from __future__ import annotations

from collections import Counter

from pathways_ray.controller import quotas
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Session, Tables
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import EarlyLaunch, InlineArgument, Launch


def refusal_of(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The first rule that refuses a launch, in the order in which a user should learn of them. Rules that can concern
    few launches are asked about those alone: every launch goes by here."""
    breaker, quota = tables.circuit_breaker, session.tenant.quota
    return (
        (quotas.while_suspended(session) if session.suspended else None)
        or program.failure  # to be planned or compiled
        or (breaker.refusal(program.culprit) if breaker.refused else None)
        or arguments_unfit(tables, session, program, launch)
        or (donated_twice(program, launch) if program.donated else None)
        or results_taken(session, program, launch)
        or quotas.buffers(session, tables.buffers, len(program.results), program.name)
        or (over_device_bytes(tables, session, program, launch) if quota.device_bytes is not None else None)
    )


def arguments_unfit(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """An argument does not exist, has failed, or is not of the program's type. A session names only its own buffers."""
    arguments, types, carries = launch.arguments, program.arguments, False
    if len(arguments) != len(types):
        return Failure(
            "GraphError",
            f"program {program.name!r} takes {len(types)} buffers, the launch gives {len(arguments)}",
        )
    if type(launch) is not Launch and ((inline := launch.inline) or 0 in arguments):
        carries = bool(inline) or type(launch) is EarlyLaunch
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
        if buffer.type != expected:
            return Failure(
                "GraphError",
                f"program {program.name!r} takes {expected.type} on slice {expected.slice}; buffer {number} is "
                f"{buffer.type.type} on slice {buffer.type.slice}",
            )
    return None


def donated_twice(program: PlannedProgram, launch: Launch) -> Failure | None:
    """The memory of an argument is taken that the launch names once more: hosts would find an array that is gone. Not
    of a part of a launch, whose values may be equal."""
    if program.key < 0 or len(set(launch.arguments)) == len(launch.arguments):
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
    missing = [place for place, number in enumerate(launch.arguments) if not number]
    places = [place for place, _ in inline] if inline else missing
    if places != missing:
        text = f"carries arguments {places}, and does not name arguments {missing}"
    elif program.script is not None:
        text = f"carries arguments {places}; a program that decides needs buffers"
    elif program.donated and not set(program.donated).isdisjoint(places):
        text = f"carries arguments {places}; buffers alone are donated"
    else:
        for place, data in inline:
            expected = program.arguments[place]
            if len(data) != expected.array_bytes:
                size = f"{len(data)} bytes as argument {place}, which is {expected.type}: {expected.array_bytes}"
                return Failure("GraphError", f"launch {launch.launch} of program {program.name!r} carries {size}")
        return None
    return Failure("WireError", f"launch {launch.launch} of program {program.name!r} {text}")


def failed_argument(session: Session, launch: Launch) -> Failure | None:
    """The failure of an argument, if one has failed. It stays so, whatever the launches before this one do: nobody need
    wait for them."""
    found = (session.buffers.get(number) for number in launch.arguments)
    return next((buffer.failure for buffer in found if buffer is not None and buffer.failure is not None), None)


def results_taken(session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """A number stands for one buffer, and 0 for none: another one under it would be on hosts without being counted."""
    first, donated = launch.results, session.donated
    if not first and program.results:
        return Failure("WireError", f"launch {launch.launch} gives its result number 0, which stands for no buffer")
    numbers = range(first, first + len(program.results))
    if session.buffers.keys().isdisjoint(numbers) and (not donated or donated.keys().isdisjoint(numbers)):
        return None
    for number in numbers:
        if session.lives(number):
            return Failure("WireError", f"launch {launch.launch} gives its result number {number}, which is taken")
    return None


def over_device_bytes(tables: Tables, session: Session, program: PlannedProgram, launch: Launch) -> Failure | None:
    """The results do not fit into the tenant's quota of memory on devices, beside what the launch does not give up."""
    carried = quotas.carried_bytes(program, launch.inline)
    purpose = f"the results of program {program.name!r}" + (" and arguments of its launch" if carried else "")
    asked = quotas.taken_bytes(program, launch) + carried
    return quotas.device_bytes(session, tables.sessions.values(), asked, purpose)
