"""Calls that clients make of a simulated host: those that they hand over, and those whose values it answers with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.run.instructions import Called, Event, Handed
from pathways_ray.executor.run.prepared import PreparedProgram
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import Done, IslandLaunchFailed, LaunchEarly, ServeCall

Shards = list[dict[int, int]]
Answer = Callable[[Shards | None], None]


class ServingHost:
    """The part of a simulated host that takes calls of clients. An answer of None leaves one to be launched."""

    store: BufferStore
    under_epoch: bool

    def __init__(self) -> None:
        self._numbers = count(1)
        self.answers: dict[int, Answer] = {}
        self.serving: dict[int, tuple[Called, list[Any]]] = {}

    def _happened(self, event: Event) -> None:
        raise NotImplementedError

    def watch(self, sequence: int, values: list[Any], program: PreparedProgram, *rest: Any) -> None:
        raise NotImplementedError

    def launch_early(self, session: int, tenant: str, message: LaunchEarly) -> None:
        """A client hands over a call."""
        if self.under_epoch and not self.store.ended(session):
            self._happened(Handed(session, tenant_mark(tenant), message))

    def serve_call(self, session: int, tenant: str, message: ServeCall, answer: Answer) -> None:
        """A client asks for the values of a call."""
        if self.under_epoch and not self.store.ended(session):
            number = next(self._numbers)
            self.answers[number] = answer
            self._happened(Called(session, tenant_mark(tenant), message, number))

    def serve(
        self, called: Called, number: int, program: PreparedProgram, completing: list[Any], values: list[Any]
    ) -> None:
        self.serving[number] = called, values
        self.watch(number, completing, program, (), True, ())

    def leave_call(self, called: Called) -> None:
        self.answers.pop(called.number)(None)

    def was_served(self, number: int, report: Done | IslandLaunchFailed) -> bool:
        """Whether what is over was a call, which is answered, and not reported."""
        if number not in self.serving:
            return False
        called, values = self.serving.pop(number)
        failed = isinstance(report, IslandLaunchFailed)
        self.answers.pop(called.number)(None if failed else [value.memory() for value in values])
        return True
