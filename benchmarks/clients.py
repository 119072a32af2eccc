"""The processes that the tenants benchmark drives: clients of the runtime, and JAX called directly.

All of them do the same. A *computation* is a gang on all devices that repeats the computation of `systems` n times in a
loop: an all-reduce of a scalar, a division, an addition. Its output is the input of the next one (`v = f(v)`), and the
final value must be the number of repetitions, or the run fails.

A process keeps a bounded number of computations in flight: it issues them in groups, and before it issues a further one
it waits for the last value of a group some way back. It sleeps while it waits. It looks at no other value, so that the
runtime is free to run neighbours as one.

Times are seconds of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.systems import computation, limit_cpu_threads
from pathways_ray.executor.compile.cpu_backend import CORES_VARIABLE, core_of, pinned

GROUPS = 8  # in flight at once: one is waited for while the others keep the devices busy
IN_FLIGHT_S = 0.2  # work in flight: many times what a launch takes to the devices and back, also on a crowded machine
IN_FLIGHT = (16, 512)  # bounds on the computations in flight; a session may have 1,024
CALIBRATION_S = 0.15  # of every measurement on the way to the length of a computation


@dataclass(frozen=True)
class Task:
    """What a process does in one run.

    Args:
        lanes: names of what it runs in turn; a client's are its tenants, JAX has only one.
        steps: repetitions n in a computation.
        start: when all processes begin.
        seconds: for how long it issues computations.
        in_flight: computations without a value, in each lane.
    """

    lanes: tuple[str, ...]
    steps: int
    start: float
    seconds: float
    in_flight: int


@dataclass(frozen=True)
class Outcome:
    """How many computations a process has run, from `began` until the last was over at `ended`.

    `seen` are moments with the number that was known to be over by then.
    """

    computations: int
    began: float
    ended: float
    seen: list[tuple[float, int]] = field(default_factory=list)


def in_flight(length: float, clients: int = 1) -> int:
    """Computations of `length` seconds that each of `clients` keeps in flight; a multiple of GROUPS."""
    least, most = IN_FLIGHT
    return max(least, min(most, round(IN_FLIGHT_S / length / clients))) // GROUPS * GROUPS


def repeated(steps: int, devices: int, v: Any) -> Any:
    """A computation as one device sees it, inside `jax.shard_map`: (1,) -> (1,)."""
    import jax

    return jax.lax.fori_loop(0, steps, lambda _, v: computation(v, devices), v)


@dataclass
class Lane:
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
        self.value = value
        self.count += count

    def check(self, steps: int) -> None:
        value, expected = np.asarray(self.value), self.count * steps
        if not np.array_equal(value, np.full_like(value, expected)):
            raise AssertionError(f"after {expected} steps the value is {value}")


def drive(lanes: Sequence[Lane], task: Task) -> Outcome:
    """Issues computations of all lanes in turn for the task's time, and waits for all of them."""
    group, turns = max(1, task.in_flight // GROUPS), len(lanes)
    for lane in lanes:
        lane.reset()
    waiting: deque[tuple[int, list[Any]]] = deque()
    seen: list[tuple[float, int]] = []
    time.sleep(max(0.0, task.start - time.perf_counter()))
    began = time.perf_counter()
    issued = 0
    while time.perf_counter() < task.start + task.seconds:
        if turns == 1:
            lanes[0].issue(group)
        else:
            for _ in range(group):
                for lane in lanes:
                    lane.issue(1)
        issued += group * turns
        waiting.append((issued, [lane.value for lane in lanes]))
        if len(waiting) == GROUPS:
            over, values = waiting.popleft()
            for value in values:
                value.block_until_ready()
            seen.append((time.perf_counter(), over))
    for lane in lanes:
        lane.value.block_until_ready()
    ended = time.perf_counter()
    for lane in lanes:
        lane.check(task.steps)
        lane.value = None
    return Outcome(issued, began, ended, [*seen, (ended, issued)])


# -- the two kinds of process -----------------------------------------------------------------------------------------


class JaxAlone:
    """JAX on CPU devices of this process, with as many threads as a host of the runtime has."""

    def __init__(self, devices: int) -> None:
        limit_cpu_threads(devices)
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        with pinned(core_of(0, os.environ.get(CORES_VARIABLE, ""))):  # as a host of the runtime
            jax.devices()
        self.devices = devices
        self.mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        self.lanes: dict[int, Lane] = {}

    def lane(self, steps: int) -> Lane:
        import jax
        from jax.sharding import PartitionSpec as P

        if steps not in self.lanes:
            function = functools.partial(repeated, steps, self.devices)
            gang = jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=P("x"), out_specs=P("x")))
            start = jax.device_put(np.zeros(self.devices, np.float32), jax.NamedSharding(self.mesh, P("x")))
            self.lanes[steps] = Lane(gang, start)
        return self.lanes[steps]

    def run(self, task: Task) -> Outcome:
        return drive([self.lane(task.steps)], task)

    def length(self, steps: int, guess: float) -> float:
        """Seconds that a computation of so many steps takes, one after the other, when nothing disturbs it."""
        lane = self.lane(steps)
        lane.reset()
        lane.issue(1)
        lane.check(steps)  # it is compiled now
        found = []
        for _ in range(5):
            task = Task(("",), steps, time.perf_counter(), CALIBRATION_S, in_flight(guess))
            outcome = self.run(task)
            found.append((outcome.ended - outcome.began) / outcome.computations)
        return min(found)

    def calibrate(self, lengths: Sequence[float]) -> list[int]:
        """The steps with which a computation takes about so many seconds."""
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
        self.lanes: dict[tuple[str, int], Lane] = {}

    def numbers(self) -> dict[str, int]:
        """The number of each tenant's session."""
        return {name: session.id for name, session in self.sessions.items()}

    def prepare(self, steps: Sequence[int]) -> None:
        """Connects as each tenant, registers the computations of these lengths, and runs each once."""
        import jax
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        for name, token in self.tokens.items():
            session = self.sessions[name] = self.connect(token, name=name)
            held = session.virtual_slice((self.devices,), ("x",))
            start = pw.put(np.zeros(self.devices, np.float32), slice=held, spec=P("x"))
            for number in steps:
                function = functools.partial(repeated, number, self.devices)
                spread = jax.shard_map(function, mesh=held.mesh, in_specs=P("x"), out_specs=P("x"))
                gang = pw.compiled(spread, slice=held, in_specs=P("x"), out_specs=P("x"))
                # Lowered now: a call would take the session that is connected last.
                lane = self.lanes[name, number] = Lane(launching(gang.lower(start)), start)
                lane.reset()
                lane.issue(1)
                lane.check(number)

    def run(self, task: Task) -> Outcome:
        return drive([self.lanes[name, task.steps] for name in task.lanes], task)


