"""A GPT whose experts lie on slices of their own, as a cut of `gradient_step`.

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
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import DATA, TENSOR, Gpt, join, layers, moe, take, whole
from megatron_ptdp.models.interface import Parameter, Tree
from megatron_ptdp.parallel.gradient_step import Gradients, specs_of
from megatron_ptdp.parallel.options import Options
from megatron_ptdp.parallel.part_nodes import named
from megatron_ptdp.parallel.sizes import Sizes
from megatron_ptdp.parallel.stage_specs import BATCH_SPEC

EXPERT_ARRAYS = ("in", "out")
"""The arrays of a feed-forward part that lie with the experts."""


def check(model: Any, sizes: Sizes, options: Options) -> None:
    """Makes sure that the experts of a model can lie on slices of their own, if they are to.

    Raises:
        ConfigError: another part of the configuration needs them with their layers.
        BadSizes: the model has no experts, or slices or members cannot share them.
    """
    slices, members = sizes.expert_slices, sizes.expert_members
    if not slices:
        return
    if not isinstance(model, Gpt) or not model.config.experts:
        raise BadSizes(f"expert_slices {slices} are for a gpt with experts; set experts, or leave expert_slices out")
    count = model.config.experts
    if count % slices or count // slices % members:
        raise BadSizes(
            f"{count} experts cannot be shared evenly by {slices} slices of {members} members; choose expert_slices "
            "and expert_members whose product divides the experts"
        )
    others = {"pipeline": sizes.pipeline, "chunks": sizes.chunks, "data": sizes.data}
    for name, value in {**others, "token_slices": sizes.token_slices}.items():
        if value > 1:
            raise ConfigError(
                f"with expert_slices the rest of the model is one slice of tensor members: no {name} {value}"
            )
    compute = model.compute
    if compute.sequence_parallel or compute.recompute == "full" or options.zero:
        raise ConfigError(
            "experts on slices of their own go without sequence_parallel, recompute full and zero, which are "
            f"{compute.sequence_parallel}, {compute.recompute} and {options.zero}"
        )


class ExpertSlices:
    """The cut of a model: `gradient_step.Cut`.

    Args:
        model: the members of TENSOR share the home
        slices: the home, of shape (1, t) with axes (DATA, TENSOR), and behind it those of the experts, in order, each
            with the same number of neighbours; of shape (1, s), whose s members share the experts of the slice
        sizes: with as many examples and microbatches
        dtype: in which parameters are used
    """

    home = 0

    def __init__(self, model: Gpt, slices: Sequence[pw.VirtualSlice], sizes: Sizes, dtype: str) -> None:
        self.model, self.slices, self.sizes, self.dtype = model, list(slices), sizes, dtype
        config, count = model.config, len(slices) - 1
        self.each = config.experts // count
        tokens = sizes.examples * config.sequence
        self.rows = moe.capacity_of(config, tokens) if config.capacity else tokens
        rest = model.parameters(whole(model))
        own, held = _apart(rest.pop("layers"))
        rest["layers"] = [jax.tree.map(_of_one_layer, own)] * model.layers
        experts = [jax.tree.map(lambda p: _of_experts(p, self.each), held)] * model.layers
        self.parameters = [rest, *[experts] * count]
        self.wanted = [frozenset(model.batch(1)), *[frozenset[str]()] * count]
        self._compile()

    def take(self, number: int, tree: Tree) -> Tree:
        """The tree of a part: all but the experts, with a list of layers; or its experts in each layer.

        Raises:
            CheckpointError: it is no tree of this model.
        """
        found = take(self.model, whole(self.model), tree)
        own, experts = _apart(found.pop("layers"))
        if not number:
            return {**found, "layers": [_row(own, k) for k in range(self.model.layers)]}
        first = (number - 1) * self.each
        held = jax.tree.map(lambda array: array[:, first : first + self.each], experts)
        return [_row(held, k) for k in range(self.model.layers)]

    def join(self, parts: Sequence[Tree]) -> Tree:
        """The whole tree again, of parameters or of gradients."""
        rest, *experts = parts
        own = _stacked(rest["layers"])
        joined = jax.tree.map(lambda *arrays: np.concatenate(arrays, 1), *map(_stacked, experts))
        found = {**rest, "layers": {**own, "ffn": {**own["ffn"], **joined}}}
        return join(self.model, [whole(self.model)], [found])

    def explain(self) -> str:
        """The bytes that move between slices, as text."""
        config = self.model.config
        rows = self.sizes.examples * config.sequence * config.top_k
        size = rows * config.hidden * jnp.dtype(self.dtype).itemsize
        return (
            f"each layer and microbatch, there and back: at most {rows:,} rows from the home to the experts, "
            f"{size:,} bytes"
        )

    # --- the program --------------------------------------------------------------------------------------------------

    def gradients(self, params: Sequence[Tree], batch: Sequence[Mapping[str, Any]], scale: Any) -> Gradients:
        """Loss and gradients, microbatch by microbatch; and for each layer the choices that found no room."""
        total: Any = None
        losses, dropped = [], []
        for rows in self.microbatches(dict(batch[0])):

            def loss(params: list[Tree], rows: Any = rows) -> Any:
                return self._loss(params, rows, scale)

            (value, lost), found = jax.value_and_grad(loss, has_aux=True)(list(params))
            total = found if total is None else [add(*two) for add, *two in zip(self.add, total, found, strict=True)]
            losses.append(value)
            dropped.append(lost)
        return Gradients(losses, total, {"dropped": [list(layer) for layer in zip(*dropped, strict=True)]})

    def losses(self, params: Sequence[Tree], batch: Sequence[Mapping[str, Any]], scale: Any) -> list[Any]:
        """The losses alone."""
        return [self._loss(list(params), rows, scale)[0] for rows in self.microbatches(dict(batch[0]))]

    def _loss(self, params: list[Tree], batch: Mapping[str, Any], scale: Any) -> tuple[Any, list[Any]]:
        if self.prepare:
            params = [prepare(part) for prepare, part in zip(self.prepare, params, strict=True)]
        own, *experts = params
        own = dict(own)
        x, balances, dropped = self.begin(own["embedding"], batch["tokens"]), [], []
        homes = [self.slices[1 + number // self.each] for number in range(self.model.config.experts)]
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
        return self.end(own, x, balances, dict(batch), scale), dropped

    def _compile(self) -> None:
        every, count = [specs_of(part) for part in self.parameters], self.sizes.microbatches
        rest = {name: part for name, part in every[0].items() if name != "layers"}
        layer = every[0]["layers"][0]
        self.microbatches = pw.compiled(
            named("microbatches", lambda batch: [{n: a[k] for n, a in batch.items()} for k in range(count)]),
            slice=self.slices[0],
            in_specs=BATCH_SPEC,
            out_specs=P(DATA),
        )
        self.begin = self._at_home("begin", self._begin, (rest["embedding"], P()))
        self.ahead = self._at_home("ahead_of_experts", self._ahead, (layer, P()))
        self.behind = self._at_home("behind_experts", self._behind, (P(), P(), P()))
        self.end = self._at_home("end", self._end, (rest, P(), P(), P(), P()))
        self.experts = [
            pw.compiled(named(f"experts{number}", self._experts), slice=slice, in_specs=(P(TENSOR), P()), out_specs=P())
            for number, slice in enumerate(self.slices[1:])
        ]
        placed = list(zip(self.slices, every, strict=True))
        self.add = [
            pw.compiled(named("add", _sum), slice=slice, in_specs=(specs, specs), out_specs=specs)
            for slice, specs in placed
        ]
        self.prepare = [
            pw.compiled(named("parameters", self._cast), slice=slice, in_specs=(specs,), out_specs=specs)
            for slice, specs in placed
            if self.dtype not in ("float32", "float64")
        ]

    def _at_home(self, name: str, function: Callable[..., Any], specs: tuple[Any, ...]) -> Any:
        """A function of members of TENSOR as one of whole arrays, whose results are whole."""
        mesh = self.slices[0].mesh.abstract_mesh

        def run(*arguments: Any) -> Any:
            return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P())(*arguments)

        return pw.compiled(named(name, run), slice=self.slices[0], in_specs=specs, out_specs=P())

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

    def _end(
        self, params: Tree, x: jax.Array, balances: list[jax.Array], batch: Mapping[str, Any], scale: jax.Array
    ) -> jax.Array:
        loss = self.model.loss(params, x, {"balance": sum(balances[1:], balances[0])}, batch)
        return loss * scale.astype(loss.dtype)

    def _cast(self, params: Tree) -> Tree:
        return jax.tree.map(lambda array: array.astype(self.dtype), params)


def _apart(stack: Tree) -> tuple[Tree, Tree]:
    """A stack of layers without its experts, and these."""
    ffn = stack["ffn"]
    own = {name: part for name, part in ffn.items() if name not in EXPERT_ARRAYS}
    return {**stack, "ffn": own}, {name: ffn[name] for name in EXPERT_ARRAYS}


def _of_one_layer(stacked: Parameter) -> Parameter:
    return replace(stacked, shape=stacked.shape[1:], spec=P(*stacked.spec[1:]), stacked=False)


def _of_experts(stacked: Parameter, each: int) -> Parameter:
    return replace(stacked, shape=(each, *stacked.shape[2:]), spec=P(TENSOR), stacked=False)


def _sum(one: Tree, other: Tree) -> Tree:
    return jax.tree.map(jnp.add, one, other)


def _row(stack: Tree, k: int) -> Tree:
    return jax.tree.map(lambda array: array[k], stack)


def _stacked(rows: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)
