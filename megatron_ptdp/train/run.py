"""A whole run: checks everything it can before a cluster starts, then trains, in stretches between losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from megatron_ptdp.data import Batches
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import Compute, build
from megatron_ptdp.parallel import Sizes, cuts, stale
from megatron_ptdp.parallel.layer_split import cut
from megatron_ptdp.parallel.shapes import tied_arrays
from megatron_ptdp.schedules import Schedule, ScheduleError, Timeline, simulate
from megatron_ptdp.train import timeline
from megatron_ptdp.train.checkpoints import Checkpoints, Restored
from megatron_ptdp.train.config import Config
from megatron_ptdp.train.display import Display
from megatron_ptdp.train.loading import loader_of
from megatron_ptdp.train.loop import Loop
from megatron_ptdp.train.records import CHECKPOINTS, Records, locked, writing
from megatron_ptdp.train.setup import (
    Training,
    batches_of,
    cluster_of,
    options_of,
    own_cluster,
    schedule_of,
    sizes_of,
)
from megatron_ptdp.train.speed import Peak, peak_of
from megatron_ptdp.train.stop import Stop
from megatron_ptdp.train.survivor import LOST, Start, Survivor
from pathways_ray.errors import PathwaysError


@dataclass(frozen=True)
class RunOptions:
    """Options of one run beside its configuration.

    Attributes:
        max_restarts: restarts from checkpoints after losses of hosts, where no snapshots are taken
        trace_step: the number of a step to be drawn; 0 for none
    """

    max_restarts: int = 0
    trace_step: int = 0


def train(config: Config, options: RunOptions, console: Console) -> int:
    """Trains as configured, from the newest checkpoint of the directory on; returns the steps that are done.

    Raises:
        ConfigError, BadSizes, TokenFileError, CheckpointError: something does not fit; nothing was trained.
        TrainingStopped (NotFinite, TooManyRestarts, …): training cannot go on.
        PathwaysError: the cluster failed.
    """
    try:
        schedule = schedule_of(config)
    except ScheduleError as error:
        raise ConfigError(str(error)) from error
    sizes = sizes_of(config, schedule)
    require_fitting(config, schedule, sizes)
    if options.trace_step and config.cluster.url:
        raise ConfigError("--trace-step needs a cluster of this run's own: leave url and token out")
    batches, data = batches_of(config, sizes.batch)
    if config.run.eval_every:
        batches.held_out(1)  # refused now, if it is too little
    directory = Path(config.run.directory)

    def warn(text: str) -> None:
        console.print(f"warning: {text}", markup=False, soft_wrap=True)

    with (
        locked(directory),
        Checkpoints(directory / CHECKPOINTS, config.model, config.run.keep, warn) as checkpoints,
    ):
        restored = checkpoints.latest()
        if restored:
            _compare(restored, data, warn)
            if restored.about.step >= config.run.steps:
                warn(f"all {config.run.steps} steps are done; set steps to more to go on")
                return restored.about.step
        _check_traced(options.trace_step, restored.about.step if restored else 0, config.run.steps)
        stop = Stop(lambda text: console.print(text, markup=False))
        # In this order: Ray sets a handler for SIGTERM of its own.
        with cluster_of(config, sizes) as session, stop.listening():
            if own := getattr(session, "cluster", None):
                stop.before_leaving = own.stop
            run = Run(config, options, schedule, batches, data, directory, checkpoints, session, console, stop)
            return run.to_the_end(restored)


def require_fitting(config: Config, schedule: Schedule, sizes: Sizes) -> None:
    """Makes sure, before a cluster starts, that the model can be cut, trained by the schedule, and placed on it.

    Raises:
        ConfigError, BadSizes: model, sizes, options and the cluster that is asked for do not fit each other.
    """
    parallel = config.parallel
    model = build(config.model, Compute(parallel.tensor, parallel.sequence_parallel, parallel.recompute))
    if parallel.lighter and sizes.stages == 1:
        raise BadSizes(f"lighter {parallel.lighter} is of a first and a last stage, and here is one; leave it out")
    stages = cut(model.layers, sizes.stages, parallel.lighter, parallel.stage_layers or None)
    step = options_of(config)
    step.check(sizes)
    cuts.check(model, sizes, step, stages)
    if schedule.updates and 0 < parallel.min_data < parallel.data:
        raise ConfigError(
            f"{schedule.name} is another rule with fewer replicas, which take more microbatches and so more updates: "
            f"leave min_data {parallel.min_data} out"
        )
    stale.check(schedule, sizes, step, list(tied_arrays([model.parameters(stage) for stage in stages])))
    if not config.cluster.url:
        own_cluster(config, sizes)


def _check_traced(number: int, done: int, steps: int) -> None:
    """Raises `ConfigError` for a step that this run cannot draw; 0 for no step."""
    if number and not done + 1 < number <= steps:
        raise ConfigError(
            f"--trace-step {number} cannot be drawn: this run has steps {done + 1} to {steps}, and the first one "
            "compiles; choose another, or set steps to more"
        )


def _compare(restored: Restored, data: Mapping[str, int], warn: Any) -> None:
    """Warns where the data goes on in another order than before."""
    there = restored.about.data
    if differ := [f"{name} {there[name]} then, {data[name]} now" for name in there if there[name] != data.get(name)]:
        warn(
            f"the data is not in the order in which checkpoint {restored.about.step} saw it ({', '.join(differ)}): "
            "it goes on with the batch of that number in the new order"
        )


@dataclass(frozen=True)
class Bubbles:
    """The bubble in `run.json`: idle time over busy time.

    Attributes:
        bubble_of_ideal: predicted by the schedule, from the measured times of the stages once there are some; before,
            with equal stages and a backward of twice the time of a forward
        bubble_measured: of the step that was recorded, with launches, messages, reductions and the update
        stage_seconds: for each kind of action the mean time of each stage
        measured_at: the number of that step; 0 before it
        actions_unseen: actions that were over before the host looked
    """

    bubble_of_ideal: float
    bubble_measured: float | None = None
    stage_seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    measured_at: int = 0
    actions_unseen: int = 0

    @classmethod
    def of(cls, number: int, ran: timeline.Measured, model: Timeline) -> Bubbles:
        """The bubbles of a step that ran, and of its prediction."""
        found = timeline.stage_times(model.schedule, ran.timeline).items()
        times: dict[str, tuple[float, ...]] = {kind: each for kind, each in found if any(each)}
        return cls(model.bubble.of_ideal, ran.timeline.bubble.of_ideal, times, number, ran.unseen)


@dataclass
class Run:
    """Training on a cluster, in stretches between losses."""

    config: Config
    options: RunOptions
    schedule: Schedule
    batches: Batches
    data: dict[str, int]
    directory: Path
    checkpoints: Checkpoints
    session: Any
    console: Console
    stop: Stop
    recorded: bool = False

    def to_the_end(self, restored: Restored | None) -> int:
        """Trains until all steps are done, or an end was asked for.

        Raises:
            As `train`.
        """
        survivor = self._survivor()
        start = survivor.begin(restored)
        peak: Peak | None = None
        described: Sizes | None = None
        while True:
            lost: PathwaysError | None = None
            try:
                if peak is None:
                    peak = peak_of(survivor.training.layout, self.config.run.peak_flops, self.config.run.dtype)
                if survivor.training.sizes != described:
                    self._describe(survivor.training, peak)
                    described = survivor.training.sizes
                done, state = self._stretch(survivor, start, peak)
                if state is None:
                    return done
                start.done, start.state = done, state
                del state
                start = survivor.grown(start)
            except LOST as error:
                lost = error.with_traceback(None)  # its frames hold the state
            if lost is not None:
                start = survivor.recovered(lost)

    def _survivor(self) -> Survivor:
        def say(text: str) -> None:
            self.console.print(text, markup=False, soft_wrap=True)

        restarts = self.options.max_restarts
        return Survivor(self.config, self.session, self.checkpoints, self.directory, restarts, say)

    def _stretch(self, survivor: Survivor, start: Start, peak: Peak) -> tuple[int, Any]:
        training, done = survivor.training, start.done
        state, start.state = start.state, None
        bubble = f"{simulate(training.schedule).bubble.of_ideal:.1%}"
        run = self.config.run
        with (
            Records(self.directory, done) as records,
            Display(self.console, done, run.steps, bubble, run.log_every) as display,
        ):
            held_out = self.batches.held_out(run.eval_batches) if run.eval_every else []
            loop = Loop(
                training,
                loader_of(training, self.batches),
                self.batches,
                self.data,
                self.checkpoints,
                records,
                display,
                self.stop,
                peak,
                survivor,
                held_out,
            )
            display.waits("the first step is compiled")
            if number := self._step_to_record(done):
                loop.instead = {number: self._recording(number, training, display, peak)}
            return loop.run(state, done)

    def _step_to_record(self, done: int) -> int:
        """The number of the step whose actions are timed: the one to be drawn, else the first that does not compile. 0
        for no step: it was timed or is behind us, there is one pipeline device, or the hosts are not this run's own."""
        if self.recorded:
            return 0
        if self.options.trace_step:
            return self.options.trace_step if self.options.trace_step > done else 0
        able = self.schedule.devices > 1 and not self.config.cluster.url
        return done + 2 if able and done + 2 <= self.config.run.steps else 0

    def _recording(self, number: int, training: Training, display: Display, peak: Peak) -> Any:
        """A function that runs a step while nothing else runs, and reports its bubble and the predicted one."""

        def run(state: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            made: tuple[Any, dict[str, Any]]
            made, seen = timeline.record(training.step, state, batch)
            self.recorded = True
            ran = timeline.measured(training.schedule, training.layout.slices[0][: training.sizes.pipeline], seen)
            if not any(map(timeline.is_seen, ran.timeline.started)):
                display.say(f"step {number}: the times of its actions were not seen")
                return made
            model = timeline.predicted(training.schedule, ran.timeline)
            self._describe(training, peak, Bubbles.of(number, ran, model))
            text = timeline.prediction(model, training.layout.slices[0][: training.sizes.pipeline])
            with writing(self.directory):
                (self.directory / "predicted.json").write_text(text, encoding="utf-8")
            display.bubble = f"{ran.timeline.bubble.of_ideal:.1%} (measured at step {number})"
            said = f"step {number}: bubble {ran.timeline.bubble.of_ideal:.1%}, predicted {model.bubble.of_ideal:.1%}"
            if number == self.options.trace_step:
                with writing(self.directory):
                    drawn = timeline.write(self.directory, number, ran, model)
                said += f" of the ideal time; {drawn.picture}, {drawn.trace}"
            display.say(said)
            return made

        return run

    def _describe(self, training: Training, peak: Peak, bubbles: Bubbles | None = None) -> None:
        """Writes `run.json`, the context of the metrics."""
        parameters = build(self.config.model).counted()
        bubbles = bubbles or Bubbles(simulate(training.schedule).bubble.of_ideal)
        about = {
            "config": msgspec.to_builtins(msgspec.structs.replace(self.config, cluster=type(self.config.cluster)())),
            "parameters": parameters.parameters,
            "parameters_for_a_token": parameters.for_a_token,
            "devices": training.sizes.devices,
            "examples_per_step": training.sizes.batch,
            "schedule": training.schedule.name,
            "microbatches": training.sizes.microbatches,
            **asdict(bubbles),
            "moves": training.step.explain().splitlines(),
            "peak_flops": peak.flops,
            "peak_source": peak.source,
        }
        with writing(self.directory):
            (self.directory / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=2) + b"\n")
        if bubbles.measured_at:
            return
        chosen = f", {parameters.for_a_token:,} for a token," if self.config.model.experts else ""
        self.console.print(
            f"{parameters.parameters:,} parameters{chosen} on {about['devices']} devices, "
            f"{about['examples_per_step']} examples a step of {self.batches.there:,}; "
            f"peak {peak.flops / 1e9:,.1f} GFLOP/s a device ({peak.source})",
            markup=False,
            soft_wrap=True,
        )
