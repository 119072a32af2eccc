"""The model of `benchmarks.training` in plain multi-controller JAX: a process for each device, data parallel over gloo.

Two ways that its users write a step with gradient accumulation:

    scan     one jitted function: a scan over the microbatches, one all-reduce of the gradients, the update
    calls    a call of a jitted function for each microbatch, and one for the all-reduce and the update

It is the same step: `Model.forward` and the optimizer are those that this runtime runs; the norm of the gradient is
returned, and nothing is changed by a gradient that is not finite.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from benchmarks.peers.trainers import serve

JOIN_LIMIT_S = 60


class PlainJax:
    """The process of one device. Its devices' threads run on its core, as those of this runtime's hosts do."""

    def __init__(self, rank: int, ranks: int, address: str, sizes: dict[str, Any], parameters: str) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax
        from jax.sharding import AxisType
        from jax.sharding import PartitionSpec as P

        from benchmarks.training import model as shared
        from megatron_ptdp import models

        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, ranks, rank, initialization_timeout=JOIN_LIMIT_S)
        self.jax, self.rank, self.ranks = jax, rank, ranks
        self.sizes = shared.Sizes(**sizes)
        self.model = self.sizes.model()
        self.stage = models.whole(self.model)
        decay = jax.tree.map(lambda parameter: parameter.decay, self.model.parameters(self.stage))
        self.transform = self.sizes.optimizer(decay)
        self.whole, self.batch = shared.read(parameters)
        self.mesh = jax.make_mesh((ranks, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
        self.everywhere = jax.NamedSharding(self.mesh, P())
        self.by_example = jax.NamedSharding(self.mesh, P(None, "data"))
        self.functions = self._functions()
        self.states: dict[tuple[str, int], tuple[Any, Any]] = {}

    def _functions(self) -> dict[str, Any]:
        import jax

        from megatron_ptdp.models.layers import vary

        P = jax.sharding.PartitionSpec
        whole, shares = P(), P("data")

        def mapped(function: Any, inputs: Any, outputs: Any) -> Any:
            return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs)

        def one(params: Any, tokens: Any) -> tuple[Any, Any]:
            """Loss and gradients of one microbatch, of this member's examples. Parameters are typed as each member's
            own: gradients are then added up over all microbatches before the all-reduce."""
            loss = functools.partial(self._loss, tokens=tokens)
            return jax.value_and_grad(loss)(vary(params, "data"))

        def accumulated(params: Any, tokens: Any) -> tuple[Any, Any]:
            zero = vary(jax.tree.map(jax.numpy.zeros_like, (0.0, params)), "data")
            add = functools.partial(jax.tree.map, jax.numpy.add)
            sums, _ = jax.lax.scan(lambda sums, each: (add(sums, one(params, each)), None), zero, tokens)
            return jax.lax.psum(sums, "data")

        def scan(params: Any, slots: Any, tokens: Any, count: float) -> Any:
            sums = mapped(accumulated, (whole, P(None, "data")), whole)(params, tokens)
            return self._updated(params, slots, sums, count)

        def first(params: Any, tokens: Any) -> Any:
            return jax.tree.map(lambda g: g[None], one(params, tokens))

        def further(params: Any, sums: Any, tokens: Any) -> Any:
            return jax.tree.map(lambda s, g: s + g[None], sums, one(params, tokens))

        def total(sums: Any) -> Any:
            return jax.lax.psum(jax.tree.map(lambda s: s[0], sums), "data")

        def last(params: Any, slots: Any, sums: Any, count: float) -> Any:
            return self._updated(params, slots, mapped(total, (shares,), whole)(sums), count)

        return {
            "scan": jax.jit(scan, donate_argnums=(0, 1), static_argnums=3),
            "first": jax.jit(mapped(first, (whole, shares), shares)),
            "further": jax.jit(mapped(further, (whole, shares, shares), shares), donate_argnums=(1,)),
            "last": jax.jit(last, donate_argnums=(0, 1, 2), static_argnums=3),
        }

    def _loss(self, params: Any, tokens: Any) -> Any:
        return self.model.forward(self.stage, params, {}, {"tokens": tokens})

    def _updated(self, params: Any, slots: Any, sums: Any, count: float) -> Any:
        """The parameters and slots after a step; as they were where a gradient is not finite."""
        import jax
        import jax.numpy as jnp
        import optax

        loss, gradients = jax.tree.map(lambda total: total / count, sums)
        leaves = jax.tree.leaves(gradients)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves))
        bad = jnp.stack([jnp.sum(~jnp.isfinite(leaf)) for leaf in leaves])
        applied = jnp.isfinite(loss) & jnp.isfinite(norm) & (jnp.sum(bad) == 0)
        changes, after = self.transform.update(gradients, slots, params)
        new = optax.apply_updates(params, changes), after
        params, slots = jax.tree.map(lambda there, here: jnp.where(applied, there, here), new, (params, slots))
        return params, slots, (loss, norm, applied, bad)

    def prepare(self, case: str, microbatches: int, steps: int) -> list[float]:
        """`case` is "scan" or "calls"; `microbatches` is M of a pipeline: M / 2 on each of two devices."""
        params = self.jax.device_put(self.whole, self.everywhere)
        slots = self.jax.jit(self.transform.init, out_shardings=self.everywhere)(params)
        self.states[case, microbatches] = params, slots
        losses = [float(self._step(case, microbatches)) for _ in range(steps)]
        return [] if self.rank else losses

    def train(self, case: str, microbatches: int, steps: int) -> None:
        """As `trainers.Trainer`; nothing is waited for between the steps."""
        for _ in range(steps):
            loss = self._step(case, microbatches)
        self.jax.block_until_ready((loss, self.states[case, microbatches]))

    def _step(self, case: str, microbatches: int) -> Any:
        params, slots = self.states[case, microbatches]
        sizes, each = self.sizes, microbatches // self.ranks
        count = float(sizes.tokens(microbatches))
        rows = self.batch[: microbatches * sizes.examples].reshape(each, self.ranks, sizes.examples, -1)[:, self.rank]
        if case == "scan":
            tokens = self.jax.make_array_from_process_local_data(self.by_example, rows)
            params, slots, metrics = self.functions["scan"](params, slots, tokens, count)
        else:
            by_example = self.jax.NamedSharding(self.mesh, self.jax.sharding.PartitionSpec("data"))
            batches = [self.jax.make_array_from_process_local_data(by_example, row) for row in rows]
            sums = self.functions["first"](params, batches[0])
            for tokens in batches[1:]:
                sums = self.functions["further"](params, sums, tokens)
            params, slots, metrics = self.functions["last"](params, slots, sums, count)
        self.states[case, microbatches] = params, slots
        return metrics[0]


if __name__ == "__main__":
    serve(PlainJax, ("jax", "jaxlib", "optax", "numpy"))
