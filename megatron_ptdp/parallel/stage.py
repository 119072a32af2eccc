"""Forward and backwards of one stage, as functions of whole arrays over the mesh of its slice.

Inside `jax.shard_map` each function is one member's. The parameters are typed there as varying over DATA, so that their
gradients stay what the member's own examples give; they are added up over microbatches, and over DATA only once, when
all are there (from ZeRO-2 on, with each microbatch). Sums over TENSOR are autodiff's own.

All backwards take the same arguments, of which those that a stage does not need are empty:

    params    as forward takes them
    values    the stage's input
    kept      what forward kept; empty when the backward computes the forward again
    batch     all microbatches of the step, [m, examples, ...]; k is the number of this one
    upstream  the gradient of what the stage gave, of floating values in the order of the leaves; of the loss: [scale]
    sums      of the gradients of the parameters so far, donated

and give (sums, downstream, loss): the new sums, the gradient of `values`, and on a stage with the loss, if the forward
is computed here, the sum of losses of each member of DATA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from megatron_ptdp.models.interface import DATA, Model, Tree
from megatron_ptdp.models.layers import vary
from megatron_ptdp.parallel.gathering import fetching, is_fetched
from megatron_ptdp.parallel.reduce import scattered
from megatron_ptdp.parallel.shapes import StageShapes, is_float
from megatron_ptdp.parallel.split_backward.jaxpr_split import used_inputs
from megatron_ptdp.parallel.split_backward.residuals import AXES, Pullback
from megatron_ptdp.parallel.stage_specs import BATCH_SPEC, Signature, StageSpecs


class StageMath:
    """The functions of one stage; `specs` are the layouts of their arguments and results."""

    def __init__(
        self,
        model: Model,
        shapes: StageShapes,
        microbatches: int,
        mesh: AbstractMesh,
        keep_input: bool,
        compute: str,
        master: str,
        direct: bool = True,
    ) -> None:
        self.model, self.shapes, self.mesh = model, shapes, mesh
        self.compute, self.master = compute, master
        self.keep_input, self.direct = keep_input, direct
        self.used = master if shapes.zero == 3 else compute  # the dtype of parameters as they come in
        self.pullback: Pullback | None = None
        self.batch_types = {
            name: jax.ShapeDtypeStruct((microbatches, *shape), jnp.dtype(dtype))
            for name, (shape, dtype) in model.batch(shapes.examples).items()
        }
        self.wanted: tuple[str, ...] = tuple(self.batch_types)
        self.wanted = self._probe()

    # --- on one member, inside shard_map ------------------------------------------------------------------------------

    def _ready(self, params: Tree) -> Tree:
        """The parameters that the model takes, typed as varying over DATA. With ZeRO-3 those of layers stay parts."""

        def gathered(array: Any, dimension: int, fetched: bool) -> Any:
            if fetched:
                return array
            array = array.astype(self.compute)
            return array if dimension < 0 else jax.lax.all_gather(array, DATA, axis=dimension, tiled=True)

        if self.shapes.zero == 3:
            params = jax.tree.map(gathered, params, self.shapes.shared, is_fetched(self.shapes))
        return vary(params, DATA)

    def _function(self, values: Tree, batch: Mapping[str, Any], k: Any) -> tuple[Callable[..., Any], list[Any]]:
        """The stage as a function of parameters and floating values, and these values. It gives floating outputs and
        other outputs."""
        leaves, tree = jax.tree.flatten(values)
        floats = [is_float(value) for value in jax.tree.leaves(self.shapes.values)]
        one = {name: jax.lax.dynamic_index_in_dim(array, k, keepdims=False) for name, array in batch.items()}
        shapes = self.shapes
        fetch = fetching(shapes, self.compute, self.master, self.direct)

        def run(params: Tree, moved: list[Any]) -> tuple[list[Any], list[Any]]:
            rest = iter(moved)
            full = [next(rest) if floating else leaf for floating, leaf in zip(floats, leaves, strict=True)]
            extra = {"fetch": fetch} if fetch else {}
            out = self.model.forward(shapes.stage, params, jax.tree.unflatten(tree, full), one, **extra)
            if shapes.stage.has_loss:
                return [vary(out, DATA)], []
            kinds = jax.tree.leaves(shapes.outgoing)
            made = [
                vary(array, *(axis for axis in AXES if axis in jax.tree.leaves(tuple(kind.spec))))
                for array, kind in zip(jax.tree.leaves(out), kinds, strict=True)
            ]
            return (
                [array for array, kind in zip(made, kinds, strict=True) if is_float(kind)],
                [array for array, kind in zip(made, kinds, strict=True) if not is_float(kind)],
            )

        return run, [leaf for floating, leaf in zip(floats, leaves, strict=True) if floating]

    def _merged(self, floats: list[Any], others: list[Any]) -> Any:
        """The output of a forward: the values for the next stage, or the member's loss as an array of one element."""
        if self.shapes.stage.has_loss:
            return floats[0][None]
        kinds, tree = jax.tree.flatten(self.shapes.outgoing)
        first, second = iter(floats), iter(others)
        return jax.tree.unflatten(tree, [next(first) if is_float(kind) else next(second) for kind in kinds])

    def _evaluate(self, params: Tree, values: Tree, batch: Tree, k: Any) -> Any:
        function, moved = self._function(values, batch, k)
        return self._merged(*function(self._ready(params), moved))

    def _forward(self, params: Tree, values: Tree, batch: Tree, k: Any) -> tuple[Any, list[Any]]:
        if self.keep_input:
            return self._evaluate(params, values, batch, k), []
        params = self._ready(params)
        function, moved = self._function(values, batch, k)
        out, pull, others = jax.vjp(function, params, moved, has_aux=True)
        pullback, kept = Pullback.split(pull, (params, moved))
        if self.pullback is None:
            self.pullback = pullback
        elif (self.pullback.leaves, self.pullback.axes) != (pullback.leaves, pullback.axes):
            raise RuntimeError(f"forward of {self.shapes.stage} keeps other arrays than when it was traced first")
        return self._merged(out, others), kept

    def gradients(
        self, params: Tree, values: Tree, kept: list[Any], batch: Tree, k: Any, upstream: list[Any], recompute: bool
    ) -> tuple[Tree, list[Any], Any]:
        """Gradients of parameters and of floating values; and the loss, if the forward is computed again."""
        params = self._ready(params)
        loss = None
        if recompute:
            function, moved = self._function(values, batch, k)
            out, pull, _ = jax.vjp(function, params, moved, has_aux=True)
            loss = out[0][None] if self.shapes.stage.has_loss else None
        else:
            assert self.pullback is not None
            moved = [
                leaf
                for leaf, kind in zip(jax.tree.leaves(values), jax.tree.leaves(self.shapes.values), strict=True)
                if is_float(kind)
            ]
            pull = self.pullback.join((params, moved), kept)
        if self.shapes.stage.has_loss:
            dtype = jnp.float64 if self.master == "float64" else jnp.float32
            upstream = [vary(upstream[0].astype(dtype), DATA)]
        gradients, downstream = pull(upstream)
        return gradients, downstream, loss

    def added(self, sums: Tree, gradients: Tree) -> Tree:
        """The sums with the gradients of one more microbatch."""

        def add(total: Any, gradient: Any, dimension: int, fetched: bool) -> Any:
            gradient = gradient.astype(total.dtype)
            if self.shapes.zero < 2 or dimension < 0:
                return total + gradient[None]
            return total + (gradient if fetched else scattered(gradient, dimension, self.direct))

        return jax.tree.map(add, sums, gradients, self.shapes.shared, is_fetched(self.shapes))

    # --- of whole arrays ----------------------------------------------------------------------------------------------

    @property
    def specs(self) -> StageSpecs:
        """Layouts of the arguments and results of the functions below."""
        residuals = self.pullback.specs if self.pullback else []
        return StageSpecs(self.shapes, dict.fromkeys(self.wanted, BATCH_SPEC), residuals)

    def kept_axes(self) -> tuple[frozenset[str], ...]:
        """The axes over which each residual differs."""
        return self.pullback.axes if self.pullback else ()

    def forward(self, params: Tree, values: Tree, batch: Tree, k: Any) -> tuple[Any, list[Any]]:
        """(values for the next stage or the losses [members], what the backward needs)."""
        made: tuple[Any, list[Any]] = self.mapped(self._forward, self.specs.forward(wires=False))(
            params, values, batch, k
        )
        return made

    def evaluate(self, params: Tree, values: Tree, batch: Tree, k: Any) -> Any:
        """The first result of `forward`, with nothing kept: no backward follows."""
        return self.mapped(self._evaluate, self.specs.evaluation(wires=False))(params, values, batch, k)

    def backward(self, recompute: bool, weights: bool, inputs: bool) -> Callable[..., Any]:
        """A backward.

        Args:
            recompute: it computes the forward again; else it takes what that kept
            weights: it adds to the sums; else it takes and gives none
            inputs: it gives the gradient of the values
        """
        loss = recompute and self.shapes.stage.has_loss and inputs

        def run(params: Tree, values: Tree, kept: Any, batch: Tree, k: Any, upstream: Any, sums: Tree) -> Any:
            gradients, downstream, losses = self.gradients(params, values, kept, batch, k, upstream, recompute)
            return (
                self.added(sums, gradients) if weights else {},
                downstream if inputs else [],
                losses if loss else (),
            )

        return self.mapped(run, self.specs.backward(recompute, weights, inputs, wires=False))

    def mapped(self, function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
        """A function of members' parts as one of whole arrays."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=signature.inputs, out_specs=signature.output, check_vma=True
        )

    def arguments(self) -> tuple[Tree, Tree, Tree, Any]:
        """Shapes and dtypes of the arguments of a forward."""
        return (
            jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, self.used), self.shapes.parameters),
            jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), self.shapes.values),
            {name: self.batch_types[name] for name in self.wanted},
            jax.ShapeDtypeStruct((), jnp.int32),
        )

    def upstream(self) -> list[Any]:
        """Shapes and dtypes of the gradients of a forward's results."""
        if self.shapes.stage.has_loss:
            return [jax.ShapeDtypeStruct((), "float64" if self.master == "float64" else "float32")]
        kinds = [kind for kind in jax.tree.leaves(self.shapes.outgoing) if is_float(kind)]
        return [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds]

    @property
    def has_two_parts(self) -> bool:
        """Whether I saves values for W, see `SplitBackward`. Where whole layers are recomputed, these values would be
        the gradients themselves: there both parts compute all of it, and each gives its own gradients."""
        recompute = getattr(getattr(self.model, "compute", None), "recompute", "none")
        return not self.keep_input and recompute != "full" and self.shapes.zero != 3

    def _probe(self) -> tuple[str, ...]:
        """Traces the forward once, to find the residuals that it keeps and the arrays of the batch that it takes."""

        def run(params: Tree, values: Tree, batch: Tree, k: Any) -> Any:
            return self._forward(params, values, batch, k)[0]

        closed = jax.make_jaxpr(self.mapped(run, self.specs.evaluation(wires=False)))(*self.arguments())
        (inner,) = (e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
        names: Sequence[str] = sorted(self.batch_types)  # the order of a dict's leaves
        first = len(inner.invars) - 1 - len(names)
        used = used_inputs(inner)
        return tuple(name for number, name in enumerate(names, start=first) if number in used)
