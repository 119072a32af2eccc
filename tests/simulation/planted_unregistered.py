"""Bugs planted into what becomes of programs that a client drops; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.client.renewals import Renewals
from pathways_ray.controller.admission import Admission
from pathways_ray.controller.backlog import Backlog
from pathways_ray.controller.preparation import Preparation
from pathways_ray.transport.messages import Unregister
from tests.simulation.planted import Original, Patch, bug, wrapped

REPLACED: dict[str, Any] = {"replaces": 0.5, "loops": 1.0}


@bug(faults=0, **REPLACED)
def a_program_is_dropped_before_deferred_launches_of_it(patch: Patch) -> None:
    patch.setattr(Backlog, "may_unregister", lambda self, message: True)


@bug(faults=0, **REPLACED)
def a_program_is_dropped_before_launches_that_wait(patch: Patch) -> None:
    def call(original: Original, self: Admission, session: Any, message: Any) -> Any:
        if isinstance(message, Unregister):
            return self.preparation.unregistered(session, message.program)
        return original(self, session, message)

    wrapped(patch, Admission, "call", call)


@bug(faults=0, shown=3, **REPLACED)
def functions_that_other_programs_name_are_let_go(patch: Patch) -> None:
    def unregistered(original: Original, self: Renewals, program: int) -> Unregister:
        functions = self.programs[program][2] if program in self.programs else ()
        original(self, program)
        return Unregister(program, functions)

    wrapped(patch, Renewals, "unregistered", unregistered)


@bug(faults=0, **REPLACED)
def hosts_keep_what_is_dropped(patch: Patch) -> None:
    patch.setattr(Preparation, "drop", lambda self, program: [])
