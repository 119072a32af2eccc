"""`jax.device_put` and `jax.lax.with_sharding_constraint` to a slice: moves in programs, refused in computations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import limits
from pathways_ray.client import placement, specs
from pathways_ray.errors import Failure, UsageError
from pathways_ray.ir.graph import Transfer

V = np.arange(8, dtype=np.float32).reshape(4, 2)

WORDS: list[Any] = [jax.device_put, jax.lax.with_sharding_constraint]


@pytest.mark.parametrize("put", WORDS)
def test_a_program_moves_what_is_put_on_another_slice(session, a4, b22, put) -> None:
    x, there = pw.put(V, a4, P("x")), NamedSharding(b22.mesh, P("x", "y"))
    doubled = pw.program(lambda v: put(v, there) * 2)
    moved = pw.program(lambda v: put(v, there))
    for found, expected in ((doubled(x), V * 2), (moved(x), V), (moved(V), V), (put(x, there), V)):
        assert (found.slice, found.sharding.spec) == (b22, P("x", "y"))
        np.testing.assert_array_equal(np.asarray(found), expected)
    assert [node.layout.slice for node in moved.lower(x).graph.nodes if isinstance(node, Transfer)] == [b22.id]
    captured = pw.program(lambda v: put(x, there) + put(v + 1, there))(x)
    assert captured.slice is b22
    np.testing.assert_array_equal(np.asarray(captured), V * 2 + 1)


@pytest.mark.parametrize("put", WORDS)
def test_rows_of_a_batch_are_put_together(session, b22, put) -> None:
    there = NamedSharding(b22.mesh, P("y"))
    found = pw.program(jax.vmap(lambda v: put(v, there) * 2))(V)
    assert found.slice is b22
    np.testing.assert_array_equal(np.asarray(found), V * 2)


def test_trees_derivatives_and_other_layouts(session, a4, b22) -> None:
    x, there = pw.put(V, a4, P("x")), NamedSharding(b22.mesh, P(None, "y"))
    found = pw.program(lambda v: jax.device_put({"w": v, "b": v + 1}, there))(x)
    assert [leaf.slice for leaf in found.values()] == [b22, b22]
    np.testing.assert_array_equal(np.asarray(found["b"]), V + 1)
    gradient = pw.program(jax.grad(lambda v: (jax.device_put(v, there) ** 2).sum()))(x)
    np.testing.assert_array_equal(np.asarray(gradient), V * 2)
    whole = pw.program(lambda v: jax.device_put(v, NamedSharding(a4.mesh, P())))(x)
    assert (whole.slice, whole.sharding.spec) == (a4, P())


def test_a_compiled_function_is_not_mapped_over_another_slice(session, a4) -> None:
    there = session.virtual_slice((4,), ("x",))

    def over(where: Any) -> Any:
        return jax.shard_map(lambda v: v * 2, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"))

    refused = pw.compiled(over(there), slice=a4)
    for call in (refused, pw.program(lambda v: refused(v))):
        with pytest.raises(UsageError, match=r"runs on slice a4 .*, and jax.shard_map inside of it names slice"):
            call(V)
    np.testing.assert_array_equal(np.asarray(pw.compiled(over(a4), slice=a4)(V)), V * 2)


@pytest.mark.parametrize("put", WORDS)
def test_a_computation_stays_on_its_slice(session, a4, b22, put) -> None:
    x, there, own = pw.put(V, a4), NamedSharding(b22.mesh, P()), NamedSharding(a4.mesh, P("x"))
    jitted = jax.jit(lambda v: put(v, there) * 2)
    assert jitted(pw.put(V, b22)).slice is b22
    if put is jax.device_put:  # on its own it is a program, which moves
        assert jitted(x).slice is b22
    refused = r"runs on slice a4 .*, and jax.(device_put|lax.with_sharding_constraint) inside of it names slice b22"
    compiled = pw.compiled(lambda v: put(v, there), slice=a4)
    nested = pw.program(lambda v: jax.jit(lambda u: put(u, there) * 2)(v))
    branched = pw.program(lambda v: pw.cond(v.sum() > 0, lambda u: put(u, there), lambda u: u + 1, v))
    moving = [nested, branched] if put is jax.device_put else []  # these move in a program
    for call in moving:
        assert call(x).slice is b22
    for call in (compiled, *([jitted, nested, branched] if not moving else [])):
        with pytest.raises(UsageError, match=refused):
            call(x)
    for call in (jax.jit(lambda v: put(v, own) * 2), pw.compiled(lambda v: put(v, own) * 2, slice=a4)):
        assert call(x).slice is a4


def test_bodies_over_several_slices_move_too(session, a4, b22) -> None:
    f = pw.compiled(lambda v: v + 1, slice=a4)
    g = pw.compiled(lambda v: v + 2, slice=b22)
    here, there = NamedSharding(a4.mesh, P()), NamedSharding(b22.mesh, P())

    def body(_: Any, v: Any) -> Any:
        return jax.device_put(g(jax.device_put(f(v), there)), here)

    found = pw.program(lambda v: pw.fori_loop(0, 2, body, v))(pw.put(V, a4))
    assert found.slice is a4
    np.testing.assert_array_equal(np.asarray(found), V + 6)


CONSTRUCTORS: dict[str, Any] = {
    "zeros": lambda device: jnp.zeros((4, 2), device=device),
    "ones": lambda device: jnp.ones((4, 2), jnp.int8, device=device),
    "empty": lambda device: jnp.empty((4, 2), device=device),
    "full": lambda device: jnp.full((4, 2), 7, device=device),
    "zeros_like": lambda device: jnp.zeros_like(V, device=device),
    "full_like": lambda device: jnp.full_like(jnp.asarray(V), 3, device=device),
    "asarray": lambda device: jnp.asarray(V, device=device),
    "array": lambda device: jnp.array([[1, 2], [3, 4], [5, 6], [7, 8]], device=device),
    "arange": lambda device: jnp.arange(8, device=device),
    "arange from": lambda device: jnp.arange(3, 19, 2, device=device),
    "linspace": lambda device: jnp.linspace(0, 1, 8, device=device),
    "astype": lambda device: jnp.astype(V, jnp.int32, device=device),
    "lax.full": lambda device: jax.lax.full((4, 2), 7.0, sharding=device),
    "lax.full_like": lambda device: jax.lax.full_like(V, 3, sharding=device),
    "lax.broadcasted_iota": lambda device: jax.lax.broadcasted_iota(jnp.int32, (4, 2), 1, out_sharding=device),
}


@pytest.mark.parametrize("make", CONSTRUCTORS.values(), ids=CONSTRUCTORS)
def test_constructors_take_a_layout_of_a_slice_as_their_device(session, a4, make) -> None:
    plain, found = make(None), make(NamedSharding(a4.mesh, P("x")))
    assert type(found) is pw.Array
    assert (found.slice, found.sharding.spec) == (a4, P("x"))
    assert (found.dtype, found.weak_type) == (plain.dtype, plain.weak_type)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(plain))
    inside = pw.program(lambda v: (v, make(NamedSharding(a4.mesh, P("x")))))(V)[1]
    assert (inside.slice, inside.sharding.spec) == (a4, P("x"))


def test_constructors_move_what_lies_elsewhere(session, a4, b22) -> None:
    there = NamedSharding(b22.mesh, P("y"))
    x = pw.put(V, a4, P("x"))
    moved: list[Any] = [jnp.asarray(x, device=there), jnp.astype(x, jnp.int32, device=there)]
    for found in moved:
        np.testing.assert_array_equal(np.asarray(found), V)
        assert found.slice is b22


@pytest.mark.parametrize("put", WORDS)
def test_a_jitted_function_of_values_of_this_process_puts_them_on_a_slice(session, a4, put) -> None:
    there = NamedSharding(a4.mesh, P("x"))
    found = jax.jit(lambda v: put(v, there) * 2)(V)
    assert type(found) is pw.Array
    assert found.slice is a4
    np.testing.assert_array_equal(np.asarray(found), V * 2)


@pytest.mark.parametrize("put", WORDS)
def test_so_does_one_that_puts_them_there_deeper_inside(session, a4, b22, put) -> None:
    own, there = NamedSharding(a4.mesh, P("x")), NamedSharding(b22.mesh, P())
    step = jax.jit(lambda v: put(v, own) + 1)
    for call in (
        jax.jit(lambda v: step(v)),
        jax.jit(lambda v: jax.lax.scan(lambda c, _: (step(c), None), v, None, 1)[0]),
        jax.jit(lambda v: jax.lax.cond(v.sum() > 0, step, lambda u: u, v)),
    ):
        for found in (call(V), pw.program(lambda v, call=call: call(v))(V)):
            assert type(found) is pw.Array
            assert found.slice is a4
            np.testing.assert_array_equal(np.asarray(found), V + 1)
    other = jax.jit(lambda v: put(v, there) + 1)
    both = pw.program(lambda v, w: (step(v), other(w)))(V, V)
    assert [one.slice for one in both] == [a4, b22]
    with pytest.raises(UsageError, match=r"runs on slice .*, and jax.* inside of it names slice (a4|b22)"):
        jax.jit(lambda v: step(v) + jax.jit(lambda u: put(u, there))(v))(V)


def test_a_jitted_function_moves_what_it_puts_on_another_slice(session, a4, b22) -> None:
    x, there = pw.put(V, a4, P("x")), NamedSharding(b22.mesh, P("x", "y"))
    found = jax.jit(lambda v: jax.device_put(v, there) * 2)(x)
    assert (found.slice, found.sharding.spec) == (b22, P("x", "y"))
    np.testing.assert_array_equal(np.asarray(found), V * 2)


def test_shard_map_runs_on_the_slice_of_its_mesh(session, a4, b22) -> None:
    """Whether its arguments lie there, on another slice or in this process."""
    there = session.virtual_slice((4,), ("x",), name="c4")
    mapped = jax.shard_map(lambda v: v * 2, mesh=there.mesh, in_specs=P("x"), out_specs=P("x"))
    for given in (V, pw.put(V, a4, P("x")), pw.put(V, there), pw.put(V, b22, P("x", "y"))):
        for call in (mapped, jax.jit(mapped), jax.jit(lambda v: mapped(v) + 0), pw.program(mapped)):
            found = call(given)
            assert (found.slice, found.sharding.spec) == (there, P("x"))
            np.testing.assert_array_equal(np.asarray(found), V * 2)
    pinned = jax.jit(mapped, in_shardings=NamedSharding(a4.mesh, P("x")))
    with pytest.raises(
        UsageError, match=r"has shardings on slice a4 .* and on slice c4 .*; a function runs on one slice"
    ):
        pinned(V)


@pytest.mark.parametrize("call", [jax.jit, pw.program])
def test_what_is_mapped_over_another_slice_is_put_back(session, a4, call) -> None:
    elsewhere = session.virtual_slice((4,), ("x",), name="c4")
    x, own, there = pw.put(V, a4), NamedSharding(a4.mesh, P()), NamedSharding(elsewhere.mesh, P("x"))

    def mapped(where: pw.VirtualSlice) -> Any:
        return jax.shard_map(lambda u: u * 2, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"))

    def back(v: Any) -> Any:
        return jax.device_put(mapped(elsewhere)(v), own)

    for body, expected in (
        (back, V * 2),
        (lambda v: jax.jit(back)(v), V * 2),
        (lambda v: jax.checkpoint(back)(v) + 1, V * 2 + 1),
        (lambda v: jax.lax.cond(v[0, 1] > 0, back, lambda u: u + 0, v), V * 2),
        (lambda v: jax.lax.scan(lambda c, _: (back(c), None), v, None, 2)[0], V * 4),
        (lambda v: mapped(a4)(back(v)), V * 4),
    ):
        found = call(body)(x)
        assert found.slice is a4
        np.testing.assert_array_equal(np.asarray(found), expected)
    kept, put = call(lambda v: (v + 1, mapped(elsewhere)(jax.device_put(v, there))))(x)
    assert (kept.slice, put.slice) == (a4, elsewhere)


def test_a_constraint_says_how_a_replicated_value_lies(session, a4) -> None:
    own = NamedSharding(a4.mesh, P("x"))
    found = jax.jit(lambda v: jax.lax.with_sharding_constraint(v * 2, own))(pw.put(V, a4))
    assert found.sharding.spec == P("x")
    np.testing.assert_array_equal(np.asarray(found), V * 2)


def test_a_nested_shard_map_runs_on_the_slice_of_its_mesh(session, a4) -> None:
    elsewhere = session.virtual_slice((4,), ("x",), name="c4")

    def summed(where: pw.VirtualSlice) -> Any:
        return jax.shard_map(lambda u: jax.lax.psum(u, "x"), mesh=where.mesh, in_specs=P("x"), out_specs=P())

    mapped, expected = summed(a4), V.sum(0, keepdims=True)
    for body in (
        lambda v: jax.jit(lambda u: mapped(u) + 0)(v),
        lambda v: jax.checkpoint(mapped)(v),
        lambda v: jax.lax.scan(lambda c, _: (c, mapped(c)), v, None, 1)[1][0],
    ):
        for given in (V, pw.put(V, elsewhere), pw.put(V, a4)):
            found = pw.program(body)(given)
            assert found.slice is a4
            np.testing.assert_array_equal(np.asarray(found), expected)
    both = pw.program(lambda v: jax.jit(lambda u: mapped(u) + summed(elsewhere)(u))(v))
    with pytest.raises(UsageError, match=r"on slice a4 .* and on slice c4 .*; a function runs on one slice"):
        both(V)


BODIES: dict[str, Any] = {
    "jit": lambda put, v: jax.jit(put)(v),
    "checkpoint": lambda put, v: jax.checkpoint(put)(v),
    "carry": lambda put, v: jax.lax.scan(lambda c, _: (put(c), None), v, None, 2)[0],
    "rows": lambda put, v: jax.lax.scan(lambda c, _: (c, put(c)), v, None, 1)[1][0],
    "cond": lambda put, v: jax.lax.cond(v[0, 1] > 0, put, lambda u: put(u + 1), v),
    "while": lambda put, v: jax.lax.while_loop(lambda c: c.sum() < 100, put, v),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_what_says_inside_of_bodies_how_values_lie_is_heard(session, a4, body) -> None:
    own = NamedSharding(a4.mesh, P("x"))
    puts: list[Any] = [
        lambda v: jax.lax.with_sharding_constraint(v * 2, own),
        jax.shard_map(lambda u: u * 2, mesh=a4.mesh, in_specs=P("x"), out_specs=P("x")),
    ]
    expected = np.asarray(body(lambda v: v * 2, jnp.asarray(V)))
    for put in puts:
        for call in (jax.jit(lambda v, put=put: body(put, v)), pw.program(lambda v, put=put: body(put, v))):
            found = call(pw.put(V, a4))
            assert (found.slice, found.sharding.spec) == (a4, P("x"))
            np.testing.assert_array_equal(np.asarray(found), expected)


def test_branches_that_leave_a_value_in_several_layouts_leave_it_like_an_operand(session, a4) -> None:
    own = NamedSharding(a4.mesh, P("x"))
    for given in (P(), P("x")):
        found = jax.jit(
            lambda v: jax.lax.cond(v[0, 1] > 0, lambda u: jax.lax.with_sharding_constraint(u, own), jnp.zeros_like, v)
        )(pw.put(V, a4, given))
        assert found.sharding.spec == given
        np.testing.assert_array_equal(np.asarray(found), V)


def test_to_put_a_value_on_its_own_slice_lays_it_out(session, a4) -> None:
    own, spread = NamedSharding(a4.mesh, P("x")), P("x")
    for f, given, expected in (
        (lambda v: jax.device_put(v, own), P(), spread),
        (lambda v: jax.device_put(v, own) * 2, spread, spread),
        (lambda v: jax.jit(lambda u: jax.device_put(u, own))(v) * 2, P(), spread),
        (lambda v: jax.device_put(v, NamedSharding(a4.mesh, P())), spread, P()),
        (lambda v: jax.device_put(v * 2), spread, spread),
        (lambda v: v + jax.device_put(jnp.zeros(3), NamedSharding(a4.mesh, P())).sum(), spread, spread),
    ):
        found = jax.jit(f)(pw.put(V, a4, given))
        assert found.sharding.spec == expected
        np.testing.assert_array_equal(np.asarray(found), jax.jit(f)(pw.put(V, a4)))


@pytest.mark.parametrize("call", [jax.jit, pw.program])
def test_what_names_a_slice_claims_no_other_one(session, a4, b22, call) -> None:
    there = NamedSharding(b22.mesh, P())
    first = call(lambda v: jax.device_put(v * 2, there) + 1)(V)
    gradient = call(jax.grad(lambda v: (jax.device_put(v * 2, there) ** 2).sum()))
    assert (first.slice, gradient(V).slice, gradient(pw.put(V, a4)).slice) == (b22, b22, a4)
    np.testing.assert_array_equal(np.asarray(first), V * 2 + 1)
    np.testing.assert_array_equal(np.asarray(gradient(pw.put(V, a4))), V * 8)
    assert session._default_slice is None


def test_arguments_on_several_slices_come_in_any_order(session, a4, b22) -> None:
    there = NamedSharding(b22.mesh, P())
    x, y = pw.put(V, a4, P("x")), pw.put(V.T, b22)
    for found in (
        jax.jit(lambda p, q: jax.device_put(p, there) @ q)(x, y),
        jax.jit(lambda q, p: jax.device_put(p, there) @ q)(y, x),
    ):
        assert found.slice is b22
        np.testing.assert_array_equal(np.asarray(found), V @ V.T)


KEPT: dict[str, Any] = {
    "carry": lambda put, v: jax.lax.scan(lambda c, _: (c * 2, put(c.sum())), v, None, 3),
    "rows": lambda put, v: jax.lax.scan(lambda c, row: (c + put(row.sum()), row * 2), 0.0, v)[::-1],
    "cond": lambda put, v: jax.lax.cond(v[0, 1] > 0, lambda u: (u * 2, put(u)), lambda u: (u * 3, put(u + 1)), v),
    "while": lambda put, v: jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (c[0] * 2, c[1] + put(c[0][0, 0]) + 1), (v, 0.0)
    ),
    "nested": lambda put, v: jax.jit(lambda u: jax.lax.scan(lambda c, _: (c * 2, put(c)), u, None, 2))(v),
}


@pytest.mark.parametrize("call", [jax.jit, pw.program])
@pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)
def test_what_a_body_does_not_put_elsewhere_stays(session, a4, b22, kept, call) -> None:
    there = NamedSharding(b22.mesh, P())
    found = call(lambda v: kept(lambda u: jax.device_put(u, there), v))(pw.put(V, a4, P("x")))
    assert [one.slice for one in found] == [a4, b22]
    if kept is not KEPT["rows"]:  # these are made in the loop, in its layout
        assert found[0].sharding.spec == P("x")
    for one, other in zip(found, kept(lambda u: u, jnp.asarray(V)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("rounds", [0, 2])
def test_all_is_where_a_body_puts_it_in_loops_without_rounds_or_inside_of_others(session, a4, b22, rounds) -> None:
    there = NamedSharding(b22.mesh, P())

    def inner(c: Any, _: Any) -> Any:
        return jax.lax.scan(lambda d, _: (d + 1, jax.device_put(d.sum(), there)), c, None, rounds)

    carry, rows = pw.program(lambda v: jax.lax.scan(inner, v, None, 2))(pw.put(V, a4))
    assert (carry.slice, rows.slice, rows.shape) == (b22, b22, (2, rounds))
    np.testing.assert_array_equal(np.asarray(carry), V + 2 * rounds)
    assert pw.program(lambda v: inner(v, None))(pw.put(V, a4))[0].slice is (a4 if rounds else b22)


INSIDE: dict[str, Any] = {
    "checkpoint": lambda put, v: jax.checkpoint(put)(v),
    "jit": lambda put, v: jax.jit(jax.checkpoint(put))(v),
    "gradient": lambda put, v: put(v) + jax.grad(jax.checkpoint(lambda u: (put(u) ** 2).sum()))(v),
    "scan": lambda put, v: jax.lax.scan(lambda c, _: (c, put(v)), 0, None, 2)[1],
    "cond": lambda put, v: jax.lax.cond(v[0, 1] > 0, put, lambda u: u * 1, v),
    "while": lambda put, v: jax.lax.while_loop(lambda c: c.sum() < 100, put, v),
    "loop of several slices": lambda put, v: put(jax.lax.fori_loop(0, 2, lambda _, c: put(c) + v, v)),
}


@pytest.mark.parametrize("call", [jax.jit, pw.program])
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_parts_of_a_program_put_values_on_another_slice(session, a4, b22, inside, call) -> None:
    x, own, there = pw.put(V, a4), NamedSharding(a4.mesh, P()), NamedSharding(b22.mesh, P("x"))
    expected = np.asarray(inside(lambda v: v * 2, jnp.asarray(V)))
    for to in ((there,), (there, own)):

        def put(v: Any, to: Any = to) -> Any:
            for layout in to:
                v = jax.device_put(v, layout)
            return v * 2

        found = call(lambda v, put=put: inside(put, v))(x)
        assert found.slice is (b22 if len(to) == 1 else a4)
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_reshard_of_jax_moves_as_device_put_does(session, a4, b22) -> None:
    """It was ignored: what it took stayed on its slice, or in this process."""
    x, there, here = pw.put(V, a4), NamedSharding(b22.mesh, P()), NamedSharding(a4.mesh, P())
    f, g = pw.compiled(lambda v: v + 1, slice=a4), pw.compiled(lambda v: v * 2, slice=b22)
    reshard = jax.sharding.reshard

    def loop(v):
        return pw.fori_loop(0, 2, lambda k, u: reshard(g(reshard(f(u), there)), here), v)

    def f_there(v):
        return reshard(v, there)

    for function in (f_there, pw.program(f_there), jax.vmap(f_there)):
        for given in (x, V, jnp.asarray(V)):
            found = function(given)
            assert (found.slice, found.sharding.spec) == (b22, P())
            np.testing.assert_array_equal(found, V)
    moved = jax.jit(lambda v: f_there(v) * 2)(x)
    assert moved.slice is b22
    np.testing.assert_array_equal(moved, V * 2)
    looped = pw.program(loop)(x)
    assert looped.slice is a4
    np.testing.assert_array_equal(looped, (V + 1) * 4 + 2)
    gradient = pw.program(jax.grad(lambda v: (g(reshard(f(v), there)) ** 2).sum()))(x)
    assert gradient.slice is a4
    np.testing.assert_array_equal(gradient, (V + 1) * 8)
    with pytest.raises(UsageError, match=r"jax\.sharding\.reshard inside of it names"):
        pw.compiled(f_there, slice=a4)(x)
    split = pw.put(V, a4, P("x"))
    for made in (lambda f: pw.program(f), lambda f: pw.compiled(f, slice=a4, in_specs=P("x"))):
        assert made(lambda v: reshard(v, here))(split).sharding.spec == P()


@pytest.mark.parametrize(
    ("put", "kind"),
    [
        (lambda x, s: jax.device_put(x, jax.memory.Space.Host), "MemorySpace.Host"),
        (lambda x, s: jax.device_put(x, s.with_memory_kind("pinned_host")), "pinned_host"),
        (lambda x, s: pw.put(x, s.with_memory_kind("unpinned_host")), "unpinned_host"),
        (lambda x, s: jax.jit(lambda v: v + 1, out_shardings=s.with_memory_kind("pinned_host"))(x), "pinned_host"),
    ],
)
def test_a_memory_kind_is_left_out_with_one_warning(session, a4, put, kind) -> None:
    specs._warn_of_kind.cache_clear()
    x = pw.put(V, a4, P("x"))
    with pytest.warns(UserWarning, match=f"^{kind} is left out: arrays on slices lie in the memory of") as caught:
        found = [put(x, x.sharding) for _ in range(2)]
    assert [one.filename for one in caught] == [__file__]
    assert [one.sharding for one in found] == [x.sharding] * 2
    for plain in (jax.memory.Space.Device, jax.memory.Space.Any, x.sharding.with_memory_kind("device")):
        assert jax.device_put(x, plain).sharding == x.sharding


def test_a_tree_is_placed_at_once(session, a4, b22) -> None:
    """By `jax.device_put` as by `pw.put`: what moves goes by one launch; what is JAX's own stays with JAX."""
    there, device = NamedSharding(b22.mesh, P("x", "y")), jax.devices()[0]
    tree = {"moved": [pw.put(V + k, a4, P("x")) for k in range(5)], "new": [V + 10, V[:, :2] * 2], "own": V}
    before = len(session.launched)
    found = jax.device_put(tree, {"moved": there, "new": there, "own": device})
    assert len(session.launched) == before + 1
    assert isinstance(found["own"], jax.Array)
    assert found["own"].devices() == {device}
    assert [leaf.slice for leaf in (*found["moved"], *found["new"])] == [b22] * 7
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    again = jax.device_put(found["moved"], there)
    assert [one._buffer for one in again] == [one._buffer for one in found["moved"]]
    own = jax.device_put(found["moved"], there, may_alias=False)
    assert not {one._buffer for one in own} & {one._buffer for one in again}
    jax.tree.map(np.testing.assert_array_equal, own, again)


