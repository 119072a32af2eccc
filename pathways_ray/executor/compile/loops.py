"""Finds repetitions in a recipe, so that `y = f(y)` a hundred times is compiled as one loop and not as a hundred calls.

A loop is compiled once whatever its length, and runs faster than the same calls one behind the other. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pathways_ray import limits
from pathways_ray.ir.graph import Part, Recipe, Ref

LEAST = 3
"""So many equal blocks in a row become a loop."""

LONGEST = 8
"""Parts that a block may have."""


class Repetition(NamedTuple):
    """`times` equal blocks of `period` parts from part `start` on. Each block after the first one takes from the block
    before what the second one takes from the first; everything else it takes is the same for all.

    `carried` are values of a block (its part, the output) that the next block or something behind the last one uses.
    """

    start: int
    period: int
    times: int
    carried: tuple[Ref, ...]

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


def repetitions(recipe: Recipe) -> list[Repetition]:
    """What can be run as loops, from the first part to the last; none overlap. Nothing in a recipe longer than the
    runtime composes: looking takes the square of its length, and a tenant may send one of any length."""
    parts = recipe.parts
    if len(parts) > limits.MAX_FUSED_PARTS:
        return []
    last_use = _last_uses(recipe)
    found: list[Repetition] = []
    at = 0
    while at < len(parts):
        longest = max(
            (_repetition(parts, at, period, last_use) for period in range(1, LONGEST + 1)),
            key=lambda r: r.period * (r.times - 1),
        )
        if longest.times >= LEAST:
            found.append(longest)
            at = longest.end
        else:
            at += 1
    return found


def _last_uses(recipe: Recipe) -> dict[Ref, int]:
    """The last part that takes a value; beyond all parts where the recipe gives it."""
    last = {ref: number for number, part in enumerate(recipe.parts) for ref in part.inputs}
    return last | dict.fromkeys(recipe.outputs, len(recipe.parts))


class _Call(NamedTuple):
    """What a part does, with inputs relative to its block: of the block itself ("own"), of the one before ("before"),
    or of what stood before the first one ("same", with its absolute place)."""

    function: str
    alone: bool
    inputs: tuple[tuple[str, Ref], ...]


def _repetition(parts: Sequence[Part], start: int, period: int, last_use: dict[Ref, int]) -> Repetition:
    """The longest repetition from `start` on; `times` is 1 where there is none."""
    first, second = (_block(parts, start + k * period, start, period) for k in (0, 1))
    times = 1
    if first is not None and second is not None and _continues(first, second):
        times = 2
        while _block(parts, start + times * period, start, period) == second:
            times += 1
    if times > 1:
        times = min([times, *_seen_later(start, period, times, last_use)])
    if times == 1 or second is None:
        return Repetition(start, period, 1, ())
    final = start + period * (times - 1)
    fed = {ref for call in second for kind, ref in call.inputs if kind == "before"}
    kept = {
        Ref(ref.node - final, ref.output)
        for ref, last in last_use.items()
        if final <= ref.node < final + period <= last
    }
    return Repetition(start, period, times, tuple(sorted(fed | kept, key=lambda ref: (ref.node, ref.output))))


def _block(parts: Sequence[Part], at: int, start: int, period: int) -> list[_Call] | None:
    """What the block at `at` does; None when it cannot be part of a repetition from `start` on."""
    if at + period > len(parts):
        return None
    calls = []
    for part in parts[at : at + period]:
        inputs = []
        for ref in part.inputs:
            if ref.node >= at:
                inputs.append(("own", Ref(ref.node - at, ref.output)))
            elif ref.node < start:
                inputs.append(("same", ref))
            elif ref.node >= at - period:
                inputs.append(("before", Ref(ref.node - at + period, ref.output)))
            else:
                return None
        calls.append(_Call(part.function, part.no_fusion, tuple(inputs)))
    return calls


def _continues(first: list[_Call], second: list[_Call]) -> bool:
    """Whether the second block does what the first one did, with what that gave in some places."""
    return any(kind == "before" for call in second for kind, _ in call.inputs) and all(
        one.function == other.function
        and one.alone == other.alone
        and len(one.inputs) == len(other.inputs)
        and all(b[0] == "before" or a == b for a, b in zip(one.inputs, other.inputs, strict=True))
        for one, other in zip(first, second, strict=True)
    )


def _seen_later(start: int, period: int, times: int, last_use: dict[Ref, int]) -> list[int]:
    """Up to which block repetitions may go, for each value of a block but the last one that something behind the next
    block takes."""
    final = start + period * (times - 1)
    blocks = (((ref.node - start) // period, last) for ref, last in last_use.items() if start <= ref.node < final)
    return [block + 1 for block, last in blocks if last >= start + period * (block + 2)]
