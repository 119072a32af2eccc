"""A traced backward split in two, so that neither part repeats what the other computed.

The backward of a stage is traced to a jaxpr. The equations that the gradients of the inputs need are the first part
(I); of the rest, those that the gradients of the parameters need are the second (W). Values of the first part that the
second uses are *saved for W*: above all the gradient of each linear layer's output, which W multiplies with the layer's
input. A scan over layers is split likewise, into two scans: the first gives the saved values of all its iterations, the
second takes them.

Equations that only change the layout of a saved value run again in the second part, so that the value is saved once.
Other equations with functions inside (a checkpointed one, say) are not split: they are in the first part if it needs
any of their outputs.
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
class SplitJaxpr:
    """One jaxpr in two parts.

    Attributes:
        jaxpr: of all of it
        first, second: the numbers of the outputs that each part gives
        equations: for each part the numbers of its equations; some are in both
        scans: the split scans, by the numbers of their equations
        saved: variables of this jaxpr that are saved for W; those of its scans follow them in every list of values
        needs: for each part, the numbers of the inputs it takes
    """

    jaxpr: Any
    first: frozenset[int]
    second: frozenset[int]
    equations: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))
    scans: dict[int, SplitScan] = field(default_factory=dict)
    saved: list[Any] = field(default_factory=list)
    needs: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())

    @classmethod
    def of(cls, jaxpr: Any, first: Iterable[int], second: Iterable[int], own: Iterable[int] = ()) -> SplitJaxpr:
        """Splits a jaxpr.

        Args:
            first, second: the numbers of the outputs of each part
            own: the numbers of the inputs that only the first part has
        """
        made = cls(jaxpr, frozenset(first), frozenset(second))
        known = made._sweep_first()
        made._sweep_second(known, {jaxpr.invars[number] for number in own})
        return made

    def _sweep_first(self) -> set[Any]:
        """Finds the first part, and returns the variables that it computes."""
        needed = _variables(self.jaxpr.outvars[number] for number in self.first)
        known: set[Any] = set()
        for number in reversed(range(len(self.jaxpr.eqns))):
            equation = self.jaxpr.eqns[number]
            wanted = [k for k, var in enumerate(equation.outvars) if var in needed]
            if not wanted:
                continue
            self.equations[0].insert(0, number)
            if equation.primitive.name == "scan":
                scan = self.scans[number] = SplitScan.begun(equation, wanted)
                needed |= _variables(equation.invars[k] for k in scan.inputs(0))
                known.update(equation.outvars[k] for k in scan.outputs(0))
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
            if number in self.scans:
                scan = self.scans[number]
                if scan.finish([k for k in wanted if equation.outvars[k] not in known]):
                    self.equations[1].insert(0, number)
                    needed |= _variables(equation.invars[k] for k in scan.inputs(1))
            elif equation.outvars[wanted[0]] not in known or equation.primitive.name in LAYOUTS:
                self.equations[1].insert(0, number)
                needed |= _variables(equation.invars)
                known.difference_update(equation.outvars)  # here it is computed once more
        self.needs = (self.needs[0], self._inputs(needed - own))
        order = [*self.jaxpr.invars, *(var for equation in self.jaxpr.eqns for var in equation.outvars)]
        self.saved = [var for var in order if var in needed and (var in known or var in own)]

    def _inputs(self, needed: set[Any]) -> frozenset[int]:
        return frozenset(k for k, var in enumerate(self.jaxpr.invars) if var in needed)

    # --- running ------------------------------------------------------------------------------------------------------

    def run_first(self, inputs: Mapping[int, Any], constants: Sequence[Any] = ()) -> tuple[dict[int, Any], list[Any]]:
        """The outputs of the first part by their numbers, and the values saved for W."""
        values = self._given(inputs, constants)
        inner: list[Any] = []
        for number in self.equations[0]:
            equation = self.jaxpr.eqns[number]
            if number in self.scans:
                saved = self.scans[number].run_first(equation, values)
                inner += saved
            else:
                _evaluate(equation, values)
        outputs = {number: _read(values, self.jaxpr.outvars[number]) for number in self.first}
        return outputs, [*(values[var] for var in self.saved), *inner]

    def run_second(
        self, inputs: Mapping[int, Any], saved: Sequence[Any], constants: Sequence[Any] = ()
    ) -> dict[int, Any]:
        """The outputs of the second part by their numbers."""
        values = self._given(inputs, constants)
        values.update(zip(self.saved, saved, strict=False))
        rest = list(saved[len(self.saved) :])
        for number in sorted({*self.equations[1], *self.scans}):
            equation = self.jaxpr.eqns[number]
            if number not in self.scans:
                _evaluate(equation, values)
                continue
            scan = self.scans[number]
            mine, rest = rest[: scan.saved_count], rest[scan.saved_count :]
            if number in self.equations[1]:
                scan.run_second(equation, values, mine)
        return {number: _read(values, self.jaxpr.outvars[number]) for number in self.second}

    @property
    def saved_count(self) -> int:
        """The number of saved values, those of scans included."""
        return len(self.saved) + sum(scan.saved_count for scan in self.scans.values())

    def _given(self, inputs: Mapping[int, Any], constants: Sequence[Any]) -> dict[Any, Any]:
        values = dict(zip(self.jaxpr.constvars, constants, strict=True))
        values.update({self.jaxpr.invars[number]: value for number, value in inputs.items()})
        return values


@dataclass
class SplitScan:
    """A `scan` in two parts. Its inputs are constants, the initial carry, and rows of which each iteration takes one.
    Its outputs are the last carry, and rows of which each iteration gives one.

    Attributes:
        constants, carried: how many there are
        body: of an iteration
        split: the body in two parts
        carries: for each part, the numbers of the carried values
        given: for each part, the numbers of the rows that it gives, counted from the first carried value
    """

    constants: int
    carried: int
    body: Any
    split: SplitJaxpr
    carries: tuple[list[int], list[int]]
    given: tuple[list[int], list[int]]

    @classmethod
    def begun(cls, equation: Any, wanted: Sequence[int]) -> SplitScan:
        """A scan with its first part only, which gives these outputs."""
        params = equation.params
        constants, carried, body = params["num_consts"], params["num_carry"], params["jaxpr"]
        split, carries = _closed_over_carries(body.jaxpr, constants, carried, set(wanted), set())
        given = [k for k in sorted(wanted) if k >= carried]
        return cls(constants, carried, body, split, (sorted(carries), []), (given, []))

    def finish(self, wanted: Sequence[int]) -> bool:
        """Adds the second part, which gives these outputs; False without outputs."""
        if not wanted:
            return False
        carries, given = self.carries[0], self.given[0]
        before = {*carries, *given}
        self.split, others = _closed_over_carries(
            self.body.jaxpr, self.constants, self.carried, set(wanted) - before, before
        )
        self.carries = (carries, sorted(others))
        self.given = (given, [k for k in sorted(wanted) if k >= self.carried])
        return True

    @property
    def saved_count(self) -> int:
        """The number of values that each iteration saves: 0 without a second part."""
        return self.split.saved_count if self.carries[1] or self.given[1] else 0

    def outputs(self, part: int) -> list[int]:
        return [*self.carries[part], *self.given[part]]

    def inputs(self, part: int) -> list[int]:
        """Numbers of the equation's inputs: those that the body needs, and the initial carry."""
        first = {self.constants + k for k in self.carries[part]}
        return sorted(first | self.split.needs[part])

    def run_first(self, equation: Any, values: dict[Any, Any]) -> list[Any]:
        """Adds the outputs to the values, and returns the saved values of all iterations."""

        def iteration(inputs: Mapping[int, Any], _: Sequence[Any]) -> tuple[dict[int, Any], list[Any]]:
            outputs, saved = self.split.run_first(inputs, self.body.consts)
            return outputs, saved if self.saved_count else []

        return self._run(0, iteration, equation, values, [])

    def run_second(self, equation: Any, values: dict[Any, Any], saved: Sequence[Any]) -> None:
        def iteration(inputs: Mapping[int, Any], own: Sequence[Any]) -> tuple[dict[int, Any], list[Any]]:
            return self.split.run_second(inputs, own, self.body.consts), []

        self._run(1, iteration, equation, values, saved)

    def _run(self, part: int, iteration: Any, equation: Any, values: dict[Any, Any], saved: Sequence[Any]) -> list[Any]:
        start = self.constants + self.carried
        needed = self.inputs(part)
        fixed = {k: _read(values, equation.invars[k]) for k in needed if k < self.constants}
        moving = {k: _read(values, equation.invars[k]) for k in needed if k >= start}
        carries, given = self.carries[part], self.given[part]
        initial = [_read(values, equation.invars[self.constants + k]) for k in carries]

        def body(carry: list[Any], taken: tuple[dict[int, Any], list[Any]]) -> tuple[list[Any], Any]:
            own = {self.constants + k: value for k, value in zip(carries, carry, strict=True)}
            outputs, more = iteration({**fixed, **own, **taken[0]}, taken[1])
            return [outputs[k] for k in carries], ([outputs[k] for k in given], more)

        params = equation.params
        last, (rows, more) = jax.lax.scan(
            body, initial, (moving, list(saved)), params["length"], params["reverse"], params["unroll"]
        )
        values.update(zip((equation.outvars[k] for k in [*carries, *given]), [*last, *rows], strict=True))
        made: list[Any] = more
        return made


