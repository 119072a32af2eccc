"""Arrays of slices in JAX's own functions: they compute on the slice, and give what plain JAX gives."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import TraceError, UsageError
from pathways_ray.ir.graph import Transfer
from tests.unit.client import jax_names
from tests.unit.client.local import LocalSession, opened

V = np.arange(8, dtype=np.float32)
M = np.arange(32, dtype=np.float32).reshape(8, 4)
BIG = np.ones(1 << 14, np.float32)


def same(session: LocalSession, function: Any, *arguments: Any) -> Any:
    """What a function makes of arrays on a slice, which must be what it makes of plain ones. Nothing is fetched."""
    before = session.fetched
    found = function(*arguments)
    assert session.fetched == before
    plain = function(*(jnp.asarray(np.asarray(x)) if isinstance(x, pw.Array) else x for x in arguments))
    trees: list[Any] = [jax.tree.structure(found), jax.tree.structure(plain)]
    assert trees[0] == trees[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert isinstance(one, pw.Array)
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6)
    return found


OPERATIONS = {
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "-x": lambda x: -x,
    "x * x": lambda x: x * x,
    "x ** 2": lambda x: x**2,
    "x / 2, x // 2, x % 3": lambda x: (x / 2, x // 2, x % 3),
    "divmod(x, 3)": lambda x: divmod(x, 3),
    "x > 1": lambda x: x > 1,
    "x == x": lambda x: x == x,
    "x @ x.T": lambda x: x @ x.T,
    "np.ones + x": lambda x: np.ones(4, np.float32) + x,
    "jnp.ones + x": lambda x: jnp.ones(4) + x,
    "abs(x), round(x, 1)": lambda x: (abs(x), round(x, 1)),
    "x.sum()": lambda x: x.sum(),
    "x.mean(0)": lambda x: x.mean(0),
    "x.astype": lambda x: x.astype(jnp.int32),
    "x.reshape": lambda x: x.reshape(4, 8),
    "x.at[0].set": lambda x: x.at[0].set(7.0),
    "x.at[1, 2].add": lambda x: x.at[1, 2].add(1),
    "x[0]": lambda x: x[0],
    "x[-1, 1:]": lambda x: x[-1, 1:],
    "x[::-1, None]": lambda x: x[::-1, None],
    "x[[1, 2]]": lambda x: x[np.array([1, 2])],
    "list(x)": list,
    "sum(list(x))": lambda x: sum(list(x)),
    "jnp.where": lambda x: jnp.where(x > 2, x, 0.0),
    "jnp.concatenate": lambda x: jnp.concatenate([x, np.ones((1, 4), np.float32)]),
    "jnp.zeros_like": lambda x: jnp.zeros_like(x),
    "jax.nn.softmax": jax.nn.softmax,
    "jax.jit": lambda x: jax.jit(lambda v: v * 2)(x),
    "jax.grad": lambda x: jax.grad(lambda v: (v * jnp.sin(v)).sum())(x),
    "jax.vmap": lambda x: jax.vmap(lambda v: v.sum())(x),
    "jax.lax.scan": lambda x: jax.lax.scan(lambda c, v: (c + v, c.sum()), jnp.zeros(4), x),
    "jax.lax.cond": lambda x: jax.lax.cond(True, lambda v: v, lambda v: -v, x),
    "jax.checkpoint": lambda x: jax.grad(jax.checkpoint(lambda v: jnp.sin(v).sum()))(x),
    "jnp.asarray": lambda x: jnp.asarray(x) + 0,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_runs_on_the_slice(session, a4, name) -> None:
    x = pw.put(M, a4, P("x"))
    for leaf in jax.tree.leaves(same(session, OPERATIONS[name], x)):
        assert leaf.slice is a4


def test_results_lie_as_jax_has_them(session, a4, b22) -> None:
    x = pw.put(M, a4, P("x"))
    z = pw.put(M, b22, P("x", "y"))
    cases: list[tuple[Any, P]] = [
        (x + 1, P("x")),
        (x.T, P(None, "x")),
        (x.sum(1), P("x")),
        (x.sum(), P()),
        (x @ np.ones((4, 2), np.float32), P("x")),
        (x.T @ x, P()),
        (jnp.zeros_like(x), P("x")),
        (z.T, P("y", "x")),
        (z.mean(0), P("y")),
        (jax.grad(lambda v: (v**2).sum())(z), P("x", "y")),
    ]
    for found, spec in cases:
        assert found.sharding.spec == spec, found


def test_operands_of_one_shape_stay_as_they_lie(session, a4) -> None:
    """All of them were moved to the layout of the first: results lay so, and partitioned operands became whole."""
    square = np.arange(64, dtype=np.float32).reshape(8, 8)
    p = {"down": pw.put(square, a4, P("x")), "emb": pw.put(square, a4), "up": pw.put(square, a4, P(None, "x"))}
    lying = {name: value.sharding.spec for name, value in p.items()}
    f = jax.jit(lambda p: jax.tree.map(lambda v: v * 2, p))
    for made in (f(p), pw.program(lambda p: f(p))(p), pw.jit(f, slice=a4)(p)):
        assert {name: value.sharding.spec for name, value in made.items()} == lying
    products = {P("x"): p["down"] @ p["down"], P(None, "x"): p["emb"] @ p["up"]}
    sums = {P("x"): p["down"] + p["up"], P(None, "x"): p["emb"] + p["up"]}
    for spec in products:
        np.testing.assert_array_equal(products[spec], square @ square)
        np.testing.assert_array_equal(sums[spec], square + square)
        assert (products[spec].sharding.spec, sums[spec].sharding.spec) == (spec, spec)
    node = session.launched[-1].nodes[-2]
    assert [layout.spec for layout in node.input_layouts] == [(), ((), ("x",))]
    assert not any(isinstance(one, Transfer) for graph in session.launched for one in graph.nodes)
    assert (np.ones((8, 8), np.float32) + p["up"]).sharding.spec == P(None, "x")  # what lies nowhere is put like it
    w = jax.jit(lambda g, w: w - g, donate_argnums=1)(p["emb"], p["down"])
    assert w.sharding.spec == P("x")


def test_an_index_is_one_launch_whatever_the_number(session, a4) -> None:
    x = pw.put(M, a4, P("x"))
    np.testing.assert_array_equal(np.asarray(x[3]), M[3])
    before = len(session.launched)
    graphs = len(session._programs)
    np.testing.assert_array_equal(np.asarray(x[5]), M[5])
    assert len(session.launched) == before + 1
    assert len(session._programs) == graphs, "another number is no other program"
    np.testing.assert_array_equal(np.asarray(x[x > 5]), M[M > 5])
    np.testing.assert_array_equal(np.asarray(x[True]), M[True])


def test_a_window_is_one_program_wherever_it_begins(session, a4) -> None:
    for spec, rows in ((P(), lambda k: np.s_[k : k + 2]), (P("x"), lambda k: np.s_[:, k : k + 2])):
        x = pw.put(np.arange(64 * 64, dtype=np.float32).reshape(64, 64), a4, spec)
        values = np.asarray(x)
        assert x[rows(0)].sharding.spec == spec
        graphs = len(session._programs)
        for k in range(50):
            np.testing.assert_array_equal(np.asarray(x[rows(k)]), values[rows(k)])
        np.testing.assert_array_equal(np.asarray(x[rows(-9)]), values[rows(-9)])
        assert len(session._programs) == graphs


@pytest.mark.parametrize("spec", [P(), P(None, "x"), P("x")])
def test_rows_come_by_few_programs(session, a4, spec) -> None:
    values = np.arange(136 * 4, dtype=np.float32).reshape(136, 4)
    x = pw.put(values, a4, spec)
    rows = iter(x)
    first = [next(rows) for _ in range(64)]
    graphs = len(session._programs)
    found = [*first, *rows]
    assert {row.sharding.spec for row in found} == {first[0].sharding.spec}
    np.testing.assert_array_equal(np.stack([np.asarray(row) for row in found]), values)
    if not spec[:1] or spec[0] is None:
        assert len(session._programs) == graphs + 1, "that of the last 8"


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P(None, None, ("x", "y"))])
@pytest.mark.parametrize(
    "index",
    [
        np.s_[1:3],
        np.s_[-3:-1, 1:2],
        np.s_[2:100],
        np.s_[..., 1:3],
        np.s_[1:7:2, 1:3],
        np.s_[None, 2:4, -1, 1:5],
        np.s_[1:3, None, ..., np.int32(2)],
        np.s_[:2, np.array([0, 3]), 1:3],
        np.s_[True, 2:4],
    ],
    ids=str,
)
def test_windows_are_those_of_jax_and_lie_as_its_results_do(session, b22, spec, index) -> None:
    values = np.arange(8 * 4 * 8, dtype=np.float32).reshape(8, 4, 8)
    x = pw.put(values, b22, spec)
    found, plain = x[index], jnp.asarray(values)[index]
    np.testing.assert_array_equal(np.asarray(found), plain)
    assert found.weak_type == plain.weak_type
    whole = jax.jit(lambda v: v[index])(x)  # with the bounds in the program
    assert found.sharding.spec == whole.sharding.spec


@pytest.mark.parametrize("size", [100, 200, 40000])
def test_numbers_of_few_bits_are_indices(session, a4, size) -> None:
    values = np.arange(size, dtype=np.float32)
    x, plain = pw.put(values, a4), jnp.asarray(values)
    for index in (np.int8(-1), np.int8(-100), np.int8(5), np.uint8(250), np.int16(-1), np.int64(-1), np.int64(1 << 40)):
        assert x[index] == plain[index], (size, index)
        assert x[None, index] == plain[None, index], (size, index)


@pytest.mark.parametrize(
    "index", [np.s_[(1, 2),], np.s_[:, (0, 2)], np.s_[((0, 1), (1, 0)),], np.s_[(0, 1), (2, 3)], np.s_[(),]], ids=str
)
def test_a_tuple_in_an_index_is_an_array_of_numbers(session, a4, index) -> None:
    same(session, lambda v: v[index], pw.put(M, a4))


def test_an_array_without_dimensions_cannot_be_iterated(session, a4) -> None:
    one = pw.put(np.float32(3), a4)
    for plain in (one, jnp.asarray(3.0)):
        assert not np.iterable(plain)
        with pytest.raises(TypeError, match="iteration over a 0-d array"):
            iter(plain)
        with pytest.raises(TypeError, match=r"len\(\) of"):
            reversed(plain)
    assert list(reversed(pw.put(V[:0], a4))) == []


def test_indices_that_are_too_many_raise_what_jax_raises(session, a4) -> None:
    x = pw.put(M, a4)
    for index in (np.s_[1:3, 1:2, 0:1], np.s_[..., 1:2, ...]):
        with pytest.raises(IndexError) as plain:
            jnp.asarray(M)[index]
        with pytest.raises(IndexError, match=re.escape(str(plain.value))):
            x[index]


@pytest.mark.parametrize("value", [True, 1, 2.0, 3j], ids=str)
def test_numbers_have_the_weak_type_that_jax_gives_them(session, a4, value) -> None:
    expected = jnp.asarray(value).weak_type
    assert pw.put(value, a4).weak_type == expected == pw.program(lambda v: v)(value).weak_type


def test_arguments_that_a_jitted_function_hands_through_keep_their_weak_type(session, a4) -> None:
    x, double = pw.put(M, a4, P("x")), pw.compiled(lambda v: v * 2, slice=a4)
    for number in (3, 2.5, 1j, True, jnp.asarray(3), jnp.asarray(True), np.float32(2)):
        plain = jax.jit(lambda v, s: (v * 2, s))(M, number)[1]
        found = jax.jit(lambda v, s: (double(v), s))(x, number)[1]
        assert (found.dtype, found.weak_type) == (plain.dtype, plain.weak_type), number
        assert found == plain


@pytest.mark.parametrize(
    "make",
    [
        lambda x: jnp.full_like(x, -1, dtype=np.uint8),
        lambda x: jax.lax.full_like(x, 3),
        lambda x: jnp.full_like(x, 2**32 - 1, dtype=np.uint32),
        lambda x: jnp.full_like(x.astype(np.uint8), 300),
        lambda x: jnp.full_like(x.astype(np.int32), 2.7),
        lambda x: jnp.full_like(x, x[0, 1]),
        lambda x: jnp.zeros_like(jnp.where(x > 0, 1.0, 0.0)),
        lambda x: jnp.zeros_like(jnp.where(x > 0, 1.0, 0.0)) + x.astype(jnp.bfloat16),
        lambda x: jnp.zeros_like(jnp.where(x > 0, 1.0, 0.0), dtype=np.float32),
        lambda x: jax.jit(lambda s: jnp.full_like(x, s))(2.0),
        lambda x: jax.grad(lambda s: jnp.full_like(x, s).sum())(2.0),
        lambda x: jax.vmap(lambda s: jnp.full_like(x, s))(x[0]),
        lambda x: jax.lax.scan(lambda c, s: (c, jnp.full_like(x, s)), 0, x[0])[1],
    ],
)
def test_arrays_of_one_value_are_those_of_jax(session, a4, make) -> None:
    x = pw.put(M, a4, P("x"))
    found, plain = make(x), make(jnp.asarray(M))
    np.testing.assert_array_equal(np.asarray(found), plain)
    assert (found.dtype, found.weak_type) == (plain.dtype, plain.weak_type)
    if found.shape == M.shape:
        assert found.sharding.spec == P("x")


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "float32", "bfloat16"])
def test_the_bytes_of_an_array_are_its_values(session, a4, dtype) -> None:
    """Python made one byte of each number of an array whose entries can be indices."""
    plain = np.asarray(M.astype(dtype))
    assert bytes(pw.put(plain, a4, P("x"))) == plain.tobytes()
    scalar = jnp.asarray(3, "int32")
    assert bytes(pw.put(scalar, a4)) == bytes(scalar) == bytes(3)


def test_a_product_with_a_sparse_matrix_is_refused_where_hosts_have_no_kernel_for_it(session, a4) -> None:
    dense = np.eye(8, dtype=np.float32)
    matrix = jax.device_put(sparse.BCSR.fromdense(dense), NamedSharding(a4.mesh, P()))
    for product in (lambda m, v: m @ v, jax.jit(lambda m, v: m @ v)):
        with pytest.raises(TraceError, match=r"multiplies a jax.experimental.sparse.BCSR, .* multiply its to_bcoo\(\)"):
            product(matrix, V)
    np.testing.assert_array_equal(np.asarray(matrix.to_bcoo() @ V), V)


def test_an_operation_is_built_once(session, a4) -> None:
    x = pw.put(V, a4, P("x"))
    y = x + 1
    graphs = len(session._programs)
    for _ in range(3):
        y = y + 1
    assert len(session._programs) == graphs
    np.testing.assert_array_equal(np.asarray(y), V + 4)


def test_other_slices_meet_on_that_of_the_first(session, a4, b22) -> None:
    x, z = pw.put(V, a4, P("x")), pw.put(V, b22, P("y"))
    assert (z + x).slice is b22
    np.testing.assert_array_equal(np.asarray(x - z), V - V)
    moved = pw.put(x, b22, P("y"))
    assert (moved.slice, moved.sharding.spec) == (b22, P("y"))
    again = jax.device_put({"a": V, "b": x}, NamedSharding(b22.mesh, P("x")))
    assert all(leaf.slice is b22 for leaf in jax.tree.leaves(again))
    assert pw.put({"w": V}, NamedSharding(b22.mesh, P("y")))["w"].sharding.spec == P("y")
    assert session.fetched == 1, "arrays move between slices without this process"


def test_a_captured_array_is_used_where_it_lies(session, a4) -> None:
    x = pw.put(V, a4, P("x"))
    for function in (
        jax.jit(lambda c: c + x),
        pw.program(lambda c: c + x),
        pw.program(lambda c: jnp.add(x, c)),
        pw.program(lambda c: jax.jit(lambda d: d + x)(c)),
        jax.jit(lambda c: jax.jit(lambda d: d + x)(c)),
    ):
        before = session.fetched
        found = function(1.0)
        assert (session.fetched, found.slice) == (before, a4)
        np.testing.assert_array_equal(np.asarray(found), V + 1)
    with pytest.raises(pw.errors.TraceError, match=r"<lambda> uses pw.Array\(float32\[8\].*; pass it as an argument"):
        pw.compiled(lambda c: c + x, slice=a4)(1.0)


def test_donated_to_a_jitted_function(session, a4) -> None:
    x = pw.put(V, a4, P("x"))
    y = jax.jit(lambda v: v + 1, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), V + 1)


def test_shardings_of_a_jitted_function_say_where_it_runs(session, a4, b22) -> None:
    f = jax.jit(lambda v: v * 2, in_shardings=NamedSharding(a4.mesh, P("x")))
    y = f(V)
    assert (y.slice, y.sharding.spec) == (a4, P("x"))
    g = jax.jit(lambda v: v * 2, out_shardings=NamedSharding(b22.mesh, P("y")))
    assert (g(y).slice, g(y).sharding.spec) == (b22, P("y"))
    both = jax.jit(lambda v: v, in_shardings=NamedSharding(a4.mesh, P()), out_shardings=NamedSharding(b22.mesh, P()))
    with pytest.raises(
        pw.errors.UsageError, match=r"has shardings on slice .* and on slice .*; a function runs on one"
    ):
        both(y)
    here = jax.jit(lambda v: v, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(pw.errors.UsageError, match=r"out_shardings of <lambda> are over devices of this process"):
        here(y)


def test_sizes_that_do_not_divide_may_be_constrained_inside(session, a4) -> None:
    """As in JAX: XLA pads there. A result of such sizes is whole on each device."""
    x = pw.put(M, a4, P("x"))
    f = jax.jit(lambda v: jax.lax.with_sharding_constraint(v[:7], NamedSharding(a4.mesh, P("x"))) * 2)
    assert f(x).sharding.spec == P()
    np.testing.assert_array_equal(np.asarray(f(x)), M[:7] * 2)


def test_results_of_scans_lie_as_their_rounds_do(session, a4) -> None:
    """A carry that begins whole is partitioned as what is added to it; conflicting layouts leave it whole."""

    def along(v: Any) -> Any:
        return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(8), v.T)

    last, rows = jax.jit(along)(pw.put(M, a4, P("x")))
    assert (last.sharding.spec, rows.sharding.spec) == (P("x"), P(None, "x"))
    np.testing.assert_array_equal(np.asarray(last), M.sum(1))
    square = pw.put(np.ones((4, 4), np.float32), a4, P("x"))
    turned = jax.jit(lambda v: jax.lax.scan(lambda c, _: (c.T + 1, None), v, None, 3)[0])(square)
    assert turned.sharding.spec == P()
    np.testing.assert_array_equal(np.asarray(turned), np.full((4, 4), 4.0))


# --- without jax.jit --------------------------------------------------------------------------------------------------

BY_ITSELF: dict[str, Any] = {
    "index": lambda v: v[2:5],
    "mask": lambda v: v[v > 3],
    "rows": lambda v: [*v][3],
    "windows": lambda v: [*v.reshape(2, 4)],
    "reversed": lambda v: next(reversed(v)),
    "fill": lambda v: jnp.full_like(v, 3),
    "scan": lambda v: jax.lax.scan(lambda c, row: (c + row, c), v[0], v),
    "cond": lambda v: jax.lax.cond(v[1] > 0, lambda: v * 2, lambda: v * 3),
}


@pytest.mark.parametrize("function", BY_ITSELF.values(), ids=BY_ITSELF)
@pytest.mark.parametrize("spec", [P(), P("x")])
def test_operations_are_done_one_by_one_where_functions_are_not_jitted(session, a4, function, spec) -> None:
    x = pw.put(V, a4, spec)
    with jax.disable_jit():
        found = function(x)
    assert {one.slice for one in jax.tree.leaves(found)} == {a4}
    expected = jax.tree.leaves(function(jnp.asarray(V)))
    for one, other in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


NONZERO: dict[str, Any] = {
    "jnp.nonzero": jnp.nonzero,
    "np.nonzero": np.nonzero,
    "method": lambda v: v.nonzero(),
    "of a size": lambda v: jnp.nonzero(v, size=5, fill_value=-1),
    "place": lambda v: jnp.place(v, v > 2, v, inplace=False),
    "none": lambda v: jnp.nonzero(v > 9),
    "matrix": lambda v: jnp.nonzero(v.reshape(2, 4)),
    "flatnonzero": jnp.flatnonzero,
    "argwhere": jnp.argwhere,
    "where": lambda v: jnp.where(v > 2),
    "unique": lambda v: jnp.unique(v, return_index=True, return_counts=True),
}


@pytest.mark.parametrize("function", NONZERO.values(), ids=NONZERO)
def test_what_is_not_zero_is_found_without_sums_over_the_devices_of_a_slice(session, a4, function) -> None:
    """XLA takes time by the square of a partitioned dimension on CPUs for the sum of all that is before each element.
    A launch of some 100,000 elements took longer than launches may, and its hosts were restarted."""
    values = np.array([0, 1, 0, 3, 4, 0, 4, 7], np.float32)
    found = function(pw.put(values, a4, P("x")))
    sums = [node for graph in session.launched for node in graph.nodes if getattr(node, "name", "") == "cumsum"]
    assert [layout.spec for node in sums for layout in node.input_layouts if any(layout.spec)] == []
    expected = function(jnp.asarray(values))
    trees: list[Any] = [jax.tree.structure(found), jax.tree.structure(expected)]
    assert trees[0] == trees[1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.slice, one.dtype) == (a4, other.dtype)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_is_not_zero_of_a_number_is_refused_as_in_jax(session, a4) -> None:
    with pytest.raises(ValueError, match="nonzero on 0d arrays"):
        jnp.nonzero(pw.put(np.float32(1), a4))


def test_what_is_not_zero_of_a_captured_array_is_found_in_the_function(session, a4) -> None:
    x = pw.put(V, a4, P("x"))
    np.testing.assert_array_equal(jax.jit(lambda: jnp.nonzero(x, size=7)[0])(), np.arange(1, 8))
    with pytest.raises(jax.errors.ConcretizationTypeError, match="size argument of"):
        jax.jit(lambda: jnp.nonzero(x))()


def test_calls_on_slices_are_jitted_always(session, a4, b22) -> None:
    x, own = pw.put(V, a4), NamedSharding(b22.mesh, P("x"))
    double, pinned = pw.compiled(lambda v: v * 2, slice=b22), pw.jit(lambda v: v * 2, in_shardings=own)
    mapped = jax.shard_map(lambda u: u * 2, mesh=b22.mesh, in_specs=P("x"), out_specs=P("x"))
    rolled = pw.program(lambda v: jax.lax.scan(lambda c, _: (c + 1, None), v, None, 5)[0])
    with jax.disable_jit():
        for call in (double, pw.program(double), pw.program(pinned), mapped):
            assert call(x).slice is b22
            np.testing.assert_array_equal(np.asarray(call(x)), V * 2)
        np.testing.assert_array_equal(np.asarray(jax.vmap(double)(x)), V * 2)
        for gradient in (jax.grad(lambda v: double(v).sum()), jax.grad(jax.checkpoint(lambda v: double(v).sum()))):
            np.testing.assert_array_equal(np.asarray(gradient(x)), np.full(8, 2.0))
        np.testing.assert_array_equal(np.asarray(rolled(x)), V + 5)
        assert len(rolled.lower(x).graph.nodes) == 3


# --- typed keys -------------------------------------------------------------------------------------------------------


def test_programs_for_arrays_of_64_bits_name_the_setting_that_they_need(session, a4) -> None:
    """JAX would trace them with 32 bits."""
    with jax.enable_x64(True):
        wide = pw.put(np.arange(4) / 3, a4)
    for use in (pw.compiled(jnp.sin, slice=a4), pw.program(jnp.sin)):
        with pytest.raises(UsageError, match=r"is a float64\[4\], which it takes as float32.*jax_enable_x64"):
            use(wide)
        with jax.enable_x64(True):
            assert use(wide).dtype == np.float64
    handed = pw.program(lambda v: v.astype(np.float32))
    with pytest.raises(UsageError, match=r"argument 0 of <lambda> is a float64\[4\], which it takes as float32"):
        handed(wide)
    with jax.enable_x64(True):
        assert handed(wide).dtype == np.float32


def test_so_do_programs_that_move_arrays_of_64_bits(session, a4, b22) -> None:
    """JAX leaves a cast to 32 bits out, since it has none of 64: they would move as they are."""
    with jax.enable_x64(True):
        wide = pw.put(np.arange(4) + 2**40, a4)
    there, own = NamedSharding(b22.mesh, P()), NamedSharding(a4.mesh, P())
    add = pw.compiled(lambda v: v + 1, slice=b22)
    for moves in (
        lambda v: pw.reshard(v, b22),
        lambda v: jax.device_put(v, there),
        lambda v: jax.lax.with_sharding_constraint(v, there),
        lambda v: jax.jit(lambda u: jax.device_put(u, there))(v),
        lambda v: pw.cond(jnp.ones(()) > 0, lambda u: (jax.device_put(u, own), add(u)), lambda u: (u, add(u)), v),
        lambda v: pw.scan(lambda c, _: (jax.device_put(c, own), add(c)), v, None, 2),
    ):
        cast = pw.program(lambda v, moves=moves: moves(v.astype(jnp.int32)))
        with pytest.raises(UsageError, match=r"is a int64\[4\], which it takes as int32.*jax_enable_x64"):
            cast(wide)
        with jax.enable_x64(True):
            assert {one.dtype for one in jax.tree.leaves(cast(wide))} == {np.dtype(np.int32)}
    for moved in (pw.reshard(wide, b22), pw.put(wide, b22), jax.device_put(wide, there)):  # outside of programs
        assert (moved.slice, moved.dtype) == (b22, np.int64)
        np.testing.assert_array_equal(np.asarray(moved), np.arange(4) + 2**40)


def test_typed_keys_are_arrays(session, a4) -> None:
    plain = jax.random.key(3)
    k = pw.put(plain, a4)
    assert (k.shape, k.dtype) == ((), plain.dtype)
    assert repr(k) == "pw.Array(key<fry>[] @ slice a4 (x=4):P(), ready)"
    draw = lambda key: jax.random.normal(key, (2,))  # noqa: E731
    for function in (draw, jax.jit(draw), pw.program(draw), pw.compiled(draw, slice=a4)):
        for key in (k, plain):
            np.testing.assert_array_equal(np.asarray(function(key)), np.asarray(draw(plain)))
    state = pw.compiled(lambda s: {"k": jax.random.split(s["k"])}, slice=a4)({"k": plain})
    assert (state["k"].dtype, state["k"].shape) == (plain.dtype, (2,))
    expected = jax.random.key_data(jax.random.split(plain)[1])
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(state["k"][1])), expected)
    fetched = jax.device_get(state["k"])
    assert jnp.issubdtype(fetched.dtype, jax.dtypes.prng_key)
    with pytest.raises(TypeError, match=r"typed PRNG keys have no NumPy value; take np.asarray\(jax.random.key_data"):
        np.asarray(k)


def test_typed_keys_are_captured_returned_and_sharded(session, a4) -> None:
    k = pw.put(jax.random.key(3), a4)
    for key in (k, jax.random.key(3)):
        found = pw.program(lambda v, key=key: v + jax.random.normal(key, v.shape))(V)
        np.testing.assert_allclose(np.asarray(found), V + jax.random.normal(jax.random.key(3), (8,)), rtol=1e-6)
    made = pw.program(lambda: jax.random.key(5))()
    assert float(jax.random.uniform(made)) == float(jax.random.uniform(jax.random.key(5)))
    keys = pw.put(jax.random.split(jax.random.key(0, impl="rbg"), 4), a4, P("x"))
    assert (keys.shape, keys.sharding.spec) == ((4,), P("x"))
    drawn = jax.vmap(lambda key: jax.random.bits(key))(keys)
    assert drawn.shape == (4,)


# --- what needs the value ---------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_before_anything_is_fetched(session, a4) -> None:
    x = pw.put(M, a4, P("x"))
    for call, kind, match in (
        (lambda: float(x), TypeError, r"float\(\) of an array takes one of one element; this one has shape \(8, 4\)"),
        (lambda: bool(x), ValueError, r"the truth of an array of shape \(8, 4\) is not clear; write y.any\(\)"),
        (lambda: [1, 2][x[0, 0]], TypeError, r"only a whole number is an index, not float32\[\]"),
        (lambda: x[0.5], TypeError, r"an index of an array is made of whole numbers.*got 0.5"),
        (lambda: x["a"], TypeError, r"an index of an array is made of whole numbers.*got 'a'"),
        (lambda: x.device, pw.errors.UsageError, r"the jax.Device of a pw.Array is not in this process"),
        (lambda: x.addressable_shards, pw.errors.UsageError, r"np.asarray\(y\) fetches the value"),
        (lambda: jax.device_put(x, jax.devices()[0]), pw.errors.UsageError, r"jax.device_put cannot move pw.Array"),
        (lambda: jax.jit(lambda v: float(v.sum()))(x), jax.errors.ConcretizationTypeError, "float"),
        (lambda: x + "a", TypeError, "unsupported operand"),
        (lambda: x @ np.ones(3, np.float32), TypeError, "dot_general"),
    ):
        with pytest.raises(kind, match=match):
            call()
    with pytest.raises(TypeError, match="immutable"):
        x[0] = 1
    assert session.fetched == 0


def test_arrays_of_two_sessions_do_not_meet(session, a4) -> None:
    other = opened()
    z = pw.put(V, other.virtual_slice((4,)))
    with pytest.raises(pw.errors.ForeignArray, match="belongs to another session; fetch it there"):
        pw.put(V, a4) + z
    other.close()


def test_a_program_runs_in_the_session_of_its_arrays_or_slices(session, a4) -> None:
    """Whichever was opened last; with neither it is that one."""
    double = pw.compiled(lambda v: v * 2, slice=a4)
    x = pw.put(V, a4)
    steps = [pw.program(lambda v, k: double(v) + k), pw.program(lambda v, k: 2 * v + k)]
    holding = pw.program(lambda v: v * 2 + x)
    once = pw.program(lambda v: double(v), on_retrace="raise")
    once(V)
    other = opened()
    assert once(V).slice is a4
    there = other.virtual_slice((4,))
    z = pw.put(V, there)
    for step in steps:
        for given in ((V, x), (x, V)):
            assert np.array_equal(step(*given), V * 3)
            assert step(*given).slice is a4
        assert np.array_equal(pw.padded(step, sizes=(8, 16), in_axes=(None, 0))(x, V), V * 3)
        assert step.lower(x, V).out_info.sharding.mesh == a4.mesh
        with pytest.raises(pw.errors.ForeignArray, match="belongs to another session; fetch it there"):
            step(x, z)
    for _ in range(2):
        assert [one.slice for one in (steps[0](V, V), holding(V), pw.program(lambda v: v + 1)(z))] == [a4, a4, there]
    assert steps[1](V, V).slice.session is other
    looped = pw.program(lambda v: pw.fori_loop(0, 2, lambda k, u: double(u), v))
    assert np.array_equal(looped(V), V * 4)
    mixed = pw.program(lambda v: (double(v), pw.reshard(v, there)))
    with pytest.raises(
        pw.errors.GraphError, match=r"uses slice 1 .*, which belongs to another session: a call runs in"
    ):
        mixed(V)
    other.close()


def test_a_function_may_name_slices_of_several_sessions(session, a4) -> None:
    """Those of one for arguments of these types, of another for others: each call finds its program."""
    other = opened()
    there = other.virtual_slice((4,))
    here, away = (pw.compiled(lambda v: v * 2, slice=where) for where in (a4, there))
    traced = []

    @pw.program
    def either(v: Any) -> Any:
        traced.append(v.shape)
        return v * 3 if v.ndim == 2 else here(v) + BIG.sum() if v.size == 8 else away(v) + BIG.sum()

    assert either(M).slice.session is other  # it names no slice for a matrix
    made = [either.prepared((v,)) for v in (V, V[:4], M)]
    for _ in range(3):
        assert [either(v).slice for v in (V, V[:4])] == [a4, there]
        assert either(M).slice.session is other
    assert [either.prepared((v,)) for v in (V, V[:4], M)] == made
    third = opened()
    assert [either.prepared((v,)) for v in (V, V[:4])] == made[:2]
    assert len(traced) == 3
    assert either(M).slice.session is third
    third.close()
    other.close()


def test_a_program_whose_session_has_ended_is_not_called_by_way_of_another(session, a4) -> None:
    double, last = pw.compiled(lambda v: v * 2, slice=a4), opened()
    step = pw.program(lambda v: double(v))
    assert step(V).slice is a4
    session._driver.disconnected("it was shut down")
    for _ in range(2):
        with pytest.raises(pw.errors.GraphError, match="belongs to another session, now closed"):
            step(V)
    last.close()


def test_default_slices_are_of_the_session_whose_slices_a_function_names(session, a4) -> None:
    """For each type of arguments; whichever session was opened last."""
    double, anywhere = pw.compiled(lambda v: v * 2, slice=a4), pw.compiled(lambda v: v + 1)
    step = pw.program(lambda v: (anywhere(v), double(v), pw.reshard(v)))
    step(V)
    other = opened()
    for one in (step, pw.program(step.fun)):
        for given in (V, V[:4]):
            assert {made.slice.session for made in one(given)} == {session}
    other.close()


def test_a_call_that_fails_decides_for_no_other_where_it_runs(session, a4) -> None:
    x, other = pw.put(V, a4), opened()
    z = pw.put(V, other.virtual_slice((4,)))
    anywhere = pw.compiled(lambda v, w: v + w)
    step = pw.program(lambda v, w: anywhere(v, w))
    with pytest.raises(pw.errors.ForeignArray, match="belongs to another session; fetch it there"):
        step(x, z)
    assert step(V, V).slice.session is other
    other.close()


def test_what_was_made_before_a_shutdown_says_that_its_session_is_closed(session, a4) -> None:
    """And a session has begun since."""
    double, kept = pw.compiled(lambda v: v * 2, slice=a4), pw.put(V, a4)
    session._driver.disconnected("it was shut down")
    other = opened()
    with pytest.raises(
        pw.errors.GraphError, match=r"belongs to another session, now closed \(it was shut down\): make the slice again"
    ):
        double(V)
    mine = pw.compiled(lambda v: v * 2, slice=other.virtual_slice((4,)))
    with pytest.raises(
        pw.errors.ForeignArray, match=r"belongs to another session, now closed \(it was shut down\), and went with it"
    ):
        mine(kept)
    other.close()


# --- leaves of trees --------------------------------------------------------------------------------------------------


def test_errors_name_the_leaf(session, a4) -> None:
    f = pw.program(lambda state, *, rest=None: state["w"] + 1)
    gone = pw.put(V, a4)
    gone.delete()
    for call, kind, match in (
        (lambda: f({"w": V, "n": "text"}), pw.errors.InvalidArray, r"argument state\['n'\] of <lambda> is a str; pass"),
        (lambda: f({"w": V}, rest=[None, "b"]), pw.errors.InvalidArray, r"argument rest\[1\] of <lambda> is a str"),
        (lambda: f({"w": gone}), pw.errors.BufferDeleted, r"argument state\['w'\] of <lambda>: .*: it was deleted"),
        (lambda: pw.put({"a": [V, {}.keys()]}, a4), pw.errors.InvalidArray, r"leaf \['a'\]\[1\]: .*is a dict_keys"),
        (lambda: pw.put({"a": V[:7]}, a4, P("x")), pw.errors.SpecError, r"leaf \['a'\]: put: dimension 0 of .* size 7"),
        (lambda: pw.put({"a": V}, a4, P("x", None)), pw.errors.SpecError, r"spec, leaf \['a'\]: .*has 2 entries, and"),
        (
            lambda: pw.compiled(lambda v: v.sum(), slice=a4, out_specs=P(None))(V),
            pw.errors.SpecError,
            r"out_specs of <lambda>: .*has 1 entries, and the array has 0 dimensions",
        ),
        (
            lambda: pw.put(V, NamedSharding(jax.sharding.AbstractMesh((4,), ("x",)), P())),
            pw.errors.UsageError,
            r"is over a mesh of no slice; write NamedSharding\(slice.mesh, spec\)",
        ),
    ):
        with pytest.raises(kind, match=match):
            call()


# --- the lists of the page --------------------------------------------------------------------------------------------


def test_the_page_has_what_becomes_of_each_method() -> None:
    table = jax_names.methods_table()
    page = jax_names.PAGE.read_text(encoding="utf-8").partition("## Methods and properties")[2]
    listed = jax_names.lists(table, ".")
    assert [line for line in listed if line] == [line for line in page.splitlines()[1:] if line]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_page_has_what_becomes_of_each_function() -> None:
    assert jax_names.page(jax_names.text()) == jax_names.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_lives_on_when_the_array_is_donated(session: LocalSession, copied: Any) -> None:
    where = session.virtual_slice((2,), ("x",))
    y = pw.put(V, where, P("x"))
    found = copied(y)
    pw.compiled(lambda v: v + 1, slice=where, in_specs=P("x"), donate_argnums=0)(y)
    assert y.is_deleted()
    assert (found.sharding, found.dtype) == (y.sharding, y.dtype)
    np.testing.assert_array_equal(np.asarray(found), V)


def test_what_numpy_leaves_to_methods_is_computed_on_the_slice(session: LocalSession, a4: Any) -> None:
    """docs/arrays.md lists these: NumPy's other functions fetch. `np.argsort` ended in a TraceError."""
    text = (Path(pw.__file__).parents[1] / "docs/arrays.md").read_text()
    said = text.split("What NumPy leaves to a method")[1].split(": ", 1)[1].split(".\n")[0]
    names = [name.removeprefix("np.") for name in re.findall(r"`([\w.]+)`", said)]
    value = np.array([3, 1, 2, 0, 0, 5, 4, 7], np.float32)
    more = {"reshape": ((2, 4),), "repeat": (2,), "swapaxes": (0, 0), "searchsorted": (1.0,)}
    y = pw.put(value, a4)
    assert len(names) == 22
    for name in names:
        function = getattr(np, name)
        made, wanted = function(y, *more.get(name, ())), function(value, *more.get(name, ()))
        for one, other in zip(made, wanted, strict=True) if isinstance(made, tuple) else [(made, wanted)]:
            assert isinstance(one, pw.Array), name
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)
    assert isinstance(np.sort(y), np.ndarray)
    assert isinstance(np.concatenate([y, y]), np.ndarray)
    np.testing.assert_array_equal(y.argsort(descending=True), jnp.argsort(value, descending=True))
    np.testing.assert_array_equal(y.argsort(stable=False)[-1], 7)


