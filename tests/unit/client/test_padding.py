"""`pw.padded`: batches of any size, compiled for a few; and `on_retrace`."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw


def test_a_server_of_many_sizes_compiles_a_handful(session) -> None:
    a = session.virtual_slice((4,), ("x",))
    traced = []

    def serve(w: Any, batch: Any) -> Any:
        traced.append(batch["rows"].shape)
        return {"y": batch["rows"] @ w, "w": w.sum()}

    compiled = pw.compiled(serve, slice=a, in_specs=(P(), P("x")), on_retrace="raise")
    f = pw.padded(compiled, sizes=(16, 4, 32), in_axes=(None, 0), out_axes={"y": 0, "w": None})
    w = pw.put(np.ones((3, 2), np.float32), a)
    rows = np.arange(96, dtype=np.float32).reshape(32, 3)
    with pytest.raises(
        pw.errors.TraceError, match=r"serve was traced again \(2 times now\): leaf 1 was float32\[4,3\] on c"
    ):
        pw.warmup(f, (w, {"rows": rows[:1]}))
    g = pw.padded(pw.compiled(serve, slice=a), sizes=(4, 16, 32), in_axes=(None, 0), out_axes={"y": 0, "w": None})
    traced.clear()
    pw.warmup(g, (w, {"rows": rows[:1]}))
    assert traced == [(4, 3), (16, 3), (32, 3)]
    for count in range(1, 33):
        found = g(w, {"rows": rows[:count]})
        np.testing.assert_array_equal(found["y"], rows[:count] @ np.ones((3, 2)))
        assert type(found["w"]) is pw.Array
    assert len(traced) == 3


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_a_batch_lies_along_any_axis(session, axis: int) -> None:
    double = pw.padded(pw.program(lambda v: v * 2), sizes=(2, 4), in_axes=axis, out_axes=axis)
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(double(value), 2 * value)


@pytest.mark.parametrize("join_calls", [False, True])
def test_a_batch_of_typed_keys_is_filled_up_with_others(session, join_calls: bool) -> None:
    where = session.virtual_slice((1,), ("x",))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    same = pw.padded(pw.compiled(lambda k: k, slice=where), sizes=(4,), in_axes=-1, out_axes=-1, join_calls=join_calls)
    pw.warmup(same, (keys,))
    compiled = session.compiled
    found = same(keys)
    assert (found.dtype, session.compiled) == (keys.dtype, compiled)
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(keys))


@pytest.mark.parametrize("join_calls", [False, True])
def test_the_type_of_a_result_does_not_depend_on_the_size_of_the_batch(session, join_calls: bool) -> None:
    """A weak type stays one when a batch is filled up."""
    where = session.virtual_slice((1,), ("x",))
    w = pw.put(jnp.ones(2, jnp.bfloat16), where)
    scaled = pw.compiled(lambda v, w: v * w, slice=where)
    f = pw.padded(scaled, sizes=(4,), in_axes=(-2, None), join_calls=join_calls)
    weak = jnp.broadcast_to(2.5, (4, 2))
    assert weak.weak_type
    pw.warmup(f, (weak, w))
    compiled = session.compiled
    for count in (1, 3, 4):
        found = f(weak[:count], w)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found, np.full((count, 2), 2.5))
    assert session.compiled == compiled
    assert f(np.asarray(weak), w).dtype == np.float32


@pytest.mark.parametrize("join_calls", [False, True])
def test_rows_do_not_keep_a_batch_that_is_much_larger(session, join_calls: bool) -> None:
    where = session.virtual_slice((1,), ("x",))
    f = pw.padded(pw.compiled(lambda v: v * 2, slice=where), sizes=(64,), join_calls=join_calls)
    for count in (2, 60):
        rows = base = f(np.ones((count, 64), np.float32))
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.nbytes <= 4 * rows.nbytes
        np.testing.assert_array_equal(rows, np.full((count, 64), 2, np.float32))
        assert rows.flags.writeable


def test_batches_that_do_not_fit(session) -> None:
    f = pw.padded(pw.program(lambda v, w: v + w[:, 0]), sizes=(8,))
    with pytest.raises(pw.errors.UsageError, match=r"takes batches of one size, not of \[2, 3\] \(in_axes=0\)"):
        f(np.ones(2), np.ones((3, 1)))
    with pytest.raises(pw.errors.UsageError, match=r"is given no batch: .* where in_axes=\(None, 0\) has an axis"):
        pw.padded(pw.program(lambda v, w: v), sizes=(8,), in_axes=(None, 0))(np.ones(2), None)
    total = pw.padded(pw.program(lambda v: v.sum()), sizes=[8])
    with pytest.raises(
        pw.errors.UsageError, match=r"a result of shape \(\) has no batch of 8 along axis 0; say .*out_axes="
    ):
        total(np.ones(3))


@pytest.mark.parametrize("join_calls", [False, True])
@pytest.mark.parametrize(
    ("argument", "shape"), [(np.float32(1), r"\(\)"), ([1.0, 2.0], r"\(\)"), ("abc", r"\(\)"), (np.ones(3), r"\(3,\)")]
)
def test_an_argument_without_the_axis_of_a_batch(session, argument: Any, shape: str, join_calls: bool) -> None:
    axis = 1 if isinstance(argument, np.ndarray) else 0
    f = pw.padded(pw.program(lambda v: v), sizes=(8,), in_axes=axis, join_calls=join_calls)
    with pytest.raises(pw.errors.UsageError, match=rf"shape {shape}, without an axis {axis} for a batch; .* in_axes="):
        f(argument)
    with pytest.raises(pw.errors.UsageError, match=f"without an axis {axis} for a batch"):
        f.calls((argument,))
    total = pw.padded(pw.program(lambda v: v.sum(1)), sizes=(8,), out_axes=1, join_calls=join_calls)
    with pytest.raises(pw.errors.UsageError, match=r"a result of shape \(8,\) has no batch of 8 along axis 1; say"):
        total(np.ones((3, 2)))


@pytest.mark.parametrize("join_calls", [False, True])
def test_a_batch_with_a_mask_is_refused_as_without_padding(session, join_calls: bool) -> None:
    """Filled up, or joined with others, it would lose its mask."""
    f = pw.padded(pw.program(lambda v: v), sizes=(2, 8), join_calls=join_calls)
    for rows in (2, 3):
        with pytest.raises(pw.errors.InvalidArray, match="cannot be a JAX array: JAX has no masked arrays; fill it"):
            f(np.ma.array(np.ones(rows), mask=True))


def test_an_interrupted_wait_says_how_to_cancel(session, monkeypatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    y = pw.program(lambda v: v + 1)(np.ones(2))
    for name, wait in (("wait", y.block_until_ready), ("fetch", lambda: float(y[0]))):
        monkeypatch.setattr(session, name, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            wait()
        assert "is still being computed; y.cancel() cancels it" in caught.value.__notes__[0]


def test_a_retrace_says_what_differs_and_where(session) -> None:
    f = pw.program(lambda v: v + 1, name="f", on_retrace="warn")
    f(np.ones(2))
    with pytest.warns(
        UserWarning, match=r"f was traced again .*: leaf 0 was float\d+\[2\] on client, now float\d+\[3\] on"
    ) as seen:
        f(np.ones(3))
    assert [one.filename for one in seen] == [__file__]


def test_calls_that_cannot_be_traced_are_no_traces(session) -> None:
    """A server that is asked for wrong shapes compiles nothing, and is warned of nothing."""
    f = pw.program(lambda v: v + np.ones(2), name="f", on_retrace="warn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(pw.errors.TraceError):
                f(np.ones(3))
        f(np.ones(2))
        with pytest.raises(pw.errors.TraceError):
            f(np.ones(3))
    with pytest.warns(UserWarning, match=r"f was traced again \(2 times now\): leaf 0 was float\d+\[2\] on client"):
        f(np.ones((1, 2)))
    strict = pw.program(lambda v: v + np.ones(2), name="strict", on_retrace="raise")
    with pytest.raises(pw.errors.TraceError, match=r"'strict' .* cannot be traced"):
        strict(np.ones(3))
    strict(np.ones(2))  # the first that there is
