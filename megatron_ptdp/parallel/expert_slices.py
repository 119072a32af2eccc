"""A GPT whose experts lie on slices of their own: loss and gradients as one program.

One slice, the *home*, has all but the experts. In each layer a token's choices leave it by `pw.route`, a copy of the
token for each expert that it chose; the slices compute the experts that they hold, and `pw.combine` brings back what
they made. Each expert takes the rows that `moe.capacity_of` gives it: with `capacity` in the model's configuration its
first choices, as on one slice; without one all tokens may come, so nothing is dropped, and all rows are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes
from megatron_ptdp.models import TENSOR, Gpt, join, layers, moe, take, whole
from megatron_ptdp.models.interface import DATA, Parameter, Tree

EXPERT_ARRAYS = ("in", "out")
"""The arrays of a feed-forward part that lie with the experts."""


class ExpertSlices:
    """The program of a model.

    Args:
        model: without sequence parallelism; the members of TENSOR share the home
        home: a slice of shape (1, t) with axes (DATA, TENSOR)
        slices: for the experts, in order, each the same number of neighbours; with axes (DATA, TENSOR) as well, of
            shape (1, s), whose s members share the experts of the slice
        examples: of a batch

    Raises:
        BadSizes: the model has no experts, or slices or members cannot share them.
    """

    def __init__(self, model: Gpt, home: pw.VirtualSlice, slices: Sequence[pw.VirtualSlice], examples: int) -> None:
        config, compute = model.config, model.compute
        if not config.experts or compute.sequence_parallel:
            raise BadSizes(f"experts on slices of their own need experts, without sequence_parallel: {config}")
        wrong = [one for one in (home, *slices) if one.axes != (DATA, TENSOR) or one.shape[0] != 1]
        if wrong or home.shape[1] != compute.tensor:
            raise BadSizes(
                f"slices have the shape (1, members) and the axes ({DATA!r}, {TENSOR!r}), not {wrong or home}"
            )
        uneven = not slices or config.experts % len(slices)
        if uneven or any(config.experts // len(slices) % one.shape[1] for one in slices):
            raise BadSizes(
                f"{config.experts} experts cannot be shared evenly by {len(slices)} slices and their members"
            )
        self.model, self.home, self.slices, self.examples = model, home, list(slices), examples
        self.each = config.experts // len(slices)
        tokens = examples * config.sequence
        self.rows = moe.capacity_of(config, tokens) if config.capacity else tokens
        self.rest = model.parameters(whole(model))
        self.layer = jax.tree.map(_of_one_layer, _apart(self.rest.pop("layers"))[0])
        self._compile()
        self._program = pw.program(self._gradients, name="expert_slices")

    def place(self, tree: Tree) -> tuple[Tree, list[Tree]]:
        """The whole tree of a model as NumPy arrays, on the slices: all but the experts, with a list of layers; and for
        each slice its experts in each layer.

        Raises:
            CheckpointError: it is no tree of this model.
        """
        found = take(self.model, whole(self.model), tree)
        own, experts = _apart(found.pop("layers"))
        found["layers"] = [_row(own, k) for k in range(self.model.layers)]
        specs = {**_specs(self.rest), "layers": [_specs(self.layer)] * self.model.layers}
        placed = []
        for number, slice in enumerate(self.slices):
            first = number * self.each
            held = jax.tree.map(lambda array, first=first: array[:, first : first + self.each], experts)
            placed.append(pw.put([_row(held, k) for k in range(self.model.layers)], slice, P(TENSOR)))
        return pw.put(found, self.home, specs), placed

    def gather(self, rest: Tree, experts: Sequence[Tree]) -> Tree:
        """The whole tree again, of parameters or of gradients."""
        found: Tree = jax.tree.map(np.asarray, rest)
        own = _stacked(found["layers"])
        held = [_stacked(jax.tree.map(np.asarray, one)) for one in experts]
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays, 1), *held)
        found["layers"] = {**own, "ffn": {**own["ffn"], **joined}}
        return join(self.model, [whole(self.model)], [found])

    def __call__(self, rest: Tree, experts: Sequence[Tree], batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """The sum of the losses, its gradients in the form of `place`, and for each layer the choices that found no
        room, as futures."""
        made: tuple[Any, Any, Any] = self._program(rest, list(experts), dict(batch))
        return made

    # --- the program --------------------------------------------------------------------------------------------------

    def _gradients(self, rest: Tree, experts: list[Tree], batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        def loss(rest: Tree, experts: list[Tree]) -> Any:
            return self._loss(rest, experts, batch)

        (value, dropped), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(rest, experts)
        return value, gradients, dropped

    def _loss(self, rest: Tree, experts: list[Tree], batch: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        own = dict(rest)
        x, balances, dropped = self.begin(own["embedding"], batch["tokens"]), [], []
        homes = [self.slices[number // self.each] for number in range(self.model.config.experts)]
        for k, layer in enumerate(own.pop("layers")):
            x, sent, chosen, weights, balance = self.ahead(layer, x)
            parts, handle = pw.route(sent, chosen, homes, self.rows)
            made: list[Any] = []
            for number, experts_of in enumerate(self.experts):
                came = [part.rows for part in parts[number * self.each : (number + 1) * self.each]]
                made += experts_of(experts[number][k], came)
            x = self.behind(x, weights, pw.combine(made, handle))
            balances.append(balance)
            dropped.append(jnp.sum(jnp.asarray(handle.dropped)))
        return self.end(own, x, balances, dict(batch)), dropped

    def _compile(self) -> None:
        layer, rest = _specs(self.layer), _specs(self.rest)
        self.begin = self._at_home("begin", self._begin, (rest["embedding"], P()))
        self.ahead = self._at_home("ahead_of_experts", self._ahead, (layer, P()))
        self.behind = self._at_home("behind_experts", self._behind, (P(), P(), P()))
        self.end = self._at_home("end", self._end, (rest, P(), P(), P()))
        self.experts = [
            pw.compiled(
                _named(f"experts{number}", self._experts), slice=slice, in_specs=(P(TENSOR), P()), out_specs=P()
            )
            for number, slice in enumerate(self.slices)
        ]

    def _at_home(self, name: str, function: Callable[..., Any], specs: tuple[Any, ...]) -> Any:
        """A function of members of TENSOR as one of whole arrays, whose results are whole."""
        mesh = self.home.mesh.abstract_mesh

        def run(*arguments: Any) -> Any:
            return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P())(*arguments)

        return pw.compiled(_named(name, run), slice=self.home, in_specs=specs, out_specs=P())

    # --- on the slices ------------------------------------------------------------------------------------------------

    def _begin(self, params: Tree, tokens: jax.Array) -> jax.Array:
        return self.model.embedded(params, tokens[:, :-1])

    def _ahead(self, params: Tree, x: jax.Array) -> tuple[jax.Array, ...]:
        """A layer up to its experts: [B, S, H] before them, a row for each choice [N·k, H], its expert [N·k], the
        weights [B, S, k], and the balance [B]."""
        x = self.model.attended(x, params)
        normed = layers.norm(x, params["ffn_norm"])
        top_k = self.model.config.top_k
        routed = moe.route(layers.wide(normed) @ layers.wide(params["ffn"]["router"]["weight"]), top_k)
        rows = jnp.repeat(normed.reshape(-1, normed.shape[-1]), top_k, axis=0)
        weights = jnp.take_along_axis(routed.weights, routed.chosen, -1)
        return x, rows, routed.chosen.reshape(-1).astype(jnp.int32), weights, routed.balance

    def _experts(self, params: Tree, rows: list[jax.Array]) -> list[jax.Array]:
        """The rows [rows, H] of each expert of a slice, through it."""
        return list(moe.computed(jnp.stack(rows), params, self.model.config))

    def _behind(self, x: jax.Array, weights: jax.Array, made: jax.Array) -> jax.Array:
        """The rest of a layer: each token's choices [N·k, H] are weighed and added."""
        made = made.reshape(*weights.shape, x.shape[-1])
        return x + jnp.sum(made * weights[..., None].astype(x.dtype), axis=-2)

    def _end(self, params: Tree, x: jax.Array, balances: list[jax.Array], batch: Mapping[str, Any]) -> jax.Array:
        return self.model.loss(params, x, {"balance": sum(balances[1:], balances[0])}, batch)


def _apart(stack: Tree) -> tuple[Tree, Tree]:
    """A stack of layers without its experts, and these."""
    ffn = stack["ffn"]
    own = {name: part for name, part in ffn.items() if name not in EXPERT_ARRAYS}
    return {**stack, "ffn": own}, {name: ffn[name] for name in EXPERT_ARRAYS}


def _of_one_layer(stacked: Parameter) -> Parameter:
    return replace(stacked, shape=stacked.shape[1:], spec=P(*stacked.spec[1:]), stacked=False)


def _specs(tree: Tree) -> Tree:
    return jax.tree.map(lambda parameter: parameter.spec, tree)


def _row(stack: Tree, k: int) -> Tree:
    return jax.tree.map(lambda array: array[k], stack)


def _stacked(rows: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return function(*arguments)

    run.__name__ = name
    return run
