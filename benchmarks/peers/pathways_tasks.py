"""Task graphs on this runtime, in two ways.

    tasks    each task is a node of a program, a compiled function on a slice of one device. Edges between tasks in
             different places are transfers that the runtime plans. This is what Task Bench asks of task systems.
    gang     a row of tasks is one node, a compiled function on all devices; edges are one `all_gather` inside it. This
             is how Task Bench's MPI programs are written, one rank for each core, and how JAX programs are.

A program holds STEPS rows; longer graphs are calls of it, one after the other, each with the last row of the call
before. The number of iterations is an argument, so that another duration needs no compilation.

`--no-fusion`: no node is fused with another and each call is a message, so each row is a launch of its own on the
devices.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers import task_graphs
from benchmarks.peers.protocol import System, serve
from benchmarks.peers.task_graphs import KERNEL, KERNEL_START, MODULUS, PATTERNS, START, STEPS, WIDTH

PAYLOADS = dict.fromkeys((*PATTERNS, "calibrate"), "x * x + x on 64 float32, in a loop of XLA")


def work(iterations: Any, seed: Any) -> Any:
    """A task's work: 0.0, but the compiler cannot know. `seed` makes it depend on the inputs, so nothing is shared."""
    import jax
    import jax.numpy as jnp

    x = jnp.full(KERNEL, KERNEL_START, jnp.float32) - 1e-6 * seed
    x = jax.lax.fori_loop(0, iterations, lambda _, x: x * x + x, x)
    return jnp.where(jnp.sum(x) > 0, 1.0, 0.0)


def task(iterations: Any, *inputs: Any, point: int) -> Any:
    """A task as a function of its inputs: scalars."""
    total = 1.0 + point + sum((k + 1) * each for k, each in enumerate(inputs))
    return total % MODULUS + work(iterations, inputs[0] if inputs else 0.0)


def row_of_tasks(iterations: Any, v: Any, pattern: str, row: int) -> Any:
    """A row as one device of the gang sees it, inside `jax.shard_map`: (1,) -> (1,)."""
    import jax
    import jax.numpy as jnp

    here = jax.lax.axis_index("x")
    wanted = [task_graphs.dependencies(pattern, row, p) for p in range(WIDTH)]
    total = 1.0 + here + 0.0 * v
    if any(wanted):
        factors = jnp.array([[q.index(p) + 1.0 if p in q else 0.0 for p in range(WIDTH)] for q in wanted])  # [to][from]
        total = total + jnp.sum(factors[here] * jax.lax.all_gather(v, "x", tiled=True))
    return total % MODULUS + work(iterations, v[0])


