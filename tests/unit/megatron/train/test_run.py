"""What a run says of its training. Trainings and stretches are stand-ins."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from megatron_ptdp.schedules import simulate
from megatron_ptdp.train.config import load
from megatron_ptdp.train.fitting import Fit
from megatron_ptdp.train.run import Run, RunOptions
from megatron_ptdp.train.survivor import Start

SETTINGS = ("model=gpt-tiny", "pipeline=2", "batch=8", "peak_flops=1e12")


class Survivor:
    """Goes on with other numbers of replicas after each stretch."""

    def __init__(self, *replicas: int) -> None:
        fits = [Fit.of(load(None, [*SETTINGS, f"data={data}"])) for data in replicas]
        step = SimpleNamespace(explain=lambda: "")
        self.trainings = [
            SimpleNamespace(schedule=fit.schedule, sizes=fit.sizes, step=step, layout=None) for fit in fits
        ]

    @property
    def training(self) -> Any:
        return self.trainings[0]

    def begin(self, restored: Any) -> Start:
        return Start(0, "state")

    def grown(self, start: Start) -> Start:
        del self.trainings[0]
        return start


@dataclass
class Told(Run):
    """A run that keeps what `run.json` says in each stretch."""

    survivor: Any = None
    found: list[Any] = field(default_factory=list)

    def _survivor(self) -> Any:
        return self.survivor

    def _stretch(self, survivor: Any, start: Start, peak: Any) -> tuple[int, Any]:
        path = self.directory / "run.json"
        self.found.append(json.loads(path.read_text()) if path.exists() else None)
        path.unlink(missing_ok=True)
        return start.done + 1, "state" if len(survivor.trainings) > 1 else None


def test_what_is_said_of_a_training_is_of_the_replicas_that_it_has(tmp_path: Path) -> None:
    """It begins with one of two replicas, loses nothing in the next stretch, and has both in the last."""
    survivor = Survivor(1, 1, 2)
    configured = Fit.of(load(None, [*SETTINGS, "data=2"]))
    unused: Any = None
    batches: Any = SimpleNamespace(there=100)
    run = Told(
        config=configured.config,
        options=RunOptions(),
        schedule=configured.schedule,
        batches=batches,
        data={},
        directory=tmp_path,
        checkpoints=unused,
        session=unused,
        console=Console(file=StringIO()),
        stop=unused,
        survivor=survivor,
    )
    one, two = (simulate(training.schedule).bubble.of_ideal for training in survivor.trainings[1:])
    assert run.to_the_end(None) == 3
    first, unchanged, last = run.found
    assert (first["devices"], first["microbatches"], first["bubble_of_ideal"]) == (2, 8, one)
    assert unchanged is None
    assert (last["devices"], last["microbatches"], last["bubble_of_ideal"]) == (4, 4, two)
