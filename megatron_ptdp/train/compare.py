"""Compares the losses of two runs at the same steps, from their `metrics.jsonl`."""

from __future__ import annotations

import json
from math import inf, isnan
from pathlib import Path
from typing import NamedTuple

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.train.records import METRICS


class Difference(NamedTuple):
    """The difference between the curves of two runs, over the steps that both have.

    Attributes:
        steps: their number
        first, last: the numbers of the first and the last of them
        loss: the largest absolute difference of losses, in nats per token
        at: the step that has it
        relative: the largest |a - b| / |b| of losses
        norm: the same of the norms of the gradient
        ends: the losses of both at the last step
    """

    steps: int
    first: int
    last: int
    loss: float
    at: int
    relative: float
    norm: float
    ends: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, {self.first} to {self.last}; losses at the end {self.ends[0]:.6f} and "
            f"{self.ends[1]:.6f}; largest difference of losses {self.loss:.2e} (step {self.at}), relative "
            f"{self.relative:.2e}; of gradient norms, relative {self.norm:.2e}"
        )


def difference(one: Path, other: Path) -> Difference:
    """The difference of two runs, each given by its directory or its metrics file.

    Raises:
        ConfigError: a file cannot be read, or the runs have no step in common.
    """
    a, b = curve(one), curve(other)
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise ConfigError(f"{one} and {other} have no step in common: they have {len(a)} and {len(b)} steps")
    losses = {step: abs(a[step][0] - b[step][0]) for step in steps}
    at = max(steps, key=lambda step: inf if isnan(losses[step]) else losses[step])
    relative, norm = (max(abs(a[step][k] - b[step][k]) / (abs(b[step][k]) or 1.0) for step in steps) for k in (0, 1))
    ends = a[steps[-1]][0], b[steps[-1]][0]
    return Difference(len(steps), steps[0], steps[-1], losses[at], at, relative, norm, ends)


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """The loss and the norm of the gradient of each step. A last line without an end is left out: it is being written,
    or its writer was killed.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = run / METRICS if run.is_dir() else run
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        lines = map(json.loads, whole.splitlines())
        return {int(line["step"]): (float(line["loss"]), float(line["norm"])) for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = error.strerror if isinstance(error, OSError) else f"no metrics of a training: {error!r}"
        raise ConfigError(f"{path} cannot be read: {what}; give the directory of a run, or its {METRICS}") from error
