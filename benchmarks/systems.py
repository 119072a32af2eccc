"""The systems that the dispatch benchmark compares, each running the same computation on one host with 4 CPU devices.

The computation: one all-reduce of a scalar over the gang, one division, one scalar addition; its output feeds the next.

    v <- allreduce_sum(v) / 4 + 1

The division keeps values bounded, so that after k computations v is exactly k in float32, which is checked every time.
v is held as a float32 array (4,), one scalar on each device.

Every system has the same three calls. Each issues k computations without waiting in between, fetches the last value and
returns it. They differ in what one call of the user's program holds:

    opbyop(k)    one computation: k calls
    chained(k)   128 nodes, each one computation: k / 128 calls
    fused(k)     one node that holds 128 computations: k / 128 calls

A system whose `modes` leave one out has no such thing.
"""

import contextlib
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

DEVICES = 4
CHAIN = 128  # computations per call of `chained` and `fused`, as in the paper
START = np.zeros(DEVICES, np.float32)


class System(Protocol):
    """What the benchmark asks of a system: timed runs, one at a time."""

    name: str
    modes: tuple[str, ...]

    def seconds(self, mode: str, k: int) -> float:
        """Runs `mode` for k computations, checks the result, and returns the time from first call to fetched value."""
        ...

    def close(self) -> None: ...


def timed(system: Any, mode: str, k: int) -> float:
    """Seconds of `system.mode(k)`, which must return k for every device."""
    start = time.perf_counter()
    value = getattr(system, mode)(k)
    seconds = time.perf_counter() - start
    expected = np.full(DEVICES, k, np.float32)
    if not np.array_equal(value, expected):
        raise AssertionError(f"{system.name} {mode}: after {k} computations the value is {value}, not {expected}")
    return seconds


def limit_cpu_threads(devices: int = DEVICES) -> None:
    """Sets the size of XLA's CPU thread pool as the runtime's hosts do; call it before JAX makes its devices.

    The pool has one thread per core unless NPROC says otherwise. A collective blocks one thread per device, so 4
    devices on fewer cores would wait for each other for ever.
    """
    os.environ["NPROC"] = str(max(8, 2 * devices))


def computation(v: Any, devices: int = DEVICES) -> Any:
    """The computation as one device sees it, inside `jax.shard_map`: (1,) -> (1,)."""
    import jax

    total = jax.lax.pcast(jax.lax.psum(v, "x"), "x", to="varying")  # the type a loop can carry; no operation
    return total / devices + 1.0


def chain_of_computations(v: Any) -> Any:
    """CHAIN computations, one after the other, as one device sees them: (1,) -> (1,)."""
    import jax

    return jax.lax.fori_loop(0, CHAIN, lambda _, v: computation(v), v)


# -- Pathways ---------------------------------------------------------------------------------------------------------


