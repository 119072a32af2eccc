"""Loops of several programs in turn: `x = f(x); x = g(x); x = h(x)`, with calls that leave as one and without.

Three loops, none of whose launches is waited for but the last: of three small programs; of three programs of which one
takes another argument in each round (a batch that was placed before); and a training step of two programs, gradient and
update, with another batch in each round. Two runtimes are alive at the same time, alike but for `coalesce`: in the
second each call is a message of its own. Beside them the same calls of `jax.jit` in one process that owns the devices.
All values have to be bit-equal.

Run it with `python -m benchmarks.loops --json loops.json`; it takes about two minutes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import cores, measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker, answers

SYSTEMS = ("coalesced", "each by itself", "jax")
LOOPS = ("three programs", "another argument in each round", "a training step of two programs")
RATE = 0.05
WIDTH = 16
VARIED = 8
"""Arguments that take turns."""

WARM_UP = 3
"""Runs before: repeated rounds are measured, composed and compiled meanwhile."""

MEASURED = (
    "Calls of several programs in turn on {devices} devices of one host, each on what the one before gave, {rounds_in} "
    "rounds of them, the last value fetched and compared bit by bit. {rounds} rounds after {warm} to warm up, all "
    "systems alive and measured in turn; ratios are taken round by round."
)


@dataclass(frozen=True)
class Settings:
    devices: tuple[int, ...] = option((1, 4), "of the host, all of one slice")
    turns: int = option(2000, "rounds of calls in one measurement")
    rounds: int = option(7)


SMOKE = Settings(devices=(1,), turns=40, rounds=1)

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Place = Callable[[Any], Any]


class Loops:
    """The loops on one system.

    Args:
        compiled: makes a function one that runs on the devices.
        put: places a float32 array (devices, …), one part for each device.
    """

    def __init__(self, compiled: Compile, put: Place, devices: int) -> None:
        self._shape = (devices, WIDTH)
        self._put = put
        self._chain = [compiled(f) for f in (lambda v: v + 2, lambda v: v - 1, lambda v: v * 1 + 2)]
        self._scale, self._add = compiled(lambda v: v * 0.5), compiled(lambda v, batch: v + batch)
        self._shift = compiled(lambda v: v + 1)
        self._gradient = compiled(_gradient)
        self._update = compiled(lambda weights, gradient: weights - RATE * gradient)
        numbers = np.arange(devices * WIDTH, dtype=np.float32).reshape(self._shape) / 8
        self._start = put(np.zeros(self._shape, np.float32))
        self._batches = [put(np.roll(numbers, k)) for k in range(VARIED)]

    def seconds(self, loop: str, turns: int) -> tuple[float, bytes]:
        """The time of so many rounds, and the bytes of the last value."""
        run = dict(zip(LOOPS, (self._three, self._varied, self._training), strict=True))[loop]
        begun = time.perf_counter()
        found = np.asarray(run(turns))
        return time.perf_counter() - begun, found.tobytes()

    def _three(self, turns: int) -> Any:
        value, chain = self._start, self._chain
        for _ in range(turns):
            for step in chain:
                value = step(value)
        return value

    def _varied(self, turns: int) -> Any:
        value, batches = self._start, self._batches
        for turn in range(turns):
            value = self._shift(self._add(self._scale(value), batches[turn % VARIED]))
        return value

    def _training(self, turns: int) -> Any:
        weights, batches = self._start, self._batches
        for turn in range(turns):
            gradient = self._gradient(weights, batches[turn % VARIED])
            weights = self._update(weights, gradient)
        return weights


def _gradient(weights: Any, batch: Any) -> Any:
    return 2 * batch * (batch * weights - 1) / WIDTH


class Runtime(Loops):
    """A runtime with its client in this process."""

    def __init__(self, devices: int, coalesce: bool) -> None:
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(pw.init(devices_per_host=devices, coalesce=coalesce))
        where = pw.virtual_slice((devices,), ("x",))
        super().__init__(
            lambda f: pw.compiled(f, slice=where, in_specs=P("x"), out_specs=P("x")),
            lambda v: pw.put(v, where, P("x")),
            devices,
        )

    def close(self) -> None:
        self._stack.close()


class Jax(Loops):
    """`jax.jit` with all devices in this process."""

    def __init__(self, devices: int) -> None:
        lying = cores.of_this_process(devices)
        import jax

        super().__init__(
            lambda f: jax.jit(f, in_shardings=lying, out_shardings=lying), lambda v: jax.device_put(v, lying), devices
        )


def run(settings: Settings, progress: Progress) -> Result:
    rows: list[dict[str, Any]] = []
    ratios: list[dict[str, Any]] = []
    for devices in settings.devices:
        progress.say(f"{devices} devices: starting")
        samples = measured(devices, settings)
        for loop in LOOPS:
            for system in SYSTEMS:
                one = {"devices": devices, "loop": loop, "system": system}
                rows.append({**one, "calls_per_second": measure.spread(samples[system, loop])})
            for under in SYSTEMS[1:]:
                pair = measure.paired_ratios(samples[SYSTEMS[0], loop], samples[under, loop])
                ratios.append({"name": f"coalesced / {under}, {loop}, {devices} devices", **pair})
            pair = measure.paired_ratios(samples["each by itself", loop], samples["jax", loop])
            ratios.append({"name": f"each by itself / jax, {loop}, {devices} devices", **pair})
    text = MEASURED.format(
        devices=" and ".join(map(str, settings.devices)), rounds_in=settings.turns, rounds=settings.rounds, warm=WARM_UP
    )
    return {"measured": text, "rows": rows, "ratios": ratios}


def measured(devices: int, settings: Settings) -> dict[tuple[str, str], list[float]]:
    """Calls a second of each loop on each system, by rounds.

    Raises:
        AssertionError: two systems came to other bits.
    """
    with contextlib.ExitStack() as stack:
        systems = {
            "coalesced": Worker(Runtime, devices, True, daemon=False),
            "each by itself": Worker(Runtime, devices, False, daemon=False),
            "jax": Worker(Jax, devices),
        }
        for worker in systems.values():
            stack.callback(worker.close, 30)
        answers(list(systems.values()))
        values: dict[str, bytes] = {}

        def rate(case: tuple[str, str]) -> float:
            system, loop = case
            seconds, value = systems[system].ask("seconds", loop, settings.turns)
            if values.setdefault(loop, value) != value:
                raise AssertionError(f"{loop}: {system} came to other bits than {SYSTEMS[0]}")
            return settings.turns * (2 if loop == LOOPS[2] else 3) / seconds

        cases: Sequence[tuple[str, str]] = [(system, loop) for loop in LOOPS for system in SYSTEMS]
        return measure.interleaved(cases, rate, settings.rounds, WARM_UP)


show = shows(
    Table("calls a second", "rows", "devices", "loop", "system", "calls_per_second"),
    Table("ratios, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark("loops", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
