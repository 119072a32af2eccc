"""Task graphs on plain JAX, one process with all devices to itself: what is left without a runtime.

tasks    each task is a call of a jitted function on one device; edges are `jax.device_put`. XLA's CPU client would run
         these loops in the thread that calls them, one after the other, so that four devices had no more than one core;
         they get the same operations to count as on this runtime (`executor/compile/cpu_backend.py`), and run beside
         each other.
gang     each row is a call of a jitted function over all devices, as `pathways_tasks` has it.
fused    all rows of a program are one jitted function.
"""

import os
from collections.abc import Callable
from typing import Any

from benchmarks.peers.pathways_tasks import PAYLOADS, XlaTasks
from benchmarks.peers.protocol import serve
from benchmarks.peers.task_graphs import WIDTH
from pathways_ray.executor.compile.cpu_backend import with_async_cost_hint


class JaxTasks(XlaTasks):
    packages = ("jax", "jaxlib", "numpy")
    modes = dict.fromkeys(PAYLOADS, ("tasks", "gang", "fused"))

    def start(self, hosts: int, devices: int) -> None:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={WIDTH}"
        import jax

        self._jax, self._spec = jax, jax.sharding.PartitionSpec
        self._devices = jax.devices()
        self._mesh = jax.sharding.Mesh(self._devices, ("x",))

    def compiled(self, function: Callable[..., Any], place: int | None) -> Any:
        P = self._spec
        if place is None:
            mapped = self._jax.shard_map(function, mesh=self._mesh, in_specs=(P(), P("x")), out_specs=P("x"))
            return self._jax.jit(mapped)
        hinted = self._jax.jit(with_async_cost_hint(lambda *given: (function(*given),)))
        return lambda *given: hinted(*given)[0]

    def put(self, value: Any, place: int | None, spread: bool = False) -> Any:
        gang = self._jax.NamedSharding(self._mesh, self._spec("x") if spread else self._spec())
        return self._jax.device_put(value, gang if place is None else self._devices[place])

    def moved(self, value: Any, here: int, there: int) -> Any:
        return value if here == there else self._jax.device_put(value, self._devices[there])

    def program(self, rows: Callable[..., Any], mode: str) -> Any:
        return self._jax.jit(rows) if mode == "fused" else rows

    def apart(self, iterations: Any, v: Any, mode: str) -> tuple[Any, Any]:
        return self._jax.lax.optimization_barrier((iterations, v)) if mode == "fused" else (iterations, v)


if __name__ == "__main__":
    serve(JaxTasks())
