"""Programs of clients: planned at once where that is cheap, otherwise in a process beside the controller."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pathways_ray import limits
from pathways_ray.controller import events, quotas
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.plan_queue import PlanQueue
from pathways_ray.controller.planning import PlanReply, PlanRequest, plan_if_cheap, request_of
from pathways_ray.controller.programs import check_functions
from pathways_ray.controller.registration import Registration
from pathways_ray.controller.state import SendIsland, Session
from pathways_ray.controller.tenants import Tenant
from pathways_ray.controller.turns import Hold, Turns
from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.story import Entry
from pathways_ray.transport.messages import FunctionsAhead, Register

CHEAP_FUNCTION_BYTES = 1 << 20
"""Functions of a program beyond this are compared with their digests away from the loop; these take 2 ms."""

MAX_NOTED_CHARACTERS = 500
"""Of the reason why a program is refused, in the controller's story."""

_MOVED = Failure("GraphError", "a slice of the program moved while the program was planned; register it again")


class Registrar:
    """Registers programs.

    Args:
        turns: a session whose program is planned elsewhere is held meanwhile.
        fusion: whether programs are fused when they are planned.
        check: raises for functions that are not what their names say.
    """

    def __init__(
        self,
        launches: Launches,
        turns: Turns,
        fusion: bool,
        check: Callable[[Mapping[str, bytes]], None] = check_functions,
    ) -> None:
        self.launches = launches
        self.turns = turns
        self.fusion = fusion
        self.kept_bytes = limits.MAX_KEPT_BYTES
        self.check = check
        self.programs_made = 0
        self.islands_full: set[int] = set()
        self.plans = PlanQueue()
        self.plan_if_cheap = plan_if_cheap

    def island_full(self, event: events.IslandFull | events.IslandRoom, now: float) -> list[events.Command]:
        """The link to an island is full, or has room again. Until then no session registers a program: its functions
        would gather in this process, and hold up the launches of others."""
        if isinstance(event, events.IslandFull):
            self.islands_full.add(event.island)
            return []
        self.islands_full.discard(event.island)
        if not self.islands_full:
            self.turns.release_all(Hold.ISLAND)
        return []

    def request_of(
        self, graph: bytes, places: Mapping[int, PlacedSlice], tenant: Tenant, text: bool = False
    ) -> PlanRequest:
        """The request to plan a graph, or to say how it would be planned."""
        return request_of(graph, places, self.fusion, tenant, text, self.kept_bytes)

    def register(
        self, registration: Registration, session: Session, message: Register
    ) -> tuple[list[events.Command], Hold | None]:
        """Plans a program, or has it planned elsewhere; then the session's other messages have to wait."""
        self.programs_made += 1
        key = self.programs_made
        if message.program not in session.programs and (full := quotas.programs(session)) is not None:
            registration.withhold(message, full)
            return [], None
        refused = registration.refusal(session, message)
        if refused is not None:
            registration.withhold(message, refused)
            failed = PlanReply(failure=refused, checked=False, again=True)
            return self._registered(registration, session, message, key, failed), None
        # A program may arrive after a release that was called later: released slices are still known.
        request = self.request_of(message.graph, session.places, session.tenant)
        if sum(map(len, message.functions.values())) <= CHEAP_FUNCTION_BYTES:
            try:
                self.check(message.functions)
            except PathwaysError as error:
                reply: PlanReply | None = PlanReply(failure=to_failure(error), checked=False)
            else:
                reply = self.plan_if_cheap(request)
            if reply is not None:
                return self._registered(registration, session, message, key, reply), None

        def planned(reply: PlanReply) -> list[events.Command]:
            self.turns.release(session.id, Hold.PLANNING)
            if any(session.places.get(placed.mesh.id) != placed for placed in request.slices):
                reply = PlanReply(failure=_MOVED, checked=reply.checked)
            return self._registered(registration, session, message, key, reply)

        ahead = _functions_ahead(request, message.functions)
        return [*ahead, *self.plans.put(session.id, request, message.functions, planned)], Hold.PLANNING

    def _registered(
        self, registration: Registration, session: Session, message: Register, key: int, reply: PlanReply
    ) -> list[events.Command]:
        if reply.checked:
            registration.take(message.functions)
        program = registration.made(key, session, message, reply)
        if program.failure is not None:
            now = self.launches.tables.now
            text = program.failure.message[:MAX_NOTED_CHARACTERS]
            self.launches.story.note(Entry(now, "program refused", program.name, text, session=session.id))
        return [*self.launches.register(session.id, message.program, program)]


def _functions_ahead(request: PlanRequest, functions: dict[str, bytes]) -> list[events.Command]:
    """Has the islands of a program check its functions while it is planned: a second copy of the small ones costs less
    than to wait for one after the other."""
    if not functions or sum(map(len, functions.values())) > CHEAP_FUNCTION_BYTES:
        return []
    message = FunctionsAhead(request.tenant.name, request.tenant.trusted, functions)
    return [SendIsland(island, message) for island in sorted({placed.island for placed in request.slices})]
