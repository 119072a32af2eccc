"""Ordinary `jnp` operations inside programs: the bits of plain JAX, or an error that names the line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

RANDOM = np.random.default_rng(7)
A = RANDOM.standard_normal(8).astype(np.float32)
M = RANDOM.standard_normal((4, 8)).astype(np.float32)
K = RANDOM.integers(-50, 50, 8).astype(np.int32)

OPERATIONS = {
    "arithmetic": lambda a, m, k: (a + a * 2 - a / 3, -a, a**2, k // 3, k % 5),
    "weak types": lambda a, m, k: (a + 1, k + 1, k * 2.5, 3 / a, True + k, a > 0.5),
    "promotion": lambda a, m, k: (a + k, k + np.float32(1), k.astype(jnp.bfloat16) + 1, a.astype(jnp.int8) + k),
    "broadcasting": lambda a, m, k: (m + a, m * k, a[:, None] * a[None, :], m + 1),
    "elementwise": lambda a, m, k: (jnp.sin(a), jnp.exp(m), jnp.tanh(a), jnp.sqrt(jnp.abs(m)), jax.nn.relu(a)),
    "comparisons": lambda a, m, k: (jnp.where(a > 0, a, k), jnp.maximum(a, 0), (a > 0) & (k > 0), jnp.isnan(a)),
    "reductions": lambda a, m, k: (
        a.sum(),
        m.mean(axis=0),
        m.max(axis=1),
        k.sum(),
        jnp.any(k > 3),
        jnp.argmax(m, axis=1),
    ),
    "indexing": lambda a, m, k: (a[2], a[1:5], a[::-1], m[:, 3], m[1, 2:4], a[jnp.abs(k) % 8], m.at[0, 1].set(5.0)),
    "shapes": lambda a, m, k: (m.T, m.reshape(8, 4), m.ravel(), jnp.concatenate([m, m]), jnp.stack([a, a]), a[None]),
    "products": lambda a, m, k: (m @ a, a @ a, jnp.einsum("ij,kj->ik", m, m), jnp.outer(a, a)),
    "sorting": lambda a, m, k: (jnp.sort(a), jnp.argsort(k), jnp.cumsum(a), jnp.flip(m, 1)),
    "made from nothing": lambda a, m, k: (jnp.zeros(4), jnp.arange(5) + 1, jnp.eye(3), jnp.full((2, 2), 7)),
    "mixed with constants": lambda a, m, k: (a + np.arange(8.0, dtype=np.float32), m + M, np.float16(2) * a),
    "functions": lambda a, m, k: (jax.nn.softmax(m), jax.nn.gelu(a), jnp.linalg.norm(a), jnp.var(m, axis=1)),
    "derivatives": lambda a, m, k: jax.grad(lambda x: (jnp.sin(x) ** 2).sum())(a),
    "mapped": lambda a, m, k: jax.vmap(lambda row: row * a.sum())(m),
    "control flow": lambda a, m, k: (
        jax.lax.fori_loop(0, 4, lambda i, x: x * 1.5, a),
        jax.lax.cond(a[0] > 0, jnp.sin, jnp.cos, a),
        jax.lax.scan(lambda c, r: (c + r, c), a, m),
    ),
    "random": lambda a, m, k: jax.random.normal(jax.random.PRNGKey(3), (4,)) + 1,
    "nested jit": lambda a, m, k: jax.jit(lambda x: jax.jit(jnp.cos)(x) + 1)(a),
    "integers": lambda a, m, k: (k << 2, k & 7, ~k, jnp.abs(k), k.astype(jnp.uint8), jnp.clip(k, -3, 3)),
    "complex": lambda a, m, k: (a + 1j, jnp.abs(a * 1j), (a + 2j * a).conj()),
}

WITH_SUMS = ("reductions", "products", "functions", "derivatives", "mapped")
"""Over a sharded dimension a sum is made in another order than over a whole one."""


def op_by_op(f):
    """Plain JAX, one operation at a time."""
    return f(jnp.asarray(A), jnp.asarray(M), jnp.asarray(K))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_the_bits_of_plain_jax(session, equal, name) -> None:
    equal(pw.program(OPERATIONS[name])(A, M, K), op_by_op(OPERATIONS[name]))


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in WITH_SUMS])
def test_operations_on_sharded_arrays_have_the_bits_of_plain_jax(session, slices, equal, name) -> None:
    arguments = [pw.put(value, slice=slices.a4, spec=P("x")) for value in (A, M, K)]
    equal(pw.program(OPERATIONS[name])(*arguments), op_by_op(OPERATIONS[name]))


@pytest.mark.parametrize("name", WITH_SUMS)
def test_sums_over_a_sharded_dimension(session, slices, name) -> None:
    arguments = [pw.put(value, slice=slices.a4, spec=P("x")) for value in (A, M, K)]
    result = pw.program(OPERATIONS[name])(*arguments)
    for one, plain in zip(jax.tree.leaves(result), jax.tree.leaves(op_by_op(OPERATIONS[name])), strict=True):
        assert np.asarray(one).dtype == plain.dtype
        np.testing.assert_allclose(np.asarray(one), plain, rtol=2e-6, atol=1e-6)


def test_operations_between_compiled_functions(session, slices, equal) -> None:
    inc = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    double = pw.compiled(lambda v: v * 2, slice=slices.b2, in_specs=P("x"), out_specs=P("x"))

    def f(inc, double, v):
        x = jnp.sin(inc(v)) + 1
        y = double(x * x - v)
        return jnp.where(y > x, y, 0.5), (x + y).sum(), y[3] * 2

    plain = f(jax.jit(lambda v: v + 1), jax.jit(lambda v: v * 2), jnp.asarray(A))
    first, total, last = pw.program(lambda v: f(inc, double, v))(A)
    equal((first, last), (plain[0], plain[2]))
    np.testing.assert_allclose(np.asarray(total), plain[1], rtol=1e-6)
    assert first.sharding.mesh == slices.b2.mesh


def test_operations_on_values_of_several_slices(session, slices, equal) -> None:
    places = (slices.a4, P("x")), (slices.b4, P()), (slices.a22, P(("x", "y"))), (slices.b2, P("x"))
    values = [pw.put(A * k, slice=s, spec=spec) for k, (s, spec) in enumerate(places)]

    def f(*values):
        return sum(values[1:], values[0]), jnp.stack(values), values[1] @ values[2]

    plain = f(*[jnp.asarray(A * np.float32(k)) for k in range(4)])
    result = pw.program(f)(*values)
    equal(result[:2], plain[:2])
    np.testing.assert_allclose(np.asarray(result[2]), plain[2], rtol=1e-6)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda v: jax.grad(lambda x: f(x).sum())(v),
        lambda f: lambda v: jax.vmap(f)(v),
        lambda f: lambda v: jax.checkpoint(f)(v),
        lambda f: lambda v: jax.lax.fori_loop(0, 3, lambda i, x: f(x), v),
        lambda f: lambda v: jax.lax.cond(v[0] > 0, f, f, v),
        lambda f: lambda v: jax.lax.map(f, v.reshape(2, 4)),
    ],
    ids=["grad", "vmap", "checkpoint", "loop", "cond", "map"],
)
def test_transformations_of_a_compiled_function(session, slices, equal, transform) -> None:
    f = pw.compiled(lambda v: v * 2, slice=slices.a1)
    equal(pw.program(transform(f))(A), transform(lambda v: v * 2)(jnp.asarray(A)))


def test_a_jitted_function_may_call_compiled_functions(session, slices, equal) -> None:
    f = pw.compiled(lambda v: v * 2, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    held = pw.put(A, slice=slices.a4)
    jitted = jax.jit(lambda v: f(v) + held)
    for _ in range(2):
        equal(pw.program(lambda v: jitted(jitted(v)))(A), (A * 2 + A) * 2 + A)


def test_pathways_functions_inside_plain_jit(session, slices, equal) -> None:
    """It becomes a program: its calls are nodes on their slices."""
    f = pw.compiled(lambda v: v * 2, slice=slices.a1)
    g = pw.program(lambda v: f(v) + 1)
    for function in (f, g, lambda v: g(f(v))):
        equal(jax.jit(function)(A), np.asarray(function(A)))
        equal(jax.vmap(function)(A), np.asarray(function(A)))


def test_custom_derivatives_and_named_calls(session, slices, equal) -> None:
    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    f.defjvp(lambda primals, tangents: (f(primals[0]), tangents[0] * 3))

    @jax.custom_vjp
    def g(x):
        return x * 2

    g.defvjp(lambda x: (g(x), None), lambda _, t: (t * 5,))

    def h(a):
        return f(a), jax.grad(lambda x: f(x).sum())(a), g(a), jax.grad(lambda x: g(x).sum())(a)

    equal(pw.program(h)(A), h(jnp.asarray(A)))


def test_typed_random_keys(session, slices, equal) -> None:
    def f(v):
        first, second = jax.random.split(jax.random.key(11))
        return jax.random.normal(first, (8,)) + v, jax.random.uniform(second, (3,))

    equal(pw.program(f)(A), f(jnp.asarray(A)))


def test_typed_random_keys_between_nodes(session, slices, equal) -> None:
    draw = pw.compiled(lambda k: jax.random.normal(k, (4,)), slice=slices.a1)
    key = jax.random.key(3)
    expected = jax.random.normal(jax.random.split(key)[0], (4,))
    equal(pw.program(lambda k: draw(jax.random.split(k)[0]))(key), expected)
    there = pw.put(key, slices.b4)
    equal(draw(jax.random.split(there)[0]), expected)
    made = pw.compiled(make, slice=slices.a4)(np.int32(3))
    equal(jax.random.key_data(made), jax.random.key_data(key))
    assert jax.device_get(made) == key


def make(seed):
    return jax.random.key(seed)


def test_composed_operations_round_as_single_ones(session, slices, equal) -> None:
    """A multiplication and an addition in one loop would become one instruction with one rounding."""
    square = pw.compiled(lambda v: v * v, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    less = pw.compiled(lambda v, w: v - w, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    v, w = RANDOM.standard_normal((2, 1024)).astype(np.float32)
    chained = pw.program(lambda v, w: less(square(less(square(v), w)), w))
    assert chained.lower(v, w).as_text("plan").count("execute") == 1
    one, two = jax.jit(lambda v: v * v), jax.jit(lambda v, w: v - w)
    equal(chained(v, w), two(one(two(one(v), w)), w))


def test_functions_with_barriers_of_their_own_are_not_composed(session, slices, equal) -> None:
    def body(v):
        return jax.grad(lambda x: jax.checkpoint(lambda y: jnp.sin(y * y - 1))(x).sum())(v)

    f = pw.compiled(body, slice=slices.a1)
    program = pw.program(lambda v: f(f(f(v))))
    assert program.lower(A).as_text("plan").count("execute") == 3
    plain = jax.jit(body)
    equal(program(A), plain(plain(plain(A))))


@pytest.mark.parametrize(
    "names", ["f" * 40, "fg" * 20, "f" * 9 + "g" + "f" * 9], ids=["one", "two in turn", "disturbed"]
)
@pytest.mark.parametrize("size", [1, 1000])  # the CPU compiler has a way of its own with small loops
def test_repetitions_round_as_single_calls(session, slices, equal, names, size) -> None:
    """They run as loops. Out of a loop XLA would take what is the same in every round, here `w * 3`, and then contract
    the addition with another multiplication than in a single call."""

    @pw.compiled(slice=slices[0])
    def f(v, w):
        return v * 1.0001 + w * 3, v.sum() * 1e-3

    @pw.compiled(slice=slices[0])
    def g(v, w):
        return v * 0.999 - w * 3, v.max()

    @pw.program
    def many(v, w):
        kept = None
        for name in names:
            v, kept = (f if name == "f" else g)(v, w)
        return v, kept

    v, w = np.linspace(-1, 1, size, dtype=np.float32), np.linspace(0.1, 0.7, size, dtype=np.float32)
    alone, last = v, None
    for name in names:
        alone, last = (np.asarray(x) for x in (f if name == "f" else g)(alone, w))
    found, kept = many(v, w)
    equal(np.asarray(found), alone)
    equal(np.asarray(kept), last)


def test_calls_of_a_function_with_a_loop_are_composed_as_it_is(session, slices, equal) -> None:
    @pw.compiled(slice=slices.a1)
    def f(v):
        return jax.lax.fori_loop(0, 50, lambda _, u: u * 1.01 + 0.1, v)

    alone = A
    for _ in range(6):
        alone = np.asarray(f(alone))
    equal(pw.program(lambda v: f(f(f(f(f(f(v)))))))(A), alone)
