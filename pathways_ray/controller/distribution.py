"""Functions on islands: each is sent to an island once, with the first program there that names it.

Hosts keep a function as long as they have a program that names it (`executor.run.driver`). Messages about programs
reach them in the order in which they are sent, but for `DropProgram`, which may come later: so what is counted here as
dropped may still be there, and what is counted as held is.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import SendIsland
from pathways_ray.transport.messages import DropProgram


class Distribution:
    """The programs that each island has been sent, and the number of them that name a function."""

    def __init__(self) -> None:
        self.sent: dict[int, set[int]] = {}
        self.held: dict[int, Counter[str]] = {}

    def send(self, program: PlannedProgram, island: int) -> SendIsland:
        """A program for an island, with the functions that its hosts do not have."""
        message, held = program.messages[island], self.held.setdefault(island, Counter())
        missing = {digest: blob for digest, blob in message.functions.items() if not held[digest]}
        sent = self.sent.setdefault(island, set())
        if program.key not in sent:  # otherwise it is sent again, since it could not be compiled
            sent.add(program.key)
            held.update(message.functions.keys())
        return SendIsland(island, msgspec.structs.replace(message, functions=missing))

    def drop(self, program: PlannedProgram) -> list[SendIsland]:
        """A program is not needed any more."""
        for island, message in program.messages.items():
            if program.key not in self.sent.get(island, ()):
                continue
            self.sent[island].remove(program.key)
            held = self.held[island]
            held.subtract(message.functions.keys())
            for digest in message.functions:
                if held[digest] <= 0:
                    del held[digest]
        return [SendIsland(island, DropProgram(program.session, program.key)) for island in program.islands]

    def restart(self, island: int) -> None:
        """A host of an island has started: it has none."""
        self.held.pop(island, None)
        self.sent.pop(island, None)