def _closed_over_carries(
    body: Any, constants: int, carried: int, wanted: set[int], before: set[int]
) -> tuple[SplitJaxpr, set[int]]:
    """The body in two parts, and the carried values that these outputs need: those that an iteration needs of the one
    before are carried too.

    Args:
        wanted: outputs of one part: of the first if `before` is empty, else of the second
        before: outputs of the first part
    """
    carries = {k for k in wanted if k < carried}
    earlier = {k for k in before if k < carried}
    while True:
        outputs = wanted | carries
        if before:
            split = SplitJaxpr.of(body, before, outputs, own={constants + k for k in earlier})
        else:
            split = SplitJaxpr.of(body, outputs, ())
        needs = split.needs[1 if before else 0]
        more = {k for k in range(carried) if constants + k in needs} - earlier - carries
        if not more:
            return split, carries
        carries |= more


def used_inputs(jaxpr: Any) -> frozenset[int]:
    """The numbers of the inputs that any output of a jaxpr depends on."""
    needed = _variables(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed |= _variables(equation.invars)
    return frozenset(number for number, var in enumerate(jaxpr.invars) if var in needed)


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if isinstance(atom, Var)}


def _read(values: Mapping[Any, Any], atom: Any) -> Any:
    return values[atom] if isinstance(atom, Var) else atom.val


def _evaluate(equation: Any, values: dict[Any, Any]) -> None:
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        made = equation.primitive.bind(*(_read(values, atom) for atom in equation.invars), **params)
    values.update(zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True))
