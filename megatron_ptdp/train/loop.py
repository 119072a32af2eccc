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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import numpy as np

from megatron_ptdp.data import Batches
from megatron_ptdp.errors import NotFinite
from megatron_ptdp.models import flops_per_token
from megatron_ptdp.train.checkpoints import Checkpoints
from megatron_ptdp.train.display import Display, StepFigures
from megatron_ptdp.train.loading import Loader
from megatron_ptdp.train.optimizer import rate
from megatron_ptdp.train.records import Records
from megatron_ptdp.train.setup import Training
from megatron_ptdp.train.speed import Peak, Utilization
from megatron_ptdp.train.stop import Stop

Traced = Callable[[Any, Any], tuple[Any, dict[str, Any]]]
"""Runs a step while nothing else runs, and measures it; has the result of the step."""


class InFlight(NamedTuple):
    """A step that was launched: its number counted from 1, its metrics, the tokens it predicts; and the losses on
    held-out examples, where it is followed by an evaluation."""

    number: int
    metrics: Any
    tokens: float
    held_out: tuple[Any, ...] = ()


class Guard(Protocol):
    """The object that looks after the loop (`survivor.Survivor`)."""

    def before(self, state: Any, done: int) -> None:
        """Another step is about to be launched, from the state after `done` steps."""

    def landed(self, number: int) -> None:
        """The loss of a step was seen."""

    def pauses(self) -> bool:
        """Whether the stretch is to end before the next step."""


@dataclass
class Loop:
    """One stretch of training, from a state to the end, a pause, a signal, or an error.

    Attributes:
        loader: of the batches of steps
        guard: hears of each step
        data: the values that the order of the data depends on, for checkpoints
        held_out: the batches of each evaluation
        instead: for the numbers of some steps, the function that runs in place of the step
    """

    training: Training
    loader: Loader
    batches: Batches
    data: dict[str, int]
    checkpoints: Checkpoints
    records: Records
    display: Display
    stop: Stop
    peak: Peak
    guard: Guard
    held_out: Sequence[Mapping[str, np.ndarray]] = ()
    instead: Mapping[int, Traced] = field(default_factory=dict)
    flying: deque[InFlight] = field(default_factory=deque)
    saved: int = -1
    landed_at: float = 0.0

    def __post_init__(self) -> None:
        config = self.training.config
        self._rate = rate(config.optimizer, config.run.steps)
        self._flops = flops_per_token(config.model, config.parallel.computed_again())
        self._devices = self.training.sizes.devices

    def run(self, state: Any, done: int) -> tuple[int, Any]:
        """Trains until all steps are done, an end was asked for, or the guard has it pause.

        Args:
            state: after `done` steps; it is donated.

        Returns:
            The steps that are done, and, at a pause, the state.

        Raises:
            NotFinite: a loss or a gradient is NaN or infinite.
            PathwaysError: the cluster failed.
        """
        run, step = self.training.config.run, self.training.step
        # A state that came from a snapshot, or from other devices, may be in no checkpoint yet.
        self.saved = done if done in self.checkpoints.steps() else 0
        self.landed_at = time.perf_counter()
        coming = self.loader.starting_at(done)
        while done < run.steps and not self.stop.asked:
            self._land(run.in_flight - 1)
            if self.guard.pauses():
                self._land(0)
                return done, state
            self.guard.before(state, done)
            batch, tokens = next(coming)
            launch = self.instead.get(done + 1, step)
            if launch is not step:
                self._land(0)
            state, metrics = launch(state, batch)
            done += 1
            self.flying.append(InFlight(done, metrics, tokens, self._evaluation(state, done)))
            if run.checkpoint_every and done % run.checkpoint_every == 0:
                self._save(state, done)
        self._land(0)
        if done > self.saved:
            self._save(state, done)
        self.display.waits(f"the checkpoint of step {self.saved} is being written")
        self.checkpoints.wait()
        return done, None

    def _evaluation(self, state: Any, done: int) -> tuple[Any, ...]:
        """The losses on held-out examples, as futures, where an evaluation follows this step."""
        every = self.training.config.run.eval_every
        if not every or (done % every and done != self.training.config.run.steps):
            return ()
        return tuple(self.training.step.evaluate(state, batch) for batch in self.held_out)

    def _save(self, state: Any, done: int) -> None:
        """Has the state written while training goes on: a copy on the devices is read by another thread."""
        self._land(done - self.saved)  # the checkpoint before may be waited for, and its step is to be in the records
        copy = self.training.step.snapshot(state)
        flying = tuple(self.flying)

        def gathered() -> Any:
            good = all(bool(one.metrics["applied"]) for one in flying)
            return self.training.step.gather(copy) if good else None

        self.checkpoints.save(done, gathered, self.data)
        self.saved = done

    def _land(self, most: int) -> None:
        """Looks at the results of steps until at most `most` are in flight."""
        while len(self.flying) > most:
            one = self.flying.popleft()
            loss, norm, applied = (one.metrics[name].item() for name in ("loss", "norm", "applied"))
            if not (applied and math.isfinite(loss)):
                raise NotFinite(self._what_is_not_finite(one, loss, norm))
            now = time.perf_counter()
            seconds = now - self.landed_at
            held_out = self._loss_of_held_out(one)
            self.landed_at = time.perf_counter()  # an evaluation does not count as time of a step
            seen = self._seen(one, loss, norm, seconds)
            values = {**seen._asdict(), "passes": self.batches.passes(one.number), "devices": self._devices}
            self.records.write(one.number, values if held_out is None else {**values, "eval_loss": held_out})
            self.guard.landed(one.number)
            self.display.step(one.number, seen, held_out)

    def _loss_of_held_out(self, one: InFlight) -> float | None:
        """The mean over the batches, of equal size, of the evaluation that follows the step; None without one.

        Raises:
            NotFinite: it is NaN or infinite, though the step was not.
        """
        if not one.held_out:
            return None
        loss = fmean(each.item() for each in one.held_out)
        if not math.isfinite(loss):
            raise NotFinite(
                f"the loss on held-out examples is {loss} after step {one.number}, whose own loss was finite; "
                f"{self._what_is_kept()}. Lower learning_rate, set clip, or look at the end of the token file"
            )
        return loss

    def _seen(self, one: InFlight, loss: float, norm: float, seconds: float) -> StepFigures:
        speed = one.tokens / seconds
        share = Utilization.of(speed, self._flops, self.peak, self._devices)
        learning_rate = float(self._rate(one.number - 1))
        return StepFigures(loss, norm, learning_rate, seconds, speed, share.mfu, share.hardware)

    def _what_is_not_finite(self, one: InFlight, loss: float, norm: float) -> str:
        found = self.training.step.first_bad(one.metrics)
        last = len(self.training.layout.stages) - 1
        where = f"stage {found[0]}: the gradient of {found[1]}" if found else f"stage {last}: the loss or the norm"
        return (
            f"step {one.number} is not finite: loss {loss}, norm of the gradient {norm}; first: {where}; "
            f"{self._what_is_kept()}. Lower learning_rate, set clip, or look at the data"
        )

    def _what_is_kept(self) -> str:
        steps = self.checkpoints.steps()
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "there is no checkpoint yet"
        return f"{kept} in {self.checkpoints.folder}"
