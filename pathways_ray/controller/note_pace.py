"""The pace of notes: what one tenant does must not push what others did out of the controller's story and its log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pathways_ray.story import Entry

NOTES_AT_ONCE = 128
"""A quarter of the lifecycle entries of a story."""

NOTE_S = 1.0
"""Seconds in which a tenant may have one more note. Three log files hold those of half a day."""

MAX_KNOWN = 1024
"""Tenants that are remembered beyond those which have had notes lately: each session of the operator is one."""


class NotePace:
    """Decides which notes about sessions are taken down.

    Args:
        tenant_of: the tenant of a session, or "" for one that is not known.
    """

    def __init__(self, tenant_of: Callable[[int], str]) -> None:
        self.tenant_of = tenant_of
        self.spent: dict[str, float] = {}
        """Until when the notes of each tenant are spoken for: `NOTE_S` more with each."""
        self.left_out: dict[str, int] = {}

    def paced(self, entry: Entry) -> Sequence[Entry]:
        """The notes to take down: the entry, behind how many were left out before it; or nothing."""
        tenant = self.tenant_of(entry.session) if entry.session else ""
        if not tenant:
            return (entry,)
        left = self.left_out.get(tenant, 0)
        until = max(self.spent.get(tenant, entry.at), entry.at) + (2 if left else 1) * NOTE_S
        if until - entry.at > NOTES_AT_ONCE * NOTE_S:
            self.left_out[tenant] = left + 1
            return ()
        if len(self.spent) >= MAX_KNOWN:
            self.spent = {name: at for name, at in self.spent.items() if at > entry.at}
        self.spent[tenant] = until
        if not left:
            return (entry,)
        del self.left_out[tenant]
        return Entry(entry.at, "notes left out", f"{left} of tenant {tenant}", session=entry.session), entry
