"""Task graphs on dask.distributed: one worker process of one thread for each place of a row.

A graph of all rows is handed over at once, as Task Bench does it, and dask places its tasks as it likes. Its own timers
bound what it can do: it sends messages every 2 ms from a worker, 5 ms from the scheduler, and 10 ms from the client.
"""

import itertools
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

from benchmarks.peers import task_graphs
from benchmarks.peers.protocol import System, serve
from benchmarks.peers.task_graphs import KERNEL, KERNEL_START, PATTERNS, START, WIDTH

PAYLOADS = dict.fromkeys((*PATTERNS, "calibrate"), "x * x + x on 64 float64, in a loop of Python over numpy")


def task(point: int, iterations: int, *inputs: float) -> float:
    """A task as a function of its inputs."""
    x = np.full(KERNEL, KERNEL_START)
    square = np.empty_like(x)
    for _ in range(iterations):
        np.multiply(x, x, out=square)
        np.add(x, square, out=x)
    return task_graphs.value(point, list(inputs)) + (1.0 if x.sum() > 0 else 0.0)


class DaskTasks(System):
    packages = ("dask", "distributed", "numpy")
    payloads = PAYLOADS
    modes = dict.fromkeys(PAYLOADS, ("tasks",))

    def configure(self, hosts: int, devices: int) -> None:
        if hosts * devices != WIDTH:
            raise ValueError(f"a row has {WIDTH} tasks, and there are {hosts * devices} devices")
        self._cluster = LocalCluster(
            n_workers=WIDTH, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        )
        self._client = Client(self._cluster)
        self._client.wait_for_workers(WIDTH)
        self._workers = list(self._client.scheduler_info()["workers"])
        self._runs = itertools.count()

    def prepare(self, mode: str, payload: str, count: int, iterations: int) -> None:
        """Nothing has to be compiled."""

    def run(self, mode: str, payload: str, count: int, iterations: int) -> list[float]:
        """`count` rows of a pattern; for `calibrate`, one task on each worker, all at once."""
        number = next(self._runs)  # or dask would take the results of the run before
        if payload == "calibrate":
            futures = [
                self._client.submit(task, 0, iterations, workers=[worker], pure=False) for worker in self._workers
            ]
            self._client.gather(futures)
            return [START] * WIDTH
        graph: dict[Any, Any] = {}
        for row in range(count):
            for p in range(WIDTH):
                inputs = [(number, row - 1, q) if row else START for q in task_graphs.dependencies(payload, row, p)]
                graph[number, row, p] = (task, p, iterations, *inputs)
        # All tasks of `trivial` are asked for: nothing else needs them.
        rows = range(count) if payload == "trivial" else [count - 1]
        found = self._client.get(graph, [[(number, row, p) for p in range(WIDTH)] for row in rows])
        return found[-1]

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


if __name__ == "__main__":
    serve(DaskTasks())
