"""The processes that the tenants benchmark drives: clients of the runtime, and JAX called directly.

All of them do the same. A *computation* is a gang on all devices that repeats the computation of `peers.jax_host` n
times in a loop: an all-reduce of a scalar, a division, an addition. Its output is the input of the next one
(`v = f(v)`), and the final value must be the number of repetitions, or the run fails.

A process keeps a bounded number of computations in flight: it issues them in groups, and before it issues a further one
it waits for the last value of a group some way back. It sleeps while it waits. It looks at no other value, so that the
runtime is free to run neighbours as one.

Times are seconds of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import cores
from benchmarks.peers.jax_host import computation
from benchmarks.peers.protocol import ALLREDUCE

GROUPS = 8  # in flight at once: one is waited for while the others keep the devices busy
IN_FLIGHT_S = 0.2  # work in flight: many times what a launch takes to the devices and back, also on a crowded machine
IN_FLIGHT = (16, 512)  # bounds on the computations in flight; a session may have 1,024
CALIBRATION_S = 0.15  # of every measurement on the way to the length of a computation


@dataclass(frozen=True)
class Task:
    """The work of a process in one run.

    Args:
        series: names of what it runs in turn; a client's are its tenants, JAX has only one.
        steps: repetitions n in a computation.
        start: when all processes begin.
        seconds: for how long it issues computations.
        in_flight: computations without a value, in each series.
    """

    series: tuple[str, ...]
    steps: int
    start: float
    seconds: float
    in_flight: int


@dataclass(frozen=True)
class Outcome:
    """The number of computations that a process has run, from `began` until the last was over at `ended`.

    `seen` are moments with the number that was known to be over by then.
    """

    computations: int
    began: float
    ended: float
    seen: list[tuple[float, int]] = field(default_factory=list)


def in_flight(length: float, clients: int = 1) -> int:
    """Computations of `length` seconds that each of `clients` keeps in flight; a multiple of GROUPS."""
    lower, upper = IN_FLIGHT
    return max(lower, min(upper, round(IN_FLIGHT_S / length / clients))) // GROUPS * GROUPS


def spread(steps: int, devices: int, mesh: Any) -> Any:
    """A computation over all devices of a mesh: (devices,) -> (devices,)."""
    import jax
    from jax.sharding import PartitionSpec as P

    def repeated(v: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, v: computation(v, ALLREDUCE, devices), v)

    return jax.shard_map(repeated, mesh=mesh, in_specs=P("x"), out_specs=P("x"))


@dataclass
class Series:
    """`v = f(v)`, over and over, from a value of zeros."""

    function: Callable[[Any], Any]
    start: Any
    value: Any = None
    count: int = 0

    def reset(self) -> None:
        self.value, self.count = self.start, 0

    def issue(self, count: int) -> None:
        """`count` more computations."""
        function, value = self.function, self.value
        for _ in range(count):
            value = function(value)
        self.value, self.count = value, self.count + count

    def try_out(self, steps: int) -> None:
        """Runs one computation, which compiles it."""
        self.reset()
        self.issue(1)
        self.check(steps)

    def check(self, steps: int) -> None:
        value, expected = np.asarray(self.value), self.count * steps
        if not np.array_equal(value, np.full_like(value, expected)):
            raise AssertionError(f"after {expected} steps the value is {value}")


def drive(all_series: list[Series], task: Task) -> Outcome:
    """Issues computations of all series in turn for the task's time, and waits for all of them."""
    group, turns = max(1, task.in_flight // GROUPS), len(all_series)
    for one in all_series:
        one.reset()
    waiting: deque[tuple[int, list[Any]]] = deque()
    seen: list[tuple[float, int]] = []
    time.sleep(max(0.0, task.start - time.perf_counter()))
    began = time.perf_counter()
    issued = 0
    while time.perf_counter() < task.start + task.seconds:
        if turns == 1:
            all_series[0].issue(group)
        for one in all_series * group if turns > 1 else ():
            one.issue(1)
        issued += group * turns
        waiting.append((issued, [one.value for one in all_series]))
        if len(waiting) == GROUPS:
            over, values = waiting.popleft()
            for value in values:
                value.block_until_ready()
            seen.append((time.perf_counter(), over))
    for one in all_series:
        one.value.block_until_ready()
    ended = time.perf_counter()
    for one in all_series:
        one.check(task.steps)
        one.value = None
    return Outcome(issued, began, ended, [*seen, (ended, issued)])


# -- the two kinds of process -----------------------------------------------------------------------------------------


class JaxAlone:
    """JAX on CPU devices of this process, with as many threads as a host of the runtime has."""

    def __init__(self, devices: int) -> None:
        if threads := cores.threads(devices):
            os.environ["NPROC"] = threads  # before JAX makes its devices
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        with cores.on_listed_core(0):
            jax.devices()
        self.devices = devices
        self.mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        self.series: dict[int, Series] = {}

    def one(self, steps: int) -> Series:
        import jax
        from jax.sharding import PartitionSpec as P

        if steps not in self.series:
            gang = jax.jit(spread(steps, self.devices, self.mesh))
            start = jax.device_put(np.zeros(self.devices, np.float32), jax.NamedSharding(self.mesh, P("x")))
            self.series[steps] = Series(gang, start)
        return self.series[steps]

    def run(self, task: Task) -> Outcome:
        return drive([self.one(task.steps)], task)

    def length(self, steps: int, guess: float) -> float:
        """Seconds of a computation with these steps, one after the other, when nothing disturbs it."""
        one = self.one(steps)
        one.try_out(steps)
        tasks = (Task(("",), steps, time.perf_counter(), CALIBRATION_S, in_flight(guess)) for _ in range(5))
        return min((outcome.ended - outcome.began) / outcome.computations for outcome in map(self.run, tasks))

    def calibrate(self, lengths: Sequence[float]) -> list[int]:
        """The steps of computations that take about these seconds."""
        step = self.length(256, 0.01) / 256
        found = []
        for length in lengths:
            steps = max(1, round(length / step))
            found.append(max(1, round(steps * length / self.length(steps, length))))
        return found


class Client:
    """A client process of the runtime, with a session for each of its tenants."""

    def __init__(self, url: str, tokens: dict[str, str], devices: int) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")
        import pathways_ray as pw

        self.connect = functools.partial(pw.connect, url, timeout=60.0)
        self.tokens, self.devices = tokens, devices
        self.sessions: dict[str, Any] = {}
        self.series: dict[tuple[str, int], Series] = {}

    def numbers(self) -> dict[str, int]:
        """The number of each tenant's session."""
        return {name: session.id for name, session in self.sessions.items()}

    def prepare(self, steps: Sequence[int]) -> None:
        """Connects as each tenant, registers the computations of these lengths, and runs each once."""
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        for name, token in self.tokens.items():
            session = self.sessions[name] = self.connect(token, name=name)
            devices = session.virtual_slice((self.devices,), ("x",))
            start = pw.put(np.zeros(self.devices, np.float32), slice=devices, spec=P("x"))
            for number in steps:
                function = spread(number, self.devices, devices.mesh)
                gang = pw.compiled(function, slice=devices, in_specs=P("x"), out_specs=P("x"))
                # Lowered now: a call would take the session that is connected last.
                one = self.series[name, number] = Series(launching(gang.lower(start)), start)
                one.try_out(number)

    def run(self, task: Task) -> Outcome:
        return drive([self.series[name, task.steps] for name in task.series], task)


def launching(lowered: Any) -> Callable[[Any], Any]:
    """A call of a program of one argument, in the session in which it was lowered."""
    return lambda value: lowered.program.launch([value])