class Pathways:
    """This runtime, on the session that is running, or one of its own."""

    name = "pathways"
    modes = ("opbyop", "chained", "fused")

    def __init__(self, reuse_session: bool = False) -> None:
        import jax
        from jax.sharding import PartitionSpec as P

        import pathways_ray as pw

        self._held = contextlib.ExitStack()
        if not reuse_session:
            self._held.enter_context(pw.init(islands=1, hosts_per_island=1, devices_per_host=DEVICES))
        devices = self._held.enter_context(pw.virtual_slice((DEVICES,), ("x",)))

        def gang(function: Any) -> Any:
            spread = jax.shard_map(function, mesh=devices.mesh, in_specs=P("x"), out_specs=P("x"))
            return pw.compiled(spread, slice=devices, in_specs=P("x"), out_specs=P("x"))

        self._step, self._fused = gang(computation), gang(chain_of_computations)
        self._start = pw.put(START, slice=devices, spec=P("x"))

        @pw.program
        def chain(v: Any) -> Any:
            for _ in range(CHAIN):
                v = self._step(v)
            return v

        self._chain = chain

    def opbyop(self, k: int) -> np.ndarray:
        return self._repeat(self._step, k)

    def chained(self, k: int) -> np.ndarray:
        return self._repeat(self._chain, k // CHAIN)

    def fused(self, k: int) -> np.ndarray:
        return self._repeat(self._fused, k // CHAIN)

    def _repeat(self, program: Any, calls: int) -> np.ndarray:
        v = self._start
        for _ in range(calls):
            v = program(v)
        return np.asarray(v)

    def seconds(self, mode: str, k: int) -> float:
        return timed(self, mode, k)

    def close(self) -> None:
        self._start.delete()
        self._held.close()


# -- JAX called directly ----------------------------------------------------------------------------------------------


class JaxInThisProcess:
    """JAX on 4 devices of this process."""

    name = "jax"
    modes = ("opbyop", "fused")

    def __init__(self) -> None:
        limit_cpu_threads()
        import jax
        from jax.sharding import PartitionSpec as P

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", DEVICES)
        mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        def gang(function: Any) -> Any:
            return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x")))

        self.sharding = jax.NamedSharding(mesh, P("x"))
        self.step, self._fused = gang(computation), gang(chain_of_computations)
        self._start = jax.device_put(START, self.sharding)

    def opbyop(self, k: int) -> np.ndarray:
        return self._repeat(self.step, k)

    def fused(self, k: int) -> np.ndarray:
        return self._repeat(self._fused, k // CHAIN)

    def _repeat(self, function: Any, calls: int) -> np.ndarray:
        v = self._start
        for _ in range(calls):
            v = function(v)
        return np.asarray(v)


def serve_jax(requests: Connection) -> None:
    """Body of the JAX process: answers (mode, k) with the seconds it took, until the client closes or dies."""
    jax_here = JaxInThisProcess()
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            requests.send(timed(jax_here, *requests.recv()))


class Jax:
    """JAX called directly, in a process of its own: one with 4 devices cannot live beside the client's one device."""

    name, modes = JaxInThisProcess.name, JaxInThisProcess.modes

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._requests, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve_jax, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that a dead process is an end of file here, not a wait

    def seconds(self, mode: str, k: int) -> float:
        self._requests.send((mode, k))
        return self._requests.recv()

    def close(self) -> None:
        self._requests.close()
        self._process.join()


# -- Ray actors -------------------------------------------------------------------------------------------------------


class RayHost:
    """A Ray actor that owns 4 JAX devices and does what it is told, one method call at a time.

    Each method returns its value, as Ray methods do, so the device is waited for and the value copied in every call.
    """

    def __init__(self) -> None:
        self._jax = JaxInThisProcess()
        self._value: Any = None

    def place(self, value: np.ndarray) -> None:
        """Puts (4,) float32 on the devices, where `advance` and `loop` find it."""
        import jax

        self._value = jax.device_put(value, self._jax.sharding)

    def advance(self) -> np.ndarray:
        """One computation on the value kept here."""
        self._value = self._jax.step(self._value)
        return np.asarray(self._value)

    def apply(self, value: np.ndarray) -> np.ndarray:
        """One computation on the value passed in."""
        self.place(value)
        return self.advance()

    def loop(self, times: int) -> np.ndarray:
        """Computations one after the other on the value kept here."""
        for _ in range(times):
            self._value = self._jax.step(self._value)
        return np.asarray(self._value)


class Ray:
    """Ray actors used in the ordinary way; shares the Ray that is running, or starts one."""

    name = "ray"
    modes = ("opbyop", "chained", "fused")

    def __init__(self) -> None:
        import ray

        self._ray = ray
        self._started_ray = not ray.is_initialized()
        if self._started_ray:
            ray.init(include_dashboard=False, log_to_driver=False)
        self._host = ray.remote(num_cpus=0)(RayHost).remote()

    def opbyop(self, k: int) -> np.ndarray:
        """One method call per computation, its future passed to the next: `v = f(v)`, as in the other systems."""
        value: Any = START
        for _ in range(k):
            value = self._host.apply.remote(value)
        return self._ray.get(value)

    def chained(self, k: int) -> np.ndarray:
        """128 method calls linked by futures, then one get."""
        value: Any = START
        for _ in range(k // CHAIN):
            for _ in range(CHAIN):
                value = self._host.apply.remote(value)
            value = self._ray.get(value)
        return value

    def fused(self, k: int) -> np.ndarray:
        """One method call that loops over 128 computations."""
        self._host.place.remote(START)
        futures = [self._host.loop.remote(CHAIN) for _ in range(k // CHAIN)]
        return self._ray.get(futures[-1])

    def seconds(self, mode: str, k: int) -> float:
        return timed(self, mode, k)

    def close(self) -> None:
        self._ray.kill(self._host)
        if self._started_ray:
            self._ray.shutdown()


class RayStateful(Ray):
    """The same, written to favour Ray: the value never leaves the actor, so a call passes nothing on."""

    name = "ray-stateful"
    modes = ("opbyop",)

    def opbyop(self, k: int) -> np.ndarray:
        """One method call per computation; only the last one's value is fetched."""
        self._host.place.remote(START)
        futures = [self._host.advance.remote() for _ in range(k)]
        return self._ray.get(futures[-1])
