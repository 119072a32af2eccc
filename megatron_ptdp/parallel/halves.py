"""A backward cut in two, so that neither part repeats what the other did.

The backward of a stage is traced to a jaxpr. What the gradients of the inputs need of it is the first half (I); of the
rest, what the gradients of the parameters need is the second (W). Values of the first half that the second uses are the
*taps*: above all the gradient of what each linear layer gave, which W multiplies with what went into the layer. The
first half hands them on. A loop over layers is cut likewise, into two loops: the first gives the taps of all its turns,
the second takes them.

What only lays a tap out anew is done again in the second half, rather than handed on a second time. Other equations
with functions inside (a checkpointed one, say) are not cut: they are in the first half if it needs any of their output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Var

LAYOUTS = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim", "expand_dims", "pvary"})
"""Primitives that move no more bytes than they take."""


@dataclass
class Halves:
    """The two halves of one jaxpr.

    Attributes:
        jaxpr: of all of it
        first, second: the numbers of the outputs that each half gives
        equations: for each half the numbers of its equations; some are in both
        loops: for the number of a loop, the halves of its body
        cuts: the taps of this jaxpr itself; those of its loops come behind
        needs: for each half, the numbers of the inputs it takes
    """

    jaxpr: Any
    first: frozenset[int]
    second: frozenset[int]
    equations: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    loops: dict[int, Loop] = field(default_factory=dict)
    cuts: list[Any] = field(default_factory=list)
    needs: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    @classmethod
    def of(cls, jaxpr: Any, first: Iterable[int], second: Iterable[int], own: Iterable[int] = ()) -> Halves:
        """Cuts a jaxpr.

        Args:
            first, second: the numbers of the outputs of each half
            own: the numbers of the inputs that only the first half has
        """
        made = cls(jaxpr, frozenset(first), frozenset(second))
        known = made._sweep_first()
        made._sweep_second(known, {jaxpr.invars[number] for number in own})
        return made

    def _sweep_first(self) -> set[Any]:
        """Finds the first half; the variables that it computes."""
        needed = _variables(self.jaxpr.outvars[number] for number in self.first)
        known: set[Any] = set()
        for number in reversed(range(len(self.jaxpr.eqns))):
            equation = self.jaxpr.eqns[number]
            wanted = [k for k, var in enumerate(equation.outvars) if var in needed]
            if not wanted:
                continue
            self.equations[0].insert(0, number)
            if equation.primitive.name == "scan":
                loop = self.loops[number] = Loop.begun(equation, wanted)
                needed |= _variables(equation.invars[k] for k in loop.inputs(0))
                known.update(equation.outvars[k] for k in loop.outputs(0))
            else:
                needed |= _variables(equation.invars)
                known.update(equation.outvars)
        self.needs = (self._inputs(needed), frozenset())
        return known

    def _sweep_second(self, known: set[Any], own: set[Any]) -> None:
        needed = _variables(self.jaxpr.outvars[number] for number in self.second)
        for number in reversed(range(len(self.jaxpr.eqns))):
            equation = self.jaxpr.eqns[number]
            wanted = [k for k, var in enumerate(equation.outvars) if var in needed]
            if not wanted:
                continue
            if number in self.loops:
                loop = self.loops[number]
                if loop.finish([k for k in wanted if equation.outvars[k] not in known]):
                    self.equations[1].insert(0, number)
                    needed |= _variables(equation.invars[k] for k in loop.inputs(1))
            elif equation.outvars[wanted[0]] not in known or equation.primitive.name in LAYOUTS:
                self.equations[1].insert(0, number)
                needed |= _variables(equation.invars)
                known.difference_update(equation.outvars)  # here it is computed once more
        self.needs = (self.needs[0], self._inputs(needed - own))
        order = [*self.jaxpr.invars, *(var for equation in self.jaxpr.eqns for var in equation.outvars)]
        self.cuts = [var for var in order if var in needed and (var in known or var in own)]

    def _inputs(self, needed: set[Any]) -> frozenset[int]:
        return frozenset(k for k, var in enumerate(self.jaxpr.invars) if var in needed)

    # --- running ------------------------------------------------------------------------------------------------------

    def run_first(self, inputs: Mapping[int, Any], constants: Sequence[Any] = ()) -> tuple[dict[int, Any], list[Any]]:
        """The outputs of the first half by their numbers, and the taps."""
        values = self._given(inputs, constants)
        inner: list[Any] = []
        for number in self.equations[0]:
            equation = self.jaxpr.eqns[number]
            if number in self.loops:
                taps = self.loops[number].run_first(equation, values)
                inner += taps
            else:
                _evaluate(equation, values)
        outputs = {number: _read(values, self.jaxpr.outvars[number]) for number in self.first}
        return outputs, [*(values[var] for var in self.cuts), *inner]

    def run_second(
        self, inputs: Mapping[int, Any], taps: Sequence[Any], constants: Sequence[Any] = ()
    ) -> dict[int, Any]:
        """The outputs of the second half by their numbers."""
        values = self._given(inputs, constants)
        values.update(zip(self.cuts, taps, strict=False))
        rest = list(taps[len(self.cuts) :])
        for number in sorted({*self.equations[1], *self.loops}):
            equation = self.jaxpr.eqns[number]
            if number not in self.loops:
                _evaluate(equation, values)
                continue
            loop = self.loops[number]
            mine, rest = rest[: loop.taps], rest[loop.taps :]
            if number in self.equations[1]:
                loop.run_second(equation, values, mine)
        return {number: _read(values, self.jaxpr.outvars[number]) for number in self.second}

    @property
    def taps(self) -> int:
        """How many there are."""
        return len(self.cuts) + sum(loop.taps for loop in self.loops.values())

    def _given(self, inputs: Mapping[int, Any], constants: Sequence[Any]) -> dict[Any, Any]:
        values = dict(zip(self.jaxpr.constvars, constants, strict=True))
        values.update({self.jaxpr.invars[number]: value for number, value in inputs.items()})
        return values


@dataclass
class Loop:
    """A `scan` cut in two. Its inputs are constants, what is carried at first, and what is taken in turns; its outputs
    what is carried at last, and what is given in turns.

    Attributes:
        constants, carried: how many there are
        body: of a turn
        halves: of the body
        carries: for each half, the numbers of what it carries
        given: for each half, the numbers of the outputs of a turn that it gives, counted with what is carried
    """

    constants: int
    carried: int
    body: Any
    halves: Halves
    carries: tuple[list[int], list[int]]
    given: tuple[list[int], list[int]]

    @classmethod
    def begun(cls, equation: Any, wanted: Sequence[int]) -> Loop:
        """With the first half only, which gives these outputs."""
        params = equation.params
        constants, carried, body = params["num_consts"], params["num_carry"], params["jaxpr"]
        halves, carries = _closed_over_carries(body.jaxpr, constants, carried, set(wanted), set())
        given = [k for k in sorted(wanted) if k >= carried]
        return cls(constants, carried, body, halves, (sorted(carries), []), (given, []))

    def finish(self, wanted: Sequence[int]) -> bool:
        """Adds the second half, which gives these outputs; False if there are none."""
        if not wanted:
            return False
        carries, given = self.carries[0], self.given[0]
        before = {*carries, *given}
        self.halves, others = _closed_over_carries(
            self.body.jaxpr, self.constants, self.carried, set(wanted) - before, before
        )
        self.carries = (carries, sorted(others))
        self.given = (given, [k for k in sorted(wanted) if k >= self.carried])
        return True

    @property
    def taps(self) -> int:
        """How many: none where there is no second half."""
        return self.halves.taps if self.carries[1] or self.given[1] else 0

    def outputs(self, half: int) -> list[int]:
        return [*self.carries[half], *self.given[half]]

    def inputs(self, half: int) -> list[int]:
        """Of the equation: what the body needs, and what is carried at first."""
        first = {self.constants + k for k in self.carries[half]}
        return sorted(first | self.halves.needs[half])

    def run_first(self, equation: Any, values: dict[Any, Any]) -> list[Any]:
        """Puts the outputs among the values; gives the taps of all turns."""

        def turn(inputs: Mapping[int, Any], _: Sequence[Any]) -> tuple[dict[int, Any], list[Any]]:
            outputs, taps = self.halves.run_first(inputs, self.body.consts)
            return outputs, taps if self.taps else []

        return self._run(0, turn, equation, values, [])

    def run_second(self, equation: Any, values: dict[Any, Any], taps: Sequence[Any]) -> None:
        def turn(inputs: Mapping[int, Any], own: Sequence[Any]) -> tuple[dict[int, Any], list[Any]]:
            return self.halves.run_second(inputs, own, self.body.consts), []

        self._run(1, turn, equation, values, taps)

    def _run(self, half: int, turn: Any, equation: Any, values: dict[Any, Any], taps: Sequence[Any]) -> list[Any]:
        start = self.constants + self.carried
        needed = self.inputs(half)
        fixed = {k: _read(values, equation.invars[k]) for k in needed if k < self.constants}
        moving = {k: _read(values, equation.invars[k]) for k in needed if k >= start}
        carries, given = self.carries[half], self.given[half]
        initial = [_read(values, equation.invars[self.constants + k]) for k in carries]

        def body(carry: list[Any], taken: tuple[dict[int, Any], list[Any]]) -> tuple[list[Any], Any]:
            own = {self.constants + k: value for k, value in zip(carries, carry, strict=True)}
            outputs, more = turn({**fixed, **own, **taken[0]}, taken[1])
            return [outputs[k] for k in carries], ([outputs[k] for k in given], more)

        params = equation.params
        last, (rows, more) = jax.lax.scan(
            body, initial, (moving, list(taps)), params["length"], params["reverse"], params["unroll"]
        )
        values.update(zip((equation.outvars[k] for k in [*carries, *given]), [*last, *rows], strict=True))
        made: list[Any] = more
        return made


def _closed_over_carries(
    body: Any, constants: int, carried: int, wanted: set[int], before: set[int]
) -> tuple[Halves, set[int]]:
    """The halves of a body, and what is carried for these outputs: what a turn needs of the one before is carried too.

    Args:
        wanted: outputs of the half in question: of the first, if nothing is given `before`; else of the second
        before: outputs of the first half
    """
    carries = {k for k in wanted if k < carried}
    earlier = {k for k in before if k < carried}
    while True:
        outputs = wanted | carries
        if before:
            halves = Halves.of(body, before, outputs, own={constants + k for k in earlier})
        else:
            halves = Halves.of(body, outputs, ())
        needs = halves.needs[1 if before else 0]
        more = {k for k in range(carried) if constants + k in needs} - earlier - carries
        if not more:
            return halves, carries
        carries |= more


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _read(values: Mapping[Any, Any], atom: Any) -> Any:
    return values[atom] if isinstance(atom, Var) else atom.val


def _evaluate(equation: Any, values: dict[Any, Any]) -> None:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        made = equation.primitive.bind(*(_read(values, atom) for atom in equation.invars), **params)
    values.update(zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True))
