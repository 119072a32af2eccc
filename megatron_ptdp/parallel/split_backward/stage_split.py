"""I and W of a stage that keeps residuals: the two parts of its backward, as functions of whole arrays.

I gives the gradient of the stage's input, and the values saved for W. Of the residuals, W takes those that it needs;
the others end with I. Saved values leave `jax.shard_map` in the form of residuals, see `residuals`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megatron_ptdp.models.interface import Tree
from megatron_ptdp.models.layers import vary, varying
from megatron_ptdp.parallel.split_backward.jaxpr_split import SplitJaxpr
from megatron_ptdp.parallel.split_backward.residuals import AXES, specs_over
from megatron_ptdp.parallel.stage import StageMath
from megatron_ptdp.parallel.stage_specs import Signature


class SplitBackward:
    """The backward of one stage in two parts.

    Attributes:
        early: the numbers of the residuals that only I takes
        late: of those that W takes too
        saved_axes: the axes over which each value saved for W differs
    """

    def __init__(self, math: StageMath) -> None:
        self.math = math
        self.early: list[int] = []
        self.late: list[int] = []
        self.saved_axes: list[frozenset[str]] = []
        self._local: list[Any] = []
        self._probe()

    # --- on one member, inside shard_map ------------------------------------------------------------------------------

    def _split(self, arguments: tuple[Tree, ...]) -> tuple[SplitJaxpr, Sequence[Any], Any]:
        """The split jaxpr, its constants, and the tree of the gradients of parameters.

        Args:
            arguments: (params, values, kept, upstream)
        """

        def backward(params: Tree, values: Tree, kept: list[Any], upstream: list[Any]) -> Any:
            gradients, downstream, _ = self.math.gradients(params, values, kept, {}, (), upstream, recompute=False)
            return downstream, gradients

        closed, (downstream, gradients) = jax.make_jaxpr(backward, return_shape=True)(*arguments)
        first = len(downstream)
        split = SplitJaxpr.of(closed.jaxpr, range(first), range(first, len(closed.jaxpr.outvars)))
        return split, closed.consts, jax.tree.structure(gradients)

    def _first(
        self, params: Tree, values: Tree, early: list[Any], late: list[Any], upstream: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        arguments = params, values, self._kept(early, late), upstream
        split, constants, _ = self._split(arguments)
        outputs, saved = split.run_first(dict(enumerate(jax.tree.leaves(arguments))), constants)
        return [outputs[number] for number in sorted(outputs)], [value[None, None] for value in saved]

    def _second(
        self, params: Tree, values: Tree, late: list[Any], upstream: list[Any], saved: list[Any], sums: Tree
    ) -> Tree:
        arguments = params, values, self._kept(None, late), upstream
        split, constants, tree = self._split(arguments)
        given = dict(enumerate(jax.tree.leaves(arguments)))
        outputs = split.run_second(given, [value[0, 0] for value in saved], constants)
        gradients = jax.tree.unflatten(tree, [outputs[number] for number in sorted(outputs)])
        return self.math.added(sums, gradients)

    def _kept(self, early: list[Any] | None, late: list[Any]) -> list[Any]:
        """All that was kept, in its order; zeros that nothing uses for what is not there."""
        if early is None:
            kinds = [tuple(axis for axis in AXES if axis in axes) for axes in self.math.kept_axes()]
            early = [vary(jnp.zeros(self._local[k].shape, self._local[k].dtype), *kinds[k]) for k in self.early]
        found = dict(zip((*self.early, *self.late), (*early, *late), strict=True))
        return [found[k] for k in range(len(found))]

    # --- of whole arrays ----------------------------------------------------------------------------------------------

    def input_gradient_specs(self, wires: bool) -> Signature:
        """Specs of `input_gradient`."""
        return self.math.specs.input_gradient(self.early, self.late, specs_over(self.saved_axes), wires)

    def weight_gradient_specs(self, wires: bool) -> Signature:
        """Specs of `weight_gradient`."""
        return self.math.specs.weight_gradient(self.late, specs_over(self.saved_axes), wires)

    def input_gradient(self) -> Callable[..., Any]:
        """I: from (params, values, early residuals, late residuals, upstream) to (gradients of floating values, values
        saved for W)."""
        return self.math.mapped(self._first, self.input_gradient_specs(wires=False))

    def weight_gradient(self) -> Callable[..., Any]:
        """W: from (params, values, late residuals, upstream, saved values, sums) to the new sums."""
        return self.math.mapped(self._second, self.weight_gradient_specs(wires=False))

    def _probe(self) -> None:
        """Traces the backward once, to find the residuals that W takes and the values saved for it."""
        math = self.math

        def run(params: Tree, values: Tree, kept: list[Any], upstream: list[Any]) -> list[Any]:
            arguments = params, values, kept, upstream
            split, constants, _ = self._split(arguments)
            start = len(jax.tree.leaves((params, values)))
            self.late = [k for k in range(len(kept)) if start + k in split.needs[1]]
            self.early = [k for k in range(len(kept)) if start + k not in split.needs[1]]
            self._local = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in kept]
            outputs, saved = split.run_first(dict(enumerate(jax.tree.leaves(arguments))), constants)
            self.saved_axes = [varying(value) for value in saved]
            return [outputs[number] for number in sorted(outputs)]

        params, values, _, _ = math.arguments()
        inputs, (_, downstream, _) = math.specs.backward(recompute=False, weights=False, inputs=True, wires=False)
        parameter_specs, value_specs, residual_specs, _, _, upstream_specs, _ = inputs
        signature = Signature((parameter_specs, value_specs, residual_specs, upstream_specs), downstream)
        _, kept = jax.eval_shape(math.forward, *math.arguments())
        jax.eval_shape(math.mapped(run, signature), params, values, kept, math.upstream())
