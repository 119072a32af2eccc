"""Values and types come through unchanged, or as plain JAX would change them, or are refused."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw

DTYPES = [
    "bool",
    "int4",
    "uint4",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
]
SHAPES = [(), (0,), (8,), (0, 4), (4, 0), (4, 2, 3), (1, 4)]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def sample(shape: tuple[int, ...], name: str) -> np.ndarray:
    dtype = dtype_of(name)
    values = np.arange(1, 1 + np.prod(shape, dtype=int)).reshape(shape) % 7
    return (values % 2 == 0) if name == "bool" else values.astype(np.float32).astype(dtype)


def first_divisible(shape: tuple[int, ...]) -> P:
    """A spec that cuts the first dimension that four devices can share."""
    for k, size in enumerate(shape):
        if size % 4 == 0:
            return P(*[None] * k, "x")
    return P()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape_comes_back_and_crosses_islands(session, slices, equal, name) -> None:
    values = [sample(shape, name) for shape in SHAPES]
    specs = [first_divisible(shape) for shape in SHAPES]
    there = pw.compiled(lambda vs: [jnp.flip(v) for v in vs], slice=slices.b4, in_specs=(specs,), out_specs=specs)
    back = pw.compiled(lambda vs: [jnp.flip(v) for v in vs], slice=slices.a22, in_specs=(P(),), out_specs=P())
    placed = [pw.put(value, slice=slices.a4, spec=spec) for value, spec in zip(values, specs, strict=True)]
    equal(placed, values)
    flipped, same = pw.program(lambda vs: (there(vs), back(there(vs))))(placed)
    equal(flipped, [np.flip(value) for value in values])
    equal(same, values)
    assert {array.dtype for array in flipped} == {dtype_of(name)}


def test_bits_of_special_values_are_kept(session, slices, equal) -> None:
    quiet, loud = np.uint32(0x7FC12345), np.uint32(0xFF800001)
    bits = np.array([quiet, loud, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0], np.uint32)
    special = bits.view(np.float32)
    x = pw.put(special, slice=slices.a4, spec=P("x"))
    equal(x, special)
    there = pw.compiled(lambda v: v, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    equal(there(x), special)
    negated = pw.compiled(lambda v: -v, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    equal(
        negated(np.array([0.0, np.inf, -np.inf, 2.0] * 2, np.float32)),
        np.array([-0.0, -np.inf, np.inf, -2] * 2, np.float32),
    )
    assert np.isnan(np.asarray(pw.compiled(lambda v: v / v, slice=slices.a1)(np.float32(0))))


@pytest.mark.parametrize(
    "value", [np.arange(5.0), np.arange(5), np.float64(1.5), np.int64(-3), np.uint64(7), 1j, 2.5, 3]
)
def test_64_bits_become_32_as_in_jax(session, slices, equal, value) -> None:
    f = pw.compiled(lambda v: v + v, slice=slices.a4)
    equal(f(value), jax.jit(lambda v: v + v)(value))
    equal(pw.put(value, slice=slices.a4), jnp.asarray(value))


def test_arrays_of_64_bits_are_computed_with_outside_of_enable_x64_as_in_jax(session, slices, equal) -> None:
    with jax.enable_x64(True):
        plain = jnp.arange(4) / 3
        wide = pw.put(plain, slices.a4)
    for use in (lambda v: v * v, jnp.sin, lambda v: v[1], jax.jit(lambda v: v * jnp.sin(v))):
        equal(use(wide), use(plain))
    equal(pw.put(wide, slices.a4, P("x")), plain)


def test_values_too_large_for_32_bits_go_as_in_jax(session, slices, equal) -> None:
    for value in (np.array([1e300, -1e300, 1.0]), np.array([2**40 + 3, -1]), np.uint64(2**63 + 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = np.asarray(jnp.asarray(value))
        equal(pw.put(value, slice=slices.a4), expected)
    with pytest.raises(pw.errors.InvalidArray, match=r"1099511627776 does not fit into int32 .*jax_enable_x64"):
        pw.put(2**40, slice=slices.a4)


def test_numpy_arrays_of_any_layout(session, slices, equal) -> None:
    base = np.arange(64, dtype=np.float32).reshape(8, 8)
    frozen = base.copy()
    frozen.flags.writeable = False
    layouts = {
        "big endian": base.astype(">f4"),
        "transposed": base.T,
        "strided": base[::2, ::-1],
        "fortran": np.asfortranarray(base),
        "read-only": frozen,
        "broadcast": np.broadcast_to(np.float32(3), (4, 4)),
        "one of a record": np.zeros(4, [("a", "i4"), ("b", "f4")])["b"],
    }
    for array in layouts.values():
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
        equal(pw.put(array, slice=slices.a4, spec=P("x")), native)
        equal(pw.compiled(lambda v: v * 2, slice=slices.a22, in_specs=P(("x", "y")))(array), native * 2)


@pytest.mark.parametrize("scalar", [True, 3, 2.5, 1 + 2j, np.float32(2), np.int8(3), np.bool_(True)])
@pytest.mark.parametrize("other", [np.int8, np.int32, np.float16, np.float32, ml_dtypes.bfloat16])
def test_python_scalars_are_weakly_typed_as_in_jax(session, slices, equal, scalar, other) -> None:
    f = pw.compiled(lambda a, b: a * b, slice=slices.a1)
    v = np.arange(3).astype(other)
    expected = jax.jit(lambda a, b: a * b)(v, scalar)
    equal(f(v, scalar), expected)
    equal(pw.program(lambda v: f(v, scalar))(v), expected)
    held = pw.put(scalar, slices.a1)
    equal(pw.program(lambda v: f(v, held))(v), expected)


def test_weak_types_go_on_through_nodes_and_launches_as_in_jax(session, slices, equal) -> None:
    def scale(a, b):
        return a * b

    halves = np.arange(3).astype(ml_dtypes.bfloat16)
    f, plain = pw.compiled(lambda v: v * 2, slice=slices.a1), jax.jit(lambda v: v * 2)
    g = pw.compiled(scale, slice=slices.b2)
    expected = plain(2.5) * halves
    equal(pw.program(lambda v, w: f(v) * w)(2.5, halves), expected)
    equal(pw.program(lambda v, w: g(f(v), w))(2.5, halves), expected)
    equal(g(f(2.5), halves), expected)
    handed_back = pw.program(lambda: (5.0, jnp.asarray(5.0)))()
    for same in (
        pw.put(5.0, slice=slices.a1),
        pw.program(lambda v: v)(5.0),
        pw.program(lambda v: v * 2)(2.5),
        *handed_back,
    ):
        equal(g(same, halves), expected)
    equal(g(f(np.float32(2.5)), halves), plain(np.float32(2.5)) * halves)


@pytest.mark.parametrize("there", ["a1", "b2"])
def test_weak_types_and_settings_go_on_in_branches_and_loops_as_in_jax(session, slices, equal, there) -> None:
    def scale(a, b):
        return a * b

    def bits(key):
        with jax.threefry_partitionable(False):
            return jax.random.bits(key, (8,))

    halves, key = np.arange(3).astype(ml_dtypes.bfloat16), jax.random.key(7)
    near, far = pw.compiled(scale, slice=slices.a1), pw.compiled(scale, slice=getattr(slices, there))
    scaled = pw.program(lambda v: pw.fori_loop(0, 2, lambda i, v: near(far(v, 2.5), 3), v))
    equal(scaled(pw.put(halves, slices.a1)), jax.lax.fori_loop(0, 2, lambda i, v: scale(scale(v, 2.5), 3), halves))
    chosen = pw.program(lambda v: pw.cond(v[1] > 0, lambda v: near(far(v, 2.5), 3), lambda v: near(far(v, 1), 1), v))
    equal(chosen(halves), jnp.asarray(halves) * 2.5 * 3)
    assert (np.asarray(bits(key)) != np.asarray(jax.random.bits(key, (8,)))).any()
    zeros = np.zeros(8, np.uint32)
    drawn = pw.program(lambda v: pw.fori_loop(0, 1, lambda i, v: near(far(v + bits(key), 1), 1), v))
    equal(drawn(pw.put(zeros, slices.a1)), bits(key))


def test_jax_arrays(session, slices, equal) -> None:
    values = [jnp.arange(8), jnp.ones((2, 4), jnp.bfloat16), jnp.asarray(2.0), jnp.zeros((0, 2))]
    equal(pw.put(values, slice=slices.a4), values)
    weak = jnp.asarray(2.0) * 1
    f = pw.compiled(lambda a, b: a * b, slice=slices.a1)
    equal(f(np.arange(3, dtype=np.float16), weak), jax.jit(lambda a, b: a * b)(np.arange(3, dtype=np.float16), weak))


def test_arrays_larger_than_a_part_of_the_wire(session, slices, equal) -> None:
    big = np.random.default_rng(3).integers(0, 2**32, (1 << 20, 3), dtype=np.uint32)  # 12 MiB, three parts
    x = pw.put(big, slice=slices.a4)
    equal(x, big)
    there = pw.compiled(lambda v: v ^ 1, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    equal(there(x), big ^ 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a", "b"]), "cannot be a JAX array: dtype <U1"),
        (np.array([object()]), "cannot be a JAX array: dtype object"),
        (np.array([1, None]), "cannot be a JAX array: dtype object"),
        (np.array(["2020-01-01"], "datetime64[D]"), r"cannot be a JAX array: dtype datetime64"),
        (np.zeros(2, [("a", "i4")]), "cannot be a JAX array: dtype"),
        (np.zeros(2, np.longdouble), "cannot be a JAX array"),
        (np.ma.masked_array([1, 2], np.array([False, True])), "masked"),
        ("text", "is a str; pass numbers"),
        (b"bytes", "is a bytes; pass numbers"),
        ({1, 2}, "is a set; pass numbers"),
    ],
    ids=["str", "object", "none", "datetime", "record", "longdouble", "masked", "text", "bytes", "set"],
)
def test_what_jax_has_no_type_for_is_refused(session, slices, value, message) -> None:
    f = pw.compiled(lambda v: v, slice=slices.a4)
    for use in (f, pw.program(lambda v: f(v)), lambda v: pw.put(v, slice=slices.a4)):
        with pytest.raises(pw.errors.InvalidArray, match=message):
            use(value)


def test_64_bits_stay_when_jax_has_them(session, python) -> None:
    assert "all equal" in python.run("values_x64", session.url, session.token, JAX_ENABLE_X64="1")


def test_hosts_do_not_go_by_the_variables_with_which_their_starter_debugs(python) -> None:
    given = {"JAX_DEBUG_NANS": "1", "JAX_DEBUG_INFS": "1", "JAX_TRANSFER_GUARD": "disallow_explicit"}
    assert "made by log" in python.run("debugging_variables", **given)


@pytest.mark.parametrize("size", [8, 1 << 19], ids=["small", "large"])
def test_small_functions_of_several_devices_waited_for_or_not(slices, size: int) -> None:
    """Hosts call them on each device by itself, or, in a loop that leaves as one launch, on all together; between both
    lie functions that only have one call for all, and such that take the memory of what they get, where it is large."""

    def mean(v):
        return jax.shard_map(lambda v: jax.lax.psum(v, "x") / 8 + v / 2, in_specs=P("x"), out_specs=P("x"))(v)

    def compiled(function, **donated):
        return pw.compiled(function, slice=slices.a4, in_specs=P("x"), out_specs=P("x"), **donated)

    add, sums, turned = compiled(lambda v: v + 4), compiled(mean), compiled(lambda v: jnp.flip(v))
    taking = compiled(lambda v: v * 2 - 4, donate_argnums=0)

    def rounds(v, count, wait):
        for k in range(count):
            v = sums(add(v))
            if k % 7 == 0:
                v = taking(turned(v))
            if wait:
                assert np.isfinite(np.asarray(v)).all()
        return np.asarray(v)

    start = np.arange(size, dtype=np.float32) % 8 * 64
    expected = start
    for k in range(60):
        expected = expected + 4
        whole = expected.reshape(4, -1)
        total = ((whole[0] + whole[1]) + whole[2]) + whole[3]
        expected = (total / 8 + whole / 2).reshape(-1)
        if k % 7 == 0:
            expected = expected[::-1] * 2 - 4
    for wait in (True, False):
        placed = pw.put(start, slice=slices.a4, spec=P("x"))
        np.testing.assert_array_equal(rounds(placed, 60, wait), expected)
