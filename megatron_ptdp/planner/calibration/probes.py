"""The probes of `measure`: each is made and compiled once, and measured again whenever it is called.

Loops on the device are as long as needed for a launch to be little beside them. Where two programs differ in one thing
(a message, say), both are run one after the other; the least that each ever took is what it takes undisturbed,
and the difference of these is the answer, never below zero. Of training steps the lower quartile counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from megatron_ptdp import schedules
from megatron_ptdp.models import Compute, Gpt, ModelConfig, initialise, whole
from megatron_ptdp.parallel import Layout, Options, build_step
from megatron_ptdp.parallel import Sizes as Cut
from megatron_ptdp.planner.calibration.fit import VOCABULARY, Reference

LIMIT_S = 120.0
MIN_LOOP_S = 0.02  # that a loop on the device takes, about
WORK_S = 0.004  # of a computation between two messages, about
TURNS = 8  # such computations of each device
FEWER = 4  # times fewer launches, to see what one costs
REPEATS = 2  # of a difference, each time
ARRAYS = 20  # that an action takes and gives, about


class Probe(Protocol):
    """Measures when called. `value` is what came out of all calls, in seconds."""

    def __call__(self) -> None: ...

    @property
    def value(self) -> float: ...


class Difference:
    """(seconds of one call - seconds of another) / by. Both are run once here, to compile."""

    def __init__(self, longer: Callable[[], Any], shorter: Callable[[], Any], by: float) -> None:
        self.longer, self.shorter, self.by = longer, shorter, by
        seconds(longer), seconds(shorter)
        self.least = [float("inf"), float("inf")]

    def __call__(self) -> None:
        for _ in range(REPEATS):
            taken = seconds(self.longer), seconds(self.shorter)
            self.least = [min(pair) for pair in zip(self.least, taken, strict=True)]

    @property
    def value(self) -> float:
        return max(self.least[0] - self.least[1], 0.0) / self.by


class Quartile:
    """The lower quartile of what calls give: other work on the machine makes single ones longer, none shorter."""

    def __init__(self, call: Callable[[], float]) -> None:
        self.call = call
        self.samples: list[float] = []

    def __call__(self) -> None:
        self.samples.append(self.call())

    @property
    def value(self) -> float:
        return sorted(self.samples)[len(self.samples) // 4]


def devices_of(island: int) -> list[pw.VirtualSlice]:
    """A slice for each device of an island."""
    count = next(sum(len(host["devices"]) for host in one["hosts"]) for one in pw.islands() if one["island"] == island)
    found: dict[tuple[int, int], pw.VirtualSlice] = {}
    for _ in range(4 * count):  # slices may meet on a device; the resource manager prefers free ones
        one = pw.virtual_slice((1,), ("x",), island=island)
        place = one.placed.devices[0]
        found.setdefault((place.host, place.index), one)
        if len(found) == count:
            break
    return [found[place] for place in sorted(found)]


def host_of(one: pw.VirtualSlice) -> int:
    return one.placed.devices[0].host


def wait(values: Any) -> None:
    for value in jax.tree.leaves(values):
        value.block_until_ready(LIMIT_S)


def seconds(call: Callable[[], Any]) -> float:
    """Until the results of a call are there."""
    start = time.perf_counter()
    wait(call())
    return time.perf_counter() - start


def compiled(function: Callable[..., Any], where: pw.VirtualSlice) -> Any:
    return pw.compiled(function, slice=where, in_specs=P(), out_specs=P())


def put(value: Any, where: pw.VirtualSlice, spec: Any = None) -> Any:
    return pw.put(value, slice=where, spec=P() if spec is None else spec)


def looped(run: Callable[[Any], Any], places: Sequence[pw.VirtualSlice]) -> Probe:
    """Seconds of one turn of a loop on devices, with enough turns for a launch to be little beside them.

    Args:
        run: launches the loop, of as many turns as the number that it is given for each of `places`
        places: where the numbers lie
    """

    def of(turns: int) -> Callable[[], Any]:
        numbers = [put(np.int32(turns), one) for one in places]
        return lambda: run(numbers)

    none, turns = of(0), 1
    seconds(none)
    base = min(seconds(none) for _ in range(3))
    while turns < 1 << 20:
        taken = min(seconds(of(turns)) for _ in range(2)) - base
        if taken >= MIN_LOOP_S:
            break
        turns *= max(2, min(16, round(MIN_LOOP_S / max(taken, 1e-4))))
    return Difference(of(turns), none, turns)


# --- one device, all at once ------------------------------------------------------------------------------------------


def empty(where: pw.VirtualSlice) -> Probe:
    """An empty launch that is waited for, the mean of a few."""
    same, value = compiled(lambda v: v + 1, where), put(np.zeros((8,), np.float32), where)
    wait(same(value))

    def call() -> float:
        start = time.perf_counter()
        for _ in range(8):
            wait(same(value))
        return (time.perf_counter() - start) / 8

    return Quartile(call)


def product(devices: Sequence[pw.VirtualSlice], size: int, dtype: Any) -> Probe:
    """A product size×size×size on each of the devices at once."""

    def products(v: Any, turns: Any) -> Any:
        a = v.astype(dtype)
        return jax.lax.fori_loop(0, turns, lambda _, x: x @ a, a).astype(jnp.float32)

    return everywhere(products, np.full((size, size), 1 / size, np.float32), devices)


def copy(devices: Sequence[pw.VirtualSlice], size: int) -> Probe:
    """An elementwise operation that reads and writes `size` bytes, on each of the devices at once."""

    def passes(v: Any, turns: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, x: x * 0.5 + 1, v)[:1]

    return everywhere(passes, np.zeros((size // 4,), np.float32), devices)


def everywhere(loop: Callable[[Any, Any], Any], value: Any, devices: Sequence[pw.VirtualSlice]) -> Probe:
    """One turn of a loop on each of the devices at once."""
    values = [put(value, one) for one in devices]
    runs = [compiled(loop, one) for one in devices]
    return looped(lambda turns: [run(*both) for run, *both in zip(runs, values, turns, strict=True)], devices)


# --- between devices --------------------------------------------------------------------------------------------------


def reduction(where: pw.VirtualSlice, size: int) -> Probe:
    """An all-reduce of `size` bytes of each device of a slice."""
    count = len(where.placed.devices)
    value = put(np.zeros((count, size // 4), np.float32), where, P("x"))

    def sums(v: Any, turns: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, x: jax.lax.psum(x, "x") * (1 / count), v)

    inner = jax.shard_map(sums, mesh=where.mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    run = pw.compiled(inner, slice=where, in_specs=(P("x"), P()), out_specs=P("x"))
    return looped(lambda turns: run(value, *turns), [where])


def message(here: pw.VirtualSlice, there: pw.VirtualSlice, size: int, ahead: int) -> Probe:
    """Seconds that a message of `size` bytes takes from two devices that compute and exchange their outputs.

    Each device takes what the other made, against the same with values that stay. With `ahead` 0 it takes them at once,
    and waits for the whole message. With 1 it has a computation to do first, so what is left is what sending and
    receiving take from the devices although they are overlapped.
    """
    work = [spender(one, WORK_S, 1) for one in (here, there)]
    values = [[put(np.zeros((size // 4,), np.float32), one)] for one in (here, there)]

    def exchange(crossed: bool, name: str) -> Any:
        def run(first: Any, second: Any) -> Any:
            made, taken = [], []
            for turn in range(TURNS + ahead):
                if turn < TURNS:
                    made.append((work[0](first, 1), work[1](second, 1)))
                if turn >= ahead:
                    x, y = made[turn - ahead]
                    taken.append((work[0](y if crossed else x, 1), work[1](x if crossed else y, 1)))
            return taken

        return pw.program(run, name=name)

    exchanged, kept = exchange(True, "exchange"), exchange(False, "keep")
    # With 1, a turn of two computations has a message in and one out, and a stage is charged for each computation.
    return Difference(lambda: exchanged(*values), lambda: kept(*values), TURNS * (1 + ahead))


def action(devices: Sequence[pw.VirtualSlice]) -> Probe:
    """Seconds that a launch with as many arrays as a stage has takes from a device: the same work in many launches and
    in few."""
    work = [spender(one, WORK_S / FEWER, ARRAYS) for one in devices]
    values = [[put(np.zeros((2048,), np.float32), one) for _ in range(ARRAYS)] for one in devices]

    def launches(count: int, longer: int, name: str) -> Any:
        def run(values: Any) -> Any:
            for _ in range(count):
                values = [each(own, longer) for each, own in zip(work, values, strict=True)]
            return values

        return pw.program(run, name=name)

    many, few = launches(TURNS * FEWER, 1, "many"), launches(TURNS, FEWER, "few")
    return Difference(lambda: many(values), lambda: few(values), TURNS * (FEWER - 1))


def spender(where: pw.VirtualSlice, duration: float, arrays: int) -> Callable[[Any, int], Any]:
    """A computation on a device that takes some arrays, spends about `duration` s (or a multiple of it), and returns
    them."""

    def spend(values: Any, turns: Any) -> Any:
        start = jnp.full((96, 96), 1 / 96, jnp.float32) + values[0][0]
        spent = jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x @ x), start)[0, 0]
        return [value + 0 * spent for value in values]

    run, value = compiled(spend, where), [put(np.zeros((8,), np.float32), where)] * arrays

    def taken(turns: int) -> float:
        number = put(np.int32(turns), where)
        wait(run(value, number))
        return min(seconds(lambda: run(value, number)) for _ in range(3))

    some = 64
    each = max(taken(4 * some) - taken(some), 1e-6) / (3 * some)
    turns = max(1, round(duration / each))
    numbers = {longer: put(np.int32(turns * longer), where) for longer in (1, FEWER)}
    return lambda values, longer: run(values, numbers[longer])


# --- training steps ---------------------------------------------------------------------------------------------------


class Steps:
    """Training steps of a small GPT on each of the devices at once, each device with a pipeline of one stage.

    Called, it gives the seconds of a step.
    """

    def __init__(self, reference: Reference, devices: Sequence[pw.VirtualSlice], dtype: str) -> None:
        sizes = (reference.layers, reference.hidden, reference.heads, reference.sequence)
        compute = Compute(dtype="float32" if dtype == "float32" else "bfloat16")
        model = Gpt(ModelConfig("gpt", *sizes, vocabulary=VOCABULARY, tied=False), compute)
        schedule = schedules.build("1f1b", 1, reference.microbatches)
        cut = Cut(microbatches=reference.microbatches, examples=reference.examples)
        start = initialise(model, whole(model), 0)
        self.steps, self.states = [], []
        for one in devices:
            layout = on(one, model, cut)
            step = build_step(model, _adamw, layout, schedule, Options(compute=dtype))
            self.steps.append(step)
            self.states.append(step.initial(start))
        self.arrays = len(jax.tree.leaves(self.states[0].params))
        shape = (cut.batch, reference.sequence + 1)
        self.batch = {"tokens": np.random.default_rng(0).integers(0, VOCABULARY, shape).astype(np.int32)}
        self.count = 1
        self()  # compiles
        self.count = max(2, round(0.15 / self()))

    def __call__(self) -> float:
        start = time.perf_counter()
        ends: list[Any] = []
        for _ in range(self.count):
            ends = []
            for place, step in enumerate(self.steps):
                self.states[place], metrics = step(self.states[place], self.batch)
                ends.append(metrics["loss"])
        wait(ends)
        wait([jax.tree.leaves(state.params)[0] for state in self.states])
        return (time.perf_counter() - start) / self.count


def _adamw(decay: Any) -> optax.GradientTransformation:
    return optax.adamw(3e-4, weight_decay=0.1, mask=decay)


def on(where: pw.VirtualSlice, model: Gpt, cut: Cut) -> Layout:
    """A layout of one stage on the device of a slice."""
    place, tried = where.placed.devices[0], []
    try:
        for _ in range(32):  # the resource manager takes the device with the fewest slices
            layout = Layout.of(model, cut, islands=(where.placed.island,))
            if layout.slices[0][0].placed.devices[0] == place:
                return layout
            tried.append(layout)
    finally:
        for layout in tried:
            layout.release()
    raise RuntimeError(f"no slice came to lie on device {place.index} of host {place.host}")