def launching(lowered: Any) -> Callable[[Any], Any]:
    """What calls a program of one argument in the session in which it was lowered."""
    return lambda value: lowered.launch([value])


def serve(kind: Callable[..., Any], settings: dict[str, Any], requests: Connection) -> None:
    """Body of a process: calls methods of a `kind` as it is told to, until the other end closes or dies."""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        try:
            serving = kind(**settings)
        except Exception:
            requests.send((traceback.format_exc(), None))
            return
        requests.send(("", None))
        while True:
            try:
                name, arguments = requests.recv()
            except ConnectionError:
                return
            try:
                reply = ("", getattr(serving, name)(*arguments))
            except Exception:
                reply = (traceback.format_exc(), None)
            requests.send(reply)


class Process:
    """A process that serves a `JaxAlone` or a `Client`; starts at once, `ready` waits for it."""

    def __init__(self, kind: Callable[..., Any], **settings: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._requests, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(kind, settings, theirs), daemon=True)
        self._process.start()
        theirs.close()  # so that a dead process is an end of file here, not a wait

    def tell(self, method: str, *arguments: Any) -> None:
        """Has a method called; `answer` returns what it returned."""
        self._requests.send((method, arguments))

    def answer(self) -> Any:
        failed, reply = self._requests.recv()
        if failed:
            raise RuntimeError(f"a process of the benchmark failed:\n{failed}")
        return reply

    ready = answer

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def close(self) -> None:
        self._requests.close()
        self._process.join()
