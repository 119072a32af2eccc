"""Programs that are registered again before they are launched, since a slice of theirs has moved, the controller is
another one, or had no room for them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container

from pathways_ray.client.events import Registered
from pathways_ray.transport.messages import Register, Unregister


class Renewals:
    """The programs of a session, and which of them are `stale`: the present controller has yet to get them, as they are
    now. They are until a registration leaves. One may wait behind launches, which then take it along.

    A function is sent once to each controller, which has it as long as the session: `sent` are those that the present
    one has. `taken_along` has the launches with which registrations of programs have left: what becomes of those before
    says nothing of these.
    """

    def __init__(self) -> None:
        self.programs: dict[int, tuple[frozenset[int], bytes, tuple[str, ...]]] = {}
        self.functions: dict[str, bytes] = {}
        self.sent: set[str] = set()
        self.stale: set[int] = set()
        self.taken_along: dict[int, int] = {}
        self._named: Counter[str] = Counter()

    def registered(self, event: Registered) -> Register:
        """A program is registered; returns the message, to be `filled` when it leaves."""
        named = frozenset(mesh.id for mesh in event.graph.slices)
        self.programs[event.program] = named, event.encoded, tuple(event.functions)
        self.functions |= event.functions
        self._named.update(event.functions.keys())
        self.stale.add(event.program)
        return self.message(event.program)

    def moved(self, slices: Container[int]) -> None:
        """Slices have other devices: the controller has forgotten the programs that name them."""
        self.stale.update(n for n, (named, *_) in self.programs.items() if any(one in slices for one in named))

    def refused(self, program: int, launch: float = math.inf) -> None:
        """The controller has not taken a program, nor perhaps its functions, for a reason that may pass; so a launch of
        it has failed, or somebody has asked for it."""
        if program in self.programs and launch >= self.taken_along.get(program, 0):
            self.sent.difference_update(self.programs[program][2])
            self.stale.add(program)

    def controller_lost(self) -> None:
        """The next controller has no program, and no function."""
        self.stale.update(self.programs)
        self.sent.clear()

    def message(self, program: int) -> Register:
        """The message that registers a program, to be `filled` when it leaves."""
        return Register(program, self.programs[program][1], {})

    def filled(self, message: Register, launch: int = 0) -> Register:
        """A message that leaves now, perhaps with a launch, with the functions that the controller lacks."""
        self.stale.discard(message.program)
        if message.program not in self.programs:
            return message
        self.taken_along[message.program] = launch
        missing = [digest for digest in self.programs[message.program][2] if digest not in self.sent]
        self.sent.update(missing)
        functions = self.functions
        return Register(message.program, message.graph, {one: functions[one] for one in missing if one in functions})

    def not_left(self, message: object) -> None:
        """The message that was to leave may not have: of its program, what `filled` has noted is noted no more. What
        the controller has it may get again."""
        program = getattr(message, "program", 0)
        if program in self.programs:
            self.stale.add(program)
            self.sent.difference_update(self.programs[program][2])

    def unregistered(self, program: int) -> Unregister:
        """The message that leaves now for a program that is called no more, with the functions that no other names."""
        _, _, functions = self.programs.pop(program, (frozenset(), b"", ()))
        self.stale.discard(program)
        self.taken_along.pop(program, None)
        self._named.subtract(functions)
        gone = tuple([digest for digest in functions if self._named[digest] <= 0])
        for digest in gone:
            del self._named[digest]
            self.functions.pop(digest, None)
            self.sent.discard(digest)
        return Unregister(program, gone)

    def close(self) -> None:
        """The session is over, and what is yet called goes nowhere. Who has a slice or an array of it has the session,
        and would have all of its functions."""
        self.functions = {}
