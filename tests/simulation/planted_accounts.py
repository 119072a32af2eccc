"""Bugs planted into the accounts of controller and schedulers; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.controller import quotas
from pathways_ray.controller.admission import Admission
from pathways_ray.controller.backlog import WaitingLaunch
from pathways_ray.controller.cross_island import CrossIslandWindow
from pathways_ray.controller.state import Session
from pathways_ray.errors import Failure
from pathways_ray.scheduler.policies import Ledger, Usage
from pathways_ray.scheduler.queues import Queues
from tests.simulation.planted import Original, Patch, bug, wrapped


@bug(faults=0, cancels=0.3)
def a_launch_that_was_refused_stays_in_its_account(patch: Patch) -> None:
    def refuse(original: Original, self: Admission, session: Session, launch: WaitingLaunch, failure: Failure) -> Any:
        self.tables.ledger.enter(session.usage)
        return original(self, session, launch, failure)

    wrapped(patch, Admission, "refuse", refuse)


@bug(faults=0)
def a_tenant_without_launches_counts_as_active(patch: Patch) -> None:
    def leave(self: Ledger, usage: Usage) -> None:
        usage.busy -= 1

    def end(self: Ledger, usage: Usage, estimate: float, actual: float) -> None:
        self.settle(usage, estimate, actual)
        leave(self, usage)

    patch.setattr(Ledger, "leave", leave)
    patch.setattr(Ledger, "end", end)


@bug(faults=0, inline=0.7)
def bytes_that_a_launch_carried_count_once_it_is_over(patch: Patch) -> None:
    wrapped(patch, quotas, "carry", lambda original, *launch: 0 * original(*launch))


@bug(faults=0, calls=0.4)
def launches_that_called_functions_count_once_they_are_over(patch: Patch) -> None:
    patch.setattr(CrossIslandWindow, "answered", lambda self, session, islands: None)


@bug(faults=10, shown=1, islands={0: [0, 1], 1: [2]}, clients=4, window=2, launches=(40, 40), slow=10.0)
def launches_that_waited_in_a_scheduler_stay_in_their_accounts(patch: Patch) -> None:
    def clear(original: Original, self: Queues) -> None:
        for queue in self.waiting.values():
            self.ledger.enter(queue.usage)
        original(self)

    wrapped(patch, Queues, "clear", clear)
