"""XLA on CPU: computations that would run in the thread that enqueues them, and the cores and threads of devices."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_ray.compat import interrupting_nobody
from pathways_ray.errors import CompileError
from pathways_ray.executor.compile.backend import AcceleratorBackend
from pathways_ray.executor.compile.cpu_backend import (
    FEW_ELEMENTS,
    MAX_LANES,
    SHORT_BYTES,
    CpuBackend,
    Lanes,
    core_of,
    pinned,
    pool_threads,
    with_async_cost_hint,
    would_block_dispatch,
)
from pathways_ray.executor.compile.platforms import backend_of
from pathways_ray.executor.run.parts import Keeps


def compiled(run: Callable[..., Any], *arguments: Any) -> Any:
    return jax.jit(run).lower(*(jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for a in arguments)).compile()


def add_one(x: jax.Array) -> tuple[jax.Array]:
    return (x + 1,)


def turns(n: jax.Array, x: jax.Array) -> tuple[jax.Array]:
    """A loop of a length that is known when it runs."""
    return (jax.lax.fori_loop(0, n, lambda _, x: x * x + x, x),)


def few_turns(x: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.fori_loop(0, 5, lambda _, x: x * x + x, x),)


def many_turns(x: jax.Array) -> tuple[jax.Array]:
    """Some tenths of a second."""
    return (jax.lax.fori_loop(0, 1 << 11, lambda _, x: jnp.tanh(x @ x), x),)


def branches(x: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),)


def transposed(x: jax.Array) -> tuple[jax.Array]:
    return (x.T,)


def factored(x: jax.Array) -> tuple[jax.Array]:
    return (jnp.linalg.cholesky(x),)


def squared(x: jax.Array) -> tuple[jax.Array]:
    return (x @ x,)


SMALL, EIGHT, BIG = np.full((2, 2), -0.5, np.float32), np.eye(8, dtype=np.float32), np.zeros((1024, 1024), np.float32)


@pytest.mark.parametrize(
    ("run", "arguments", "expected"),
    [
        (add_one, (SMALL,), False),  # cheap and short: another thread would take longer
        (few_turns, (SMALL,), False),
        (turns, (np.int32(3), SMALL), True),
        (transposed, (SMALL,), False),
        (transposed, (BIG,), True),  # no operation, but 8 MiB
        (factored, (EIGHT,), True),  # LAPACK's are not counted
        (squared, (BIG,), False),  # XLA knows that it is long
    ],
)
def test_what_is_counted_as_cheap_but_may_be_long_is_found(
    run: Callable[..., Any], arguments: tuple[Any, ...], expected: bool
) -> None:
    assert would_block_dispatch(compiled(run, *arguments)) is expected


def test_bytes_that_are_known_count_in_place_of_what_xla_counts() -> None:
    assert not would_block_dispatch(compiled(transposed, BIG), SHORT_BYTES - 1)
    assert would_block_dispatch(compiled(transposed, SMALL), SHORT_BYTES)


@pytest.mark.parametrize(
    ("run", "arguments"), [(turns, (np.int32(30), SMALL)), (transposed, (BIG,)), (factored, (EIGHT,))]
)
def test_with_the_hint_it_gives_the_same_bits_and_does_not_block_dispatch(
    run: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    plain, longer = compiled(run, *arguments), compiled(with_async_cost_hint(run), *arguments)
    assert not would_block_dispatch(longer)
    outputs = longer(*arguments)
    assert [float(end) for end in outputs[1:]] == [0.0]
    assert np.asarray(outputs[0]).tobytes() == np.asarray(plain(*arguments)[0]).tobytes()


@pytest.mark.parametrize(
    ("run", "arguments", "devices", "expected"),
    [
        (add_one, (SMALL,), 1, False),
        (add_one, (SMALL,), 2, True),  # XLA has a thread for each
        (squared, (BIG,), 1, True),
        (with_async_cost_hint(factored), (EIGHT,), 1, True),
    ],
)
def test_what_may_be_in_a_device_queue_is_told_from_what_is_over(
    run: Callable[..., Any], arguments: tuple[Any, ...], devices: int, expected: bool
) -> None:
    assert CpuBackend().queues(compiled(run, *arguments), devices) is expected
    assert AcceleratorBackend().queues(compiled(run, *arguments), devices)


MIDDLE = np.full((64, 64), 0.01, np.float32)


@pytest.mark.parametrize(
    ("run", "arguments", "devices", "expected"),
    [
        (add_one, (SMALL,), 1, Keeps.BRIEFLY),
        (squared, (MIDDLE,), 1, Keeps.ALIKE),
        (many_turns, (MIDDLE,), 1, Keeps.ALIKE),
        (squared, (MIDDLE,), 4, Keeps.BRIEFLY),  # XLA has a thread for each
        (branches, (MIDDLE,), 1, Keeps.VARYING),
        (with_async_cost_hint(turns), (np.int32(3), SMALL), 1, Keeps.VARYING),
        (with_async_cost_hint(transposed), (BIG,), 1, Keeps.VARYING),  # as it has a branch; it is not short anyway
        (lambda x: (jnp.linalg.cholesky(x @ x),), (MIDDLE,), 1, Keeps.VARYING),
    ],
)
def test_how_long_a_call_may_keep_a_thread_is_known(
    run: Callable[..., Any], arguments: tuple[Any, ...], devices: int, expected: Keeps
) -> None:
    assert CpuBackend().keeps(compiled(run, *arguments), devices) is expected
    assert AcceleratorBackend().keeps(compiled(run, *arguments), devices) is Keeps.BRIEFLY


def test_a_thread_within_calls_computes_what_it_calls() -> None:
    """1. A computation of some tenths of a second is over when its call returns; elsewhere it has just begun.
    2. One whose arguments are not there is enqueued. 3. All give the same bits."""
    run, there, behind = compiled(many_turns, MIDDLE), jnp.asarray(MIDDLE), list[bool]()

    def call() -> None:
        made.append(run(there)[0])
        ready.append(made[-1].is_ready())

    made, ready = list[Any](), list[bool]()
    call()

    def call_within() -> None:
        unready = made[0] if not made[0].is_ready() else run(there)[0]
        call()
        made.append(run(unready)[0])
        behind.append(made[-1].is_ready())

    thread = threading.Thread(target=lambda: CpuBackend().within_calls(call_within))
    thread.start()
    thread.join(60)
    call()
    assert ready == [False, True, False]
    assert len(behind) == 1
    once, again = np.asarray(run(there)[0]), np.asarray(run(run(there)[0])[0])
    assert [np.asarray(value).tobytes() for value in made] == [x.tobytes() for x in (once, once, again, once)]


def test_what_is_raised_within_calls_comes_out() -> None:
    for backend in (CpuBackend(), AcceleratorBackend()):
        with pytest.raises(KeyError, match="no such thing"):
            backend.within_calls(lambda: dict[str, None]()["no such thing"])


def test_what_never_runs_takes_next_to_no_memory() -> None:
    plain = compiled(turns, np.int32(3), SMALL)
    longer = compiled(with_async_cost_hint(turns), np.int32(3), SMALL)
    more = longer.memory_analysis().temp_size_in_bytes - plain.memory_analysis().temp_size_in_bytes
    assert more <= 16 << 10


# --- the seam ---------------------------------------------------------------------------------------------------------


class Text:
    """A compiled computation, as far as its code goes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text


