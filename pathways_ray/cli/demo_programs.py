"""The programs of `pathways demo`: those of `examples/`, with their results checked against plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pathways_ray.cli.output import load

LOSS_BOUND = 2.9
"""Nats per byte after all steps; guessing costs ln 256, 5.5."""

UNSPLIT_STEPS = 20
UNSPLIT_TOLERANCE = 1e-5

Progress = Callable[[int, int], None]
"""Called with the work done and all there is to do."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold of a result, in words for a table."""

    what: str
    expected: str
    came: str
    ok: bool


@dataclass
class Outcome:
    """The checked results of a program; `details` go into the JSON."""

    checks: list[Check]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One program of the demo: `run` takes the session, the steps to train, and a `Progress`."""

    name: str
    about: str
    run: Callable[[Any, int, Progress], Outcome]


def figure2(session: Any, steps: int, progress: Progress) -> Outcome:
    """y = b(a(v)), z = a(c(a(v))) with a = 2x, b = x + 1, c = x / 2."""
    expected = ([3.0, 5.0], [2.0, 4.0])
    y, z = load("examples.figure2").main(session)
    came = (y.tolist(), z.tolist())
    return Outcome([Check("y, z of [1, 2]", _lists(expected), _lists(came), came == expected)])


def ping_pong(session: Any, steps: int, progress: Progress) -> Outcome:
    """100 round trips; chaotic, so that one wrong bit would change most digits."""
    example = load("examples.ping_pong")
    came = example.main(session)
    expected = example.plain_jax(example.START)
    what = f"{example.ROUND_TRIPS} round trips"
    return Outcome([same_bits(what, expected.tobytes() == came.tobytes(), np.abs(expected - came).max())])


def language_model(session: Any, steps: int, progress: Progress) -> Outcome:
    """Trains over two islands, then the same in plain JAX, then the first steps with the model in one piece."""
    example = load("examples.language_model")
    first = min(UNSPLIT_STEPS, steps)
    all_steps = 2 * steps + first

    def count_from(start: int) -> Callable[[int, Any], None]:
        return lambda done, losses: progress(start + done, all_steps)

    trained = example.train_pathways(steps, count_from(0))
    reference = example.train_reference(steps, count_from(steps))
    unsplit = example.train_unsplit(first, count_from(2 * steps))
    loss = float(trained.losses[-UNSPLIT_STEPS:].mean())
    apart = float(np.abs(trained.losses - reference.losses).max())
    drift = float(np.abs(trained.losses[:first] - unsplit.losses).max())
    checks = [
        same_bits("losses and parameters", example.same_bits(trained, reference), apart),
        Check(
            f"first {first} losses",
            f"the unsplit model's, to {UNSPLIT_TOLERANCE:.0e}",
            f"{drift:.1e} apart",
            drift <= UNSPLIT_TOLERANCE,
        ),
    ]
    if steps >= example.STEPS:
        what = f"loss after {steps} steps, nats per byte"
        checks.append(Check(what, f"below {LOSS_BOUND}", f"{loss:.3f}", loss < LOSS_BOUND))
    return Outcome(checks, {"steps": steps, "losses": [float(value) for value in trained.losses]})


def same_bits(what: str, same: bool, apart: float) -> Check:
    """The check that a result has the bits of plain JAX; `apart` is the largest difference."""
    return Check(what, "bits of plain JAX", "bits of plain JAX" if same else f"up to {apart:.1e} apart", same)


def _lists(pair: tuple[list[float], list[float]]) -> str:
    return f"{pair[0]}, {pair[1]}"


PROGRAMS = (
    Program("figure2", "three functions on three slices, the first program of the paper", figure2),
    Program("ping_pong", "one program, back and forth between two islands", ping_pong),
    Program("language_model", "a transformer trained as a pipeline over two islands", language_model),
)
