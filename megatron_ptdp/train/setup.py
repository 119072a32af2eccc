"""Builds from a configuration the parts of a training: a cluster, the model on its slices, the step, the data."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax

import pathways_ray as pw
from megatron_ptdp.config.parallel import split_fault
from megatron_ptdp.data import Batches, TokenFile
from megatron_ptdp.data.batches import lengths_of
from megatron_ptdp.errors import BadSizes, ConfigError
from megatron_ptdp.models import Compute, ModelConfig, build, initialise, whole
from megatron_ptdp.parallel import Layout, Options, Sizes, build_step
from megatron_ptdp.parallel.cuts import cut_of
from megatron_ptdp.parallel.gradient_step import GradientStep
from megatron_ptdp.parallel.layout import Placement, given_back, places_on
from megatron_ptdp.parallel.update import Optimizer
from megatron_ptdp.schedules import Schedule
from megatron_ptdp.schedules import build as build_schedule
from megatron_ptdp.train.config import Config
from megatron_ptdp.train.optimizer import transformation

MAX_BACKWARDS = 8192
"""The most that a step may have on all its stages: each is a node of its program, and the runtime takes so many."""


def schedule_of(config: Config) -> Schedule:
    """Raises `ScheduleError` where the sizes break the schedule's rule; `BadSizes` where the layers do not divide into
    its stages, or no program holds it, which is seen before it is built: one for sizes that were never meant takes a
    minute."""
    parallel, model = config.parallel, config.model
    chunks = parallel.chunks or None
    stages = parallel.pipeline * (chunks or 1)
    # Layers that divide into the chunks of all devices divide into one of each.
    layers = model.encoder_layers + model.layers
    if not parallel.stage_layers and (fault := split_fault(layers, stages, parallel.lighter)):
        raise BadSizes(fault)
    units = parallel.counted() * parallel.token_slices
    if (backwards := units * stages * parallel.data_islands) > MAX_BACKWARDS:
        raise BadSizes(
            f"a step of {parallel.counted()} microbatches would have {backwards:,} backwards on all its stages, and a "
            f"program takes {MAX_BACKWARDS:,}; choose a smaller batch, or larger microbatches (microbatch)"
        )
    return build_schedule(
        parallel.schedule, parallel.pipeline, parallel.counted(), chunks, slices=parallel.token_slices
    )


def sizes_of(config: Config, schedule: Schedule) -> Sizes:
    """Raises `BadSizes`."""
    parallel = config.parallel
    return Sizes(
        pipeline=parallel.pipeline,
        tensor=parallel.tensor,
        data=parallel.data,
        chunks=schedule.stages // schedule.devices,
        microbatches=parallel.counted(),
        examples=parallel.microbatch,
        islands=parallel.data_islands,
        expert_slices=parallel.expert_slices,
        expert_members=parallel.expert_members,
        token_slices=parallel.token_slices,
    )


def own_cluster(config: Config, sizes: Sizes) -> tuple[int, int]:
    """Islands, and devices of each host, of a cluster for this run: as configured, else as many as the sizes need.

    Raises:
        BadSizes: the configured ones do not hold the sizes.
    """
    asked, placement = config.cluster, config.parallel.placement
    apart = (sizes.pipeline + bool(sizes.expert_slices)) if placement == "apart" else 1
    islands = asked.islands or apart * sizes.islands
    each = max(1, islands // sizes.islands) if placement == "apart" else 1
    needed = -(-sizes.pipeline // each) * sizes.members * sizes.tensor
    if sizes.expert_slices:
        needed = _with_experts(sizes, islands, placement)
    devices = asked.devices_per_host or -(-needed // asked.hosts_per_island)
    places_on(dict.fromkeys(range(islands), asked.hosts_per_island * devices), sizes, placement)
    return islands, devices


def _with_experts(sizes: Sizes, islands: int, placement: Placement) -> int:
    """The fewest devices of each island on which the experts' slices find a place as well."""
    least = -(-sizes.devices // islands)
    for each in range(least, sizes.devices):
        with contextlib.suppress(BadSizes):
            places_on(dict.fromkeys(range(islands), each), sizes, placement)
            return each
    return sizes.devices


@contextlib.contextmanager
def cluster_of(config: Config, sizes: Sizes) -> Iterator[pw.Session]:
    """The cluster that the configuration names, or one made for the run, which ends with the block.

    A cluster made here leaves each action of a schedule a computation of its own, so that timelines show them.

    Raises:
        Unschedulable, UsageError, ControllerLost, AuthenticationError: as `pw.init` and `pw.connect`.
    """
    asked = config.cluster
    if asked.url:
        with pw.connect(asked.url, asked.token, name="pathways-train", ca=asked.ca or None) as session:
            yield session
        return
    islands, devices = own_cluster(config, sizes)
    with pw.init(
        islands,
        asked.hosts_per_island,
        devices,
        address=asked.address or None,
        platform=asked.platform,
        fusion=False,
        lost_after_s=asked.lost_after,
    ) as session:
        yield session


def compute_of(config: Config) -> Compute:
    """The way the model is computed on the cluster of the current session."""
    parallel = config.parallel
    # gloo, between the hosts of a CPU island, gets reduce-scatters wrong.
    several = any(island["platform"] == "cpu" and len(island["hosts"]) > 1 for island in pw.islands())
    return Compute(
        tensor=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel,
        recompute=parallel.recompute,
        dtype=config.run.dtype,
        scatter="psum" if several else "psum_scatter",
    )


def master_of(config: Config) -> str:
    """The dtype of parameters, optimizer state and sums of gradients."""
    return "float64" if config.run.dtype == "float64" else "float32"


def options_of(config: Config) -> Options:
    """The options of a step. For float64 it switches JAX to 64 bits, so it is called before the first array is made."""
    if config.run.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    return Options(
        clip=config.optimizer.clip or None,
        zero=config.parallel.zero,
        scatter_gather=config.parallel.scatter_gather,
        join=config.parallel.join,
        pieces=config.parallel.pieces,
        master=master_of(config),
        compute=config.run.dtype,
    )


def optimizer_of(config: Config, schedule: Schedule) -> Optimizer:
    """The optimizer of a step, in which a schedule may have each stage update several times."""
    updates = schedule.microbatches // schedule.updates.every if schedule.updates else 1
    return transformation(config.optimizer, config.run.steps, updates)


@dataclass
class Training:
    """The parts of a training that a loop needs; slices are taken when it is made, and given back by `release`."""

    config: Config
    schedule: Schedule
    sizes: Sizes
    model: Any
    layout: Layout
    step: Any
    released: bool = False

    @classmethod
    def of(cls, config: Config, schedule: Schedule, sizes: Sizes, islands: Sequence[int] | None = None) -> Training:
        """Builds on the current session, on these islands or on all.

        Raises:
            ConfigError: the model, the sizes and the devices do not fit each other.
            PathwaysError: the cluster failed. Slices are given back then, as with any error.
        """
        parallel = config.parallel
        model = build(config.model, compute_of(config))
        layout = Layout.of(
            model,
            sizes,
            lighter=parallel.lighter,
            counts=parallel.stage_layers or None,
            placement=parallel.placement,
            islands=islands,
        )
        try:
            step = _step_of(config, schedule, model, layout)
        except BaseException:
            given_back(chain.from_iterable(layout.slices))
            raise
        return cls(config, schedule, sizes, model, layout, step)

    @property
    def used(self) -> Counter[int]:
        """Devices that it takes of each island now: its slices may have moved, and may share devices by that."""
        used: Counter[int] = Counter()
        for slice in chain.from_iterable(self.layout.slices):
            used[slice.island] += slice.size
        return used

    def first_state(self) -> Any:
        """The state before the first step: a function of the seed and the model's sizes."""
        return self.step.initial(
            initialise(self.model, whole(self.model), self.config.run.seed, master_of(self.config))
        )

    def release(self) -> None:
        self.released = True
        self.layout.release()


def _step_of(config: Config, schedule: Schedule, model: Any, layout: Layout) -> Any:
    """The step of a model on its slices."""
    options = options_of(config)
    optimizer = optimizer_of(config, schedule)
    cut = cut_of(model, layout, schedule, options)
    if cut is not None:
        return GradientStep(model, optimizer, cut, layout.sizes, options)
    return build_step(model, optimizer, layout, schedule, options)


def batches_of(config: Config, examples: int) -> tuple[Batches, dict[str, int]]:
    """The data, and what its order depends on: the CRC-32 of the file, the seed, the examples of a step and in all.

    Raises:
        TokenFileError, ConfigError: the file cannot be used with this model.
    """
    if not config.data.path:
        raise ConfigError("there is no data: set path to a token file, which `pathways-train prepare` makes")
    file = TokenFile.open(config.data.path, config.model.vocabulary, config.data.check)
    seed = config.run.seed if config.data.data_seed is None else config.data.data_seed
    lengths = lengths_of(_batch_of_one(config.model))
    batches = Batches(file, lengths, examples, seed, config.data.held_out if config.run.eval_every else 0.0)
    return batches, {"crc32": file.header.crc32, "seed": seed, "examples": examples, "trained_on": batches.there}


def _batch_of_one(model: ModelConfig) -> Any:
    return build(model).batch(1)
