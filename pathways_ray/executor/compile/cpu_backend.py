"""XLA on CPU: the settings and precautions that it needs. No other platform has anything to do with them.

- *Threads.* A collective holds one thread per device until all have arrived (`pool_threads`). On a small machine,
  device threads can be kept on chosen cores (`core_of`, `pinned`).
- *Collectives between hosts* are gloo's. It listens where JAX does not say, its thread must interrupt no other
  (`compat.interrupting_nobody`), and it has a wrong reduce-scatter.
- *Barriers* between fused functions must survive until loops are fused, or bits would depend on what was fused.
- *Inline execution.* XLA's CPU client runs a computation that it takes for cheap within the call that should only
  enqueue it: fewer than 1,000 floating point operations by its count. It counts a loop of unknown length as one turn,
  a LAPACK call as nothing, and a copy of a gigabyte as nothing. While such a computation runs, nothing else of the host
  is enqueued: four slices of one device would take turns. So these get operations to count that never run, and then
  have a thread of XLA's to themselves. A computation that is short as well as cheap stays as it is; handing it to
  another thread takes longer than the computation. The thread that serves clients computes more within its calls
  (`within_calls`), as long as that is brief (`keeps`).
- *Order.* It has the computations that one thread enqueues on single devices run one after the other. So what only
  moves data that is there would wait for whatever another tenant computes; it is enqueued by other threads (`Lanes`).
  What several hosts compute together has to run in the order in which it is called, in whatever thread
  (`order_over_hosts`).

JAX is imported in functions, since this file is read before the variables are set that JAX reads at its import.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pathways_ray.compat import within_callback
from pathways_ray.errors import CompileError
from pathways_ray.executor.compile.backend import Function, Rebuild
from pathways_ray.executor.run.parts import Keeps

if TYPE_CHECKING:
    import jax

    from pathways_ray.executor.compile.order_over_hosts import OrderOverHosts

CORES_VARIABLE = "PATHWAYS_CPU_CORES"
"""Lists cores, say `0` or `0,1`, for measurements on a small machine: the threads of host k's devices all run on the
k-th of them, round robin. The host's other threads run wherever the process may. Without it the kernel moves the
threads as it likes, and two that wait for each other in a collective take twice as long on two virtual cores as on
one."""

CHEAP_OPERATIONS = 1000
"""XLA's limit (`PjRtCpuExecutable`), by its own count."""

SHORT_BYTES = 1 << 20
"""A computation that reads and writes no more counts as short: some tenths of a millisecond of copying."""

COUNTED = 2 * CHEAP_OPERATIONS

FEW_ELEMENTS = 1 << 20
"""Elements that the lines of one kernel make, up to which it runs in one thread: some 0.1 ms. To wake others takes as
long on a busy machine."""


MAX_LANES = 4
"""Threads that enqueue beside the dispatcher. One is enough unless several tenants move much at once."""

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

USABLE_PART = 0.8
"""Part of a machine's memory that arrays may take."""


