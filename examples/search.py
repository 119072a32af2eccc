"""A search for a network by successive halving: `python -m examples.search [--picture search.png]`.

Sixteen members, four widths and four learning rates, on eight slices. A *rung* trains all that are left for some
checkpoints; the better half goes on, for twice as many. Members that are hopelessly behind stop within a rung: their
next checkpoint, which is under way by then, is cancelled. Those that are left are spread over the slices again, where
`pw.reshard` takes them. All of it is ordinary Python on futures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pathways_ray as pw

WIDTHS = (8, 32, 64, 96)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
GRID = tuple((width, rate) for width in WIDTHS for rate in RATES)

STEPS = 20
"""Steps of training until the next checkpoint."""

CHECKPOINTS = 2
"""Checkpoints of the first rung; each rung has twice as many as the one before."""

HOPELESS = 2.0
"""A member stops within a rung when its loss is so many times that of the last one that would go on."""

Params = Any


def start(width: int, seed: int) -> Params:
    """Parameters of a network with two hidden layers, and Adam's moments."""
    random = np.random.default_rng(seed)
    sizes = [(2, width), (width, width), (width, 1)]
    params = [
        {"w": random.normal(0, 1 / np.sqrt(m), (m, n)).astype(np.float32), "b": np.zeros(n, np.float32)}
        for m, n in sizes
    ]
    zeros = jax.tree.map(np.zeros_like, params)
    return {"params": params, "m": zeros, "v": zeros, "step": np.int32(0)}


def error(params: Params, x: jax.Array) -> jax.Array:
    """The mean squared error of a network for the function that it is to learn; x is [points, 2]."""
    y = jnp.sin(4 * x[:, :1]) * jnp.cos(3 * x[:, 1:]) + 0.3 * x[:, :1]
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)


def trainer(rate: float) -> Callable[[Any], tuple[Any, jax.Array]]:
    """A function that trains a member for `STEPS` steps, and gives it with its loss on points that it has not seen."""

    def step(number: jax.Array, state: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), state["step"])
        gradients = jax.grad(error)(state["params"], jax.random.uniform(key, (256, 2), minval=-1.0))
        count = state["step"] + 1
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, state["m"], gradients)
        v = jax.tree.map(lambda a, g: 0.999 * a + 0.001 * g * g, state["v"], gradients)
        size = rate * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
        params = jax.tree.map(lambda p, a, b: p - size * a / (jnp.sqrt(b) + 1e-8), state["params"], m, v)
        return {"params": params, "m": m, "v": v, "step": count}

    def train(state: Any) -> tuple[Any, jax.Array]:
        state = jax.lax.fori_loop(0, STEPS, step, state)
        points = jnp.stack(jnp.meshgrid(*[jnp.linspace(-1, 1, 32)] * 2), -1).reshape(-1, 2)
        return state, error(state["params"], points)

    return train


@dataclass
class Member:
    """A member of the population: where it is, what it has become, and its losses by checkpoint."""

    name: str
    width: int
    rate: float
    slice: pw.VirtualSlice
    state: Any
    losses: list[float] = field(default_factory=list)
    stopped: str = ""

    def __str__(self) -> str:
        return f"{self.name} (width {self.width}, rate {self.rate:g})"

    def move(self, where: pw.VirtualSlice) -> None:
        if where is not self.slice:
            self.slice, self.state = where, pw.reshard(self.state, where)


