"""The payload of every peer that runs JAX: one process of a gang, its devices, and the computation.

    allreduce    v <- allreduce_sum(v) / n + 1    one all-reduce of a scalar over the gang, as in the paper
    noop         v <- v + 1                       no collective: what is left is dispatch
    work-1000    the first, behind 1,000 rounds of work on each device

n is the number of devices; each holds one float32. The division keeps values bounded, so they stay exact. Between
processes the all-reduce goes over gloo; inside one it is XLA's own. The pool of threads in which XLA runs computations
has as many as NPROC says, which the benchmark sets as this runtime does for its hosts.
"""

import functools
import os
import socket
from typing import Any

from benchmarks.peers.protocol import ALLREDUCE, CHAIN, NOOP, START, WORK

JOIN_LIMIT_S = 60  # for all processes of a gang to find each other


def payloads(hosts: int) -> dict[str, str]:
    """The operation of each payload, for a gang of this many processes."""
    return {ALLREDUCE: "psum between processes" if hosts > 1 else "psum in one process", NOOP: "XLA v + 1"}


def free_address() -> str:
    """An address for the gang's first process to listen at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def computation(v: Any, payload: str, n: int) -> Any:
    """One computation as one device sees it, inside `jax.shard_map`: (1,) -> (1,)."""
    import jax

    if payload == NOOP:
        return v + 1.0
    if payload.startswith(WORK):  # the mean of v and v, again and again: v, exactly
        iterations = int(payload.removeprefix(WORK))
        v = jax.lax.fori_loop(0, iterations, lambda _, u: 0.5 * u + 0.5 * v, v)
    total = jax.lax.pcast(jax.lax.psum(v, "x"), "x", to="varying")  # the type a loop can carry; no operation
    return total / n + 1.0


def chain_of_computations(v: Any, payload: str, n: int) -> Any:
    """CHAIN computations, one after the other, as one device sees them: (1,) -> (1,)."""
    import jax

    return jax.lax.fori_loop(0, CHAIN, lambda _, v: computation(v, payload, n), v)


class JaxHost:
    """One process of the gang. The value stays on the devices unless a method returns it.

    Args:
        host, hosts: the number of this process, and of all.
        devices: of this process.
        coordinator: the address of `free_address`, the same for all.
    """

    def __init__(self, host: int, hosts: int, devices: int, coordinator: str) -> None:
        import jax
        import numpy as np

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
        if hosts > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(coordinator, hosts, host, initialization_timeout=JOIN_LIMIT_S)
        # Device threads run on the core of a host of the runtime; not all environments can import `benchmarks.cores`.
        cores, before = os.environ.get("PATHWAYS_CPU_CORES", ""), os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, {int(cores.split(",")[host % len(cores.split(","))])})
        jax.local_devices()
        os.sched_setaffinity(0, before)
        self._jax, self._np = jax, np
        n = hosts * devices
        mesh = jax.make_mesh((n,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")
        self._sharding = jax.NamedSharding(mesh, spec)

        def gang(function: Any, payload: str) -> Any:
            one_device = functools.partial(function, payload=payload, n=n)
            return jax.jit(jax.shard_map(one_device, mesh=mesh, in_specs=spec, out_specs=spec))

        self._start = [START] * devices
        self._step = {payload: gang(computation, payload) for payload in (ALLREDUCE, NOOP)}
        self._fused = {payload: gang(chain_of_computations, payload) for payload in (ALLREDUCE, NOOP)}
        self._gang = gang
        self._value: Any = None
        for payload in (ALLREDUCE, NOOP):  # compile now: all processes must, at the same time
            self.reset()
            self.steps(payload, 1)
            self.fused(payload)
            self.fetch()

    def place(self, value: Any) -> None:
        """Puts this process's part of the value, one number for each device, on its devices."""
        local = self._np.asarray(value, self._np.float32)
        self._value = self._jax.make_array_from_process_local_data(self._sharding, local)

    def reset(self) -> None:
        self.place(self._start)

    def prepare(self, payload: str) -> None:
        """Compiles what is not yet compiled; all processes must, at the same time."""
        if payload not in self._step:
            self._step[payload] = self._gang(computation, payload)
            self.reset()
            self.steps(payload, 1)
            self.wait()

    def steps(self, payload: str, times: int) -> None:
        """Enqueues computations; waits for none."""
        step = self._step[payload]
        for _ in range(times):
            self._value = step(self._value)

    def fused(self, payload: str) -> None:
        """Enqueues one computation that is CHAIN of them."""
        self._value = self._fused[payload](self._value)

    def wait(self) -> None:
        self._value.block_until_ready()

    def fetch(self) -> Any:
        """This process's part of the value, (devices,) float32, when it is there."""
        shards = sorted(self._value.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return self._np.concatenate([self._np.asarray(shard.data) for shard in shards])

    def apply(self, payload: str, value: Any) -> Any:
        """One computation on the value passed in; returns the result."""
        self.place(value)
        self.steps(payload, 1)
        return self.fetch()

    def follow(self, orders: list[str]) -> None:
        """Enqueues the computations of a list of payloads."""
        for payload in orders:
            self.steps(payload, 1)