class CpuBackend:
    """Virtual devices on the cores of a host."""

    shares_memory = True
    seals = True
    elements_apart = CHEAP_OPERATIONS
    moving = Keeps.ALIKE

    def __init__(self) -> None:
        self._lanes = Lanes()
        self._order: OrderOverHosts | None = None

    def configure(self, devices: int) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
        threads = pool_threads(devices)
        if threads:
            os.environ["NPROC"] = str(threads)

    def making_devices(self, host: int) -> contextlib.AbstractContextManager[None]:
        return pinned(core_of(host, os.environ.get(CORES_VARIABLE, "")))

    def before_group(self, address: str) -> None:
        import jax

        from pathways_ray.compat import gloo_listens_at

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        gloo_listens_at(address)

    def memory(self, device: Any) -> int:
        """A part of the machine's memory, or of that of the container: processes and the system take the rest."""
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
            limits.append(int(CONTAINER_LIMIT.read_text()))
        return int(USABLE_PART * min(limits))

    def options(self, fused: bool, loops: bool, elements: int) -> dict[str, str | bool] | None:
        """XLA's CPU compiler takes barriers out before it fuses loops, and would then contract a multiplication of one
        part and an addition of the next into one rounding. Left in, they cost nothing; but it cannot make one function
        of a small loop that has them, and is not to try. A kernel of lines is as long as all of them; on small arrays
        it is done before other threads, to which the compiler would give parts of it, have woken. What it runs is the
        same without XLA's fusion emitters, which write it by way of MLIR and take a third longer."""
        if not fused:
            return None
        passes = ["cse_barrier_expander"] + ["small-while-loop-hoisting"] * loops
        passes += ["cpu-parallel-task-assigner"] * (0 < elements <= FEW_ELEMENTS)
        made: dict[str, str | bool] = {"xla_disable_hlo_passes": ",".join(passes)}
        return {**made, "xla_cpu_use_fusion_emitters": False} if elements else made

    def rewritten(self, module: bytes, hosts: int) -> bytes:
        if hosts < 2:
            return module
        from pathways_ray.executor.compile.reduce_scatter import without_reduce_scatter

        return without_reduce_scatter(module)

    def check(self, compiled: Any, hosts: int) -> None:
        if hosts > 1 and "reduce-scatter(" in (compiled.as_text() or ""):
            raise CompileError(
                "it holds a reduce-scatter, which gives wrong sums over gloo (the collectives between CPU hosts); "
                "write jax.lax.psum and take the slice you need"
            )

    def prepare(self, compiled: Any, devices: int, rebuild: Rebuild, nbytes: int = 0) -> Any:
        """XLA runs a computation inline on one device only."""
        if devices == 1 and would_block_dispatch(compiled, nbytes):
            return rebuild(with_async_cost_hint)
        return compiled

    def over_hosts(self, compiled: Function, devices: int) -> Function:
        from pathways_ray.executor.compile.order_over_hosts import OrderOverHosts

        self._order = self._order or OrderOverHosts()
        return self._order.in_order(compiled, devices)

    def queues(self, compiled: Any, devices: int) -> bool:
        return devices > 1 or not is_cheap(compiled)

    def keeps(self, compiled: Any, devices: int) -> Keeps:
        if not self.queues(compiled, devices) or devices > 1:
            return Keeps.BRIEFLY
        return Keeps.VARYING if may_vary(compiled) else Keeps.ALIKE

    def within_calls(self, run: Callable[[], None]) -> None:
        within_callback(run)

    def beside(self, moves: Function, is_busy: Callable[[], bool]) -> Function:
        lanes = self._lanes

        def moved(*given: Any) -> Sequence[Any]:
            if is_busy() and all(value.is_ready() for value in given):
                return lanes.call(moves, given)
            return moves(*given)

        return moved


# --- threads ----------------------------------------------------------------------------------------------------------


def pool_threads(devices: int) -> int:
    """Threads of XLA's CPU pool for a host with `devices` virtual devices; 0 leaves XLA's own choice.

    A collective holds one thread per device until all have arrived, so a pool no larger than the cores deadlocks as
    soon as devices outnumber them. Twice the devices leaves threads for what runs beside a collective. A single device
    needs none of it, and a larger pool than cores costs compute time.
    """
    return max(8, 2 * devices) if devices > 1 else 0


def core_of(host: int, listed: str) -> int | None:
    """The core of a host's devices; None when no cores are listed.

    Raises:
        ValueError: an entry of the list is not a number.
    """
    try:
        cores = [int(core) for core in listed.split(",") if core.strip()]
    except ValueError:
        raise ValueError(f"{CORES_VARIABLE} lists cores, such as 0,1, and is {listed!r}") from None
    return cores[host % len(cores)] if cores else None


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Keeps threads that are made inside, and those that they make, on a core; None leaves everything as it is.

    Raises:
        OSError: this machine has no such core for this process.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- order ------------------------------------------------------------------------------------------------------------


