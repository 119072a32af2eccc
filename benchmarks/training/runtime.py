"""The cases of `benchmarks.training` that run on this runtime, all on one cluster.

Island 0 has two hosts, islands 1 and 2 one each, island 3 four, with one CPU device a host. The device of host k runs
on core k mod 2: of every pair of neighbouring hosts each has a core. So island 0, and islands 1 and 2 together, hold
two devices honestly; island 3 holds four on two cores.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np

import pathways_ray as pw
from benchmarks.cores import listed
from benchmarks.training.model import Sizes
from megatron_ptdp import schedules
from megatron_ptdp.parallel import Layout, Options, Step, build_step
from megatron_ptdp.parallel import Sizes as Cut
from megatron_ptdp.schedules import Costs, Schedule
from megatron_ptdp.train import timeline

ISLANDS = (2, 1, 1, 4)  # hosts of each
INSIDE, ACROSS, FOUR = (0,), (1, 2), (3,)
LIMIT_S = 120.0
SPMD = "spmd"


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        system: "pathways", "jax" or "torch"
        how: "spmd" (data parallel), or a schedule; of plain JAX the way its step is written
        microbatches: M of the pipeline; data parallel, each of two replicas takes M/2 of the same size
        devices: S
        place: "inside" one island, or "across" two
    """

    system: str
    how: str
    microbatches: int
    devices: int = 2
    place: str = "inside"

    @property
    def name(self) -> str:
        where = f", {self.place}" if self.system == "pathways" else ""
        return f"{self.system} {self.how}, S {self.devices}, M {self.microbatches}{where}"

    def schedule(self) -> Schedule:
        if self.how == SPMD:
            return schedules.build("1f1b", 1, self.microbatches // self.devices)
        return schedules.build(self.how, self.devices, self.microbatches)

    def cut(self, examples: int) -> Cut:
        made = self.schedule()
        if self.how == SPMD:
            islands = 2 if self.place == "across" else 1
            return Cut(data=self.devices, islands=islands, microbatches=made.microbatches, examples=examples)
        chunks = made.stages // made.devices
        return Cut(pipeline=self.devices, chunks=chunks, microbatches=self.microbatches, examples=examples)

    @property
    def islands(self) -> tuple[int, ...]:
        if self.devices > 2:
            return FOUR
        return ACROSS if self.place == "across" else INSIDE

    @property
    def bubble(self) -> float:
        """Of the schedule, over the ideal time, when a backward takes twice a forward; 0 for data parallelism."""
        return 0.0 if self.how == SPMD else schedules.simulate(self.schedule()).bubble.of_ideal


KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""For glibc, in bytes: what is freed stays with the process. Without, temporary memory of more than 32 MiB goes back to
the system after each computation, and page faults take up to 40 % of a core: by a few bytes more or less."""


@contextlib.contextmanager
def cores_listed() -> Iterator[list[int]]:
    """All processes started inside keep their memory, and hosts have the first two cores in turn for their devices.

    Yields these cores; [] if there is only one.
    """
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    cores = cores if len(cores) == 2 else []
    with patch.dict(os.environ, {**KEPT, **listed(cores)}):
        yield cores


@contextlib.contextmanager
def cluster(fusion: bool) -> Iterator[pw.Session]:
    with pw.init([pw.Island("cpu", hosts) for hosts in ISLANDS], fusion=fusion) as session:
        yield session


@dataclass
class Prepared:
    """A case that runs. `state` is donated by every step."""

    layout: Layout
    step: Step
    batch: dict[str, np.ndarray]
    state: Any


class Runtime:
    """Cases on a cluster; they stay there until the end."""

    def __init__(self, session: pw.Session, sizes: Sizes) -> None:
        self.session, self.sizes = session, sizes
        self.whole = sizes.parameters()
        self.prepared: dict[Case, Prepared] = {}

    def prepare(self, case: Case, steps: int) -> list[float]:
        """Compiles a case and takes the first steps from the given parameters; their losses."""
        model, cut = self.sizes.model(), case.cut(self.sizes.examples)
        apart = case.place == "across" and case.how != SPMD
        layout = Layout.of(model, cut, placement="apart" if apart else "together", islands=case.islands)
        require_apart(layout)
        step = build_step(model, self.sizes.optimizer, layout, case.schedule(), Options(join=True))
        state = step.initial(self.whole)
        batch = {"tokens": self.sizes.batch(case.microbatches)}
        here = self.prepared[case] = Prepared(layout, step, batch, state)
        losses = []
        for _ in range(steps):
            here.state, metrics = step(here.state, batch)
            losses.append(float(metrics["loss"]))
            if not bool(np.asarray(metrics["applied"])):
                raise RuntimeError(f"{case.name}: a gradient was not finite, at loss {losses[-1]}")
        return losses

    def seconds(self, case: Case, steps: int) -> float:
        """The time of these steps, none waited for before the last."""
        here = self.prepared[case]
        start = time.perf_counter()
        for _ in range(steps):
            here.state, metrics = here.step(here.state, here.batch)
        wait(metrics["loss"], here.state)
        return time.perf_counter() - start

    def recorded(self, case: Case) -> timeline.Measured:
        """One step, alone, as it ran."""
        here = self.prepared[case]
        (here.state, _), seen = timeline.record(here.step, here.state, here.batch)
        return timeline.measured(case.schedule(), here.layout.slices[0], seen)

    def stage_costs(self, devices: int, records: int) -> tuple[Costs, float]:
        """Times of the actions of each stage while no other device computes, and the time of the rest of a step.

        A step of one microbatch is such a case: its stages run one after the other.
        """
        case = Case("pathways", "1f1b", 1, devices)
        self.prepare(case, 2)
        took: defaultdict[tuple[bool, int], list[float]] = defaultdict(list)  # by whether it is a forward, and stage
        rest = []
        for _ in range(records):
            found = self.recorded(case)
            for span in found.timeline.started:
                part = span.entry.parts[0]
                took[part.kind == "F", part.stage].append(span.end - span.start)
            rest.append(max(sum(o.end - o.start for o in found.others if o.device == d) for d in range(devices)))
        forward, backward = (tuple(median(took[way, k] or [0.0]) for k in range(devices)) for way in (True, False))
        nothing = (0.0,) * devices
        return Costs(forward, nothing, nothing, backward), median(rest)

    def hop(self, devices: int, place: str, records: int) -> float:
        """Seconds from the end of an action to the begin of the next one on another device, which waits for it alone.

        The median over the hops of recorded steps of one microbatch, where nothing else is under way.
        """
        case = Case("pathways", "1f1b", 1, devices, place)
        if case not in self.prepared:
            self.prepare(case, 2)
        hops = []
        for _ in range(records):
            spans = pairwise(sorted(self.recorded(case).timeline.started, key=lambda span: span.start))
            hops += [max(0.0, after.start - before.end) for before, after in spans if before.device != after.device]
        return median(hops)

    def moved(self, devices: int, tensor: int) -> list[dict[str, Any]]:
        """Bytes between two islands of a step, with and without scatter/gather, counted from the layouts."""
        from megatron_ptdp.parallel import transfer_bytes

        sizes = Cut(pipeline=devices, tensor=tensor, microbatches=8, examples=self.sizes.examples)
        model = self.sizes.model(tensor)
        layout = Layout.of(model, sizes, placement="apart", islands=(INSIDE[0], FOUR[0]))
        try:
            step = build_step(model, self.sizes.optimizer, layout, schedules.build("1f1b", devices, 8))
            rows, edges = [], list(zip(step.shapes, layout.slices[0], layout.slices[0][1:], strict=False))
            for scatter in (True, False):
                found = [transfer_bytes.boundary(*edge, scatter) for edge in edges]
                moved = {
                    "bytes_between_hosts": 8 * sum(one.between_hosts for one in found),
                    "bytes_to_devices": 8 * sum(one.to_devices for one in found),
                }
                rows.append({"tensor": tensor, "scatter_gather": scatter, **moved})
            return rows
        finally:
            layout.release()


def require_apart(layout: Layout) -> None:
    """Raises RuntimeError where two slices of a replica share a device: then nothing runs side by side."""
    devices = [(place.host, place.index) for row in layout.slices for slice in row for place in slice.placed.devices]
    if len(set(devices)) < len(devices):
        raise RuntimeError(f"slices of one case share devices: {devices}")


def wait(loss: Any, state: Any) -> None:
    """Until a step is over: the loss is there, and one array of each stage's new parameters."""
    import jax

    loss.block_until_ready(LIMIT_S)
    for part in (part for row in state.params for part in row):
        jax.tree.leaves(part)[0].block_until_ready(LIMIT_S)


def bubbles(case: Case, records: Sequence[timeline.Measured], hop_s: float) -> dict[str, Any]:
    """The bubble of recorded steps, and of the same schedule simulated with the mean times of the step's actions, when
    a message takes `hop_s` seconds."""
    schedule = case.schedule()
    rows = []
    for found in records:
        ran, model = found.timeline, timeline.predicted(schedule, found.timeline, hop_s)
        rows.append(
            {
                "measured": ran.bubble.of_ideal,
                "predicted": model.bubble.of_ideal,
                "makespan_ms": 1e3 * ran.makespan,
                "predicted_ms": 1e3 * model.makespan,
                "busy_ms": 1e3 * ran.bubble.busy / len(ran.rows),
                "others_ms": 1e3 * sum(one.end - one.start for one in found.others) / len(ran.rows),
            }
        )
    picture = [  # in ms
        [span.device, part.kind, part.microbatch, round(1e3 * span.start, 3), round(1e3 * span.end, 3)]
        for span in records[-1].timeline.started
        for part in span.entry.parts
    ]
    return {"case": case.name, "ideal": case.bubble, "hop_ms": 1e3 * hop_s, "records": rows, "picture": picture}
