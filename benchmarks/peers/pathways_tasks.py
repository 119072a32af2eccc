"""Task graphs on this runtime, in two ways.

    tasks    each task is a node of a program, a compiled function on a slice of one device. Edges between tasks in
             different places are transfers that the runtime plans. This is what Task Bench asks of task systems.
    gang     a row of tasks is one node, a compiled function on all devices; edges are one `all_gather` inside it. This
             is how Task Bench's MPI programs are written, one rank for each core, and how JAX programs are.

A program holds STEPS rows; longer graphs are calls of it, one after the other, each with the last row of the call
before. The number of iterations is an argument, so that another duration needs no compilation.

`--no-fusion`: no node is fused with another, so each row is a launch of its own on the devices.
"""

import contextlib
import functools
import sys
from typing import Any

import numpy as np

from benchmarks.peers import task_graphs
from benchmarks.peers.protocol import System, serve
from benchmarks.peers.task_graphs import KERNEL, KERNEL_START, MODULUS, PATTERNS, START, STEPS, WIDTH

MODES = ("tasks", "gang")
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


class PathwaysTasks(System):
    packages = ("jax", "jaxlib", "ray", "grpcio", "numpy")
    payloads = PAYLOADS
    modes = dict.fromkeys(PAYLOADS, MODES)

    def __init__(self, fusion: bool = True) -> None:
        self._fusion = fusion

    def configure(self, hosts: int, devices: int) -> None:
        import jax
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        if hosts * devices != WIDTH:
            raise ValueError(f"a row has {WIDTH} tasks, and there are {hosts * devices} devices")
        self._pw, self._P = pw, P
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(
            pw.init(islands=1, hosts_per_island=hosts, devices_per_host=devices, fusion=self._fusion)
        )
        self._gang = self._stack.enter_context(pw.virtual_slice((WIDTH,), ("x",)))
        self._places = [self._stack.enter_context(pw.virtual_slice((1,), ("x",))) for _ in range(WIDTH)]
        self._tasks = [
            pw.compiled(functools.partial(task, point=p), slice=place, in_specs=P(), out_specs=P())
            for p, place in enumerate(self._places)
        ]
        one = jax.shard_map(
            lambda iterations, v: v + work(iterations, v[0]),
            mesh=self._gang.mesh,
            in_specs=(P(), P("x")),
            out_specs=P("x"),
        )
        self._one_task = pw.compiled(one, slice=self._gang, in_specs=(P(), P("x")), out_specs=P("x"))
        self._programs: dict[tuple[str, str], Any] = {}

    def _row(self, pattern: str, row: int) -> Any:
        import jax

        P = self._P
        spread = jax.shard_map(
            functools.partial(row_of_tasks, pattern=pattern, row=row),
            mesh=self._gang.mesh,
            in_specs=(P(), P("x")),
            out_specs=P("x"),
        )
        return self._pw.compiled(spread, slice=self._gang, in_specs=(P(), P("x")), out_specs=P("x"))

    def _program(self, mode: str, pattern: str) -> Any:
        """A program of STEPS rows: last row -> last row. Of `trivial` it returns all rows, so that none is left out."""
        edges = task_graphs.dependencies
        keep_all = pattern == "trivial"
        rows = [self._row(pattern, row) for row in range(task_graphs.period(pattern))] if mode == "gang" else []

        @self._pw.program
        def gang(iterations: Any, v: Any) -> Any:
            kept = []
            start = v
            for row in range(STEPS):
                v = rows[row % len(rows)](iterations, start if keep_all else v)
                kept.append(v)
            return kept if keep_all else kept[-1:]

        @self._pw.program
        def tasks(iterations: Any, v: Any) -> Any:
            kept = []
            for row in range(STEPS):
                v = [self._tasks[p](iterations[p], *(v[q] for q in edges(pattern, row, p))) for p in range(WIDTH)]
                kept.append(v)
            return kept if keep_all else kept[-1:]

        return gang if mode == "gang" else tasks

    def prepare(self, mode: str, payload: str, count: int, iterations: int) -> None:
        pw, P = self._pw, self._P
        number = np.int32(iterations)
        if mode == "gang" or payload == "calibrate":
            self._iterations: Any = pw.put(number, slice=self._gang, spec=P())
            self._start: Any = pw.put(np.full(WIDTH, START, np.float32), slice=self._gang, spec=P("x"))
        else:
            self._iterations = [pw.put(number, slice=place, spec=P()) for place in self._places]
            self._start = [pw.put(np.float32(START), slice=place, spec=P()) for place in self._places]
        if payload != "calibrate" and (mode, payload) not in self._programs:
            program = self._programs[mode, payload] = self._program(mode, payload)
            np.asarray(program(self._iterations, self._start)[-1])  # compiles
        self._one_task(*self._arguments()).block_until_ready()

    def _arguments(self) -> tuple[Any, Any]:
        pw, P = self._pw, self._P
        return pw.put(np.int32(1), slice=self._gang, spec=P()), pw.put(
            np.zeros(WIDTH, np.float32), slice=self._gang, spec=P("x")
        )

    def run(self, mode: str, payload: str, count: int, iterations: int) -> list[float]:
        """`count` rows of a pattern; for `calibrate`, one task on each worker, all at once."""
        if payload == "calibrate":
            return np.asarray(self._one_task(self._iterations, self._start)).tolist()
        v, program = self._start, self._programs[mode, payload]
        for _ in range(count // STEPS):
            *_, v = program(self._iterations, v)
        if mode == "gang":
            return np.asarray(v).tolist()
        return [float(each) for each in v]

    def release(self, mode: str, payload: str) -> None:
        self._iterations = self._start = None

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    serve(functools.partial(PathwaysTasks, fusion="--no-fusion" not in sys.argv))