class Search:
    """Members on slices, one for each width and rate of `grid`. `trained` counts the checkpoints asked for."""

    def __init__(self, slices: Sequence[pw.VirtualSlice], grid: Sequence[tuple[int, float]] = GRID) -> None:
        self.slices, self.grid = slices, grid
        self.functions: dict[tuple[str, int], Any] = {}
        self.begin()

    def begin(self) -> None:
        """Begins, or begins again with what was compiled."""
        self.members: list[Member] = []
        for number, (width, rate) in enumerate(self.grid):
            where = self.slices[number % len(self.slices)]
            state = pw.put(start(width, seed=number), where)
            self.members.append(Member(f"member_{number}", width, rate, where, state))
        self.trained = 0

    def train(self, member: Member) -> Any:
        """Launches a member's training until its next checkpoint; its loss, as a future."""
        key = member.name, member.slice.id
        if key not in self.functions:
            function = trainer(member.rate)
            function.__name__ = member.name
            self.functions[key] = pw.compiled(function, slice=member.slice, donate_argnums=0)
        member.state, loss = self.functions[key](member.state)
        self.trained += 1
        return loss

    def rung(self, members: Sequence[Member], checkpoints: int, keep: int) -> list[Member]:
        """Trains members for some checkpoints; the `keep` best of them. While results of a checkpoint come in,
        whichever is first, the next one is under way on all slices."""
        left = list(members)
        ahead = {member.name: self.train(member) for member in left}
        for checkpoint in range(checkpoints):
            losses = ahead
            ahead = {m.name: self.train(m) for m in left} if checkpoint + 1 < checkpoints else {}
            names = {id(loss): name for name, loss in losses.items()}
            found = {names[id(loss)]: float(loss) for loss in pw.as_completed(losses.values(), timeout=120)}
            for member in left:
                member.losses.append(found[member.name])
            left, lost = split(left, keep)
            for member in lost:
                member.stopped = f"{member.losses[-1]:.3g} after {len(member.losses)} checkpoints"
                if member.name in ahead:
                    ahead.pop(member.name).cancel()
        return sorted(left, key=lambda member: member.losses[-1])[:keep]

    def run(self, show: Callable[[str], None] = print) -> Member:
        """The best member, found by successive halving."""
        left, checkpoints = list(self.members), CHECKPOINTS
        while len(left) > 1:
            before, keep = left, len(left) // 2
            for number, member in enumerate(left):
                member.move(self.slices[number % len(self.slices)])
            left = self.rung(left, checkpoints, keep)
            stopped = sum(bool(member.stopped) for member in before)
            best = left[0]
            show(
                f"{len(before)} members, {checkpoints} checkpoints: {stopped} stopped early, {len(left)} go on; "
                f"the best is {best} with {best.losses[-1]:.3g}"
            )
            checkpoints *= 2
        return left[0]


def split(members: Sequence[Member], keep: int) -> tuple[list[Member], list[Member]]:
    """Those that go on with a rung, and those that are hopelessly behind the last of the `keep` best."""
    losses = sorted(member.losses[-1] for member in members if not math.isnan(member.losses[-1]))
    bound = HOPELESS * losses[keep - 1] if len(losses) >= keep else math.inf
    return [m for m in members if m.losses[-1] <= bound], [m for m in members if not m.losses[-1] <= bound]


def draw(computed: Mapping[int, Sequence[Any]], members: Sequence[Member], devices: int, path: str) -> None:
    """Writes when each member was trained on which slice."""
    from matplotlib.figure import Figure

    names = [member.name for member in members]
    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=110)
    axes = figure.subplots()
    ran = [(host, one) for host, of_host in sorted(computed.items()) for one in of_host if one.name in names]
    first = min(one.start for _, one in ran)
    shades = [f"C{WIDTHS.index(m.width)}" for m in members], [0.35 + 0.2 * RATES.index(m.rate) for m in members]
    for host, one in ran:
        which = names.index(one.name)
        row, span = host * devices + one.devices[0], (one.start - first, one.end - one.start)
        axes.broken_barh([span], (row - 0.42, 0.84), color=shades[0][which], alpha=shades[1][which], linewidth=0)
        if span[1] > 0.012 * (max(o.end for _, o in ran) - first):
            axes.text(sum((span[0], span[1] / 2)), row, str(which), ha="center", va="center", fontsize=6)
    axes.set_ylim(len(computed) * devices - 0.5, -0.5)
    axes.set_yticks(range(len(computed) * devices))
    axes.set(xlabel="seconds", ylabel="slice", title="numbers are members; colours are widths, paler is a lower rate")
    axes.spines[:].set_visible(False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", metavar="FILE", help="when each member was trained on which slice")
    options = parser.parse_args()
    with pw.init(islands=2, devices_per_host=4):
        slices = [pw.virtual_slice((1,), ("x",), island=k // 4, name=f"search{k}") for k in range(8)]
        search = Search(slices)
        begun = time.perf_counter()
        best = search.run()
        seconds = time.perf_counter() - begun
        whole = len(search.members) * len(best.losses)
        print(f"{best}: {best.losses[-1]:.3g}; {search.trained} checkpoints of {whole}, {seconds:.1f} s")
        for member in search.members:
            if member.stopped:
                print(f"  {member} stopped at {member.stopped}")
        if options.picture:  # of a second run, in which nothing has to be compiled
            search.begin()
            with pw.recording() as computed:
                search.run(lambda line: None)
            draw(computed, search.members, 4, options.picture)


if __name__ == "__main__":
    main()
