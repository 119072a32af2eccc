"""Experts that compute the tokens that chose them, beside each expert for all tokens.

One layer's experts of `megatron_ptdp`, forward and backward, in one process on one device: *dense*, where each expert
computes all tokens; *dropless*, in blocks; with a *capacity* of 1.25. Milliseconds, interleaved, and the operations of
each by XLA's count, as multiples of those of the chosen experts alone (forward and backward of `top_k` of them).

Run it with `python -m benchmarks run experts --json experts.json`; it takes under a minute.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows


@dataclass(frozen=True)
class Settings:
    tokens: int = option(2048, "of a microbatch")
    hidden: int = option(256, "size of a token")
    ffn: int = option(512, "columns of an expert")
    experts: tuple[int, ...] = option((4, 8, 16), "of the layer")
    top_k: int = option(2, "experts of a token")
    rounds: int = option(7, "of all ways, after one that compiles")


SMOKE = Settings(tokens=64, hidden=16, ffn=16, experts=(4,), rounds=1)


def step_of(config: Any, compute: Any) -> Any:
    """The loss of a layer's experts and its gradients, on one member."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from megatron_ptdp.models import DATA, TENSOR, layers, moe

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (DATA, TENSOR))

    def inside(params: Any, x: jax.Array) -> jax.Array:
        y, _ = moe.experts(layers.enter(x, compute), layers.vary(params, TENSOR), config, compute)
        return jnp.sum(y * y)

    loss = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def compared(settings: Settings, experts: int) -> list[dict[str, Any]]:
    """The ways for one number of experts."""
    import jax
    import numpy as np

    from megatron_ptdp.models import Compute, ModelConfig

    config = ModelConfig(
        "gpt",
        layers=1,
        hidden=settings.hidden,
        heads=1,
        sequence=settings.tokens,
        vocabulary=8,
        ffn=settings.ffn,
        experts=experts,
        top_k=settings.top_k,
        bias=False,
    )
    random = np.random.default_rng(0)
    x = random.standard_normal((1, settings.tokens, settings.hidden), np.float32)
    h, f = settings.hidden, settings.ffn
    params = {
        "router": {"weight": 0.02 * random.standard_normal((h, experts), np.float32)},
        "in": {"weight": 0.02 * random.standard_normal((experts, h, f), np.float32)},
        "out": {"weight": 0.02 * random.standard_normal((experts, f, h), np.float32)},
    }
    ways = {
        "dense": step_of(config, Compute(experts="dense")),
        "dropless": step_of(config, Compute()),
        "capacity 1.25": step_of(replace(config, capacity=1.25), Compute()),
    }
    needed = 3 * 4 * settings.tokens * settings.top_k * h * f
    steps = {way: step.lower(params, x).compile() for way, step in ways.items()}
    took: dict[str, list[float]] = {way: [] for way in ways}
    losses = {}
    for _ in range(settings.rounds + 1):
        for way, step in steps.items():
            begun = time.perf_counter()
            losses[way], _ = jax.block_until_ready(step(params, x))
            took[way].append(1e3 * (time.perf_counter() - begun))
    np.testing.assert_allclose(losses["dropless"], losses["dense"], rtol=1e-4)
    ratios = {way: [a / b for a, b in zip(took["dense"][1:], times[1:], strict=True)] for way, times in took.items()}
    return [
        {
            "experts": experts,
            "way": way,
            "operations": (steps[way].cost_analysis() or {})["flops"] / needed,
            "ms": measure.spread(times[1:]),
            "ratio": measure.spread(ratios[way]),
        }
        for way, times in took.items()
    ]


def run(settings: Settings, progress: Progress) -> Result:
    """Measures in this process."""
    machine = measure.machine()
    rows: list[dict[str, Any]] = []
    for experts in settings.experts:
        progress.say(f"{experts} experts")
        rows += compared(settings, experts)
    figures = [
        {"name": f"dense / {row['way']}, {row['experts']} experts", "unit": "x", **row["ratio"]}
        for row in rows
        if row["way"] != "dense"
    ]
    return {"benchmark": "experts", "machine": machine, "rows": rows, "figures": figures}


show = shows(
    Table(
        "one layer's experts, forward and backward", "rows", "experts", "way", "operations:.2f", "ms:.1f", "ratio:.2f"
    )
)

BENCHMARK = Benchmark("experts", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