class XlaTasks(System):
    """Task graphs of functions that XLA compiles. A place is None, the gang, or the number of one device in it."""

    payloads = PAYLOADS
    modes = dict.fromkeys(PAYLOADS, ("tasks", "gang"))

    def configure(self, hosts: int, devices: int) -> None:
        if hosts * devices != WIDTH:
            raise ValueError(f"a row has {WIDTH} tasks, and there are {hosts * devices} devices")
        self._programs: dict[tuple[str, str], Any] = {}
        self.start(hosts, devices)
        self._tasks = [self.compiled(functools.partial(task, point=p), p) for p in range(WIDTH)]
        self._one_task = self.compiled(lambda iterations, v: v + work(iterations, v[0]), None)

    def start(self, hosts: int, devices: int) -> None:
        """Starts the system."""
        raise NotImplementedError

    def compiled(self, function: Callable[..., Any], place: int | None) -> Any:
        """A function of the number of iterations and of values, for one device, or mapped over the gang."""
        raise NotImplementedError

    def put(self, value: Any, place: int | None, spread: bool = False) -> Any:
        """A value at a place; in the gang each device has all of it, or a part of it."""
        raise NotImplementedError

    def moved(self, value: Any, here: int, there: int) -> Any:
        """A value of one device, where a task on another can take it."""
        raise NotImplementedError

    def program(self, rows: Callable[..., Any], mode: str) -> Any:
        """A function that calls what is compiled, as the system's users have it in this mode."""
        raise NotImplementedError

    def _program(self, mode: str, pattern: str) -> Any:
        """A program of STEPS rows: last row -> last row. Of `trivial` it returns all rows, so that none is left out."""
        edges, keep_all, period = task_graphs.dependencies, pattern == "trivial", task_graphs.period(pattern)
        gangs = [functools.partial(row_of_tasks, pattern=pattern, row=row) for row in range(period)]
        rows = [] if mode == "tasks" else [self.compiled(gang, None) for gang in gangs]

        def gang(iterations: Any, start: Any) -> Any:
            kept, v = [], start
            for row in rows * (STEPS // period):
                v = row(*self.apart(iterations, start if keep_all else v, mode))
                kept.append(v)
            return kept if keep_all else kept[-1:]

        def tasks(iterations: Any, v: Any) -> Any:
            kept = []
            for row in range(STEPS):
                inputs = [[self.moved(v[q], q, p) for q in edges(pattern, row, p)] for p in range(WIDTH)]
                v = [self._tasks[p](iterations[p], *inputs[p]) for p in range(WIDTH)]
                kept.append(v)
            return kept if keep_all else kept[-1:]

        return self.program(tasks if mode == "tasks" else gang, mode)

    def apart(self, iterations: Any, v: Any, mode: str) -> tuple[Any, Any]:
        """The arguments of a row, so that it stays a computation of its own."""
        return iterations, v

    def prepare(self, mode: str, payload: str, count: int, iterations: int) -> None:
        number = np.int32(iterations)
        if mode != "tasks" or payload == "calibrate":
            self._iterations: Any = self.put(number, None)
            self._start: Any = self.put(np.full(WIDTH, START, np.float32), None, spread=True)
        else:
            self._iterations = [self.put(number, p) for p in range(WIDTH)]
            self._start = [self.put(np.float32(START), p) for p in range(WIDTH)]
        if payload != "calibrate" and (mode, payload) not in self._programs:
            program = self._programs[mode, payload] = self._program(mode, payload)
            np.asarray(program(self._iterations, self._start)[-1])  # compiles
        np.asarray(
            self._one_task(self.put(np.int32(1), None), self.put(np.zeros(WIDTH, np.float32), None, spread=True))
        )

    def run(self, mode: str, payload: str, count: int, iterations: int) -> list[float]:
        """`count` rows of a pattern; for `calibrate`, one task on each worker, all at once."""
        if payload == "calibrate":
            return np.asarray(self._one_task(self._iterations, self._start)).tolist()
        v, program = self._start, self._programs[mode, payload]
        for _ in range(count // STEPS):
            *_, v = program(self._iterations, v)
        return [float(each) for each in v] if mode == "tasks" else np.asarray(v).tolist()

    def release(self, mode: str, payload: str) -> None:
        self._iterations = self._start = None


class PathwaysTasks(XlaTasks):
    packages = ("jax", "jaxlib", "ray", "grpcio", "numpy")

    def __init__(self, fusion: bool = True) -> None:
        self._fusion = fusion

    def start(self, hosts: int, devices: int) -> None:
        import pathways_ray as pw

        self._pw, self._stack = pw, contextlib.ExitStack()
        started = pw.init(hosts_per_island=hosts, devices_per_host=devices, fusion=self._fusion, coalesce=self._fusion)
        self._stack.enter_context(started)
        self._gang = self._stack.enter_context(pw.virtual_slice((WIDTH,), ("x",)))
        self._places = [self._stack.enter_context(pw.virtual_slice((1,), ("x",))) for _ in range(WIDTH)]

    def compiled(self, function: Callable[..., Any], place: int | None) -> Any:
        import jax
        from jax.sharding import PartitionSpec as P

        if place is not None:
            return self._pw.compiled(function, slice=self._places[place], in_specs=P(), out_specs=P())
        given, made = (P(), P("x")), P("x")
        mapped = jax.shard_map(function, mesh=self._gang.mesh, in_specs=given, out_specs=made)
        return self._pw.compiled(mapped, slice=self._gang, in_specs=given, out_specs=made)

    def put(self, value: Any, place: int | None, spread: bool = False) -> Any:
        from jax.sharding import PartitionSpec as P

        where = self._gang if place is None else self._places[place]
        return self._pw.put(value, slice=where, spec=P("x") if spread else P())

    def moved(self, value: Any, here: int, there: int) -> Any:
        return value  # the runtime plans the transfer

    def program(self, rows: Callable[..., Any], mode: str) -> Any:
        return self._pw.program(rows)

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    serve(PathwaysTasks(fusion="--no-fusion" not in sys.argv))
