"""Registration: the functions that sessions have sent, and the way from a message to a planned program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.planning import PlanReply, result_count
from pathways_ray.controller.programs import Lowered, PlannedProgram
from pathways_ray.controller.state import Session
from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.transport.messages import Register

MAX_FAILURE_CHARACTERS = 4096
"""Of the failure of a program, which every launch of it repeats."""


class TenantFunctions:
    """The functions of all sessions of a tenant by digest, each held once, and how many sessions hold it."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[bytes, int]] = {}
        self.bytes = 0

    def missing(self, functions: Mapping[str, bytes]) -> int:
        """Bytes of the functions that are not held."""
        return sum(len(blob) for digest, blob in functions.items() if digest not in self.held)

    def hold(self, digest: str, blob: bytes) -> bytes:
        """Counts one more session with a function; returns the copy that all share."""
        blob, count = self.held.get(digest, (blob, 0))
        self.bytes += len(blob) if not count else 0
        self.held[digest] = blob, count + 1
        return blob

    def release(self, digest: str) -> None:
        blob, count = self.held.pop(digest)
        if count > 1:
            self.held[digest] = blob, count - 1
        else:
            self.bytes -= len(blob)


class Registration:
    """The functions that a session has sent.

    `withheld` are functions that came in a message that was refused, by digest: the client takes them for sent, so
    programs that name them fail for the same reason, until it sends them again, as launches of these have it do.
    `leaving` are those that the client names no more, and that programs still have.

    Args:
        tenants: the functions of the tenant that the session belongs to.
    """

    def __init__(self, tenants: TenantFunctions) -> None:
        self.tenants = tenants
        self.functions: dict[str, bytes] = {}
        self.function_bytes = 0
        self.withheld: dict[str, Failure] = {}
        self.leaving: set[str] = set()

    def refusal(self, session: Session, message: Register) -> Failure | None:
        """The failure of a program that is not looked at, if there is one."""
        self.let_go(session)
        size = len(message.graph) + sum(map(len, message.functions.values()))
        refused = quotas.message_bytes(session.tenant, size, "a program")
        if refused is not None:
            return refused
        held = self.function_bytes + session.plan_bytes
        if held + size > limits.MAX_SESSION_FUNCTION_BYTES:
            return Failure(
                "TooLarge",
                f"the functions of a program have {size} bytes and those this session sent before, with the plans of "
                f"its programs, {held}; {limits.MAX_SESSION_FUNCTION_BYTES} are the limit. Open a new session",
            )
        more = self.tenants.missing(message.functions)
        if self.tenants.bytes + more > limits.MAX_TENANT_FUNCTION_BYTES:
            return Failure(
                "QuotaExceeded",
                f"the functions of a program have {more} bytes that are new to tenant {session.tenant.name!r}, whose "
                f"sessions hold {self.tenants.bytes}; {limits.MAX_TENANT_FUNCTION_BYTES} are allowed. Close some",
            )
        return None

    def made(self, key: int, session: Session, message: Register, reply: PlanReply) -> PlannedProgram:
        """The program of a reply, or one with the failure to make it."""
        failure, again = reply.failure, reply.again
        if reply.lowered is not None:
            failure = self._withheld(reply.lowered)
            again = failure is not None
        if failure is None:
            assert reply.lowered is not None
            try:
                known, tenant = self.functions, session.tenant
                return PlannedProgram.of(key, session.id, reply.lowered, known, tenant.name, tenant.trusted)
            except PathwaysError as error:
                failure = to_failure(error)
        if len(failure.message) > MAX_FAILURE_CHARACTERS:
            failure = msgspec.structs.replace(failure, message=failure.message[:MAX_FAILURE_CHARACTERS] + "…")
        return PlannedProgram(key, session.id, "", failure=failure, promised=result_count(message.graph), again=again)

    def _withheld(self, lowered: Lowered) -> Failure | None:
        """The reason why a function of a program was withheld."""
        for part in (part for segment in lowered.segments or (lowered,) for part in segment.islands.values()):
            for digest in part.functions:
                if digest in self.withheld and digest not in self.functions:
                    return self.withheld[digest]
        return None

    def withhold(self, message: Register, failure: Failure) -> None:
        """The functions of a message that was refused are not taken."""
        if len(self.withheld) + len(message.functions) <= limits.MAX_PROGRAMS:
            self.withheld |= dict.fromkeys(message.functions, failure)

    def take(self, functions: Mapping[str, bytes]) -> None:
        """Keeps functions that are what their names say."""
        self.leaving -= functions.keys()
        for digest, blob in functions.items():
            if digest not in self.functions:
                self.functions[digest] = self.tenants.hold(digest, blob)
                self.function_bytes += len(blob)

    def let_go(self, session: Session, digests: Iterable[str] = ()) -> None:
        """The client names these functions no more, unless it sends them again. Each is held, and counted, as long as
        a program of the session has it: behind launches that wait, or whatever the client says."""
        said = self.functions.keys() & digests
        self.leaving |= said
        for digest in (said | session.unnamed) & self.leaving:
            if digest not in session.naming:
                self.leaving.remove(digest)
                blob = self.functions.pop(digest)
                self.function_bytes -= len(blob)
                self.tenants.release(digest)
        session.unnamed.clear()

    def close(self) -> None:
        """Lets go of the session's functions."""
        for digest in self.functions:
            self.tenants.release(digest)
        self.functions.clear()
