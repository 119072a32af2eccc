"""Whether a tenant may have what it asks for: refusals that name what was asked, allowed and held."""

from __future__ import annotations

from collections.abc import Iterable

from pathways_ray.controller.state import Session
from pathways_ray.errors import Failure

BACKLOG = 8192
"""Launches and other calls of one session that may wait here; a client that keeps to its limit never gets there."""


def launches(session: Session) -> Failure | None:
    """The failure of one more launch over the quota of launches without an outcome, or over the runtime's own."""
    held = session.usage.busy
    allowed = session.tenant.quota.launches
    if allowed is not None and held >= allowed:
        return Failure(
            "QuotaExceeded",
            f"tenant {session.tenant.name!r} may have {allowed} launches without an outcome; it has {held} and asks "
            "for 1 more",
        )
    if session.backlog >= BACKLOG:
        return Failure("QuotaExceeded", f"{BACKLOG} calls of a session may wait; there are {session.backlog}")
    return None


def device_bytes(session: Session, sessions: Iterable[Session], asked: int, what: str) -> Failure | None:
    """The failure of taking `asked` more bytes on devices for `what`, if that is over the tenant's quota."""
    allowed = session.tenant.quota.device_bytes
    if allowed is None:
        return None
    held = sum(s.device_bytes for s in sessions if s.tenant.name == session.tenant.name)
    if held + asked <= allowed:
        return None
    return Failure(
        "QuotaExceeded",
        f"tenant {session.tenant.name!r} may hold {allowed} bytes on devices; it holds {held} and asks for {asked} "
        f"more for {what}",
    )