def test_device_put_without_aliases_gives_an_array_of_its_own(session: LocalSession, a4: Any) -> None:
    """It was the same one, which the next donation took."""
    x = pw.put(V, a4, P("x"))
    same_place = [x.sharding, NamedSharding(a4.mesh, P("x")), None]
    made = [jax.device_put({"w": x}, to, may_alias=False)["w"] for to in same_place]
    shared = [jax.device_put(x, to) for to in same_place]
    moved = jax.device_put(x, NamedSharding(a4.mesh, P()), may_alias=False)
    key = pw.put(jax.random.key(1), a4)
    keys = jax.device_put(key, may_alias=False)
    x.delete(), key.delete()
    assert all(one.is_deleted() for one in shared)
    for one in (*made, moved):
        np.testing.assert_array_equal(one, V)
    assert [one.sharding.spec for one in made] == [P("x")] * 3
    np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.key(1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "complex64"])
def test_a_scalar_without_a_format_is_shown_as_in_jax(session, a4, dtype) -> None:
    value = jnp.ones((), dtype)
    x = pw.put(value, a4)
    assert (f"{x}", str(x)) == (f"{value}", str(value))
    key = pw.put(jax.random.key(0), a4)
    assert f"{key}" == repr(key)  # as before: it has no NumPy value


def test_the_bytes_of_an_array_on_all_its_devices(session, a4) -> None:
    for spec, copies in ((P("x"), 1), (P(), 4)):
        assert pw.put(V, a4, spec).on_device_size_in_bytes() == copies * V.nbytes