def test_only_cpu_has_a_backend_of_its_own() -> None:
    assert isinstance(backend_of("cpu"), CpuBackend)
    for platform in ("gpu", "tpu"):
        assert isinstance(backend_of(platform), AcceleratorBackend)


def test_a_reduce_scatter_is_refused_between_cpu_hosts_only() -> None:
    wrong = Text("x = f32[2] reduce-scatter(y)")
    with pytest.raises(CompileError, match="reduce-scatter, which gives wrong sums over gloo"):
        CpuBackend().check(wrong, 2)
    CpuBackend().check(wrong, 1)
    CpuBackend().check(Text("x = f32[2] all-reduce(y)"), 2)
    AcceleratorBackend().check(wrong, 2)


def test_barriers_stay_where_functions_were_fused() -> None:
    assert CpuBackend().options(fused=False, loops=False, elements=0) is None
    barriers = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    assert CpuBackend().options(fused=True, loops=False, elements=0) == barriers
    both = {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}
    assert CpuBackend().options(fused=True, loops=True, elements=0) == both
    assert AcceleratorBackend().options(fused=True, loops=True, elements=1) is None


@pytest.mark.parametrize(("elements", "expected"), [(1, True), (FEW_ELEMENTS, True), (FEW_ELEMENTS + 1, False)])
def test_few_elements_are_not_given_to_other_threads(elements: int, expected: bool) -> None:
    options = CpuBackend().options(fused=True, loops=False, elements=elements) or {}
    passes = str(options["xla_disable_hlo_passes"]).split(",")
    assert passes == ["cse_barrier_expander", *["cpu-parallel-task-assigner"] * expected]


def test_xla_writes_kernels_of_lines_without_its_fusion_emitters() -> None:
    made = [CpuBackend().options(fused=True, loops=False, elements=elements) or {} for elements in (0, 1)]
    assert [each.get("xla_cpu_use_fusion_emitters") for each in made] == [None, False]


def test_a_computation_on_several_devices_stays_as_it_is() -> None:
    plain, built = compiled(transposed, BIG), object()
    assert CpuBackend().prepare(plain, 2, lambda change: built) is plain
    assert AcceleratorBackend().prepare(plain, 1, lambda change: built) is plain
    assert CpuBackend().prepare(plain, 1, lambda change: built) is built


def test_several_devices_have_threads_to_spare() -> None:
    assert [pool_threads(devices) for devices in (1, 2, 4, 8)] == [0, 8, 8, 16]


