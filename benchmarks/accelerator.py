"""One device of this machine, a GPU where there is one: this runtime beside plain JAX on the same device.

A value there and back, from a placed argument and from a NumPy one; a tree of 20 values; a computation a call, in a
stream, a small one and a product of matrices; 256 MiB placed, and computed and fetched; and a step of a model, eight
products and activations in bfloat16. JAX and two runtimes, alike but for `fusion` and `coalesce`, are alive at the same
time, each in a process of its own, and are measured in turn. Values have to be exact; of the model none is looked at.

Run it with `python -m benchmarks.accelerator --json accelerator.json`; it takes about a minute.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.harness import Benchmark, Progress, Result, option
from benchmarks.printing import Table, shows
from benchmarks.workers import Worker, answers

SYSTEMS = ("pathways", "each by itself", "jax")
LEAVES = 20
MODEL_LAYERS = 8


MEASURED = (
    "One device, {device}. Microseconds of: a value there and back ({waits} of each in a measurement); a call in a "
    "stream of {stream}, of {products} products, the last value fetched; the others one at a time. {rounds} rounds "
    "after one to warm up, all systems alive and measured in turn; ratios are of rates, so JAX's time over this "
    "runtime's, round by round."
)


@dataclass(frozen=True)
class Settings:
    waits: int = option(300, "values waited for in one measurement")
    stream: int = option(2000, "calls of one measurement of a stream")
    width: int = option(4096, "rows and columns of the model's matrices")
    mib: int = option(256, "of the big array")
    rounds: int = option(5)

    @property
    def products(self) -> int:
        """Products of one measurement of a stream, each of which takes longer than a small call."""
        return max(self.stream // 4, 1)


SMOKE = Settings(waits=3, stream=20, width=64, mib=1, rounds=1)


class Cases:
    """The cases, on one system.

    Args:
        compiled: makes a function one that runs on the device.
        put: places an array there.
    """

    def __init__(self, compiled: Callable[..., Any], put: Callable[[Any], Any], settings: Settings) -> None:
        import jax
        import jax.numpy as jnp

        def model(weights: Any, rows: Any) -> Any:
            for _ in range(MODEL_LAYERS):
                rows = jax.nn.gelu(rows @ weights)
            return rows

        self._jax, self._put, self._settings = jax, put, settings
        self._step = compiled(lambda v: v + 1)
        self._product = compiled(lambda v: v @ v)
        self._tree = compiled(lambda v: [v + k for k in range(LEAVES)])
        self._model = compiled(model)
        self._zero = put(np.zeros(1, np.float32))
        self._identity = put(np.eye(1024, dtype=np.float32))
        self._bytes = np.arange(settings.mib << 20, dtype=np.uint8)
        self._big = put(self._bytes)
        numbers = np.random.default_rng(0).standard_normal((settings.width, settings.width)) / settings.width**0.5
        self._weights = put(np.asarray(numbers, jnp.bfloat16))
        self._rows = put(np.ones((settings.width, settings.width), jnp.bfloat16))
        self.cases = {
            "value": self._value,
            "value of a NumPy argument": self._argument,
            f"tree of {LEAVES} values": self._leaves,
            "call in a stream": lambda: self._stream(self._step, self._zero, settings.stream),
            "product in a stream": lambda: self._stream(self._product, self._identity, settings.products),
            f"put {settings.mib} MiB": self._placed,
            f"compute and fetch {settings.mib} MiB": self._fetched,
            "step of a model": self._trained,
        }

    def about(self) -> tuple[str, list[str]]:
        """The device, as far as it is known here, and the names of the cases."""
        return "", list(self.cases)

    def microseconds(self, case: str) -> float:
        """Of one call of a case.

        Raises:
            AssertionError: a wrong value.
        """
        return 1e6 * self.cases[case]()

    def _value(self) -> float:
        begun, count = time.perf_counter(), self._settings.waits
        values = [float(np.asarray(self._step(self._zero))[0]) for _ in range(count)]
        return self._of(begun, count, values == [1.0] * count)

    def _argument(self) -> float:
        given = [np.full(1, k, np.float32) for k in range(self._settings.waits)]
        begun = time.perf_counter()
        values = [float(np.asarray(self._step(one))[0]) for one in given]
        return self._of(begun, len(given), values == [k + 1.0 for k in range(len(given))])

    def _leaves(self) -> float:
        begun, count = time.perf_counter(), max(self._settings.waits // 10, 1)
        for _ in range(count):
            found = self._jax.device_get(self._tree(self._zero))
        return self._of(begun, count, [float(one[0]) for one in found] == list(map(float, range(LEAVES))))

    def _stream(self, step: Any, start: Any, count: int) -> float:
        begun, value = time.perf_counter(), start
        for _ in range(count):
            value = step(value)
        found = np.asarray(value)
        expected = np.eye(1024) if found.ndim > 1 else np.full(1, count)
        return self._of(begun, count, np.array_equal(found, expected))

    def _placed(self) -> float:
        begun = time.perf_counter()
        placed = self._put(self._bytes).block_until_ready()
        seconds = time.perf_counter() - begun
        placed.delete()
        return seconds

    def _fetched(self) -> float:
        begun = time.perf_counter()
        found = np.asarray(self._step(self._big))
        return self._of(begun, 1, bool(found[0] == self._bytes[0] + 1) and found.size == self._bytes.size)

    def _trained(self) -> float:
        rows, count = self._rows, 10
        begun = time.perf_counter()
        for _ in range(count):
            rows = self._model(self._weights, rows)
        rows.block_until_ready()
        return self._of(begun, count, True)

    def _of(self, begun: float, count: int, right: bool) -> float:
        seconds = (time.perf_counter() - begun) / count
        if not right:
            raise AssertionError("a wrong value")
        return seconds


class Runtime(Cases):
    """A runtime with its client in this process."""

    def __init__(self, settings: Settings, together: bool) -> None:
        import pathways_ray as pw

        self._stack = contextlib.ExitStack()
        self._session = self._stack.enter_context(pw.init(fusion=together, coalesce=together))
        where = pw.virtual_slice((1,), ("x",))
        super().__init__(lambda f: pw.compiled(f, slice=where), lambda v: pw.put(v, slice=where), settings)

    def about(self) -> tuple[str, list[str]]:
        (island,) = self._session.status()["islands"]
        return island["generation"] or island["platform"], list(self.cases)

    def close(self) -> None:
        self._stack.close()


class Jax(Cases):
    """`jax.jit` in this process, on the first device that JAX finds."""

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        device = jax.devices()[0]
        super().__init__(jax.jit, lambda v: jax.device_put(v, device), settings)


def run(settings: Settings, progress: Progress) -> Result:
    with contextlib.ExitStack() as stack:
        progress.say("starting")
        systems = {
            "pathways": Worker(Runtime, settings, True, daemon=False),
            "each by itself": Worker(Runtime, settings, False, daemon=False),
            "jax": Worker(Jax, settings),
        }
        for worker in systems.values():
            stack.callback(worker.close, 30)
        answers(list(systems.values()))
        device, cases = systems["pathways"].ask("about")
        progress.say(f"on {device}")
        samples = measure.interleaved(
            [(system, case) for case in cases for system in SYSTEMS],
            lambda one: systems[one[0]].ask("microseconds", one[1]),
            settings.rounds,
            1,
        )
    about = {**asdict(settings), "products": settings.products}
    text = MEASURED.format(device=device, **about)
    rows = [{"case": case, **{system: measure.spread(samples[system, case]) for system in SYSTEMS}} for case in cases]
    ratios = [
        {"name": f"{system} / jax, {case}", **measure.paired_ratios(samples["jax", case], samples[system, case])}
        for case in cases
        for system in SYSTEMS[:2]
    ]
    return {"device": device, "measured": text, "rows": rows, "ratios": ratios}


show = shows(
    Table("microseconds", "rows", "case", *(f"{system}:,.0f" for system in SYSTEMS)),
    Table("ratios of rates, round by round", "ratios", "name", ".:.2f"),
)

BENCHMARK = Benchmark("accelerator", __doc__, Settings, SMOKE, run, show)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
