"""Arrays, functions and sessions as Python objects: compared, pickled, bound as methods, taken into a fork."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import pathways_ray as pw

V = np.arange(8, dtype=np.float32)
CHILD_LIMIT_S = 10.0


def test_arrays_are_compared_by_value(session, inc) -> None:
    y, z = inc(V), inc(V)
    assert (y == z).all()
    assert not (y != z).any()
    assert (y == V).tolist() == [False] * 8
    assert np.equal(V + 1, y).all()
    assert len({y, z}) == 2, "handles stay apart in sets"
    assert y.tolist() == (V + 1).tolist()
    assert y.tobytes() == (V + 1).tobytes()
    assert f"{pw.compiled(lambda v: v[3], slice=inc.slice)(y):.2f}" == "4.00"
    assert f"{y}" == str(y)


def test_handles_are_copied_and_not_pickled(session, inc, equal) -> None:
    y = inc(V)
    with pytest.raises(pw.errors.UsageError, match=r"float32\[8\].*is a handle of this session.*np.asarray"):
        pickle.dumps(y)
    again, best = copy.copy(y), copy.deepcopy({"a": [y, y], "on": inc.slice})
    assert best["a"][0] is best["a"][1]
    assert best["on"] is inc.slice
    y.delete()
    equal(best["a"][0], V + 1)  # an array of its own
    equal(again, V + 1)  # so is this one
    with pytest.raises(ValueError, match="cannot be had without a copy"):
        np.array(again, copy=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    weights: Any
    power: int = dataclasses.field(metadata={"static": True}, default=1)

    def __hash__(self) -> int:
        return self.power

    @pw.program
    def step(self, v: Any) -> Any:
        return v + self.weights**self.power

    @partial(pw.compiled, static_argnums=0)
    def raised(self, v: Any) -> Any:
        return v**self.power


def test_functions_are_methods(session, equal) -> None:
    model = Model(V, 2)
    equal(model.step(V), V + V**2)
    equal(Model.step(model, V), V + V**2)
    equal(model.raised(V), V**2)


def test_static_parts_of_pytrees_that_cannot_be_compared(session, inc) -> None:
    f = pw.program(lambda model: inc(model.weights))
    f(Model(V, np.arange(3)))  # type: ignore[arg-type]
    with pytest.raises(pw.errors.UsageError, match=r"cannot be told from earlier ones: .*arrays cannot be passed as"):
        f(Model(V, np.arange(3)))  # type: ignore[arg-type]


def test_settings_of_jax_are_part_of_a_trace(session, slices, equal) -> None:
    def third(v: Any) -> Any:
        return v.astype(float) / 3

    up = pw.compiled(third, slice=slices.a1)
    f = pw.program(lambda v: up(v) * np.arange(8))
    for wide in (False, True, False):
        with jax.enable_x64(wide):
            equal(f(V), jax.jit(third)(V) * np.arange(8))


def test_a_compiled_function_holds_no_other_one(session, slices, inc) -> None:
    for inner in (inc, pw.program(lambda v: inc(v))):
        with pytest.raises(
            pw.errors.UsageError, match=r"already; pw.compiled decorates a plain function, which its attr"
        ):
            pw.compiled(inner, slice=slices.a4)
        with pytest.raises(pw.errors.TraceError, match=r"calls a compiled function.*Call both from a pw.program"):
            pw.compiled(lambda v, inner=inner: inner(v) * 2, slice=slices.a4)(V)


def test_a_constant_returned_again_after_it_was_given_away(session, slices, inc, equal) -> None:
    """1. A program returns a constant, placed for each call. 2. The caller deletes it, or donates it. 3. What another
    call returned is there, and the next call places it again."""
    give = pw.compiled(lambda v: v * 2, slice=slices.a4, donate_argnums=0)
    constant = np.float32(7)
    f = pw.program(lambda v: (inc(v), constant))
    first, second = f(V)[1], f(V)[1]
    assert second._buffer is not first._buffer
    first.delete()
    equal(second, constant)
    equal(give(f(V)[1]), np.float32(14))
    equal(f(V), (V + 1, constant))


def test_first_calls_of_several_threads_with_captured_arrays(session, slices, equal) -> None:
    """Each thread may place what the program captured; what one has placed lives until its launch has left."""
    captured = [np.full(1 << 16, k + 1.0, np.float32) for k in range(4)]
    total = pw.compiled(lambda v, *held: v + sum(one.sum() for one in held), slice=slices.a1)
    expected = np.float32(1 + 10 * (1 << 16))
    for _ in range(3):
        f = pw.program(lambda v: total(v, *captured))
        pw.warmup(f, (np.float32(1),))
        start = threading.Barrier(6)

        def call(_: int, f: Any = f, start: threading.Barrier = start) -> np.ndarray[Any, Any]:
            start.wait(30)
            return np.asarray(f(np.float32(1)))

        with ThreadPoolExecutor(6) as threads:
            for value in threads.map(call, range(6)):
                equal(value, expected)


def test_a_loop_that_donates_its_state_keeps_no_values_of_it(session, slices) -> None:
    """Small leaves of the state come along with the loss, and the next step takes them."""

    def train(state: dict[str, Any], x: Any) -> Any:
        return {name: leaf + x for name, leaf in state.items()}, x.sum()

    step = pw.compiled(train, slice=slices.a1, donate_argnums=0)
    plus = pw.compiled(lambda v: v + 1, slice=slices.a1, donate_argnums=0)
    state = {name: np.zeros(100, np.float32) for name in "abc"}
    for _ in range(20):
        state, loss = step(state, np.float32(1))
        assert float(loss) == 1.0
    assert not session._driver.siblings.values
    for _ in range(5):  # nor of a loss that is asked for with its call, and given away unread
        state, loss = step(state, np.float32(1))
        more = plus(loss)
    assert float(more) == 2.0
    assert not session._data.ahead.asked


@pytest.mark.parametrize(
    "options", [{"island": -1}, {"island": "a"}, {"island": 1.0}, {"name": 3}, {"platform": 3}], ids=str
)
def test_options_of_slices_that_make_no_sense(session, options) -> None:
    with pytest.raises(pw.errors.UsageError, match=r"island= takes the number of an island|are text"):
        pw.virtual_slice((1,), **options)


def test_text_is_no_spec(session, slices) -> None:
    with pytest.raises(pw.errors.SpecError, match=r"spec holds 'x'; its leaves are jax.sharding.PartitionSpec or None"):
        pw.put(V, slice=slices.a4, spec="x")


def in_a_fork(call: Callable[[], Any]) -> str:
    """What a call comes to in a forked process."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a fork of many threads is no good idea is the point
        child = os.fork()
    if not child:
        try:
            os.write(write, repr(call()).encode())
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode()[:2000])
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert select.select([read], [], [], CHILD_LIMIT_S)[0], "the fork hangs"
        return os.read(read, 4096).decode()
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_fork_leaves_the_session_to_its_parent(session, slices, inc, equal) -> None:
    """It has the sockets, and none of the threads: what it wrote there would be taken for the parent's."""
    y = inc(V)
    held = [y]
    uses = [lambda: inc(V), lambda: np.asarray(y), lambda: y.block_until_ready(), session.status, lambda: pw.put(V)]
    for use in uses:
        assert "SessionClosed: the session" in (said := in_a_fork(use)), said
        assert "is a fork of" in said
    assert "UsageError: this process is a fork of one that runs a cluster" in in_a_fork(pw.init)

    def delete_and_shut_down() -> None:
        held.pop().delete()
        pw.shutdown()

    assert in_a_fork(delete_and_shut_down) == "None"
    equal(y, V + 1)
    equal(inc(y), V + 2)