@pytest.mark.parametrize(("devices", "threads"), [(1, "1"), (4, "8")])
def test_who_starts_a_host_of_one_device_says_how_many_threads_it_has(
    devices: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("NPROC", "1")
    CpuBackend().configure(devices)
    assert os.environ["NPROC"] == threads


# --- order ------------------------------------------------------------------------------------------------------------


MANY_TURNS = np.int32(1 << 25)
"""Some seconds, which are over before a test ends: nothing can stop a computation."""


class Value:
    """An array, as far as its state goes."""

    def __init__(self, ready: bool) -> None:
        self.ready = ready

    def is_ready(self) -> bool:
        return self.ready

    def is_deleted(self) -> bool:
        return False


def test_what_moves_data_that_is_there_waits_for_no_other_computation() -> None:
    """1. A computation runs for long. 2. Data moves meanwhile; by the thread that enqueued the first it would wait."""
    long = compiled(with_async_cost_hint(turns), MANY_TURNS, SMALL)
    move, x = compiled(transposed, SMALL), jnp.asarray(SMALL)
    beside = CpuBackend().beside(move, lambda: True)
    running = long(MANY_TURNS, SMALL)
    behind, (moved,) = move(x)[0], beside(x)
    moved.block_until_ready()
    assert not behind.is_ready()
    assert not running[0].is_ready()
    assert np.asarray(moved).tobytes() == np.asarray(behind).tobytes() == SMALL.T.tobytes()


@pytest.mark.parametrize(("busy", "ready", "apart"), [(True, True, True), (False, True, False), (True, False, False)])
def test_another_thread_enqueues_what_would_wait_otherwise(busy: bool, ready: bool, apart: bool) -> None:
    found: list[Any] = []

    def move(*given: Any) -> Any:
        found.append(threading.current_thread())
        return given

    given = Value(ready)
    assert CpuBackend().beside(move, lambda: busy)(given) == (given,)
    assert (found[0] is not threading.current_thread()) is apart


def test_what_a_call_in_another_thread_raises_comes_to_its_caller() -> None:
    lanes = Lanes()

    def wrong(*given: Any) -> Any:
        raise SystemExit("no")

    for _ in range(2):
        with pytest.raises(SystemExit, match="no"):
            lanes.call(wrong, ())
    value = Value(True)
    assert lanes.call(lambda x: (x,), (value,)) == (value,)


def test_a_thread_whose_last_computation_is_under_way_gets_no_other() -> None:
    lanes, made = Lanes(), [Value(False) for _ in range(MAX_LANES)]
    threads: list[int] = []

    def call(value: Any) -> Any:
        threads.append(threading.get_ident())
        return (value,)

    for value in made:
        lanes.call(call, (value,))
    assert len({*threads, threading.get_ident()}) == MAX_LANES + 1
    lanes.call(call, (Value(True),))
    assert threads[-1] == threading.get_ident()
    made[1].ready = True
    lanes.call(call, (Value(True),))
    assert threads[-1] == threads[1]


def test_what_another_thread_made_is_kept_by_nobody_else() -> None:
    lanes = Lanes()
    made = weakref.ref(lanes.call(lambda ready: (Value(ready),), (False,))[0])
    assert made() is None


def test_memory_that_is_read_in_another_thread_is_not_overwritten_before() -> None:
    """The copy is long, so that it only begins within the call; a computation that takes the memory is called next."""
    x = jnp.asarray(np.arange(BIG.size, dtype=np.float32).reshape(BIG.shape))
    wanted = np.asarray(x).T.tobytes()
    move = compiled(with_async_cost_hint(transposed), BIG)
    taking = jax.jit(lambda x: x * 0, donate_argnums=0).lower(jax.ShapeDtypeStruct(BIG.shape, BIG.dtype)).compile()
    lanes = Lanes()
    moved = lanes.call(move, (x,))[0]
    taken = taking(x)
    assert not np.asarray(taken).any()
    assert np.asarray(moved).tobytes() == wanted


def test_devices_that_have_one_queue_have_no_other_threads() -> None:
    move = compiled(transposed, SMALL)
    assert AcceleratorBackend().beside(move, lambda: True) is move


# --- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, listed, core",
    [(0, "", None), (3, " ", None), (0, "5", 5), (4, "5", 5), (0, "0,1", 0), (1, "0, 1", 1), (2, "0,1", 0)],
)
def test_hosts_go_round_the_cores(host: int, listed: str, core: int | None) -> None:
    assert core_of(host, listed) == core


def test_what_is_no_core_is_named() -> None:
    with pytest.raises(ValueError, match="lists cores, such as 0,1, and is 'first'"):
        core_of(0, "first")


def test_threads_made_inside_stay_there() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    seen: list[set[int]] = []
    go = threading.Event()

    def look() -> None:
        go.wait(10)
        seen.append(os.sched_getaffinity(0))

    with pinned(core):
        thread = threading.Thread(target=look)
        thread.start()
    assert os.sched_getaffinity(0) == before
    go.set()
    thread.join(10)
    assert seen == [{core}]


def test_threads_made_inside_interrupt_nobody() -> None:
    before = os.sched_getscheduler(0)
    seen: list[int] = []
    with interrupting_nobody():
        thread = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
        thread.start()
    thread.join(10)
    assert seen == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == before


def test_without_a_core_nothing_changes() -> None:
    before = os.sched_getaffinity(0)
    with pinned(None):
        assert os.sched_getaffinity(0) == before
