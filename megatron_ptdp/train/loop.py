"""The training loop: launches steps ahead of their results, looks at each result, and keeps the state safe.

A step is launched before the loss of the one before is known, so that the devices never wait for this process; but at
most `in_flight` of them are. Results are looked at in order. So a loss that is not finite is seen a few steps late,
which does no harm: the step itself leaves the state as it was, and a checkpoint is only written when all steps before
it are known to be good.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_ptdp.data import Batches
from megatron_ptdp.errors import NotFinite
from megatron_ptdp.models import flops_per_token
from megatron_ptdp.train.checkpoints import Checkpoints
from megatron_ptdp.train.display import Display, Seen
from megatron_ptdp.train.optimizer import rate
from megatron_ptdp.train.records import Records
from megatron_ptdp.train.setup import Training
from megatron_ptdp.train.speed import Peak, Utilization
from megatron_ptdp.train.stop import Stop

Traced = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]
"""Runs a step alone and draws it; the same result as the step."""


class InFlight(NamedTuple):
    """A step that was launched: its number counted from 1, its metrics, the tokens it predicts."""

    number: int
    metrics: Any
    tokens: float


@dataclass
class Loop:
    """One stretch of training, from a state to the end, a signal, or an error.

    Attributes:
        data: what the order of the data depends on, for checkpoints
        trace: the number of a step, and what runs it in place of the step itself
    """

    training: Training
    batches: Batches
    data: dict[str, int]
    checkpoints: Checkpoints
    records: Records
    display: Display
    stop: Stop
    peak: Peak
    trace: tuple[int, Traced] | None = None
    flying: deque[InFlight] = field(default_factory=deque)
    saved: int = -1
    landed_at: float = 0.0

    def __post_init__(self) -> None:
        config = self.training.config
        self._rate = rate(config.optimizer, config.run.steps)
        self._flops = flops_per_token(config.model, config.parallel.recompute)

    def run(self, state: Any, done: int) -> int:
        """Trains until all steps are done or an end was asked for; returns the steps that are done.

        Args:
            state: after `done` steps; it is donated.

        Raises:
            NotFinite: a loss or a gradient is NaN or infinite.
            PathwaysError: what happened to the cluster.
        """
        run, step = self.training.config.run, self.training.step
        self.saved, self.landed_at = done, time.perf_counter()
        coming = self.batches.starting_at(done)
        while done < run.steps and not self.stop.asked:
            self._land(run.in_flight - 1)
            batch = next(coming)
            launch = step
            if self.trace and self.trace[0] == done + 1:
                self._land(0)
                launch = self.trace[1]
            state, metrics = launch(state, batch)
            done += 1
            self.flying.append(InFlight(done, metrics, float(self.training.model.tokens(batch))))
            if run.checkpoint_every and done % run.checkpoint_every == 0:
                self._save(state, done)
        self._land(0)
        if done > self.saved:
            self._save(state, done)
        self.checkpoints.wait()
        return done

    def _save(self, state: Any, done: int) -> None:
        """Has the state written while training goes on: a copy on the devices is read by another thread."""
        copy = self.training.step.snapshot(state)
        flying = tuple(self.flying)

        def gathered() -> Any:
            good = all(bool(one.metrics["applied"]) for one in flying)
            return self.training.step.gather(copy) if good else None

        self.checkpoints.save(done, gathered, self.data)
        self.saved = done

    def _land(self, most: int) -> None:
        """Looks at the results of steps until at most so many are in flight."""
        while len(self.flying) > most:
            one = self.flying.popleft()
            loss, norm, applied = (one.metrics[name].item() for name in ("loss", "norm", "applied"))
            if not (applied and math.isfinite(loss)):
                raise NotFinite(self._what_is_not_finite(one, loss, norm))
            now = time.perf_counter()
            seconds, self.landed_at = now - self.landed_at, now
            seen = self._seen(one, loss, norm, seconds)
            self.records.write(one.number, {**seen._asdict(), "passes": self.batches.passes(one.number)})
            self.display.step(one.number, seen)

    def _seen(self, one: InFlight, loss: float, norm: float, seconds: float) -> Seen:
        speed = one.tokens / seconds
        share = Utilization.of(speed, self._flops, self.peak, self.training.sizes.devices)
        learning_rate = float(self._rate(one.number - 1))
        return Seen(loss, norm, learning_rate, seconds, speed, share.mfu, share.hardware)

    def _what_is_not_finite(self, one: InFlight, loss: float, norm: float) -> str:
        found = self.training.step.first_bad(one.metrics)
        last = len(self.training.layout.stages) - 1
        where = f"stage {found[0]}: the gradient of {found[1]}" if found else f"stage {last}: the loss or the norm"
        steps = self.checkpoints.steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        return (
            f"step {one.number} is not finite: loss {loss}, norm of the gradient {norm}; first: {where}. The state "
            f"before it is good; {kept} in "
            f"{self.checkpoints.folder}. Lower learning_rate, set clip, or look at the data"
        )
