"""Functions composed into one computation: run one behind the other, with borders that keep the bits of each.

XLA must not join the arithmetic of two functions, or the bits would depend on what was grouped: it simplifies what it
sees through, and its CPU compiler contracts a multiplication and an addition into one rounding. What lies between keeps
it from both, between the rounds of loops as well:

- A *barrier*: both sides are kernels of their own, each of which takes XLA some 11 ms to make.
- A *seal*: an exclusive or of the value's bits and a number that is 0, which only the running computation knows. The
  kernel goes on behind it. It stands between two lines (`Formula.is_line`) of which the second alone takes what the
  first makes: what XLA does within each is then what it does with it alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways_ray.executor.compile.functions import Called
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.ir.graph import Loop, Part, Ref
from pathways_ray.joint_exports import Member

Calls = Mapping[str, Called]
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
    given = _Chain(parts, outputs, calls, lines)
    emitted = (Member, FormulaCall)
    if len(parts) > 1 and all(isinstance(part, Part) and isinstance(calls[part.function], emitted) for part in parts):
        return list(_chain_p().bind(*inputs, chain=given))
    return given.run(_Traced(lines), inputs)


class _Traced:
    """The steps of a recipe, for JAX to trace them."""

    def __init__(self, lines: frozenset[str]) -> None:
        self.zero: Any = jax.lax.optimization_barrier(np.uint32(0)) if lines else None

    def call(self, function: Any, values: Sequence[Any]) -> Sequence[Any]:
        return jax.tree.leaves(function.call(*values))  # an export gives a tree of its client's, which may be one array

    def barrier(self, values: Sequence[Any]) -> Sequence[Any]:
        return jax.lax.optimization_barrier(values)

    def sealed(self, value: Any) -> Any:
        bits = jax.lax.bitcast_convert_type(value, np.uint32) ^ self.zero
        return jax.lax.bitcast_convert_type(bits, value.dtype)


class _Emitted:
    """The same as operations of the module that JAX makes at the moment, of values of it: to trace and lower 100
    functions takes 80 ms, to write down 400 operations 6. Only calls members and formulas."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.zeros: dict[tuple[int, ...], Any] = {}

    def call(self, function: Member | FormulaCall, values: Sequence[Any]) -> Sequence[Any]:
        return function.emitted(self.context, values)

    def barrier(self, values: Sequence[Any]) -> Sequence[Any]:
        return list(stablehlo.OptimizationBarrierOp(values).results)

    def sealed(self, value: Any) -> Any:
        kind = ir.RankedTensorType(value.type)
        bits = ir.RankedTensorType.get(kind.shape, ir.IntegerType.get_unsigned(32))
        sealed = stablehlo.xor(stablehlo.bitcast_convert(bits, value), self._zero(bits))
        return stablehlo.bitcast_convert(kind, sealed)

    def _zero(self, kind: Any) -> Any:
        shape = tuple(kind.shape)
        if shape not in self.zeros:
            number = ir.DenseElementsAttr.get(np.zeros((), np.uint32).data, type=kind.element_type)
            (zero,) = self.barrier([stablehlo.constant(number)])
            self.zeros[shape] = stablehlo.broadcast_in_dim(kind, zero, ir.DenseI64ArrayAttr.get([]))
        return self.zeros[shape]


@functools.cache
def _chain_p() -> Any:
    """The primitive that a recipe is which only calls members and formulas; its lowering has what stands in it."""
    made = jex_core.Primitive("pathways_chain")
    made.multiple_results = True

    @made.def_abstract_eval
    def types(*given: Any, chain: _Chain) -> list[Any]:
        return [
            given[ref.output] if ref.node < 0 else jax.core.ShapedArray(kind.shape, kind.dtype)
            for ref, kind in zip(chain.outputs, map(chain.type_of, chain.outputs), strict=True)
        ]

    def lowered(ctx: Any, *values: Any, chain: _Chain) -> list[Any]:
        return chain.run(_Emitted(ctx.module_context), values)

    mlir.register_lowering(made, lowered, cacheable=False)
    return made


class _Chain:
    """The parts of a recipe, and the functions of them that are `lines`."""

    def __init__(
        self, parts: Sequence[Part | Loop], outputs: Sequence[Ref], calls: Calls, lines: frozenset[str]
    ) -> None:
        self.parts, self.outputs, self.calls, self.lines = parts, outputs, calls, lines

    def type_of(self, ref: Ref) -> Any:
        """The type of a value that a part makes; None of an input."""
        part = self.parts[ref.node]
        return self.calls[part.function].out_avals[ref.output] if ref.node >= 0 and isinstance(part, Part) else None

    def run(self, ops: Any, inputs: Sequence[Any]) -> list[Any]:
        """The outputs, as `ops` makes them."""
        values = self._values(ops, self.parts, self.outputs, inputs)
        return [values[ref] for ref in self.outputs]

    def _values(
        self,
        ops: Any,
        parts: Sequence[Part | Loop],
        outputs: Sequence[Ref],
        inputs: Sequence[Any],
        inside: bool = False,
    ) -> dict[Ref, Any]:
        """The values of the parts of a recipe, or of the body of a loop (`inside`)."""
        values = {Ref(-1, k): value for k, value in enumerate(inputs)}
        uses = Counter([*outputs, *(ref for part in parts for ref in part.inputs)])
        for number, part in enumerate(parts):
            arguments = [values[ref] for ref in part.inputs]
            if isinstance(part, Loop):
                results = self._loop(ops, part, arguments)
            else:
                if self._is_sealed(parts, part, uses):
                    arguments = [ops.sealed(value) for value in arguments]
                elif (number or inside) and arguments:
                    arguments = ops.barrier(arguments)
                results = ops.call(self.calls[part.function], arguments)
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

    def _loop(self, ops: Any, loop: Loop, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The outputs of the last round. Where one of them is not carried, it is made by a first round before the loop,
        so that XLA's loop has a value of its type to begin with."""
        places = [place for place, _ in loop.carried]
        fed = [value for _, value in loop.carried]
        also = [ref for ref in dict.fromkeys(loop.outputs) if ref not in fed]

        def again(_: Any, given: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            taken = list(arguments)
            for place, value in zip(places, given, strict=False):
                taken[place] = value
            values = self._values(ops, loop.body, [*fed, *also], taken, inside=True)
            return tuple(values[ref] for ref in [*fed, *also])

        start: Sequence[jax.Array] = [arguments[place] for place in places]
        if also:
            start = again(0, start)
        last = jax.lax.fori_loop(1 if also else 0, loop.times, again, tuple(start))
        made = dict(zip([*fed, *also], last, strict=True))
        return [made[ref] for ref in loop.outputs]
