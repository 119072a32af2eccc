"""Everyday programs that wait for each value, beside plain JAX: what a turn of each takes.

Each turn calls something and looks at a value of it before the next one: one small computation, three or five in a row,
a training step whose loss is read, an argument from NumPy, a tree that is placed, a value on another island. A turn
that takes some times as long as its neighbours has left the short road between client and host.

Run it with `python -m benchmarks.waits --json waits.json`; it takes about two minutes.
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

WIDTH, LEAVES, PLACED, BIG = 8, 20, 60, 1 << 18
WARM_UP = 3
"""Runs before: whatever repeats itself is measured, composed and compiled meanwhile."""

MEASURED = (
    "One turn of programs whose values are waited for one by one, on {devices} devices of one host, {turns} turns in a "
    "run. {rounds} rounds after {warm} to warm up, both systems alive and measured in turn; all values have to be "
    "bit-equal, and ratios are taken round by round. What crosses islands is a copy to the same devices in JAX."
)

Compile = Callable[..., Callable[..., Any]]
Move = Callable[[Any], Any]


@dataclass(frozen=True)
class Settings:
    devices: tuple[int, ...] = option((1, 4), "of the host, all of one slice")
    turns: int = option(100, "in one measurement")
    rounds: int = option(9)


SMOKE = Settings(devices=(1,), turns=4, rounds=1)


class Turns:
    """The programs on one system.

    Args:
        compiled: makes a function one that runs on the devices; with `apart`, on those of the other island. It is given
            the first argument with `donates`.
        put: places an array (devices, …), one part for each device.
        move: moves an array to the other island.
    """

    def __init__(self, compiled: Compile, put: Move, move: Move, devices: int) -> None:
        shape = (devices, WIDTH)
        self._put = put
        self._add, self._half = compiled(lambda v: v + 1), compiled(lambda v: v * 0.5)
        self._shift = [compiled(f) for f in (lambda v: v + 2, lambda v: v - 1, lambda v: v * 1 + 2)]
        self._both = compiled(lambda v: (v * 0.5 + 1, v * 2))
        self._step, self._step_of_its_own = compiled(_step), compiled(_step, donates=True)
        self._copy = compiled(lambda weights: {name: weight + 0 for name, weight in weights.items()})
        self._there, self._move = compiled(lambda v: v + 1, apart=True), move
        self._start = put(np.zeros(shape, np.float32))
        self._batch = np.arange(devices * WIDTH, dtype=np.float32).reshape(shape) / 8
        self._weights = {f"w{k}": put(self._batch * k) for k in range(LEAVES)}
        self._big = put(np.ones((devices, BIG // devices), np.float32))
        self.programs = {
            "a value": self._value,
            "whether it is there": self._whether_there,
            "three calls, a value": self._three,
            "five calls, a value": self._five,
            "two results, a value of one": self._one_of_two,
            "two results, both values": self._both_of_two,
            f"a training step of {LEAVES} arrays, its loss": self._training,
            "the same, which donates the arrays": self._training_in_place,
            "an argument from NumPy": self._given,
            "an argument that is placed": self._placed,
            f"a tree of {PLACED} arrays that is placed": self._tree,
            "operations, a value": self._operations,
            "a value of 1 MiB": self._of_a_mebibyte,
            "a value on another island": self._elsewhere,
        }

    def names(self) -> list[str]:
        """The programs."""
        return list(self.programs)

    def seconds(self, name: str, turns: int) -> tuple[float, bytes]:
        """The mean time of a turn, and the bytes of the last value."""
        program, value = self.programs[name], self._start
        found: Any = None
        begun = time.perf_counter()
        for _ in range(turns):
            value, found = program(value)
        seconds = (time.perf_counter() - begun) / turns
        return seconds, np.asarray(found).tobytes()

    def _value(self, value: Any) -> tuple[Any, Any]:
        value = self._add(value)
        return value, np.asarray(value)

    def _whether_there(self, value: Any) -> tuple[Any, Any]:
        value = self._add(value).block_until_ready()
        return value, value

    def _three(self, value: Any) -> tuple[Any, Any]:
        for call in self._shift:
            value = call(value)
        return value, np.asarray(value)

    def _five(self, value: Any) -> tuple[Any, Any]:
        for call in (*self._shift, self._half, self._add):
            value = call(value)
        return value, np.asarray(value)

    def _one_of_two(self, value: Any) -> tuple[Any, Any]:
        value, other = self._both(value)
        return value, np.asarray(other)

    def _both_of_two(self, value: Any) -> tuple[Any, Any]:
        value, other = self._both(value)
        return value, np.asarray(value) + np.asarray(other)

    def _training(self, value: Any) -> tuple[Any, Any]:
        state = value if isinstance(value, dict) else self._weights
        state, loss = self._step(state, self._start)
        return state, np.asarray(loss)

    def _training_in_place(self, value: Any) -> tuple[Any, Any]:
        state = value if isinstance(value, dict) else self._copy(self._weights)
        state, loss = self._step_of_its_own(state, self._start)
        return state, np.asarray(loss)

    def _given(self, value: Any) -> tuple[Any, Any]:
        return value, np.asarray(self._add(self._batch))

    def _placed(self, value: Any) -> tuple[Any, Any]:
        return value, np.asarray(self._add(self._put(self._batch)))

    def _tree(self, value: Any) -> tuple[Any, Any]:
        *_, last = [leaf.block_until_ready() for leaf in self._put([self._batch] * PLACED)]
        return value, last

    def _operations(self, value: Any) -> tuple[Any, Any]:
        value = value * 0.5 + 1
        return value, np.asarray(value)

    def _of_a_mebibyte(self, value: Any) -> tuple[Any, Any]:
        return value, np.asarray(self._half(self._big))

    def _elsewhere(self, value: Any) -> tuple[Any, Any]:
        return value, np.asarray(self._there(self._move(self._add(self._start))))


def _step(weights: dict[str, Any], batch: Any) -> tuple[dict[str, Any], Any]:
    loss = sum(weight * 0.5 + batch for weight in weights.values())
    return {name: weight * 0.999 for name, weight in weights.items()}, loss


class Runtime(Turns):
    """The runtime with its client in this process."""

    def __init__(self, devices: int) -> None:
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        self._stack = contextlib.ExitStack()
        self._stack.enter_context(pw.init(islands=2, devices_per_host=devices))
        here, there = (pw.virtual_slice((devices,), ("x",), island=island) for island in (0, 1))

        def compiled(function: Callable[..., Any], apart: bool = False, donates: bool = False) -> Callable[..., Any]:
            where, given = there if apart else here, 0 if donates else ()
            return pw.compiled(function, slice=where, in_specs=P("x"), out_specs=P("x"), donate_argnums=given)

        super().__init__(
            compiled, lambda v: pw.put(v, here, P("x")), lambda v: pw.reshard(v, slice=there, spec=P("x")), devices
        )

    def close(self) -> None:
        self._stack.close()


class Jax(Turns):
    """`jax.jit` with all devices in this process."""

    def __init__(self, devices: int) -> None:
        lying = cores.of_this_process(devices)
        import jax

        def compiled(function: Callable[..., Any], apart: bool = False, donates: bool = False) -> Callable[..., Any]:
            given = 0 if donates else ()
            return jax.jit(function, in_shardings=lying, out_shardings=lying, donate_argnums=given)

        super().__init__(
            compiled, lambda v: jax.device_put(v, lying), lambda v: jax.device_put(v, lying, may_alias=False), devices
        )


def run(settings: Settings, progress: Progress) -> Result:
    rows: list[dict[str, Any]] = []
    for devices in settings.devices:
        progress.say(f"{devices} devices: starting")
        rows += measured(devices, settings)
    text = MEASURED.format(
        devices=" and ".join(map(str, settings.devices)), turns=settings.turns, rounds=settings.rounds, warm=WARM_UP
    )
    return {"measured": text, "rows": rows}


def measured(devices: int, settings: Settings) -> list[dict[str, Any]]:
    """Microseconds of a turn of each program on both systems, and JAX's as a part of the runtime's.

    Raises:
        AssertionError: the two came to other bits.
    """
    with contextlib.ExitStack() as stack:
        systems = {"pathways": Worker(Runtime, devices, daemon=False), "jax": Worker(Jax, devices)}
        for worker in systems.values():
            stack.callback(worker.close, 30)
        answers(list(systems.values()))
        names: Sequence[str] = systems["jax"].ask("names")
        values: dict[str, bytes] = {}

        def microseconds(case: tuple[str, str]) -> float:
            system, name = case
            seconds, value = systems[system].ask("seconds", name, settings.turns)
            if values.setdefault(name, value) != value:
                raise AssertionError(f"{name}: {system} came to other bits")
            return 1e6 * seconds

        cases = [(system, name) for name in names for system in systems]
        samples = measure.interleaved(cases, microseconds, settings.rounds, WARM_UP)
        return [
            {
                "devices": devices,
                "program": name,
                "pathways_us": measure.spread(samples["pathways", name]),
                "jax_us": measure.spread(samples["jax", name]),
                "of_jax": measure.paired_ratios(samples["jax", name], samples["pathways", name]),
            }
            for name in names
        ]


show = shows(
    Table("a turn, us; JAX's rate is 1", "rows", "devices", "program", "pathways_us", "jax_us", "of_jax:.2f"),
)

BENCHMARK = Benchmark("waits", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
