"""The calls of one computation on several hosts, which add small values over their devices by themselves. Pure.

All its hosts call a computation at the same places of one order. In each call they agree: either each gives what is to
be summed, and gets what all gave, or all have XLA run it as one computation. A host that has its arguments says so,
with its values; one that has not takes no part. The first host hears all others, and decides: it waits for a while, and
has XLA run what not all have come to by then; they wait for its word, as they would in XLA's collective. Of two hosts,
once the first has heard the other, none decides: they tell each other, and each waits for the other's word. A partner's
end wakes all of them as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """The place of a call in the order: its launch and its gang there, which are the same on all hosts."""

    launch: int
    gang: int


READY, ABSENT, TOGETHER, APART = b"r", b"a", b"t", b"w"
"""What hosts say in a call: that they have their arguments, or take no part; who decides, that values are exchanged,
with all of these; the first one, that XLA runs the computation, also where it takes no part itself."""


PATIENCE_S = 0.02
"""Time for which the first host waits for each of the others, before it has XLA wait for them."""

RESTS = 16
"""Calls for which it does not wait, after it has waited for nothing."""


class PartnerLost(Exception):
    """A partner has ended, or is at another call: nothing more is heard from it."""


class Partner(Protocol):
    """The other end of what two hosts say to each other in the calls of one computation. Who has `deciding` may end it:
    while hosts decide on a call, nobody else has."""

    deciding: threading.Lock

    def begin(self, place: Place) -> None:
        """A call begins: the next one that both hosts make. What is left of earlier ones is let go of."""

    def say(self, kind: bytes, part: int, values: bytes = b"") -> None:
        """Says something in part `part` of the call, and does not wait until it is heard. Raises `PartnerLost`."""

    def hear(self, part: int, limit_s: float | None = None) -> tuple[bytes, bytes] | None:
        """Returns what the partner says in part `part` of the same call. Waits for it, with a limit for so many
        seconds, and returns None where nothing comes. Raises `PartnerLost`."""

    def drain(self) -> None:
        """Takes what has come, without waiting, so that the partner can say more. Raises `PartnerLost`."""

    def end(self) -> None:
        """Says nothing more: the partner hears that at once."""


class Agreement:
    """One host's side of the calls of a computation.

    Args:
        partners: the other hosts' ends on the first host, and the first one's on others, as far as they are there. A
            host that is nobody's partner takes no part.
        others: how many further hosts the computation has.
        is_first: whether this host is the first one.
    """

    def __init__(self, partners: Callable[[], Sequence[Partner]], others: int, is_first: bool) -> None:
        self._partners, self._others, self._is_first = partners, others, is_first
        self._place = Place(0, 0)
        self._met: list[Partner] = []
        self._heard: Partner | None = None
        """The one other host, once it was heard: it speaks in each call, by the same connection, or that ends."""
        self._part = self._rests = 0
        self.agreed = 0
        """Calls in which values were exchanged."""

    def at(self, launch: int, gang: int) -> None:
        """A call comes, with this place in the order."""
        self._place, self._met = Place(launch, gang), []

    def leave(self) -> None:
        """Takes no part in the values of this call. Does not wait."""
        self._begin()
        for partner in list(self._met):
            try:
                partner.say(APART if self._is_first else ABSENT, 0)
                partner.drain()
            except PartnerLost:
                partner.end()

    def agree(self, mine: bytes) -> bytes | None:
        """Gives this host's values, and returns those of all, in the order of the hosts; None where XLA is to run the
        computation. Waits for the partners."""
        self._begin()
        held = tuple(self._met)
        for partner in held:
            partner.deciding.acquire()
        try:
            if self._heard not in self._met:
                self._heard = None
            every = self._decide(mine) if self._is_first and self._heard is None else self._hear(mine)
        finally:
            for partner in held:
                partner.deciding.release()
        self.agreed += every is not None
        return every

    def exchange(self, mine: bytes) -> bytes:
        """The same for what is summed later in a call in which all have agreed. Raises `PartnerLost`."""
        self._part += 1
        if self._others == 1 or not self._is_first:
            (other,) = self._met
            every = self._told(other, mine)
            assert every is not None, "who has agreed takes part"
            return every
        every = mine + b"".join(map(self._values, self._met))
        for partner in self._met:
            partner.say(TOGETHER, self._part, every)
        return every

    def _values(self, partner: Partner) -> bytes:
        return self._answer(partner)[1]

    def _answer(self, partner: Partner) -> tuple[bytes, bytes]:
        heard = partner.hear(self._part)
        assert heard is not None, "without a limit there is an answer, or an end"
        return heard

    def _told(self, other: Partner, mine: bytes) -> bytes | None:
        """Gives this host's values, and returns those of all, of which the other one says all, or its own; None where
        it takes no part."""
        other.say(READY, self._part, mine)
        kind, values = self._answer(other)
        if kind == READY:
            return mine + values if self._is_first else values + mine
        return values if kind == TOGETHER else None

    @property
    def has_begun(self) -> bool:
        """Whether this host has said anything in this call."""
        return bool(self._met)

    def break_off(self) -> None:
        """This host fails within a call: partners that wait for it are not to go on waiting."""
        for partner in self._met:
            partner.end()

    def _begin(self) -> None:
        self._met, self._part = list(self._partners()), 0
        for partner in self._met:
            partner.begin(self._place)

    def _decide(self, mine: bytes) -> bytes | None:
        values = [mine]
        together = len(self._met) == self._others and not self._rests
        self._rests = max(0, self._rests - 1)
        for partner in list(self._met):
            if not together:
                break
            try:
                heard = partner.hear(0, PATIENCE_S)
            except PartnerLost:
                partner.end()
                self._met.remove(partner)
                together = False
                continue
            if heard is None:
                self._rests = RESTS
            elif self._others == 1:
                self._heard = partner
            together = heard is not None and heard[0] == READY
            values += heard[1:] if heard is not None else ()
        every = b"".join(values) if together else b""
        for partner in self._met:
            try:
                partner.say(TOGETHER if together else APART, 0, every)
                if not together:
                    partner.drain()  # what was not heard would fill the connection
            except PartnerLost:  # the island ends with it
                partner.end()
        return every if together else None

    def _hear(self, mine: bytes) -> bytes | None:
        for other in self._met:
            try:
                return self._told(other, mine)
            except PartnerLost:
                other.end()
        return None
