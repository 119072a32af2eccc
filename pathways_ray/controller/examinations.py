"""Examinations: clients ask what a program was compiled to, and the hosts that compiled it say.

Nothing is asked of hosts before somebody does. A host that says nothing for `EXAMINE_LIMIT_S` is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pathways_ray.controller.events import AnswerCall, Command
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.state import SendIsland
from pathways_ray.errors import Failure
from pathways_ray.transport import messages as wire

EXAMINE_LIMIT_S = 40.0
"""Seconds for the hosts: they may have programs to compile first. A call of a client waits for longer."""

MAX_EXAMINATIONS = 64
"""Examinations that wait at once; more are refused."""

MAX_TENANT_EXAMINATIONS = 4
"""Those of a tenant's programs, so that no tenant takes the places of all."""

MAX_REPORT_BYTES = 64 << 20
"""Bytes that a client is told; the rest is left out."""

MAX_KEPT_BYTES = 512 << 20
"""Bytes of reports that are kept for all examinations; one that needs more is refused."""

COST, CODE = "computations", "code"
"""The subjects of a `Look` that are answered here."""


@dataclass
class Examination:
    """A call that waits for what hosts say of a program: of each of its segments, by key and host."""

    call: int
    tenant: str
    deadline: float
    missing: set[tuple[int, int]]
    reports: list[bytes] = field(default_factory=list)
    kept: int = 0


class Examinations:
    """The examinations that wait."""

    def __init__(self, launches: Launches) -> None:
        self.launches = launches
        self.waiting: dict[int, Examination] = {}
        self.made = 0

    def ask(self, call: int, request: wire.Look) -> list[Command]:
        """Asks the hosts of a program, which they have compiled."""
        session = self.launches.sessions.get(request.of)
        program = session.programs.get(request.number) if session is not None else None
        parts = program.parts if program is not None else ()
        if failure := next((part.failure for part in parts if part.failure is not None), None):
            return [AnswerCall(call, wire.Refused(failure))]
        if session is None or not parts or not all(part.is_ready for part in parts):
            text = f"session {request.of} has no program {request.number} that its hosts have compiled"
            return [AnswerCall(call, wire.Refused(_usage(text)))]
        if len(self.waiting) >= MAX_EXAMINATIONS:
            return [AnswerCall(call, wire.Refused(_usage("too many ask at once; ask again later")))]
        tenant = session.tenant.name
        if sum(one.tenant == tenant for one in self.waiting.values()) >= MAX_TENANT_EXAMINATIONS:
            text = f"{MAX_TENANT_EXAMINATIONS} wait already that ask of programs of tenant {tenant!r}; ask again later"
            return [AnswerCall(call, wire.Refused(_usage(text)))]
        missing = {(part.key, host) for part in parts for host in part.hosts}
        self.made += 1
        deadline = self.launches.tables.now + EXAMINE_LIMIT_S
        made = self.waiting[self.made] = Examination(call, tenant, deadline, missing)
        if not missing:
            return self._answer(self.made, made)
        return [
            SendIsland(island, wire.Examine(self.made, part.key, tenant, request.subject == CODE))
            for part in parts
            for island in part.islands
        ]

    def examined(self, message: wire.Examined) -> list[Command]:
        """A host has answered."""
        waiting = self.waiting.get(message.look)
        if waiting is None or (message.program, message.host) not in waiting.missing:
            return []
        waiting.missing.discard((message.program, message.host))
        size = len(message.report)
        if size and waiting.kept + size <= MAX_REPORT_BYTES:
            kept = sum(one.kept for one in self.waiting.values())
            if kept + size > MAX_KEPT_BYTES:
                del self.waiting[message.look]
                text = f"{kept} bytes of hosts' reports wait here, of {MAX_KEPT_BYTES} that may; ask again later"
                return [AnswerCall(waiting.call, wire.Refused(_usage(text)))]
            waiting.reports.append(message.report)
            waiting.kept += size
        return [] if waiting.missing else self._answer(message.look, waiting)

    def tick(self, now: float) -> list[Command]:
        """Answers without the hosts that say nothing."""
        overdue = [(look, waiting) for look, waiting in self.waiting.items() if now >= waiting.deadline]
        return [command for look, waiting in overdue for command in self._answer(look, waiting)]

    def _answer(self, look: int, waiting: Examination) -> list[Command]:
        del self.waiting[look]
        # Joined as texts: what hosts said is not read here.
        text = b"[" + b",".join(waiting.reports) + b"]"
        return [AnswerCall(waiting.call, wire.StatusReply(text.decode(errors="replace")))]


def _usage(text: str) -> Failure:
    return Failure("UsageError", text)
