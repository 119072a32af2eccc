"""Outputs of a call that are not its results in order: arguments, captured arrays."""

from __future__ import annotations

from typing import Any

from pathways_ray.client import prng
from pathways_ray.client.array import Array
from pathways_ray.client.buffer import DELETED, FAILED
from pathways_ray.client.graph_builder import BuiltProgram, Output
from pathways_ray.client.session import Session


class Outputs:
    """Makes the handles that calls of one program return.

    `is_plain` says that a call returns its results in order, so that nobody need look at each output.
    """

    def __init__(self, session: Session, built: BuiltProgram) -> None:
        self.session = session
        self._outputs = built.outputs
        self.is_plain = [output.result for output in built.outputs] == list(range(len(built.result_kinds)))

    def of(self, results: list[Array], leaves: list[Any], placed: dict[int, Array]) -> list[Array]:
        """The handles that one call returns.

        Args:
            leaves: the arguments; those of them that the call uploaded are in `placed`.
        """
        return [self._handle(output, results, leaves, placed) for output in self._outputs]

    def _handle(self, output: Output, results: list[Array], leaves: list[Any], placed: dict[int, Array]) -> Array:
        """A result, or a new handle to what was there before."""
        if output.result >= 0:
            found = results[output.result]
            return Array(found._buffer, found._type)
        value: Any = leaves[output.leaf] if output.leaf >= 0 else output.held
        if output.leaf >= 0 and output.leaf in placed:
            value = placed[output.leaf]
        if not isinstance(value, Array):
            if prng.is_zeros(value):
                return value
            value = self.session.put(value, self.session.default_slice(), ())
        self.session.check_mine(value._buffer)
        return Array(value._buffer, value._type)


def living(arrays: dict[int, Array], key: int, constant: Any) -> Any:
    """The array made of a program's constant before, or the constant where that array is gone: lost with its host."""
    found = arrays.get(key)
    return constant if found is None or found._buffer.record.state in (DELETED, FAILED) else found
