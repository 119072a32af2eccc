"""What goes into compiled functions and programs and what comes out: pytrees, keywords, static and donated ones."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

V = np.arange(8, dtype=np.float32)


LARGE = np.arange(1 << 19, dtype=np.float32) % 1000
"""Too large for a launch that it is donated to to leave it its memory."""

both = pytest.mark.parametrize("value", [V, LARGE], ids=["small", "large"])


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weights: Any
    bias: Any
    name: str = dataclasses.field(metadata={"static": True}, default="layer")


def test_any_pytrees_in_and_out(session, slices, equal) -> None:
    @pw.compiled(slice=slices.a4)
    def scale(tree, by):
        return jax.tree.map(lambda leaf: leaf * by, tree)

    @pw.program
    def f(tree, *, by):
        return {"scaled": scale(tree, by), "nothing": None, "again": [tree.y[0]]}

    tree = Point(V, (Layer(V + 1, V + 2), {"k": V + 3, "none": None}, [], ()))
    plain = jax.tree.map(lambda leaf: leaf * np.float32(2), tree)
    result = f(tree, by=np.float32(2))
    equal(result, {"scaled": plain, "nothing": None, "again": [tree.y[0]]})
    assert isinstance(result["scaled"], Point)
    assert isinstance(result["again"][0], Layer)
    assert result["again"][0].name == "layer"


def test_keyword_arguments(session, slices, equal) -> None:
    @pw.compiled(slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    def f(a, b, *, c):
        return a + 2 * b + 3 * c

    equal(f(V, b=V, c=V), V * 6)
    equal(pw.program(lambda v, *, w: f(v, v, c=w))(V, w=V), V * 6)


def test_tuple_of_specs_leaves_keywords_replicated(session, slices, equal) -> None:
    f = pw.compiled(lambda a, *, b: a + b, slice=slices.a4, in_specs=(P("x"),), out_specs=P("x"))
    equal(f(V, b=V), V * 2)
    assert f.lower(V, b=V).as_text().count("slice2:P()") <= 1


def test_too_few_specs_are_refused(session, slices) -> None:
    f = pw.compiled(lambda a, b: a + b, slice=slices.a4, in_specs=(P("x"), P("x"), P()))
    with pytest.raises(
        pw.errors.UsageError, match="in_specs of <lambda> has 3 entries; it was called with 2 arguments"
    ):
        f(V, V)


def test_specs_that_are_no_prefix_are_refused(session, slices) -> None:
    f = pw.compiled(lambda tree: tree["a"], slice=slices.a4, in_specs=({"b": P()},))
    with pytest.raises(pw.errors.SpecError, match="in_specs of <lambda> is no pytree prefix"):
        f({"a": V})


def test_static_arguments(session, slices, equal) -> None:
    seen = []

    @pw.compiled(slice=slices.a4, in_specs=P("x"), out_specs=P("x"), static_argnums=(1, 2))
    def f(v, power, mode):
        seen.append((power, mode))
        return v**power if mode == "power" else v

    equal(f(V, 2, "power"), V**2)
    equal(f(V, 3, "power"), V**3)
    equal(f(V, 3, "other"), V)
    equal(f(V, 2, "power"), V**2)
    equal(pw.program(lambda v: f(f(v, 2, "power"), 2, "power"))(V), V**4)
    assert set(seen) == {(2, "power"), (3, "power"), (3, "other")}
    g = pw.compiled(lambda v, n: v * n, slice=slices.a1, static_argnums=1)
    for n in (1, 1.0, True, np.float16(1)):
        equal(g(np.arange(3), n), jax.jit(lambda v, n=n: v * n)(np.arange(3)))
    with pytest.raises(pw.errors.UsageError, match=r"static argument 1 of f is not hashable: \[2\]"):
        f(V, [2], "power")
    with pytest.raises(pw.errors.UsageError, match="f has static argument 1, but was called with 1 arguments"):
        f(V)


@both
@pytest.mark.parametrize("way", ["twice", "handed on twice", "donated inside", "donated inside, kept"])
def test_what_was_moved_and_back_is_donated_without_what_it_was(session, slices, equal, way, value) -> None:
    """It lies where it was, so nothing was moved."""
    a, b = slices.a4, slices.a22
    back = lambda v: pw.reshard(pw.reshard(v, b, P()), a, P("x"))  # noqa: E731
    taking = pw.compiled(lambda v: v * 2, slice=a, in_specs=P("x"), out_specs=P("x"), donate_argnums=0)
    plus = pw.compiled(lambda v: v + 1, slice=a, in_specs=P("x"), out_specs=P("x"))

    def twice(v):
        made = plus(v)
        return made, back(made), made

    def kept(v):
        made = plus(v)
        return made, taking(back(made))

    x = plus(value)  # which the runtime has made: uploads are copied at times
    if way == "donated inside":
        equal(pw.program(lambda v: taking(back(v)))(x), (value + 1) * 2)
    elif way == "donated inside, kept":
        equal(pw.program(kept)(x), (value + 2, (value + 2) * 2))
    else:
        first, second, *_ = pw.program(twice if way == "twice" else lambda v: (back(v), back(pw.reshard(v, a, P()))))(x)
        expected = np.asarray(first)
        equal(taking(second), expected * 2)
        equal(first, expected)
    equal(x, value + 1)


def test_calls_with_the_same_static_argument_may_have_any_number_of_others(session, slices, equal) -> None:
    f = pw.compiled(lambda n, *vs, by=1: sum(vs) * n * by, slice=slices.a4, static_argnums=0)
    for count in (1, 3, 2):
        equal(f(2, *[V] * count), V * (2 * count))
        assert f.lower(2, *[V] * count).out_info.shape == V.shape
    equal(f(2, V, by=3), V * 6)


def test_negative_static_position_counts_from_the_end(session, slices, equal) -> None:
    f = pw.compiled(lambda v, n: v * n, slice=slices.a4, static_argnums=-1)
    equal(f(V, 3), V * 3)


def test_static_and_donated_positions_count_all_arguments(session, slices, equal) -> None:
    f = pw.compiled(
        lambda n, a, b: (a * n, b * n),
        slice=slices.a4,
        in_specs=(None, P("x"), P()),
        out_specs=P("x"),
        static_argnums=0,
        donate_argnums=2,
    )
    x, y = pw.put(V, slice=slices.a4, spec=P("x")), pw.put(V + 1, slice=slices.a4)
    assert f.lower(3, x, y).as_text().count("reshard") == 0
    equal(f(3, x, y), (V * 3, (V + 1) * 3))
    assert not x.is_deleted()
    assert y.is_deleted()


def test_callables_of_all_kinds(session, slices, equal) -> None:
    class Scale:
        def __call__(self, v):
            return v * 3

        def method(self, v):
            return v + 3

    for function, expected in (
        (Scale(), V * 3),
        (Scale().method, V + 3),
        (functools.partial(jnp.multiply, 5.0), V * 5),
        (jnp.negative, -V),
    ):
        equal(pw.compiled(function, slice=slices.a4)(V), expected)
        equal(pw.program(function)(V), expected)


def test_what_is_passed_may_change_after_the_call(session, slices, equal) -> None:
    f = pw.compiled(lambda v: v + 1, slice=slices.a4)
    mine = V.copy()
    y = f(mine)
    mine[:] = -1
    equal(y, V + 1)


def test_argument_deleted_right_after_the_call(session, slices, equal) -> None:
    f = pw.compiled(lambda v: v + 1, slice=slices.a4)
    results = []
    for k in range(20):
        x = pw.put(V + np.float32(k), slice=slices.b4)
        results.append(f(x))
        x.delete()
    equal(results, [V + np.float32(k + 1) for k in range(20)])


def test_donated_argument_is_deleted_by_the_call(session, slices, equal) -> None:
    f = pw.compiled(lambda a, b: a + b, slice=slices.a4, in_specs=P("x"), out_specs=P("x"), donate_argnums=0)
    x, y = pw.put(V, slice=slices.a4, spec=P("x")), pw.put(V, slice=slices.a4, spec=P("x"))
    equal(f(x, y), V * 2)
    assert x.is_deleted()
    assert not y.is_deleted()
    with pytest.raises(pw.errors.BufferDeleted, match=r"float32\[8\] cannot be used: it was donated to f|<lambda>"):
        np.asarray(x)
    with pytest.raises(pw.errors.BufferDeleted, match="donated"):
        f(x, y)
    equal(y, V)


@both
def test_state_donated_step_by_step_keeps_one_copy(session, slices, equal, value) -> None:
    step = pw.compiled(lambda s: s + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"), donate_argnums=0)
    before = session.status()["buffers"]
    state = step(value)
    for _ in range(20):
        state = step(state)
    equal(state, value + 21)
    deadline = time.monotonic() + 20  # a value may be here before its launch is over for the controller
    while (now := session.status()["buffers"]) > before + 1:
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.01)


@both
def test_donating_a_copy_leaves_the_original(session, slices, equal, value) -> None:
    """What an identity or a change of layout returns has memory of its own."""
    step = pw.compiled(lambda s: s * 2, slice=slices.a4, in_specs=P("x"), out_specs=P("x"), donate_argnums=0)
    same = pw.compiled(lambda v: v, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    other = pw.compiled(lambda v: v, slice=slices.a22, in_specs=P(("x", "y")), out_specs=P(("x", "y")))
    x = pw.put(value, slice=slices.a4, spec=P("x"))
    equal(step(same(x)), value * 2)
    equal(step(other(x)), value * 2)
    equal(pw.program(lambda v: step(same(v)))(x), value * 2)
    equal(pw.program(lambda v: (step(other(v)), same(v)))(x), (value * 2, value))
    equal(x, value)


@both
def test_donation_through_another_layout_keeps_the_right_bits(session, slices, equal, value) -> None:
    f = pw.compiled(lambda a: a * 2, slice=slices.b4, in_specs=P("x"), out_specs=P("x"), donate_argnums=0)
    x = pw.put(value, slice=slices.a4, spec=P())
    equal(f(x), value * 2)
    assert x.is_deleted()


@both
@pytest.mark.parametrize("given", range(4))
def test_donating_what_lies_on_some_of_the_same_devices_leaves_the_others(session, slices, equal, given, value) -> None:
    """What a transfer leaves on its device is not copied: 1. an array goes to a part of its devices, twice, and back
    from there. 2. One of the four is donated."""
    x = pw.put(value, slice=slices.b4, spec=P())
    y, other = pw.put(x, slice=slices.b2, spec=P()), pw.reshard(x, slices.b2, P())
    arrays = [x, y, other, pw.reshard(y, slices.b4, P())]
    taken = arrays.pop(given)
    where = slices.b4 if given in (0, 3) else slices.b2
    equal(pw.compiled(lambda v: v * 2, slice=where, donate_argnums=0)(taken), value * 2)
    assert taken.is_deleted()
    for kept in arrays:
        equal(kept, value)
    equal(pw.compiled(lambda v: v + 1, slice=slices.b4)(arrays[0 if given else 2]), value + 1)


@both
@pytest.mark.slow
@pytest.mark.parametrize("there", [2, 4])
def test_so_does_donating_what_hosts_of_an_island_have_in_common(pairs, equal, there, value) -> None:
    """All of them or one: a computation over hosts whose argument is gone on one of them would end them."""
    with pw.connect(pairs.url, pairs.token) as session:
        some, others = (session.virtual_slice((size,), ("x",), island=0) for size in (6 - there, there))
        x = pw.put(value, slice=some, spec=P())
        y = pw.reshard(x, others, P())
        equal(pw.compiled(lambda v: v * 2, slice=others, donate_argnums=0)(y), value * 2)
        equal(x, value)
        equal(pw.compiled(lambda v: v + 1, slice=some)(x), value + 1)


def test_use_after_donation_in_a_program_is_refused(session, slices) -> None:
    f = pw.compiled(lambda a: a * 2, slice=slices.a4, donate_argnums=0)
    g = pw.compiled(lambda a: a + 1, slice=slices.a4)

    @pw.program
    def wrong(v):
        return f(v), g(v)

    with pytest.raises(pw.errors.GraphError, match=r"donates %0 as argument 0, but <lambda> uses it afterwards"):
        wrong(V)


def test_returning_a_donated_argument_is_refused(session, slices) -> None:
    f = pw.compiled(lambda a: a * 2, slice=slices.a4, donate_argnums=0)
    x = pw.put(V, slice=slices.a4)
    with pytest.raises(pw.errors.GraphError, match="donates argument 0 and returns it as well"):
        pw.program(lambda v: (f(v), v))(x)
    assert not x.is_deleted()


def test_donated_argument_passed_twice_is_refused(session, slices) -> None:
    f = pw.compiled(lambda a, b: a + b, slice=slices.a4, donate_argnums=0)
    x = pw.put(V, slice=slices.a4)
    with pytest.raises(pw.errors.UsageError, match="donates argument 0, which is passed or captured a second time"):
        f(x, x)
    with pytest.raises(pw.errors.UsageError, match="passed or captured a second time"):
        pw.program(lambda v: f(v, x))(x)
    assert not x.is_deleted()


def test_what_a_program_holds_is_not_given_away(session, slices, equal) -> None:
    f = pw.compiled(lambda a: a * 2, slice=slices.a4, donate_argnums=0)
    held = pw.put(V, slice=slices.a4)
    constants = pw.program(lambda: (f(held), f(V + 1)))
    for _ in range(2):
        equal(constants(), (V * 2, (V + 1) * 2))
    equal(held, V)


def test_numpy_and_jax_and_scalars_and_handles_are_arguments(session, slices, equal) -> None:
    f = pw.compiled(lambda *args: sum(args), slice=slices.a4)
    x = pw.put(V, slice=slices.b4, spec=P("x"))
    equal(f(V, jnp.asarray(V), 2, 0.5, True, np.float32(1), x), V * 3 + 4.5)


def test_what_is_no_array_is_refused(session, slices) -> None:
    f = pw.compiled(lambda v: v, slice=slices.a4)
    with pytest.raises(pw.errors.InvalidArray, match="argument v of <lambda> is a str; pass numbers, NumPy arrays"):
        f("text")
    with pytest.raises(pw.errors.InvalidArray, match="argument v of <lambda> is a object"):
        pw.program(lambda v: f(v))(object())
    with pytest.raises(pw.errors.UsageError, match=r"pw\.compiled decorates a function, not 3"):
        pw.compiled(cast(Any, 3))
    with pytest.raises(pw.errors.UsageError, match=r"slice= takes what pw\.virtual_slice returns, not 'x'"):
        pw.compiled(lambda v: v, slice=cast(Any, "x"))


def test_number_of_arguments_is_checked_by_python(session, slices) -> None:
    f = pw.compiled(lambda a, b: a + b, slice=slices.a4)
    with pytest.raises(pw.errors.TraceError, match="missing 1 required positional argument"):
        f(V)
