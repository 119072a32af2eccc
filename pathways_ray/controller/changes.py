"""Requests that change where things are: slices that clients exchange or give back for a while, islands that the
operator drains or removes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from pathways_ray import limits
from pathways_ray.controller import quotas
from pathways_ray.controller.events import CallManager, Command
from pathways_ray.controller.launches import Launches
from pathways_ray.controller.moves import Moves
from pathways_ray.controller.state import Session
from pathways_ray.errors import Failure, SessionClosed, UsageError
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import slice_tag

Continuation: TypeAlias = Callable[[Any], tuple[wire.Reply | None, list[Command]]]
"""The rest of a request, once the resource manager has answered; without a reply, it will be asked again."""

IslandChange: TypeAlias = wire.DrainIsland | wire.UndrainIsland | wire.RemoveIsland
"""Requests of the operator that change which islands take slices."""

MAX_REASON = 256
"""Characters of a drain's reason that are kept."""

_CHANGED = msgspec.msgpack.Decoder(wire.Accepted | wire.Refused)


def is_replacement(session: Session, request: wire.CreateSlice) -> bool:
    """Whether a slice takes no devices beyond those of the session: it is a part of one, or is to take the place of one
    that has no other successor, and is not itself the successor of another one."""
    old = session.slices.get(request.instead)
    fits = old is not None and old.mesh.shape == request.shape
    first = request.instead not in session.replacing and request.instead not in session.replacing.values()
    return bool(request.within) or (fits and first)


def left_behind(session: Session, request: wire.CreateSlice, placed: PlacedSlice) -> Failure | None:
    """The reason for which a part that was made is given back: its slice went meanwhile, or has other devices now, so
    that nobody would count those of the part."""
    whole = session.slices.get(request.within)
    if not request.within or (whole is not None and {*placed.devices} <= {*whole.devices}):
        return None
    return Failure("UsageError", f"slice {request.within} was released, or moved, while a part of it was made")


class Changes:
    """Answers these requests, with the resource manager.

    Args:
        data_secret: signs slices, for hosts.
        ask: has the resource manager called for a request, and goes on with its answer.

    `forget_island` is called once an island has been ended. While it is `unsure`, sessions may come back with slices
    that nobody knows of.
    """

    def __init__(
        self,
        launches: Launches,
        data_secret: str,
        ask: Callable[[int, str, tuple[Any, ...], Continuation], list[Command]],
    ) -> None:
        self.launches, self.data_secret, self.ask = launches, data_secret, ask
        self.moves = Moves(launches)
        self.forget_island: Callable[[int], list[Command]] = lambda island: []
        self.unsure: Callable[[], bool] = lambda: False

    def exchange(self, call: int, number: int, request: wire.ExchangeSlices) -> list[Command]:
        """Has the resource manager exchange slices of a session, then does so here.

        Raises:
            UsageError: they cannot be exchanged now.
        """
        quotas.enforce(self.moves.refusal(self.launches.sessions[number], request.pairs))

        def answered(done: Any) -> tuple[wire.Reply, list[Command]]:
            session = self.launches.sessions.get(number)
            if session is None:
                raise SessionClosed(f"session {number} ended while it moved a slice")
            if not done:
                raise UsageError(f"slices {[other for _, other in request.pairs]} are gone")
            if (failure := self.moves.refusal(session, request.pairs)) is not None:
                held = tuple(pair for pair in request.pairs if pair[0] in session.slices)
                back = [CallManager("exchange_slices", (number, held, -call))] if held else []
                gone = [one for one, _ in request.pairs if one not in session.slices]  # there again, at the manager
                return wire.Refused(failure), [*back, *(CallManager("release_slice", (number, one)) for one in gone)]
            commands: list[Command] = [*self.moves.exchange(session, request.pairs)]
            moved = [session.places[one] for one, _ in request.pairs]
            tags = [slice_tag(self.data_secret, number, placed) for placed in moved]
            return wire.SlicesExchanged(tuple(map(wire.SliceCreated, moved, tags))), commands

        return self.ask(call, "exchange_slices", (number, request.pairs, call), answered)

    def suspend(self, call: int, number: int, gives_way: bool) -> list[Command]:
        """Has the resource manager take back all slices of a session, then frees what it holds.

        Raises:
            UsageError: something of it is under way.
        """
        quotas.enforce(self.moves.busy(self.launches.sessions[number]))

        def answered(_: Any) -> tuple[wire.Reply, list[Command]]:
            session = self.launches.sessions.get(number)
            if session is None:
                raise SessionClosed(f"session {number} ended while it was suspended")
            return wire.Accepted(), [*self.moves.suspend(session, gives_way)]

        return self.ask(call, "release_session", (number,), answered)

    def island(self, call: int, request: IslandChange) -> list[Command]:
        """Has the resource manager drain an island, take that back, or end it.

        Raises:
            UsageError: slices may come back to an island that is to be ended.
        """
        if isinstance(request, wire.RemoveIsland) and self.unsure():
            text = f"sessions that come back to another controller may have slices on island {request.island}"
            raise UsageError(f"{text}; try again in {limits.RESUME_LIMIT_S:.0f} s")

        def answered(answer: Any) -> tuple[wire.Reply, list[Command]]:
            reply = _CHANGED.decode(answer)
            if isinstance(request, wire.UndrainIsland) and request.island in self.moves.draining:
                reply = wire.Accepted()  # refused where a call whose answer was lost has taken the drain back
            if not isinstance(reply, wire.Accepted):
                return reply, []
            if isinstance(request, wire.RemoveIsland):
                return reply, self.forget_island(request.island)
            if isinstance(request, wire.UndrainIsland):
                self.moves.draining.discard(request.island)
            else:
                self.moves.drained(request.island)
            return reply, []

        if isinstance(request, wire.DrainIsland):
            arguments = (request.island, request.deadline_s, request.reason[:MAX_REASON])
            return self.ask(call, "drain_island", arguments, answered)
        if isinstance(request, wire.UndrainIsland):
            return self.ask(call, "undrain_island", (request.island,), answered)
        return self.ask(call, "end_island", (request.island,), answered)
