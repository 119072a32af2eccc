"""Siblings: small results of one launch, which a client that asks for one of them gets in the same answer. Pure.

A training step returns metrics by the dozen, and a tree of results is fetched leaf by leaf: a question for each would
take a round trip for each. Who asks for the first leaf asks for its siblings as well. Where the last ones were of no
use (a loop that looks at the loss only), they are left alone until a second leaf of one launch is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pathways_ray import limits

MAX_SIBLING_BYTES = 1 << 12
"""A result that goes along unasked."""


class Results(NamedTuple):
    """The results of a launch: of which program, the number of the first buffer, and their kinds."""

    program: int
    first: int
    kinds: Sequence[Any]


class _Group:
    """The results that came along with one question: how many of them wait to be asked for, and whether one was."""

    __slots__ = ("program", "used", "waiting")

    def __init__(self, program: int) -> None:
        self.program = program
        self.waiting = 0
        self.used = False


class Siblings:
    """Results that the questions of a session bring along, and whether they are of use."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[_Group, Any]] = {}
        """By buffer, what came and was not asked for yet."""
        self._useless: set[int] = set()
        self._last = (0, 0)

    def of(self, results: Results | None, buffer: int) -> Sequence[int]:
        """The numbers of the results that a question for one of them brings along."""
        if results is None or results.kinds[buffer - results.first].array.nbytes > MAX_SIBLING_BYTES:
            return ()
        (launch, asked), self._last = self._last, (results.first, buffer)
        if launch == results.first and asked != buffer:
            self._useless.discard(results.program)
        return self.beside(results, buffer)

    def beside(self, results: Results, buffer: int) -> Sequence[int]:
        """The same for a question that goes with the call, before anybody asks."""
        if results.program in self._useless:
            return ()
        room = limits.MAX_SIBLINGS_BYTES
        found: list[int] = []
        for number, kind in enumerate(results.kinds, results.first):
            size = kind.array.nbytes
            if number != buffer and size <= min(MAX_SIBLING_BYTES, room) and len(found) < limits.MAX_SIBLINGS:
                room -= size
                found.append(number)
        return found

    def of_no_use(self, program: int) -> None:
        """The results of a program come along no more, until two of one launch are asked for."""
        self._useless.add(program)

    def keep(self, results: Results, values: Mapping[int, Any]) -> None:
        """Values came along with a question."""
        group = _Group(results.program)
        group.waiting = len(values)
        self.values.update((number, (group, value)) for number, value in values.items())

    def take(self, buffer: int) -> Any:
        """A value that came along with an earlier question; None where nothing came."""
        group, value = self.values.pop(buffer, (None, None))
        if group is not None:
            group.used = True
        return value

    def forget(self, buffer: int) -> None:
        """The last handle of a buffer is gone. Safe in a destructor."""
        group, _ = self.values.pop(buffer, (None, None))
        if group is not None:
            group.waiting -= 1
            if not group.waiting and not group.used:
                self.of_no_use(group.program)
