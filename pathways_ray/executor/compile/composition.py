"""Functions composed into one computation: run one behind the other, with borders that keep the bits of each.

XLA must not join the arithmetic of two functions, or the bits would depend on what was grouped: it simplifies what it
sees through, and its CPU compiler contracts a multiplication and an addition into one rounding. What lies between keeps
it from both, between the rounds of loops as well:

- A *barrier*: both sides are kernels of their own, each of which takes XLA some 11 ms to make.
- A *seal*: an exclusive or of the value's bits and a number that is 0, which only the running computation knows. The
  kernel goes on behind it. It stands between two lines (`lines`) of which the second alone takes what the first makes:
  what XLA does within each is then what it does with it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from pathways_ray.ir.graph import Loop, Part, Ref
from pathways_ray.joint_exports import Member

Calls = Mapping[str, export.Exported | Member]
"""The functions of a recipe by name."""


def composed(
    parts: Sequence[Part | Loop],
    outputs: Sequence[Ref],
    calls: Calls,
    inputs: Sequence[jax.Array],
    lines: frozenset[str] = frozenset(),
) -> list[jax.Array]:
    """The outputs of a recipe's parts, run one behind the other.

    Args:
        lines: functions between which a seal is enough.
    """
    zero = jax.lax.optimization_barrier(np.uint32(0)) if lines else None
    values = _Run(calls, lines, zero).values(parts, outputs, inputs)
    return [values[ref] for ref in outputs]


class _Run:
    """One way through a recipe, while it is traced; `zero` is the number of its seals."""

    def __init__(self, calls: Calls, lines: frozenset[str], zero: Any) -> None:
        self.calls = calls
        self.lines = lines
        self.zero = zero

    def values(
        self, parts: Sequence[Part | Loop], outputs: Sequence[Ref], inputs: Sequence[jax.Array], inside: bool = False
    ) -> dict[Ref, jax.Array]:
        """The values of the parts of a recipe, or of the body of a loop (`inside`)."""
        values = {Ref(-1, k): value for k, value in enumerate(inputs)}
        uses = Counter([*outputs, *(ref for part in parts for ref in part.inputs)])
        for number, part in enumerate(parts):
            arguments = [values[ref] for ref in part.inputs]
            if isinstance(part, Loop):
                results: Sequence[jax.Array] = self._loop(part, arguments)
            else:
                if self._is_sealed(parts, part, uses):
                    arguments = [self._sealed(value) for value in arguments]
                elif (number or inside) and arguments:
                    arguments = jax.lax.optimization_barrier(arguments)
                results = self.calls[part.function].call(*arguments)
            values.update((Ref(number, k), value) for k, value in enumerate(results))
        return values

    def _is_sealed(self, parts: Sequence[Part | Loop], part: Part, uses: Mapping[Ref, int]) -> bool:
        """Whether a seal is enough before a part."""
        if len(part.inputs) != 1 or part.inputs[0].node < 0:
            return False
        (ref,) = part.inputs
        before = parts[ref.node]
        both = isinstance(before, Part) and {before.function, part.function} <= self.lines
        return both and uses[ref] == 1

    def _sealed(self, value: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(value, np.uint32) ^ self.zero
        return jax.lax.bitcast_convert_type(bits, value.dtype)

    def _loop(self, loop: Loop, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs of the last round. Where one of them is not carried, it is made by a first round before the loop,
        so that XLA's loop has a value of its type to begin with."""
        places = [place for place, _ in loop.carried]
        fed = [value for _, value in loop.carried]
        also = [ref for ref in dict.fromkeys(loop.outputs) if ref not in fed]

        def again(_: Any, given: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            taken = list(arguments)
            for place, value in zip(places, given, strict=False):
                taken[place] = value
            values = self.values(loop.body, [*fed, *also], taken, inside=True)
            return tuple(values[ref] for ref in [*fed, *also])

        start: Sequence[jax.Array] = [arguments[place] for place in places]
        if also:
            start = again(0, start)
        last = jax.lax.fori_loop(1 if also else 0, loop.times, again, tuple(start))
        made = dict(zip([*fed, *also], last, strict=True))
        return [made[ref] for ref in loop.outputs]
