"""Task graphs on plain JAX, one process with all devices to itself: what is left without a runtime.

tasks    each task is a call of a jitted function on one device; edges are `jax.device_put`.
gang     each row is a call of a jitted function over all devices, as `pathways_tasks` has it.
fused    all rows of a program are one jitted function.
"""

import functools
import os
from typing import Any

import numpy as np

from benchmarks.peers import task_graphs
from benchmarks.peers.pathways_tasks import PAYLOADS, row_of_tasks, task, work
from benchmarks.peers.protocol import System, serve
from benchmarks.peers.task_graphs import START, STEPS, WIDTH

MODES = ("tasks", "gang", "fused")


class JaxTasks(System):
    packages = ("jax", "jaxlib", "numpy")
    payloads = PAYLOADS
    modes = dict.fromkeys(PAYLOADS, MODES)

    def configure(self, hosts: int, devices: int) -> None:
        if hosts * devices != WIDTH:
            raise ValueError(f"a row has {WIDTH} tasks, and there are {hosts * devices} devices")
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={WIDTH}"
        import jax
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        self._devices = jax.devices()
        self._mesh = Mesh(np.array(self._devices), ("x",))
        self._same, self._spread = NamedSharding(self._mesh, P()), NamedSharding(self._mesh, P("x"))
        self._tasks = [jax.jit(functools.partial(task, point=p)) for p in range(WIDTH)]
        self._one_task = self._on_all(lambda iterations, v: v + work(iterations, v[0]))
        self._programs: dict[tuple[str, str], Any] = {}

    def _on_all(self, run: Any) -> Any:
        import jax
        from jax.sharding import PartitionSpec as P

        return jax.jit(jax.shard_map(run, mesh=self._mesh, in_specs=(P(), P("x")), out_specs=P("x")))

    def _program(self, mode: str, pattern: str) -> Any:
        """STEPS rows: last row -> last row. Of `trivial` it returns all rows, so that none is left out."""
        import jax

        keep_all = pattern == "trivial"
        period = task_graphs.period(pattern)
        rows = [self._on_all(functools.partial(row_of_tasks, pattern=pattern, row=row)) for row in range(period)]

        def gang(iterations: Any, start: Any) -> Any:
            kept, v = [], start
            for row in rows * (STEPS // period):
                given = (iterations, start if keep_all else v)
                # Rows of one computation stay separate, as they do when each is a call.
                v = row(*(jax.lax.optimization_barrier(given) if mode == "fused" else given))
                kept.append(v)
            return kept if keep_all else kept[-1:]

        def tasks(iterations: Any, v: Any) -> Any:
            for row in range(STEPS):
                v = [
                    self._tasks[p](
                        iterations[p],
                        *(
                            v[q] if q == p else jax.device_put(v[q], self._devices[p])
                            for q in task_graphs.dependencies(pattern, row, p)
                        ),
                    )
                    for p in range(WIDTH)
                ]
            return [v]

        return {"tasks": tasks, "gang": gang, "fused": jax.jit(gang)}[mode]

    def prepare(self, mode: str, payload: str, count: int, iterations: int) -> None:
        import jax

        number = np.int32(iterations)
        if mode != "tasks" or payload == "calibrate":
            self._iterations: Any = jax.device_put(number, self._same)
            self._start: Any = jax.device_put(np.full(WIDTH, START, np.float32), self._spread)
        else:
            self._iterations = [jax.device_put(number, device) for device in self._devices]
            self._start = [jax.device_put(np.float32(START), device) for device in self._devices]
        if payload != "calibrate" and (mode, payload) not in self._programs:
            program = self._programs[mode, payload] = self._program(mode, payload)
            jax.block_until_ready(program(self._iterations, self._start))  # compiles
        self._one_task(
            jax.device_put(np.int32(1), self._same), jax.device_put(np.zeros(WIDTH, np.float32), self._spread)
        )

    def run(self, mode: str, payload: str, count: int, iterations: int) -> list[float]:
        """`count` rows of a pattern; for `calibrate`, one task on each worker, all at once."""
        if payload == "calibrate":
            return np.asarray(self._one_task(self._iterations, self._start)).tolist()
        v, program = self._start, self._programs[mode, payload]
        for _ in range(count // STEPS):
            *_, v = program(self._iterations, v)
        if mode == "tasks":
            return [float(each) for each in v]
        return np.asarray(v).tolist()

    def release(self, mode: str, payload: str) -> None:
        self._iterations = self._start = None


if __name__ == "__main__":
    serve(JaxTasks)
