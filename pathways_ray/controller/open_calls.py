"""Calls of clients that have no reply yet: how many each caller has."""

from __future__ import annotations

from pathways_ray import limits
from pathways_ray.controller.events import Caller
from pathways_ray.controller.tenants import TokenOwner
from pathways_ray.errors import QuotaExceeded


class OpenCalls:
    """Calls without a reply, by the name of their caller."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    def enter(self, caller: Caller) -> str:
        """Counts a call before it is read; `leave` takes what this returns.

        Raises:
            QuotaExceeded: the caller has as many calls without a reply as it may.
        """
        tenant = f"tenant {caller.tenant.name}" if isinstance(caller, TokenOwner) else "the operator"
        name = f"session {caller}" if isinstance(caller, int) else tenant
        most = limits.MAX_CALLS if isinstance(caller, int) else limits.MAX_TENANT_CALLS
        held = self.count.get(name, 0)
        if held >= most:
            raise QuotaExceeded(f"{name} has {held} calls without a reply; {most} are allowed. Wait a little")
        self.count[name] = held + 1
        return name

    def leave(self, name: str) -> None:
        """A call has its reply."""
        self.count[name] -= 1
        if not self.count[name]:
            del self.count[name]
