"""Training over two slices by `jax.value_and_grad`, beside backwards written by hand.

An encoder on one island and a decoder on the other, one `@pw.program` for each step. By hand, the decoder gives the
gradient of what it was given, and the encoder's backward takes what its forward kept: as many nodes as can be.

Run it with `python -m benchmarks.gradients --json gradients.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows


@dataclass(frozen=True)
class Settings:
    rounds: int = option(15, "of both ways, one after the other")
    steps: int = option(50, "in a round, without a wait between them")
    width: int = option(64, "of the layers")
    batch: int = option(64, "rows")


SMOKE = Settings(rounds=1, steps=2)


def steps_of(pw: Any) -> dict[str, Callable[..., Any]]:
    """The training step, both ways: (params, x, y) to (loss, params)."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    a = pw.virtual_slice((2,), ("x",), island=0)
    b = pw.virtual_slice((2,), ("x",), island=1)

    def encode(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    def decode(w: Any, h: Any, y: Any) -> Any:
        return ((h @ w - y) ** 2).mean()

    rows, whole = P("x"), P()
    encoder = pw.compiled(encode, slice=a, in_specs=(whole, rows), out_specs=rows)
    decoder = pw.compiled(decode, slice=b, in_specs=(whole, rows, rows))
    both = pw.compiled(
        lambda w, h, y: jax.value_and_grad(decode, (0, 1))(w, h, y),
        slice=b,
        in_specs=(whole, rows, rows),
        out_specs=(whole, (whole, rows)),
    )
    back = pw.compiled(lambda x, h, d: x.T @ (d * (1 - h**2)), slice=a, in_specs=(rows, rows, rows), out_specs=whole)

    def updated(params: Any, gradient: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)

    @pw.program
    def by_jax(params: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return decoder(params["decoder"], encoder(params["encoder"], x), y)

        loss, gradient = jax.value_and_grad(loss_of)(params)
        return loss, updated(params, gradient)

    @pw.program
    def by_hand(params: Any, x: Any, y: Any) -> Any:
        h = encoder(params["encoder"], x)
        loss, (of_decoder, d) = both(params["decoder"], h, y)
        return loss, updated(params, {"encoder": back(x, h, d), "decoder": of_decoder})

    return {"by hand": by_hand, "jax.value_and_grad": by_jax}


def run(settings: Settings, progress: Progress) -> Result:
    """Trains both ways in turn on a cluster of its own, and checks that losses agree."""
    import numpy as np

    import pathways_ray as pw

    machine = measure.machine()
    random = np.random.default_rng(0)
    x = random.normal(size=(settings.batch, settings.width)).astype(np.float32)
    y = x.sum(1, keepdims=True) / 8
    with pw.init(islands=2, devices_per_host=2):
        ways = steps_of(pw)
        first = {
            "encoder": random.normal(size=(settings.width, settings.width)).astype(np.float32) / 8,
            "decoder": random.normal(size=(settings.width, 1)).astype(np.float32) / 8,
        }
        states = dict.fromkeys(ways, first)
        samples: dict[str, list[float]] = {way: [] for way in ways}
        losses: dict[str, float] = {}
        for number in range(settings.rounds + 1):  # the first one compiles
            for way, step in ways.items():
                params = states[way]
                begun = time.perf_counter()
                for _ in range(settings.steps):
                    loss, params = step(params, x, y)
                losses[way] = float(loss)
                samples[way].append((time.perf_counter() - begun) / settings.steps * 1e3)
                states[way] = params
            np.testing.assert_allclose(losses["by hand"], losses["jax.value_and_grad"], rtol=1e-3, atol=1e-6)
            progress.say(f"round {number}: " + ", ".join(f"{way} {found[-1]:.2f} ms" for way, found in samples.items()))
    hand, jax_ = (samples[way][1:] for way in ways)
    ratios = [one / other for one, other in zip(jax_, hand, strict=True)]
    rows = [
        {"way": way, "ms": measure.spread(found[1:]), "ratio": measure.spread(ratios if way != "by hand" else [1.0])}
        for way, found in samples.items()
    ]
    pair = {"name": "jax.value_and_grad / by hand", **measure.spread(ratios)}
    return {"benchmark": "gradients", "machine": machine, "loss": losses["by hand"], "rows": rows, "ratios": [pair]}


show = shows(Table("a step of an encoder and a decoder on two islands", "rows", "way", "ms:.2f", "ratio:.2f"))

BENCHMARK = Benchmark("gradients", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
