"""Registration: from a client's message to a planned program, or to one that carries its failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.programs import (
    PlannedProgram,
    check_functions,
    check_size,
    decode_graph,
    plan_program,
)
from pathways_ray.controller.state import Session
from pathways_ray.errors import Failure, PathwaysError, to_failure
from pathways_ray.ir.graph import functions_in
from pathways_ray.transport.messages import Register


class Registration:
    """The functions that a session has sent.

    `withheld` are functions that came in a message that was refused, by digest: the client takes them for sent, so
    programs that name them later fail for the same reason.

    Args:
        check: raises for functions that are not what their names say.
    """

    def __init__(self, check: Callable[[Mapping[str, bytes]], None] = check_functions) -> None:
        self.check = check
        self.functions: dict[str, bytes] = {}
        self.function_bytes = 0
        self.withheld: dict[str, Failure] = {}

    def plan(self, key: int, session: Session, message: Register, fusion: bool) -> PlannedProgram:
        """A program with plans for its islands, or with the failure to make them."""
        try:
            planned = self._planned(key, session, message, fusion)
        except PathwaysError as error:
            planned = to_failure(error)
        except Exception as error:  # a malformed graph may trip the planner anywhere; it must not end the controller
            planned = Failure("WireError", f"program refused: {type(error).__name__}: {error}")
        return PlannedProgram(key, session.id, "", failure=planned) if isinstance(planned, Failure) else planned

    def _planned(self, key: int, session: Session, message: Register, fusion: bool) -> PlannedProgram | Failure:
        refused = self._refusal(session, message)
        if refused is not None:
            if len(self.withheld) < limits.MAX_PROGRAMS:
                self.withheld |= dict.fromkeys(message.functions, refused)
            return refused
        self.check(message.functions)
        self.functions.update(message.functions)
        self.function_bytes += sum(map(len, message.functions.values()))
        graph = decode_graph(message.graph)
        refused = quotas.nodes(session.tenant, len(graph.nodes), graph.name)
        if refused is not None:
            return refused
        check_size(graph)
        for digest in (part.function for recipe in graph.recipes for part in functions_in(recipe.parts)):
            if digest in self.withheld and digest not in self.functions:
                return self.withheld[digest]
        # A program may arrive after a release that was called later: released slices are still known.
        tenant = session.tenant
        return plan_program(key, session.id, graph, self.functions, session.places, fusion, tenant.name, tenant.trusted)

    def _refusal(self, session: Session, message: Register) -> Failure | None:
        size = len(message.graph) + sum(map(len, message.functions.values()))
        refused = quotas.message_bytes(session.tenant, size, "a program")
        if refused is not None:
            return refused
        if self.function_bytes + size > limits.MAX_SESSION_FUNCTION_BYTES:
            return Failure(
                "TooLarge",
                f"the functions of a program have {size} bytes and those this session sent before "
                f"{self.function_bytes}; {limits.MAX_SESSION_FUNCTION_BYTES} are the limit. Open a new session",
            )
        return None
