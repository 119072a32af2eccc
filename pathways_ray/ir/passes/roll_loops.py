"""Rolls equal parts of a recipe that follow each other into one loop: `y = f(y)` a hundred times is one part.

A loop is compiled once whatever its number of rounds, and runs faster than the same calls one behind the other. The
pass looks for blocks of up to `MAX_PERIOD` parts that repeat, each fed by the block before it, and replaces them by a
`Loop`. The bits do not change: the compiler puts the same barriers between the rounds as between the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pathways_ray import limits
from pathways_ray.ir.graph import Graph, Loop, Part, Recipe, Ref

MIN_ROUNDS = 3
"""Equal blocks in a row that become a loop; fewer would save no compile time."""

MAX_PERIOD = 8
"""Parts of a block."""


def roll_loops(graph: Graph) -> Graph:
    """The same graph with loops in its recipes."""
    return msgspec.structs.replace(graph, recipes=tuple(rolled(recipe) for recipe in graph.recipes))


def rolled(recipe: Recipe) -> Recipe:
    """The same recipe with its repetitions as loops; unchanged where nothing repeats.

    A recipe with more parts than the runtime composes is left as it is: the search takes the square of their number,
    and a tenant may send a recipe of any length.
    """
    if not MIN_ROUNDS <= len(recipe.parts) <= limits.MAX_FUSED_PARTS:
        return recipe
    found = repetitions(recipe)
    if not found:
        return recipe
    search = _Search(recipe)
    new: dict[Ref, Ref] = {}
    parts: list[Part | Loop] = []

    def moved(refs: Sequence[Ref]) -> tuple[Ref, ...]:
        return tuple(ref if ref.node == -1 else new[ref] for ref in refs)

    outputs = _output_counts(recipe)
    at = 0
    for repetition in [*found, None]:
        end = repetition.start if repetition is not None else len(recipe.parts)
        for number in range(at, end):
            part = recipe.parts[number]
            new.update((Ref(number, k), Ref(len(parts), k)) for k in range(outputs.get(number, 0)))
            parts.append(msgspec.structs.replace(part, inputs=moved(part.inputs)))
        if repetition is not None:
            loop = search.loop(repetition)
            last = repetition.end - repetition.period
            new.update((Ref(last + ref.node, ref.output), Ref(len(parts), k)) for k, ref in enumerate(loop.outputs))
            parts.append(msgspec.structs.replace(loop, inputs=moved(loop.inputs)))
            at = repetition.end
    return Recipe(tuple(parts), moved(recipe.outputs))


def _output_counts(recipe: Recipe) -> dict[int, int]:
    """Outputs that each part needs: one more than the highest output of it that is used."""
    counts: dict[int, int] = {}
    for ref in [*recipe.outputs, *(ref for part in recipe.parts for ref in part.inputs)]:
        if ref.node >= 0:
            counts[ref.node] = max(counts.get(ref.node, 0), ref.output + 1)
    return counts


class Repetition(NamedTuple):
    """`times` equal blocks of `period` parts from part `start` on. Each block after the first one takes from the block
    before what the second one takes from the first; everything else that it takes is the same for all.

    `outputs` are values of the last block (its part, the output) that a part behind it, or the recipe, uses.
    """

    start: int
    period: int
    times: int
    outputs: tuple[Ref, ...]

    @property
    def end(self) -> int:
        return self.start + self.period * self.times


def repetitions(recipe: Recipe) -> list[Repetition]:
    """The blocks of a recipe that can be rolled, from the first part to the last; none overlap."""
    search = _Search(recipe)
    found: list[Repetition] = []
    at = 0
    while at < len(recipe.parts):
        longest = max(
            (search.repetition(at, period) for period in range(1, MAX_PERIOD + 1)),
            key=lambda r: r.period * (r.times - 1),
        )
        if longest.times >= MIN_ROUNDS:
            found.append(search.with_outputs(longest))
            at = longest.end
        else:
            at += 1
    return found


def _last_uses(recipe: Recipe) -> dict[Ref, int]:
    """The last part that takes a value; beyond all parts where the recipe gives it."""
    last = {ref: number for number, part in enumerate(recipe.parts) for ref in part.inputs}
    return last | dict.fromkeys(recipe.outputs, len(recipe.parts))


class _Call(NamedTuple):
    """A part as the search sees it: a number for what it computes, and its inputs relative to its block: of the block
    itself ("own"), of the one before ("before"), or of what stood before the first one ("same", absolute)."""

    kind: int
    inputs: tuple[tuple[str, Ref], ...]


class _Search:
    """The search for repetitions in one recipe."""

    def __init__(self, recipe: Recipe) -> None:
        numbers: dict[Part | Loop, int] = {}
        self.parts = recipe.parts
        self.kinds = [
            numbers.setdefault(_without_inputs(part), len(numbers)) if _can_roll(part) else -1 for part in recipe.parts
        ]
        # For each part: its outputs that are used, each with the last part that uses it.
        self.uses: list[dict[int, int]] = [{} for _ in recipe.parts]
        for ref, last in _last_uses(recipe).items():
            if ref.node >= 0:
                self.uses[ref.node][ref.output] = last
        self.latest = [max(uses.values(), default=-1) for uses in self.uses]

    def repetition(self, start: int, period: int) -> Repetition:
        """The longest repetition from `start` on; `times` is 1 where nothing repeats."""
        none = Repetition(start, period, 1, ())
        if start + 2 * period > len(self.parts) or self.kinds[start] != self.kinds[start + period]:
            return none
        if not self._feeds_only_next(start, period):
            return none
        first, second = (self.block(start + k * period, start, period) for k in (0, 1))
        if first is None or second is None or not _continues(first, second):
            return none
        times = 2
        while (
            self._feeds_only_next(start + (times - 1) * period, period)
            and self.block(start + times * period, start, period) == second
        ):
            times += 1
        return Repetition(start, period, times, ())

    def with_outputs(self, found: Repetition) -> Repetition:
        """A repetition with the values of its last block that are used behind it."""
        final = found.end - found.period
        outputs = [
            Ref(number - final, output)
            for number in range(final, found.end)
            for output, last in self.uses[number].items()
            if last >= found.end
        ]
        return found._replace(outputs=tuple(sorted(outputs)))

    def _feeds_only_next(self, at: int, period: int) -> bool:
        """Whether no value of the block at `at` is used behind the block that follows it. The search asks before it
        compares anything: a tenant may send parts that are all alike and all used at the end."""
        return max(self.latest[at : at + period]) < at + 2 * period

    def block(self, at: int, start: int, period: int) -> list[_Call] | None:
        """The calls of the block at `at`; None when it cannot be part of a repetition from `start` on."""
        if at + period > len(self.parts) or -1 in self.kinds[at : at + period]:
            return None
        calls = []
        for number in range(at, at + period):
            inputs = []
            for ref in self.parts[number].inputs:
                if ref.node >= at:
                    inputs.append(("own", Ref(ref.node - at, ref.output)))
                elif ref.node < start:
                    inputs.append(("same", ref))
                elif ref.node >= at - period:
                    inputs.append(("before", Ref(ref.node - at + period, ref.output)))
                else:
                    return None
            calls.append(_Call(self.kinds[number], tuple(inputs)))
        return calls

    def loop(self, repetition: Repetition) -> Loop:
        """The loop of a repetition; its inputs still name the values of the recipe as it was."""
        start, period, times, outputs = repetition
        first, second = (self.block(start + k * period, start, period) for k in (0, 1))
        assert first is not None
        assert second is not None
        places: dict[tuple[Ref, Ref | None], int] = {}  # (value in the first round, value of the round before) → input
        body: list[Part | Loop] = []
        for part, one, other in zip(self.parts[start : start + period], first, second, strict=True):
            inputs = []
            for (_, initial), (kind, ref) in zip(one.inputs, other.inputs, strict=True):
                if kind == "own":
                    inputs.append(ref)
                    continue
                key = (initial, ref if kind == "before" else None)
                inputs.append(Ref(-1, places.setdefault(key, len(places))))
            body.append(msgspec.structs.replace(part, inputs=tuple(inputs)))
        return Loop(
            body=tuple(body),
            times=times,
            inputs=tuple(initial for initial, _ in places),
            carried=tuple((k, value) for k, (_, value) in enumerate(places) if value is not None),
            outputs=outputs,
        )


def _continues(first: list[_Call], second: list[_Call]) -> bool:
    """Whether the second block does what the first one did, with values of that one in places where the first one took
    what stood before it."""
    return any(kind == "before" for call in second for kind, _ in call.inputs) and all(
        one.kind == other.kind
        and len(one.inputs) == len(other.inputs)
        and all(a == b or (a[0], b[0]) == ("same", "before") for a, b in zip(one.inputs, other.inputs, strict=True))
        for one, other in zip(first, second, strict=True)
    )


def _without_inputs(part: Part | Loop) -> Part | Loop:
    """A part reduced to what it computes."""
    if isinstance(part, Loop):
        return msgspec.structs.replace(part, inputs=())
    return Part("", part.function, ())


def _can_roll(part: Part | Loop) -> bool:
    if isinstance(part, Loop):
        return all(map(_can_roll, part.body)) and _depth(part) < limits.MAX_LOOP_DEPTH
    return not (part.no_fusion or part.has_loop)


def _depth(part: Part | Loop) -> int:
    """Loops inside each other, this one included."""
    return 1 + max(map(_depth, part.body), default=0) if isinstance(part, Loop) else 0
