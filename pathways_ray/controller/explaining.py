"""Explanations: how a program of a client is placed, once it is planned and compiled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.clients import Client, Clients
from pathways_ray.controller.events import AnswerCall, Command
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.planning import PlanReply, plan_if_cheap
from pathways_ray.errors import TooLarge
from pathways_ray.transport import messages as wire

EXPLAIN_LIMIT_S = 120.0
"""`explain` waits this long for the compiled memory analysis."""


@dataclass(frozen=True)
class Explaining:
    """An `explain` that waits until its program is compiled, at most until `deadline`."""

    session: int
    program: int
    plan: str
    order: str
    deadline: float


class Explanations:
    """Answers `Explain`. `waiting` has the calls that wait for a compiler, by session: those are looked at of which
    something has changed, since there may be very many."""

    def __init__(self, launches: Launches, clients: Clients) -> None:
        self.launches = launches
        self.clients = clients
        self.waiting: dict[int, dict[int, Explaining]] = {}

    def explain(
        self, call: int, client: Client, request: wire.Explain, now: float
    ) -> tuple[wire.Reply | None, list[Command]]:
        """The reply to a client, or None where it follows."""
        session = self.launches.sessions[client.session]
        asked = self.clients.registrar.request_of(request.graph, session.slices, client.tenant, text=True)
        reply = plan_if_cheap(asked)
        if reply is not None:
            return self._placed(call, request, reply, now), []
        plans = self.clients.registrar.plans
        waiting = plans.bytes_of(client.session, client.tenant.name)
        if waiting + len(request.graph) > limits.MAX_GRAPH_BYTES:
            text = (
                f"programs of {waiting} bytes of the session wait to be planned, and one of {len(request.graph)} came"
            )
            raise TooLarge(f"{text}; {limits.MAX_GRAPH_BYTES} are the limit. Ask for one after the other")

        def planned(reply: PlanReply) -> list[Command]:
            found = self._placed(call, request, reply, self.launches.tables.now)
            return [AnswerCall(call, found)] if found is not None else []

        return None, plans.put(client.session, asked, {}, planned)

    def _placed(self, call: int, request: wire.Explain, reply: PlanReply, now: float) -> wire.Reply | None:
        """The reply once the plan is known; None where it waits until the program is compiled."""
        if reply.failure is not None:
            return wire.Refused(reply.failure)
        if request.program < 0:
            return wire.Explained(reply.plan, reply.order, {})
        explaining = Explaining(request.session, request.program, reply.plan, reply.order, now + EXPLAIN_LIMIT_S)
        found = self._explained(explaining, now)
        if found is None:  # the program comes on the stream, and this call may have overtaken it
            self.waiting.setdefault(request.session, {})[call] = explaining
        return found

    def _explained(self, waiting: Explaining, now: float) -> wire.Reply | None:
        session = self.launches.sessions.get(waiting.session)
        program = session.programs.get(waiting.program) if session is not None else None
        if session is not None and program is None and (full := quotas.programs(session)) is not None:
            return wire.Refused(full, waiting.program)
        parts = program.parts if program is not None else ()
        if failure := next((part.failure for part in parts if part.failure is not None), None):
            return wire.Refused(failure, waiting.program if program is not None and program.again else 0)
        if session is not None and now < waiting.deadline and not (parts and all(part.is_ready for part in parts)):
            return None
        needed = {host for part in parts for host in part.temporary_bytes}
        return wire.Explained(
            waiting.plan,
            waiting.order,
            {host: max(part.temporary_bytes.get(host, 0) for part in parts) for host in needed},
        )

    def programs_changed(self, sessions: Iterable[int], now: float) -> list[Command]:
        """Answers those of some sessions who waited for a program that is compiled now, has failed, or takes too
        long."""
        commands: list[Command] = []
        for session in sessions:
            of_session = self.waiting.get(session, {})
            for call, waiting in list(of_session.items()):
                reply = self._explained(waiting, now)
                if reply is not None:
                    del of_session[call]
                    commands.append(AnswerCall(call, reply))
            if not of_session:
                self.waiting.pop(session, None)
        return commands
