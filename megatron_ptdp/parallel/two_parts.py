"""I and W of a stage that keeps residuals: the halves of its backward, as functions of whole arrays.

I gives the gradient of the stage's input, and the taps that W needs of it. Of what the forward kept, W takes what it
needs; the rest ends with I. Taps leave `jax.shard_map` in the form of what forwards keep, see `residuals`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megatron_ptdp.models.interface import Tree
from megatron_ptdp.parallel.halves import Halves
from megatron_ptdp.parallel.residuals import AXES, specs_over, vary, varying
from megatron_ptdp.parallel.stage import StageMath


class TwoParts:
    """The backward of one stage in two parts.

    Attributes:
        early: the numbers of kept arrays that I alone takes
        late: of those that W takes too
        taps: the axes over which each tap differs
    """

    def __init__(self, math: StageMath) -> None:
        self.math, self.shapes = math, math.shapes
        self.early: list[int] = []
        self.late: list[int] = []
        self.taps: list[frozenset[str]] = []
        self._local: list[Any] = []
        self._probe()

    # --- on one member, inside shard_map ------------------------------------------------------------------------------

    def _cut(self, arguments: tuple[Tree, ...]) -> tuple[Halves, Sequence[Any], Any]:
        """The halves, the constants of the jaxpr, and the tree of the gradients of parameters.

        Args:
            arguments: (params, values, kept, upstream)
        """

        def backward(params: Tree, values: Tree, kept: list[Any], upstream: list[Any]) -> Any:
            gradients, downstream, _ = self.math.gradients(params, values, kept, {}, (), upstream, again=False)
            return downstream, gradients

        closed, (downstream, gradients) = jax.make_jaxpr(backward, return_shape=True)(*arguments)
        first = len(downstream)
        halves = Halves.of(closed.jaxpr, range(first), range(first, len(closed.jaxpr.outvars)))
        return halves, closed.consts, jax.tree.structure(gradients)

    def _first(
        self, params: Tree, values: Tree, early: list[Any], late: list[Any], upstream: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        arguments = params, values, self._kept(early, late), upstream
        halves, constants, _ = self._cut(arguments)
        outputs, taps = halves.run_first(dict(enumerate(jax.tree.leaves(arguments))), constants)
        return [outputs[number] for number in sorted(outputs)], [tap[None, None] for tap in taps]

    def _second(
        self, params: Tree, values: Tree, late: list[Any], upstream: list[Any], taps: list[Any], sums: Tree
    ) -> Tree:
        arguments = params, values, self._kept(None, late), upstream
        halves, constants, tree = self._cut(arguments)
        given = dict(enumerate(jax.tree.leaves(arguments)))
        outputs = halves.run_second(given, [tap[0, 0] for tap in taps], constants)
        gradients = jax.tree.unflatten(tree, [outputs[number] for number in sorted(outputs)])
        return self.math.added(sums, gradients)

    def _kept(self, early: list[Any] | None, late: list[Any]) -> list[Any]:
        """All that was kept, in its order; zeros that nothing uses for what is not there."""
        if early is None:
            kinds = [tuple(axis for axis in AXES if axis in axes) for axes in self.math.kept_axes()]
            early = [vary(jnp.zeros(self._local[k].shape, self._local[k].dtype), kinds[k]) for k in self.early]
        found = dict(zip((*self.early, *self.late), (*early, *late), strict=True))
        return [found[k] for k in range(len(found))]

    # --- of whole arrays ----------------------------------------------------------------------------------------------

    def tap_specs(self) -> list[P]:
        return specs_over(self.taps)

    def first(self) -> Callable[..., Any]:
        """I: from (params, values, kept early, kept late, upstream) to (gradients of floating values, taps)."""
        shapes, kept = self.shapes, self.math.kept_specs()
        return self.math.mapped(
            self._first,
            (
                shapes.used_specs,
                shapes.value_specs,
                [kept[k] for k in self.early],
                [kept[k] for k in self.late],
                self.math.upstream_specs(wires=False),
            ),
            (self.math.gradient_specs(shapes.values, shapes.value_specs), self.tap_specs()),
        )

    def second(self) -> Callable[..., Any]:
        """W: from (params, values, kept late, upstream, taps, sums) to the new sums."""
        shapes, kept = self.shapes, self.math.kept_specs()
        return self.math.mapped(
            self._second,
            (
                shapes.used_specs,
                shapes.value_specs,
                [kept[k] for k in self.late],
                self.math.upstream_specs(wires=False),
                self.tap_specs(),
                shapes.sum_specs,
            ),
            shapes.sum_specs,
        )

    def _probe(self) -> None:
        """Traces the backward once: what W takes of what was kept, and the taps."""
        math, shapes = self.math, self.shapes

        def run(params: Tree, values: Tree, kept: list[Any], upstream: list[Any]) -> list[Any]:
            arguments = params, values, kept, upstream
            halves, constants, _ = self._cut(arguments)
            start = len(jax.tree.leaves((params, values)))
            self.late = [k for k in range(len(kept)) if start + k in halves.needs[1]]
            self.early = [k for k in range(len(kept)) if start + k not in halves.needs[1]]
            self._local = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in kept]
            outputs, taps = halves.run_first(dict(enumerate(jax.tree.leaves(arguments))), constants)
            self.taps = [varying(tap) for tap in taps]
            return [outputs[number] for number in sorted(outputs)]

        params, values, _, _ = math.arguments()
        mapped = math.mapped(
            run,
            (shapes.used_specs, shapes.value_specs, math.kept_specs(), math.upstream_specs(wires=False)),
            math.gradient_specs(shapes.values, shapes.value_specs),
        )
        _, kept = jax.eval_shape(math.forward, *math.arguments())
        jax.eval_shape(mapped, params, values, kept, math.upstream())
