"""Quotas: refusals that name what was asked, allowed and held. Each returns a `Failure`, or None."""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray import limits
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Session
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure, from_failure
from pathways_ray.limits import MAX_BUFFERS, MAX_INLINE_BYTES, MAX_PLACES, MAX_SESSION_BUFFERS, MAX_SESSIONS, MAX_SLICES
from pathways_ray.transport.messages import InlineArgument, Launch, inline_bytes


def enforce(failure: Failure | None) -> None:
    """Raises the error of a refusal, if there is one."""
    if failure is not None:
        raise from_failure(failure)


def launches(session: Session) -> Failure | None:
    """One more launch of a session."""
    held = session.usage.busy - session.usage.parts
    allowed = session.tenant.quota.launches
    if allowed is None or held < allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"tenant {session.tenant.name!r} may have {allowed} launches without an outcome; it has {held} and asks "
        "for 1 more",
    )


def while_suspended(session: Session) -> Failure | None:
    """A suspended session has given its memory to others, and gets none until it resumes."""
    if not session.suspended:
        return None
    return Failure("SessionSuspended", f"session {session.id} is suspended: call its resume() before you use it")


def has_room(session: Session, held: int, asked: int) -> bool:
    """Whether `buffers` refuses nothing."""
    return len(session.buffers) + asked <= MAX_SESSION_BUFFERS and held + asked <= MAX_BUFFERS


def buffers(session: Session, held: int, asked: int, purpose: str) -> Failure | None:
    """`asked` more buffers of a session for `purpose`; all sessions together have `held`."""
    if has_room(session, held, asked):
        return None
    mine = len(session.buffers)
    return Failure(
        "TooLarge",
        f"the session has {mine} buffers and asks for {asked} more for {purpose}; {MAX_SESSION_BUFFERS} are the limit, "
        f"and {MAX_BUFFERS} for all sessions, which have {held}. Drop some",
    )


def programs(session: Session) -> Failure | None:
    """One more program of a session. What is refused is not noted: its launches ask this again."""
    if len(session.programs) < limits.MAX_PROGRAMS:
        return None
    return Failure(
        "TooLarge",
        f"the session has {len(session.programs)} programs; {limits.MAX_PROGRAMS} are the limit. Drop the functions of "
        "some, or open a new session",
    )


def slices(session: Session) -> Failure | None:
    """One more slice of a session."""
    if len(session.slices) < MAX_SLICES and len(session.places) < MAX_PLACES:
        return None
    return Failure(
        "TooLarge",
        f"the session holds {len(session.slices)} slices, {len(session.places)} with released ones that its arrays and "
        f"programs name; {MAX_SLICES} and {MAX_PLACES} are the limits. Release some, and drop what lies on them",
    )


def device_bytes(session: Session, sessions: Iterable[Session], asked: int, purpose: str) -> Failure | None:
    """`asked` more bytes on devices for `purpose`."""
    allowed = session.tenant.quota.device_bytes
    if allowed is None:
        return None
    held = sum(s.charged_bytes for s in sessions if s.tenant.name == session.tenant.name)
    if held + asked <= allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"tenant {session.tenant.name!r} may hold {allowed} bytes on devices; it holds {held} and asks for {asked} "
        f"more for {purpose}",
    )


def carried(launch: Launch) -> Failure | None:
    """The values that a launch carries, before it may have to wait with them."""
    size = inline_bytes(launch)
    if size <= MAX_INLINE_BYTES:
        return None
    text = f"launch {launch.launch} carries arguments of {size} bytes; {MAX_INLINE_BYTES} are the limit"
    return Failure("TooLarge", f"{text}. Put them on the slice before, and pass what pw.put returns")


def carried_bytes(program: PlannedProgram, inline: tuple[InlineArgument, ...]) -> int:
    """Bytes on devices of the arguments that a launch carries."""
    return sum([program.arguments[place].charged_bytes for place, _ in inline])


def taken_bytes(program: PlannedProgram, launch: Launch) -> int:
    """Bytes on devices that a launch takes once it is admitted: those of its results without those of the arguments
    that it gives up, each once, which count no more from then on; at least 0. It may not have been looked at yet."""
    given = {launch.arguments[k]: k for k in program.donated if k < len(launch.arguments)}
    return max(program.charged_bytes - sum(program.arguments[k].charged_bytes for k in given.values()), 0)


def carry(session: Session, program: PlannedProgram, inline: tuple[InlineArgument, ...]) -> int:
    """Counts them, as long as the launch is on its islands, and returns them."""
    carried = carried_bytes(program, inline)
    session.charged_bytes += carried
    return carried


def devices(tenant: Tenant, asked: int, sessions: Iterable[Session]) -> Failure | None:
    """One more slice, of `asked` devices."""
    allowed = tenant.quota.devices
    if allowed is None:
        return None
    mine = [s for s in sessions if s.tenant.name == tenant.name]
    held = sum(p.mesh.size for s in mine for number, p in s.slices.items() if number not in s.parts)
    if held + asked <= allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"tenant {tenant.name!r} asks for a slice of {asked} devices and holds {held} in other slices; "
        f"{allowed} are allowed. Release a slice, or ask for a smaller one",
    )


def message_bytes(tenant: Tenant, asked: int, kind: str) -> Failure | None:
    """A message of `asked` bytes; `kind` names it, with an article."""
    allowed = tenant.quota.message_bytes
    if allowed is None or asked <= allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"{kind} of {asked} bytes from tenant {tenant.name!r} is too big: {allowed} are allowed in a message. "
        "Pass big constants as arguments, or split the program into several",
    )


def nodes(tenant: Tenant, asked: int, program: str) -> Failure | None:
    """A program of `asked` nodes."""
    allowed = tenant.quota.nodes
    if allowed is None or asked <= allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"program {program!r} of tenant {tenant.name!r} has {asked} nodes; {allowed} are allowed in a program. "
        "Cut it into several",
    )


def sessions(tenant: Tenant, held: int) -> Failure | None:
    """One more session of a tenant that has `held`."""
    if held < MAX_SESSIONS:
        return None
    return Failure(
        "QuotaExceeded",
        f"tenant {tenant.name!r} asks for one more session and has {held}; {MAX_SESSIONS} are allowed. Close some",
    )
