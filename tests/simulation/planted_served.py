"""Bugs planted into calls that hosts serve; they join the table of `planted`."""

from __future__ import annotations

from typing import Any

from pathways_ray.executor.run.core import HostCore
from pathways_ray.executor.run.driver import HostDriver
from pathways_ray.executor.run.instructions import LeaveCall, Serve
from pathways_ray.simulation.serving_host import ServingHost
from tests.simulation.planted import Original, Patch, bug, wrapped
from tests.simulation.planted_early import ALONE

SERVED: dict[str, Any] = ALONE | {"serves": 1.0}
"""Its user asks for values alone, too."""


@bug(faults=0, **SERVED)
def who_asks_for_a_value_does_not_hear_that_it_has_to_be_launched(patch: Patch) -> None:
    def called(original: Original, self: HostCore, event: Any) -> Any:
        return [one for one in original(self, event) if not isinstance(one, LeaveCall)]

    wrapped(patch, HostCore, "_called", called)


@bug(faults=0, **SERVED)
def what_a_call_was_served_with_stays_on_its_host(patch: Patch) -> None:
    def serve(original: Original, self: HostDriver, serve: Serve) -> None:
        self.store.put_all(serve.called.session, (1 << 40,), ("a value",))
        original(self, serve)

    wrapped(patch, HostDriver, "_serve", serve)


@bug(faults=0, **SERVED)
def a_call_that_was_served_is_reported_as_a_launch(patch: Patch) -> None:
    def was_served(original: Original, self: ServingHost, number: int, report: Any) -> bool:
        original(self, number, report)
        return False

    wrapped(patch, ServingHost, "was_served", was_served)


@bug(faults=0, **SERVED)
def a_call_is_served_with_what_another_one_carries(patch: Patch) -> None:
    def serve(original: Original, self: HostDriver, serve: Serve) -> None:
        message = serve.called.message
        before, self.inline = getattr(self, "inline", ()), message.inline  # type: ignore[attr-defined]
        if [place for place, _ in before] == [place for place, _ in message.inline]:
            object.__setattr__(message, "inline", before)
        original(self, serve)

    wrapped(patch, HostDriver, "_serve", serve)