class Lanes:
    """Threads that call computations for another one, which waits for the calls and not for the computations. For one
    caller at a time. A lane whose last computation is under way would have the next wait for that."""

    def __init__(self) -> None:
        self._lanes: list[_Lane] = []

    def call(self, run: Function, given: Sequence[Any]) -> Sequence[Any]:
        """Calls `run` with these in a lane, or in this thread where none is free, and returns what it returns."""
        lane = next((lane for lane in self._lanes if lane.is_free), None)
        if lane is None and len(self._lanes) < MAX_LANES:
            with contextlib.suppress(RuntimeError):  # the process can have no further thread
                lane = _Lane()
                self._lanes.append(lane)
        return lane.call(run, given) if lane is not None else run(*given)


class _Lane:
    """A thread that calls what it is given."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []  # or it would keep their memory
        self._calls: queue.SimpleQueue[tuple[Function, Sequence[Any]]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Sequence[Any], BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="lane", daemon=True).start()

    @property
    def is_free(self) -> bool:
        """Whether the computation that it called last is over."""
        made = [value for value in (known() for known in self._made) if value is not None]
        return all(value.is_deleted() or value.is_ready() for value in made)

    def call(self, run: Function, given: Sequence[Any]) -> Sequence[Any]:
        self._calls.put((run, given))
        made, error = self._answers.get()
        if error is not None:
            raise error
        self._made = [weakref.ref(value) for value in made if not value.is_ready()]
        return made

    def _run(self) -> None:
        while True:
            run, given = self._calls.get()
            answer: tuple[Sequence[Any], BaseException | None]
            try:
                answer = run(*given), None
            except BaseException as error:  # the caller's
                answer = (), error
            del run, given
            self._answers.put(answer)
            del answer


# --- inline execution -------------------------------------------------------------------------------------------------


def is_cheap(compiled: Any) -> bool:
    """Whether XLA takes a computation for one that it runs, on one CPU device, in the thread that enqueues it."""
    cost: float = (compiled.cost_analysis() or {}).get("flops", 0.0)
    return cost < CHEAP_OPERATIONS


def would_block_dispatch(compiled: Any, nbytes: int = 0) -> bool:
    """Whether a compiled computation for one CPU device would run in the thread that enqueues it, and may take long.

    Args:
        nbytes: what it reads and writes, where that is known; else XLA's count.
    """
    if not is_cheap(compiled):
        return False
    if (nbytes or (compiled.cost_analysis() or {}).get("bytes accessed", 0.0)) >= SHORT_BYTES:
        return True
    return _has(compiled, " custom-call(")


def may_vary(compiled: Any) -> bool:
    """Whether a compiled computation may take much longer than the last time."""
    return _has(compiled, " custom-call(", " conditional(")


def _has(compiled: Any, *operations: str) -> bool:
    """Whether a compiled computation has one of these operations, or a loop of unknown length."""
    text = compiled.as_text() or ""
    loops = text.splitlines() if " while(" in text else ()
    return any(name in text for name in operations) or any(
        " while(" in line and "known_trip_count" not in line for line in loops
    )


def with_async_cost_hint(run: Function) -> Callable[..., tuple[Any, ...]]:
    """The function, with a last output that XLA counts as many operations, and that takes none: it is 0.0, as that of
    `compiler.with_end`. The rest of the computation is as it was."""
    import jax
    import jax.numpy as jnp

    def longer(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        # Behind a barrier, or XLA would do at once what depends on nothing.
        never, zero = jax.lax.optimization_barrier((False, jnp.float32(0)))
        counted = jax.lax.cond(
            never, lambda zero: jnp.sum(zero * jax.lax.iota(jnp.float32, COUNTED)), lambda zero: zero, zero
        )
        return (*run(*arguments), counted)

    return longer
