"""Quotas: refusals that name what was asked, allowed and held. Each returns a `Failure`, or None."""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray.controller.state import Session
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.limits import MAX_SESSIONS

MAX_BACKLOG_CALLS = 8192
"""Launches and other calls of one session that may wait here; a client that keeps to its limit never gets there."""


def launches(session: Session, backlog: int) -> Failure | None:
    """One more launch of a session of which `backlog` calls wait."""
    held = session.usage.busy
    allowed = session.tenant.quota.launches
    if allowed is not None and held >= allowed:
        return Failure(
            "QuotaExceeded",
            f"tenant {session.tenant.name!r} may have {allowed} launches without an outcome; it has {held} and asks "
            "for 1 more",
        )
    if backlog >= MAX_BACKLOG_CALLS:
        return Failure("QuotaExceeded", f"{MAX_BACKLOG_CALLS} calls of a session may wait; there are {backlog}")
    return None


def device_bytes(session: Session, sessions: Iterable[Session], asked: int, purpose: str) -> Failure | None:
    """`asked` more bytes on devices for `purpose`."""
    allowed = session.tenant.quota.device_bytes
    if allowed is None:
        return None
    held = sum(s.device_bytes for s in sessions if s.tenant.name == session.tenant.name)
    if held + asked <= allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"tenant {session.tenant.name!r} may hold {allowed} bytes on devices; it holds {held} and asks for {asked} "
        f"more for {purpose}",
    )


def devices(tenant: Tenant, asked: int, sessions: Iterable[Session]) -> Failure | None:
    """One more slice, of `asked` devices."""
    allowed = tenant.quota.devices
    if allowed is None:
        return None
    held = sum(p.mesh.size for s in sessions if s.tenant.name == tenant.name for p in s.slices.values())
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
