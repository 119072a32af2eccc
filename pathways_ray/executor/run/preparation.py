"""The programs of a host: which are compiled, and which are to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pathways_ray.executor.run import instructions as do
from pathways_ray.story import Entry, Story
from pathways_ray.transport import messages as wire


class Preparation:
    """Has programs compiled, and says so when they are.

    `wanted` are the programs that the island has been sent, `programs` those of them that are compiled. `handlers` are
    by the types of events.
    """

    def __init__(self, host: int, story: Story) -> None:
        self.host = host
        self.story = story
        self.wanted: set[int] = set()
        self.programs: dict[int, do.Prepared] = {}
        self.handlers: dict[type, Callable[[Any, float], list[do.Instruction]]] = {
            wire.Program: self._program,
            wire.DropProgram: self._dropped,
            wire.FunctionsAhead: lambda message, now: [do.Check(message)],
            do.Checked: lambda event, now: [],
            do.Prepared: self._prepared,
            do.PreparationFailed: self._failed,
            wire.Examine: self._asked,
            do.Examined: self._examined,
        }

    def handle(self, event: do.Event, now: float) -> list[do.Instruction]:
        """The instructions that follow from an event about a program."""
        return self.handlers[type(event)](event, now)

    def _program(self, message: wire.Program, now: float) -> list[do.Instruction]:
        prepared = self.programs.get(message.program)
        if prepared is not None:
            return self._ready(prepared)
        if message.program in self.wanted:
            return []
        self.wanted.add(message.program)
        return [do.Prepare(message)]

    def _ready(self, prepared: do.Prepared) -> list[do.Instruction]:
        """Tells the controller, which waits for the hosts that have a part in the program, and counts them."""
        if not prepared.plan.has_part:
            return []
        return [do.Send(wire.Ready(self.host, prepared.program, prepared.temporary_bytes, None, prepared.queues))]

    def _prepared(self, event: do.Prepared, now: float) -> list[do.Instruction]:
        self.story.note(Entry(now, "program prepared", f"{event.plan.plan.name}, number {event.program}"))
        if event.program not in self.wanted:  # it was dropped while it was compiled
            return [do.Forget(event.program), *self._ready(event)]
        self.programs[event.program] = event
        return self._ready(event)

    def _failed(self, event: do.PreparationFailed, now: float) -> list[do.Instruction]:
        self.story.note(Entry(now, "program refused", f"number {event.program}", event.failure.message))
        self.wanted.discard(event.program)  # it may be sent again, to try again
        return [do.Send(wire.Ready(self.host, event.program, 0, event.failure))]

    def _asked(self, message: wire.Examine, now: float) -> list[do.Instruction]:
        prepared = self.programs.get(message.program)
        if prepared is None or not prepared.plan.has_part:
            return [do.Send(wire.Examined(message.look, self.host, message.program, b""))]
        return [do.Ask(message)]

    def _examined(self, event: do.Examined, now: float) -> list[do.Instruction]:
        return [do.Send(wire.Examined(event.look, self.host, event.program, event.report))]

    def _dropped(self, message: wire.DropProgram, now: float) -> list[do.Instruction]:
        self.programs.pop(message.program, None)
        self.wanted.discard(message.program)
        # Also one that could not be compiled, and is not wanted any more: its functions are kept until then.
        return [do.Forget(message.program)]
