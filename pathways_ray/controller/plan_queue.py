"""Programs that wait for the planner: one is under way, and tenants take turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pathways_ray.controller import events
from pathways_ray.controller.planning import PlanReply, PlanRequest

Continuation: TypeAlias = Callable[[PlanReply], list[events.Command]]


@dataclass(eq=False)
class Asked:
    """A question for the planner, by a session, and what follows from its answer."""

    session: int
    plan: events.Plan
    then: Continuation


class PlanQueue:
    """The questions of all sessions."""

    def __init__(self) -> None:
        self.made = 0
        self.under_way: Asked | None = None
        self.waiting: dict[str, deque[Asked]] = {}

    def put(
        self, session: int, request: PlanRequest, functions: Mapping[str, bytes], then: Continuation
    ) -> list[events.Command]:
        """Enters a question of a session. `functions` are checked first."""
        self.made += 1
        asked = Asked(session, events.Plan(self.made, request, dict(functions)), then)
        self.waiting.setdefault(request.tenant.name, deque()).append(asked)
        return self._next()

    def bytes_of(self, session: int, tenant: str) -> int:
        """Bytes of the graphs of a session, of this tenant, that have no answer yet."""
        asked = [*self.waiting.get(tenant, ()), *([self.under_way] if self.under_way is not None else [])]
        return sum(len(one.plan.request.graph) for one in asked if one.session == session)

    def ended(self, event: events.Planned, now: float) -> list[events.Command]:
        """The question under way has its answer; the next one is asked."""
        asked, self.under_way = self.under_way, None
        assert asked is not None
        assert asked.plan.call == event.call
        return self._next() + asked.then(event.reply)

    def forget(self, session: int) -> None:
        """A session is closed: nobody waits for its answers any more."""
        if self.under_way is not None and self.under_way.session == session:
            self.under_way.then = lambda reply: []
        for tenant, queue in list(self.waiting.items()):
            kept = deque(asked for asked in queue if asked.session != session)
            self.waiting[tenant] = kept
            if not kept:
                del self.waiting[tenant]

    def _next(self) -> list[events.Command]:
        if self.under_way is not None or not self.waiting:
            return []
        tenant = next(iter(self.waiting))
        queue = self.waiting.pop(tenant)
        self.under_way = queue.popleft()
        if queue:
            self.waiting[tenant] = queue  # at the end: it has had its turn
        return [self.under_way.plan]
