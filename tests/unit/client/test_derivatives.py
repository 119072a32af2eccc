"""Derivatives across nodes: forward and backward of a call are nodes on its slice, with the values of plain JAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.ir.graph import Compute
from tests.unit.client.local import LocalSession, opened

RANDOM = np.random.default_rng(0)
PARAMS = {
    "encoder": RANDOM.normal(size=(4, 5)).astype(np.float32),
    "decoder": RANDOM.normal(size=(5, 3)).astype(np.float32),
}
X, T = RANDOM.normal(size=(8, 4)).astype(np.float32), RANDOM.normal(size=(8, 3)).astype(np.float32)
XS, TS = np.stack([X, X + 1]), np.stack([T, T - 1])


def encode(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def decode(w: Any, h: Any) -> Any:
    return h @ w


def plain_loss(p: Any, x: Any, t: Any) -> Any:
    return ((decode(p["decoder"], encode(p["encoder"], x)) - t) ** 2).mean()


class Model(NamedTuple):
    session: LocalSession
    a: pw.VirtualSlice
    b: pw.VirtualSlice
    encoder: Any
    loss: Any


@pytest.fixture
def model() -> Iterator[Model]:
    session = opened()
    a, b = session.virtual_slice((4,), ("x",), name="a"), session.virtual_slice((2,), ("x",), name="b")
    encoder = pw.compiled(encode, slice=a, in_specs=(P(), P("x")), out_specs=P("x"))
    decoder = pw.compiled(decode, slice=b, in_specs=(P(), P("x")), out_specs=P("x"))
    error = pw.compiled(lambda y, t: ((y - t) ** 2).mean(), slice=b, in_specs=P("x"))
    yield Model(session, a, b, encoder, lambda p, x, t: error(decoder(p["decoder"], encoder(p["encoder"], x)), t))
    session.close()


def close(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-5)


TRANSFORMATIONS = {
    "value_and_grad": lambda loss: lambda p: jax.value_and_grad(loss)(p, X, T),
    "vjp": lambda loss: lambda p: jax.vjp(lambda q: loss(q, X, T), p)[1](1.0),
    "jvp": lambda loss: lambda p: jax.jvp(lambda q: loss(q, X, T), (p,), (p,)),
    "linearize": lambda loss: lambda p: jax.linearize(lambda q: loss(q, X, T), p)[1](p),
    "vmap": lambda loss: lambda p: jax.vmap(loss, (None, 0, 0))(p, XS, TS),
    "vmap of grad": lambda loss: lambda p: jax.vmap(jax.grad(loss), (None, 0, 0))(p, XS, TS),
    "checkpoint": lambda loss: lambda p: jax.checkpoint(loss)(p, X, T),
    "grad of checkpoint": lambda loss: lambda p: jax.grad(jax.checkpoint(loss))(p, X, T),
    "hessian": lambda loss: lambda p: jax.hessian(lambda d: loss({**p, "decoder": d}, X, T))(p["decoder"]),
    "jit": lambda loss: lambda p: jax.jit(jax.grad(loss))(p, X, T),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_transformation_gives_what_plain_jax_gives(model, name) -> None:
    expected = TRANSFORMATIONS[name](plain_loss)(PARAMS)
    made = TRANSFORMATIONS[name](model.loss)
    close(pw.program(made)(PARAMS), expected)
    close(made(PARAMS), expected)  # outside of a program: node by node


def test_forward_and_backward_are_nodes_on_their_slices(model) -> None:
    lowered = pw.program(lambda p, x, t: jax.value_and_grad(model.loss)(p, x, t)).lower(PARAMS, X, T)
    nodes = [node for node in lowered.graph.nodes if isinstance(node, Compute)]
    a, b = model.a.id, model.b.id
    assert [(node.name, node.slice) for node in nodes] == [
        ("encode", a), ("decode", b), ("<lambda>", b), ("<lambda>", b), ("decode", b), ("encode", a),
    ]  # fmt: skip
    assert {s.id for s in lowered.graph.slices} == {a, b}
    # Residuals are taken where they were made, and as they lie: what crosses is the activation and its cotangent.
    crossing = [
        (node.name, ref)
        for node in nodes
        for ref, layout in zip(node.inputs, node.input_layouts, strict=True)
        if isinstance(lowered.graph.nodes[ref.node], Compute) and lowered.graph.layout_of(ref) != layout
    ]
    assert [name for name, _ in crossing] == ["decode", "encode"]


def test_an_own_derivative(model) -> None:
    def forward(w: Any, x: Any) -> Any:
        h = encode(w, x)
        return h, (w, x, h)

    def backward(kept: Any, ct: Any) -> Any:
        w, x, h = kept
        g = 2 * ct * (1 - h * h)  # twice the derivative, to see that it is the one
        return x.T @ g, g @ w.T

    own = pw.differentiable(
        model.encoder,
        forward=pw.compiled(forward, slice=model.a, in_specs=(P(), P("x"))),
        backward=pw.compiled(backward, slice=model.a),
    )
    f = pw.program(lambda w, x: jax.value_and_grad(lambda v: own(v, x).sum())(w))
    value, gradient = jax.value_and_grad(lambda w: encode(w, X).sum())(PARAMS["encoder"])
    close(f(PARAMS["encoder"], X), (value, 2 * gradient))
    close(pw.program(own)(PARAMS["encoder"], X), encode(PARAMS["encoder"], X))
    with pytest.raises(pw.errors.UsageError, match=r"pw.differentiable takes functions; backward= is None"):
        pw.differentiable(encode, forward=forward, backward=None)  # type: ignore[arg-type]


def test_training_over_two_slices(model) -> None:
    """1. The gradients of each step lie on the slice of their parameters. 2. Losses are those of plain JAX."""

    def step(loss: Any, p: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(p, X, T)
        return value, jax.tree.map(lambda v, g: v - 0.1 * g, p, gradient)

    there = pw.program(lambda p: step(model.loss, p))
    here = jax.jit(lambda p: step(plain_loss, p))
    mine: Any = {"encoder": pw.put(PARAMS["encoder"], model.a), "decoder": pw.put(PARAMS["decoder"], model.b)}
    plain: Any = PARAMS
    for _ in range(5):
        loss, mine = there(mine)
        expected, plain = here(plain)
        close(loss, expected)
    assert (mine["encoder"].slice, mine["decoder"].slice) == (model.a, model.b)
    assert len(model.session._programs) == 1


def test_a_shard_map_that_takes_whole_numbers_has_a_derivative(model: Model) -> None:
    """Members look up rows of the table that they hold."""
    mesh = model.b.mesh.abstract_mesh

    def found(table: Any, numbers: Any) -> Any:
        rows = numbers - jax.lax.axis_index("x") * table.shape[0]
        own = (rows >= 0) & (rows < table.shape[0])
        return jax.lax.psum(jnp.where(own, table[jnp.clip(rows, 0, table.shape[0] - 1)], 0), "x")

    def look_up(table: Any, numbers: Any) -> Any:
        return jax.shard_map(found, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())(table, numbers)

    f = pw.compiled(look_up, slice=model.b, in_specs=(P("x"), P()))
    gradient = pw.program(lambda table, numbers: jax.grad(lambda t: (f(t, numbers) ** 2).sum())(table))
    table = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(gradient(table, np.array([1, 3, 3], np.int32))), [0, 2, 0, 12])


@pytest.mark.parametrize("size", [1, 4])
def test_the_gradient_of_whole_numbers_is_float0(model: Model, size: int) -> None:
    where = model.session.virtual_slice((size,), ("x",))
    n, x = np.arange(8, dtype=np.int32), np.linspace(0, 1, 8, dtype=np.float32)
    zeros = np.zeros(8, jax.dtypes.float0)
    on_slice = pw.put((n, x), where, P("x"))
    pair = pw.compiled(lambda n, x: (n + 1, n * x), slice=where, in_specs=P("x"), out_specs=P("x"))

    def same(found: Any, plain: Any) -> None:
        assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, plain)
        assert [leaf.dtype for leaf in jax.tree.leaves(found)] == [leaf.dtype for leaf in jax.tree.leaves(plain)]
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))

    gradient = jax.grad(lambda n, x: (n * x).sum(), (0, 1), allow_int=True)
    through = jax.grad(lambda n, x: pair(n, x)[1].sum(), (0, 1), allow_int=True)
    of_numbers = jax.grad(lambda n, x: (n * x).sum(), allow_int=True)
    expected = gradient(n, x)
    for function in (jax.jit(gradient), pw.compiled(gradient, slice=where), pw.program(gradient)):
        same(function(*on_slice), expected)
        same(function(*pw.put((n + 1, x), where)), gradient(n + 1, x))
    same(pw.program(through)(*on_slice), expected)
    same(pw.program(lambda n, x: (jax.jit(gradient)(n, x), x))(*on_slice), (expected, x))
    same(jax.jit(of_numbers)(*on_slice), expected[0])
    same(jax.jit(gradient).lower(*on_slice).compile()(*on_slice), expected)
    assert pw.program(gradient).eval_shape(*on_slice)[0].dtype == jax.dtypes.float0

    def pushed(n: Any, x: Any, zeros: Any) -> Any:
        return jax.jvp(lambda n, x: (n + 1, n * x), (n, x), (zeros, x)), zeros.reshape(2, 4)

    for given in (jax.jit, pw.program, pw.compiled(slice=where)):
        same(given(pushed)(*on_slice, zeros), pushed(n, x, zeros))  # they are taken as well
    assert jax.device_put(zeros, jax.sharding.NamedSharding(where.mesh, P())) is zeros


def double(v: Any) -> Any:
    return jnp.tanh(v * 2)


def squared(v: Any) -> Any:
    return v * v + 0.5


def cond_of(control: Any, f: Any) -> Any:
    return lambda v: control.cond(v[0] > 0, f, lambda u: u, v)


def scan_of(control: Any, f: Any, g: Any) -> Any:
    return lambda v: control.scan(lambda u, row: (f(g(u)) * row, u[0]), v, v)


def loop_of(control: Any, f: Any, g: Any) -> Any:
    return lambda v: control.fori_loop(0, 3, lambda k, u: f(g(u)) + k, v)


def total(function: Any) -> Any:
    return lambda v: sum(one.sum() for one in jax.tree.leaves(function(v)))


def test_derivatives_through_branches_and_loops(model: Model) -> None:
    """What docs/guide.md and docs/coming_from_jax.md say of them."""
    f, g = pw.compiled(double, slice=model.a), pw.compiled(squared, slice=model.b)
    v = np.arange(1, 9, dtype=np.float32) / 8
    cases = [(cond_of(pw, f), cond_of(jax.lax, double))]
    for make in (scan_of, loop_of):
        cases += [
            (make(pw, f, g), make(jax.lax, double, squared)),
            (make(pw, f, jnp.sin), make(jax.lax, double, jnp.sin)),
        ]
    for function, plain in cases:
        wanted = jax.jit(jax.value_and_grad(total(plain)))
        for one in (function, pw.program(function)):
            program = pw.program(jax.value_and_grad(total(one)))
            for given in (v, -v):
                compared(program(pw.put(given, model.a)), wanted(given))


def chosen(control: Any, f: Any, g: Any) -> Any:
    """A branch that goes by another slice, and one that does not."""
    return lambda v: control.cond(v[0] > 0, lambda u: f(g(f(u))), f, v)


def repeated(control: Any, f: Any, g: Any) -> Any:
    """The same in a loop, on both ways."""
    return lambda v: control.scan(lambda u, k: (chosen(control, f, g)(u * k), u[1]), v, jnp.array([1.0, -1.0, 1.0]))


def test_derivatives_through_branches_over_several_slices(model: Model) -> None:
    """Of their bodies, which nobody wrote, each leaves the cotangent of an input where its own operations are."""
    f, g = pw.compiled(double, slice=model.a), pw.compiled(squared, slice=model.b)
    v = np.arange(1, 9, dtype=np.float32) / 8
    for make in (chosen, repeated):
        function, plain = total(make(pw, f, g)), total(make(jax.lax, double, squared))
        derivatives = [
            (jax.value_and_grad(function), jax.value_and_grad(plain)),
            (jax.grad(jax.checkpoint(function)), jax.grad(plain)),
            (jax.grad(total(jax.grad(function))), jax.grad(total(jax.grad(plain)))),
        ]
        for one, other in derivatives:
            program, wanted = pw.program(one), jax.jit(other)
            for given in (v, -v):
                compared(program(pw.put(given, model.a)), wanted(given))
    apart = pw.program(jax.grad(total(lambda v: pw.cond(v[0] > 0, g, f, v))))
    with pytest.raises(pw.errors.GraphError, match="the branches leave result 0 in different layouts"):
        apart(pw.put(v, model.a))  # which a user wrote


def compared(made: Any, wanted: Any) -> None:
    trees: list[Any] = [jax.tree.structure(made), jax.tree.structure(wanted)]
    assert trees[0] == trees[1]
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_jax_transforms_programs_with_branches_loops_and_routes(model: Model) -> None:
    """They were called "outside of a program", with the advice to call them from one."""
    f, g = pw.compiled(double, slice=model.a), pw.compiled(squared, slice=model.b)
    v = np.arange(1, 9, dtype=np.float32) / 8
    x, both = pw.put(v, model.a), np.stack([v, -v])
    for function, plain in (
        (pw.program(cond_of(pw, f)), cond_of(jax.lax, double)),
        (pw.program(scan_of(pw, f, g)), scan_of(jax.lax, double, squared)),
    ):
        assert jax.eval_shape(function, x) == jax.eval_shape(plain, v)
        assert [str(one) for one in jax.make_jaxpr(function)(x).out_avals] == [
            str(one) for one in jax.make_jaxpr(plain)(v).out_avals
        ]
        compared(jax.jit(function)(x), plain(v))
        compared(jax.grad(total(function))(x), jax.grad(total(plain))(v))
        for batch in (both, pw.put(both, model.a)):
            compared(jax.vmap(function)(batch), jax.vmap(plain)(both))
    destination = np.array([0, 1] * 4, np.int32)
    route = pw.program(lambda u, d: [part.rows for part in pw.route(u, d, [model.a, model.b], capacity=8)[0]])
    compared(jax.jit(route)(x, destination), route(x, destination))
    with pytest.raises(pw.errors.UsageError, match="outside of a program"):
        pw.cond(True, f, f, x)
    with pytest.raises(pw.errors.UsageError, match="outside of a program"):
        jax.jit(cond_of(pw, f))(x)
