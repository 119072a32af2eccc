"""Functions of element-wise operations are formulas, and compute on hosts what JAX computes, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.jaxpr_formulas import formula_of
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.formulas.formula import Formula, Kind, is_formulas, packed, unpacked

FLOATS = ("float32", "float64", "bfloat16", "float16")
INTEGERS = ("int32", "uint32", "int8", "uint8", "int64", "uint64")
BITS = (*INTEGERS, "bool")


def values(dtype: str, count: int = 96) -> np.ndarray[Any, Any]:
    """Numbers of all magnitudes: zeros, the smallest, infinities and NaNs of both signs among floats."""
    kind = jnp.dtype(dtype)
    random = np.random.default_rng(3)
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    if jnp.issubdtype(kind, jnp.integer):
        info = jnp.iinfo(kind)
        found = random.integers(info.min, info.max, count, dtype=kind, endpoint=True)
        found[:6] = [0, 1, info.min, info.max, 2, 3]
        return found
    found = random.standard_normal(count) * 10.0 ** random.integers(-6, 5, count)
    found[:10] = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan, 0.5, 1e-40]
    return found.astype(kind)


def formula(function: Callable[..., Any], *arguments: Any) -> Formula | None:
    return formula_of(jax.jit(function).trace(*arguments).jaxpr, AbstractMesh((1,), ("x",)))


def check(function: Callable[..., Any], *arguments: Any) -> None:
    """The function is a formula, and has the bits that JAX gives it, also from its bytes."""
    check_all([(function, arguments)])


def check_all(cases: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
    """The same of each function with its arguments; JAX compiles all as one and all formulas as one, which takes a
    fraction of the time. Each has arguments of its own, so that XLA has nothing to share between two of them."""
    calls = [call_of(function, arguments) for function, arguments in cases]
    given = [arguments for _, arguments in cases]

    def plain(given: list[tuple[Any, ...]]) -> list[Any]:
        return [jax.tree.leaves(function(*each)) for (function, _), each in zip(cases, given, strict=True)]

    def formulas(given: list[tuple[Any, ...]]) -> list[Any]:
        return [call.call(*each) for call, each in zip(calls, given, strict=True)]

    results = zip(cases, calls, jax.jit(plain)(given), jax.jit(formulas)(given), strict=True)
    for (function, _), call, wanted, made in results:
        assert [(one.shape, one.dtype) for one in call.out_avals] == [(one.shape, one.dtype) for one in wanted]
        for a, b in zip(made, wanted, strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), function


def call_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> FormulaCall:
    """The function as a formula that was read from its bytes."""
    found = formula(function, *arguments)
    assert found is not None, function
    (read,) = unpacked(packed((found,)))
    assert read == found, function
    call = FormulaCall.of(read)
    assert [(one.shape, one.dtype) for one in call.in_avals] == [(np.shape(a), jnp.asarray(a).dtype) for a in arguments]
    return call


ONE: dict[Callable[..., Any], tuple[str, ...]] = {
    **dict.fromkeys(
        (
            lax.sqrt, lax.rsqrt, lax.cbrt, lax.exp, lax.expm1, lax.log, lax.log1p, lax.logistic, lax.tanh, lax.sin,
            lax.cos, lax.tan, lax.floor, lax.ceil, lax.is_finite, jax.nn.relu, jnp.round, lax.round,
        ),
        FLOATS,
    ),
    **dict.fromkeys((lax.neg, lax.square, lambda v: lax.integer_pow(v, 2)), (*FLOATS, *INTEGERS)),
    **dict.fromkeys((lambda v, k=k: lax.integer_pow(v, k) for k in (-3, -2, -1, 1, 3, 4, 7, 12)), FLOATS),
    **dict.fromkeys((lax.abs, lax.sign), (*FLOATS, "int32", "int8", "int64")),
    lax.bitwise_not: BITS,
    **dict.fromkeys(
        (lambda v, to=to: v.astype(to) for to in ("float32", "bfloat16", "int32", "uint8", "bool", "float64")),
        (*FLOATS, *BITS),
    ),
}  # fmt: skip

TWO: dict[Callable[..., Any], tuple[str, ...]] = {
    **dict.fromkeys((lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min), (*FLOATS, *INTEGERS)),
    **dict.fromkeys((lax.pow, lax.atan2), FLOATS),
    **dict.fromkeys((lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor), BITS),
    **dict.fromkeys((lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge), (*FLOATS, *BITS)),
    lambda a, b: jnp.where(a > b, a, b): (*FLOATS, *BITS),
    lambda a, b: lax.clamp(jnp.asarray(1, a.dtype), a, b): (*FLOATS, *INTEGERS),
}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (4, 24)),
        *((dtype, (96,)) for dtype in (*FLOATS, *BITS)),
    ],
)
def test_each_operation_has_the_bits_that_jax_gives_it(dtype: str, shape: tuple[int, ...]) -> None:
    """Of infinities divided, and the like, in each type that it takes: what JAX lowers to, and what a formula does, are
    the same operations."""
    with jax.enable_x64(True):
        one = values(dtype).reshape(shape)
        other = values(dtype)[::-1].reshape(shape)
        arguments = ((ONE, (one,)), (TWO, (one, other)))
        check_all([(each, given) for table, given in arguments for each, takes in table.items() if dtype in takes])


def test_what_is_written_with_jnp_is_a_formula_too() -> None:
    x, g, rate = values("float32"), values("float32")[::-1].copy(), np.float32(0.1)
    check(lambda x, g, rate: (x - rate * g, jax.nn.sigmoid(x), jnp.clip(x, -1, 1)), x, g, rate)
    check(lambda x: jax.nn.gelu(x, approximate=True), x)
    check(lambda x: jax.nn.silu(x) * 2 + 1, x)
    check(lambda x: (x, x, 3.0 * jnp.ones_like(x)), x)
    check(lambda rate: (rate * 2, rate + 1), rate)
    check(lambda x: x * jnp.float32(np.nan), x)
    check(lambda x: jax.grad(lambda v: jnp.tanh(v) * v)(x), rate)
    check(lambda x: jax.jit(lambda a, b: a * b + 1)(x, x) / 3, x)
    check(lambda x: x + 1, np.zeros((0, 3), np.float32))
    check(lambda x: x * np.float32(-2) - 0.5, np.asfortranarray(np.ones((3, 5), np.float32)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(),
        lambda x: x[:3],
        lambda x: x @ x,
        lambda x: x.reshape(2, 48),
        lambda x: x[:, None] * x,
        lambda x: x + np.arange(96, dtype=np.float32),
        lambda x: x * jnp.complex64(1j),
        lambda x: lax.erf(x),
        lambda x: lax.optimization_barrier(x) + 1,
        lambda x: lax.fori_loop(0, 3, lambda _, v: v * 2, x),
        lambda x: lax.exp(x, accuracy=lax.Tolerance(1e-3, 0, 0)),
        lambda x: lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        lambda x: x.astype(jnp.float8_e4m3fn),
        lambda x: lax.integer_pow(x, 0),
        lambda x: jax.random.key(0),
        lambda x: jax.debug.print("{}", x) or x,
        lambda x: [x := x * 1.5 for _ in range(200)][-1],
        lambda x: lax.bitcast_convert_type(x, np.int32),
        jax.checkpoint(lambda x: x + 1),
    ],
)
def test_other_functions_are_no_formulas(function: Callable[..., Any]) -> None:
    assert formula(function, values("float32")) is None


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "int4", "float8_e4m3fn", "uint2"])
def test_values_of_other_types_are_of_no_formula(dtype: str) -> None:
    """Also where nothing is done with them."""
    with jax.enable_x64(True):
        given = jax.ShapeDtypeStruct((96,), jnp.dtype(dtype))
        assert formula(lambda v, w: (v, w), given, np.float32(1)) is None
        assert formula(lambda v: v == v, given) is None


def built(f: Any, *arguments: Any) -> Any:
    return f.prepared(arguments)._built


def test_formulas_of_a_program_come_as_one_beside_an_export_of_the_others(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    scaled = [pw.compiled(lambda v, k=k: v * k + 1, slice=where) for k in range(3)]
    summed = [pw.compiled(lambda v, k=k: v / (k + v.sum()), slice=where) for k in range(2)]

    def chain(v: Any) -> Any:
        for one in (*scaled, scaled[0], *summed):
            v = one(v)
        return jnp.tanh(v) - 1

    f, given = pw.program(chain), np.arange(8, dtype=np.float32)
    wanted = given
    for one in (*scaled, scaled[0], *summed, jnp.tanh, lambda v: v - 1):
        wanted = jax.jit(getattr(one, "fun", one))(wanted)
    assert np.asarray(f(given)).tobytes() == np.asarray(wanted).tobytes()
    made = built(f, given)
    assert sorted(map(is_formulas, made.functions.values())) == [False, True]
    names = [made.graph.recipes[node.recipe].parts[0].function for node in made.graph.nodes if hasattr(node, "recipe")]
    assert names[0] == names[3]
    assert len(set(names)) == 7
    assert "stablehlo.tanh" in f.lower(given).as_text("stablehlo")


def test_a_function_that_is_called_alone_is_a_formula(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    f = pw.compiled(lambda v: jax.nn.relu(v) + 1, slice=where)
    given = np.arange(-4, 4, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(f(given)), np.maximum(given, 0) + 1)
    (blob,) = built(f._program((given,)), given).functions.values()
    assert is_formulas(blob)


@pytest.mark.parametrize("spec", [P(), P("x"), P(("x", "y")), P("y", "x")])
def test_formulas_of_several_devices_say_how_their_values_lie(session, spec: P) -> None:
    where = session.virtual_slice((2, 2), ("x", "y"))
    scaled = [
        pw.compiled(lambda v, k=k: jnp.where(v > k, v * k, 1 - v), slice=where, in_specs=spec, out_specs=out)
        for k, out in enumerate((spec, P(), spec))
    ]

    def chain(v: Any) -> Any:
        for one in scaled:
            v = one(v)
        return v + 1

    f, given = pw.program(chain), np.arange(32, dtype=np.float32).reshape(4, 8)
    wanted = given
    for one in (*scaled, lambda v: v + 1):
        wanted = jax.jit(getattr(one, "fun", one))(wanted)
    placed = pw.put(given, where, spec)
    assert np.asarray(f(placed)).tobytes() == np.asarray(wanted).tobytes()
    made = built(f, placed)
    assert all(map(is_formulas, made.functions.values()))
    if spec != P():
        assert "sdy.sharding_constraint" in f.lower(placed).as_text("stablehlo")
    alone = built(scaled[0]._program((placed,)), placed)
    assert all(map(is_formulas, alone.functions.values()))


@pytest.mark.parametrize("spec", [P("x"), P(None, ("y", "x"))])
def test_lines_of_several_devices_have_the_bits_of_each_alone(session, spec: P) -> None:
    where = session.virtual_slice((2, 2), ("x", "y"))
    lines = [pw.compiled(lambda v, k=k: v * 1.1 + k / 7, slice=where, in_specs=spec, out_specs=spec) for k in range(9)]

    def chain(v: Any) -> Any:
        for one in lines:
            v = one(v)
        return v

    f, given = pw.program(chain), values("float32").reshape(4, 24)
    wanted = given
    for one in lines:
        wanted = jax.jit(one.fun)(wanted)
    placed = pw.put(given, where, spec)
    assert np.asarray(f(placed)).tobytes() == np.asarray(wanted).tobytes()
    recipes = built(f, placed).graph.recipes
    assert all(part.is_line for recipe in recipes for part in recipe.parts)


def test_a_number_that_lies_on_a_slice_is_not_fetched(session) -> None:
    held = pw.put(np.float32(3), session.virtual_slice((1,), ("x",)))
    closed = jax.make_jaxpr(lambda v, c: v * c)(np.ones(4, np.float32), np.float32(1)).jaxpr
    taken = jax.extend.core.ClosedJaxpr(closed.replace(constvars=closed.invars[1:], invars=closed.invars[:1]), [held])
    assert formula_of(taken, AbstractMesh((1,), ("x",))) is None
    f = pw.program(lambda v: v * held)
    np.testing.assert_array_equal(np.asarray(f(np.ones(4, np.float32))), np.full(4, 3, np.float32))


def test_a_layout_over_another_mesh_is_not_one_of_a_formula(session) -> None:
    other = jax.sharding.NamedSharding(AbstractMesh((2,), ("x",)), P("x"))
    found = jax.jit(lambda v: lax.with_sharding_constraint(v, other))
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",))):
        closed = found.trace(np.ones(4, np.float32)).jaxpr
    assert formula_of(closed, AbstractMesh((4,), ("x",))) is None
    assert formula_of(closed, AbstractMesh((2,), ("x",))) is not None


@pytest.mark.parametrize("shape", [(2**40, 2**40), (2**40, 2**40, 0)])
def test_values_of_an_exabyte_are_refused_although_they_have_no_elements(shape: tuple[int, ...]) -> None:
    made = Formula(shape, (Kind("float32", True),), (), (), (0,))
    with pytest.raises(pw.errors.ProgramRefused, match=r"a formula has values .* of more than 17592186044416 bytes"):
        made.kinds()
    assert Formula((4, 0), made.arguments, (), (), (0,)).kinds() == [Kind("float32", True)]