def test_what_cannot_be_placed_is_named_and_takes_nothing_with_it(session, a4, b22) -> None:
    there = NamedSharding(b22.mesh, P("x", "y"))
    with pytest.raises(pw.errors.SpecError, match=r"leaf \['b'\]: put: dimension 0 of float32\[3\]"):
        pw.put({"a": V, "b": np.ones(3, np.float32)}, a4, P("x"))
    with pytest.raises(UsageError, match=r"jax\.device_put cannot move"):
        jax.device_put([V, pw.put(V, a4)], [there, jax.devices()[0]])
    assert not session._core.queue


def test_very_many_move_by_several_launches_and_one_that_has_failed_by_its_own(
    session, a4, b22, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "MAX_MOVED", 4)
    found = [pw.put(V + k, a4, P("x")) for k in range(10)]
    lost = pw.put(V, a4)
    lost._buffer.record.fail(Failure("BufferLost", "it went with its host"))
    before = len(session.launched)
    *moved, gone = jax.device_put([*found, lost], NamedSharding(b22.mesh, P("x")))
    assert len(session.launched) == before + 4
    jax.tree.map(np.testing.assert_array_equal, moved, found)
    assert gone._buffer.record.failure is not None
    assert not any(one._buffer.record.failure for one in moved)


def test_big_leaves_are_converted_and_sent_one_by_one(session, a4, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a checkpoint, converted, may not fit into this process beside what it is converted from."""
    steps: list[str] = []
    converted, uploaded = session.to_put, session.upload_all

    def convert(*given: Any) -> Any:
        steps.append("convert")
        return converted(*given)

    def upload(given: Any, alone: bool = False) -> Any:
        steps.append(f"upload {len(given)}")
        return uploaded(given, alone)

    monkeypatch.setattr(session, "to_put", convert)
    monkeypatch.setattr(session, "upload_all", upload)
    big = np.zeros(limits.MAX_WHOLE_BYTES // 4 + 1)  # of float64, which becomes float32
    pw.put([V, big, V, big, V], a4)
    assert steps == ["convert", "convert", "upload 1", "convert", "convert", "upload 1", "convert", "upload 3"]
