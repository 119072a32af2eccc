"""The calls of one program that are made for their values alone, as far as its host may be asked for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pathways_ray import limits
from pathways_ray.client.array import Array
from pathways_ray.client.buffer import READY
from pathways_ray.client.carried import Carrying, Kind
from pathways_ray.client.graph_builder import BuiltProgram
from pathways_ray.client.served import ServedCall, plans_on
from pathways_ray.client.session import Session


class AskedCalls:
    """Has hosts serve calls of a program.

    Args:
        carried: the arguments that may go along, by their numbers.
        held: what was placed of that which the program captured.
    """

    def __init__(
        self, session: Session, built: BuiltProgram, carried: dict[int, Kind], held: Mapping[int, Array]
    ) -> None:
        self._session, self._built, self._carried, self._held = session, built, carried, held
        self._possible = may_be_served(built)

    def values(self, program: int, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """The values of a call's results, with these leaves of its arguments; None where it has to be launched. Waits
        for them."""
        if not self._possible or (server := self._session.server_of(program)) is None:
            return None
        if (plans := plans_on(self._built.result_kinds, server.host)) is None:
            return None
        arguments: list[int] = []
        carrying = Carrying(self._carried, limits.MAX_INLINE_BYTES)
        for k, source in enumerate(self._built.sources):
            value = leaves[source.leaf] if source.leaf >= 0 else self._held.get(k, source.held)
            if type(value) is Array:
                record = value._buffer.record
                if record.state is not READY or value._buffer.session is not self._session:
                    return None
                arguments.append(record.id)
            elif carrying.takes(k, value, source.slice):
                arguments.append(0)
            else:
                return None
        return self._session.served(program, ServedCall(server, tuple(arguments), tuple(carrying.inline), plans))


def may_be_served(built: BuiltProgram) -> bool:
    """Whether calls of a program may be made for their values alone, wherever they run: its results are what it
    returns, in order, are arrays of NumPy's types, and all that it does."""
    kinds = built.result_kinds
    plain = [output.result for output in built.outputs] == list(range(len(kinds)))
    small = 0 < len(kinds) <= limits.MAX_SERVED and not built.graph.donated_arguments and not built.reported
    return plain and small and all(kind.extended is None for kind in kinds)
