"""Bad input: a typed error with a message that says what to do, at once, and a cluster that goes on.

Each is to be refused within 2 s; the bound here leaves room for a machine that is busy with other things.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

V = np.arange(8, dtype=np.float32)
REFUSED_WITHIN_S = 10.0

kept: list[Any] = []
counter = 0


@pytest.fixture(autouse=True)
def refused_in_time(session) -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    print(f"took {took:.2f} s")
    assert took < REFUSED_WITHIN_S


# --- between nodes ----------------------------------------------------------------------------------------------------


def test_wrong_shape_between_nodes(slices, inc) -> None:
    product = pw.compiled(lambda v: jnp.ones((3, 7)) @ v, slice=slices.a4)
    with pytest.raises(
        pw.errors.TraceError, match=r"<lambda> \(test_bad_input.py:\d+\) cannot be traced: .*dot_general"
    ):
        pw.program(lambda v: product(inc(v)))(V)


def test_wrong_dtype_between_nodes(slices, inc) -> None:
    bits = pw.compiled(lambda v: v & 7, slice=slices.a4)
    with pytest.raises(
        pw.errors.TraceError, match=r"test_bad_input.py:\d+\) cannot be traced: TypeError: and does not acc"
    ):
        pw.program(lambda v: bits(inc(v)))(V)


def test_wrong_sharding_between_nodes(slices, inc) -> None:
    pairs = pw.compiled(lambda v: v.reshape(4, 2)[:3], slice=slices.a4)
    quarters = pw.compiled(lambda v: v, slice=slices.b4, in_specs=P("x"))
    with pytest.raises(
        pw.errors.SpecError, match=r"input 0: dimension 0 of float32\[3,2\] has size 3, which does not div"
    ):
        pw.program(lambda v: quarters(pairs(inc(v))))(V)


# --- arrays that cannot be used ---------------------------------------------------------------------------------------


def test_argument_of_another_session(session, slices, inc) -> None:
    with pw.connect(session.url, session.token, name="other") as other:
        with other.virtual_slice((4,), ("x",)) as there:
            x = pw.put(V, slice=there, spec=P("x"))
            np.asarray(x)
            mine = pw.compiled(lambda v: v, slice=there)
            y = pw.put(V, slice=inc.slice, spec=P("x"))
            with pytest.raises(pw.errors.ForeignArray, match="which belongs to another session; fetch it there"):
                mine(y)
            with pytest.raises(pw.errors.ForeignArray, match="which belongs to another session; fetch it there"):
                pw.program(lambda: mine(y))()
            with pytest.raises(pw.errors.GraphError, match=r"uses slice a4 \(x=4\), which belongs to another session"):
                pw.program(lambda v: (mine(v), inc(v)))(V)
        # The session made last is the other one. Functions and programs run in that of the first slice that they use.
        assert np.array_equal(np.asarray(inc(V)), V + 1)
        assert np.array_equal(np.asarray(pw.program(lambda v: inc(v))(V)), V + 1)
    for use in (inc, pw.program(lambda v: v), pw.program(lambda v: (inc(V), v))):
        with pytest.raises(pw.errors.ForeignArray, match="belongs to another session, now closed"):
            use(x)
    with pytest.raises(pw.errors.SessionClosed, match="it was shut down"):
        np.asarray(x)


def test_deleted_argument(slices, inc) -> None:
    x = pw.put(V, slice=slices.a4, spec=P("x"))
    inc(x)
    x.delete()
    for use in (
        inc,
        pw.program(lambda v: v),
        pw.program(lambda v: inc(inc(v))),
        lambda v: pw.program(lambda: inc(v))(),
    ):
        with pytest.raises(pw.errors.BufferDeleted, match=r"cannot be .*: it was deleted"):
            use(x)


def test_released_slice(session) -> None:
    with pw.virtual_slice((2,), ("x",), name="gone") as s:
        f = pw.compiled(lambda v: v + 1, slice=s)
        x = f(V)
    np.testing.assert_array_equal(np.asarray(x), V + 1)
    for use in (lambda: pw.program(lambda v: f(v))(V), lambda: pw.put(V, slice=s)):
        with pytest.raises(pw.errors.UsageError, match=r"slice gone \(x=2\).*released"):
            use()


# --- slices and specs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axes", "options", "message"),
    [
        ((5,), ("x",), {}, r"no island can hold a slice of shape \(5,\) \(5 devices\); there is island 0 with 4 cpu"),
        ((3, 2), ("x", "y"), {}, r"no island can hold a slice of shape \(3, 2\) \(6 devices\)"),
        ((10**5, 10**5, 10**5), ("x", "y", "z"), {}, "no island can hold"),
        ((2**70,), ("x",), {}, "is larger than any cluster"),
        ((0,), ("x",), {}, "every axis at least one device"),
        ((2, -1), ("x", "y"), {}, "every axis at least one device"),
        ((), (), {}, "at least one axis"),
        ((1, 1, 1, 1), ("a", "b", "c", "d"), {}, r"a slice has 1 to 3 axes, \(1, 1, 1, 1\) has 4"),
        ((2, 2), ("x",), {}, r"slice shape \(2, 2\) and axis names \('x',\) differ in number"),
        ((2, 2), ("x", "x"), {}, "must be different and not empty"),
        ((2,), ("",), {}, "must be different and not empty"),
        ((2,), ("x",), {"island": 7}, "on island 7; there is island 0"),
        ((2,), ("x",), {"platform": "tpu"}, "of platform 'tpu'; there is island 0"),
    ],
    ids=str,
)
def test_slices_that_cannot_be(shape, axes, options, message) -> None:
    with pytest.raises(pw.errors.Unschedulable, match=message):
        pw.virtual_slice(shape, axes, **options)


@pytest.mark.parametrize(
    ("shape", "axes"), [((2.5,), ("x",)), (("2",), ("x",)), (("a",), ("x",)), ((2,), (3,)), (2j, "x")]
)
def test_slices_of_no_sense(shape, axes) -> None:
    with pytest.raises(pw.errors.UsageError, match="a slice has whole sizes and axis names; got shape"):
        pw.virtual_slice(shape, axes)


def test_unknown_axis_name_in_a_spec(slices) -> None:
    message = r"axis 'y' in P\(y\) is not an axis of the mesh; it has \['x'\]"
    with pytest.raises(pw.errors.SpecError, match=message):
        pw.compiled(lambda v: v, slice=slices.a4, in_specs=P("y"))
    with pytest.raises(pw.errors.SpecError, match=message):
        pw.compiled(lambda v: v, slice=slices.a4, out_specs={"a": [P("y")]})
    with pytest.raises(pw.errors.SpecError, match=message):
        pw.put(V, slice=slices.a4, spec=P("y"))
    with pytest.raises(pw.errors.SpecError, match=message):
        pw.compiled(lambda v: v, in_specs=P("y"))(V)


def test_what_is_no_spec(slices) -> None:
    with pytest.raises(
        pw.errors.SpecError, match=r"in_specs of .* holds 'x'; its leaves are jax.sharding.PartitionSpec"
    ):
        pw.compiled(lambda v: v, slice=slices.a4, in_specs="x")
    with pytest.raises(pw.errors.SpecError, match=r"entry 3 of .* is no axis name"):
        pw.compiled(lambda v: v, slice=slices.a4, in_specs=P(3))


# --- what cannot be traced --------------------------------------------------------------------------------------------


def called(v):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(v.shape, v.dtype), v)


CALLBACKS: dict[str, Callable[..., Any]] = {
    "pure": called,
    "io": lambda v: jax.experimental.io_callback(np.sin, jax.ShapeDtypeStruct(v.shape, v.dtype), v),
    "in a loop": lambda v: jax.lax.fori_loop(0, 3, lambda i, x: called(x), v),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_host_callback_inside_a_compiled_function(slices, name) -> None:
    with pytest.raises(pw.errors.TraceError, match=r"calls back to the host \(\w+ at test_bad_input.py:\d+\)"):
        pw.compiled(CALLBACKS[name], slice=slices.a4)(V)


@pytest.mark.parametrize(
    "function", [lambda v: v[v > 0], lambda v: jnp.nonzero(v)[0], lambda v: jnp.zeros(v[0].astype(int))]
)
def test_data_dependent_shape_inside_a_compiled_function(slices, function) -> None:
    with pytest.raises(pw.errors.TraceError, match=r"<lambda> \(test_bad_input.py:\d+\) cannot be traced: ") as caught:
        pw.compiled(function, slice=slices.a4)(V)
    assert isinstance(caught.value.__cause__, (IndexError, TypeError))


def test_assignment_to_what_lives_outside_of_a_program(inc) -> None:
    def assigns_global(v):
        global counter
        counter += 1
        return inc(v)

    total = 0

    def assigns_nonlocal(v):
        def inner():
            nonlocal total
            total = total + 1

        inner()
        return inc(v)

    for function, name in ((assigns_global, "counter"), (assigns_nonlocal, "total")):
        with pytest.raises(
            pw.errors.TraceError, match=rf"assigns to '{name}', which lives outside of it \(test_bad_input"
        ):
            pw.program(function)


def test_own_variables_of_a_program_are_no_side_effect(inc, equal) -> None:
    @pw.program
    def f(v):
        count = 0

        def inner():
            nonlocal count
            count += 1
            return inc(v)

        values = [inner() for _ in range(2)]
        values.append(v + count)
        return values

    equal(f(V), [V + 1, V + 1, V + 2])


def test_tracer_kept_outside_of_a_program(inc) -> None:
    class Box:
        value: Any = None

    box = Box()

    def appends(v):
        kept.append(inc(v))
        return kept[-1]

    def sets(v):
        box.value = v * 2
        return inc(v)

    for function in (appends, sets):
        with pytest.raises(pw.errors.TraceError, match="keeps a traced value in an outer list, variable or object"):
            pw.program(function)(V)
        kept.clear()
        box.value = None


@pytest.mark.parametrize(
    "look",
    [
        lambda x: float(x[0]),
        lambda x: int(x.sum()),
        lambda x: 1 if x[0] > 0 else 2,
        lambda x: np.asarray(x),
        lambda x: range(x[0].astype(int)),
        lambda x: f"{float(x[0])}",
    ],
    ids=["float", "int", "if", "asarray", "range", "format"],
)
def test_program_that_looks_at_a_value(inc, look) -> None:
    def f(v):
        x = inc(v)
        look(x)
        return x

    with pytest.raises(
        pw.errors.TraceError, match=r"program 'f' \(test_bad_input.py:\d+\) cannot be traced: "
    ) as caught:
        pw.program(f)(V)
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("nothing", [None, (), {}, [None, {"a": ()}]], ids=str)
def test_no_outputs(inc, nothing) -> None:
    with pytest.raises(pw.errors.GraphError, match="program 'empty' returns no array; return what should be computed"):
        pw.program(lambda v: nothing, name="empty")(V)


def test_no_outputs_of_a_compiled_function(slices) -> None:
    with pytest.raises(pw.errors.GraphError, match="returns no array"):
        pw.compiled(lambda v: None, slice=slices.a4)(V)
