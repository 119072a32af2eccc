"""Composed functions: the bits of each run alone, and lines as one kernel."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh

from pathways_ray.client.jaxpr_formulas import formula_of
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.composition import Calls
from pathways_ray.executor.compile.functions import lines_among
from pathways_ray.formulas.calls import FormulaCall
from pathways_ray.formulas.formula import MAX_IN_LINE
from pathways_ray.ir.graph import Loop, Part, Recipe, Ref
from pathways_ray.ir.plan import Executable
from pathways_ray.ir.types import ArrayType, Layout
from tests.unit.executor.compile.exports import joint_of
from tests.unit.helpers import placed, spec

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

Function = Callable[..., Any]

OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""As users compile; `make test` has XLA do without."""


@functools.cache
def compiler() -> Compiler:
    devices = jax.local_devices()[:4]
    return Compiler(0, devices, {0: devices})


def calls_of(functions: Sequence[Function], *avals: Any, how: str = "formula", devices: int = 1) -> Calls:
    """The functions as clients send them, each named by its number; of the same types, as formulas where they are, or
    as exports alone or as members of one."""
    members = [jax.jit(lambda *given, one=one: (one(*given),), keep_unused=True) for one in functions]
    if how == "member":

        def together(*groups: Any) -> Any:
            return tuple(member(*group) for member, group in zip(members, groups, strict=True))

        every = export.export(jax.jit(together, keep_unused=True), platforms=("cpu",))(*[avals] * len(members))
        return {str(k): joint_of(every).member(str(k)) for k in range(len(members))}
    found: dict[str, Any] = {}
    for k, one in enumerate(members):
        formula = formula_of(one.trace(*avals).jaxpr, AbstractMesh((devices,), ("x",))) if how == "formula" else None
        found[str(k)] = export.export(one, platforms=("cpu",))(*avals) if formula is None else FormulaCall.of(formula)
    return found


def chain(count: int) -> tuple[Part, ...]:
    """Parts that each take what the one before makes."""
    return tuple(Part(str(k), str(k), (Ref(k - 1, 0),)) for k in range(count))


def compiled(
    parts: Sequence[Part | Loop], outputs: Sequence[Ref], calls: Calls, value: np.ndarray[Any, Any], devices: int = 1
) -> Any:
    """The computation of a recipe whose arguments are all like `value`."""
    where = placed(1, [f"0.{k}" for k in range(devices)])
    kind, layout = ArrayType(value.shape, value.dtype.name), Layout(1, spec("x" if devices > 1 else ""))
    nr_inputs = 1 + max(ref.output for part in parts for ref in part.inputs if ref.node == -1)
    recipe = Recipe(tuple(parts), tuple(outputs))
    given, made = ((kind,) * nr_inputs, (layout,) * nr_inputs), ((kind,) * len(outputs), (layout,) * len(outputs))
    return compiler()._compile(Executable(recipe, 1, *given, *made, ()), where, calls)


def one_by_one(functions: Sequence[Function], value: Any) -> np.ndarray[Any, Any]:
    for function in functions:
        value = jax.jit(function)(value)
    return np.asarray(value)


def kernels(made: Any) -> int:
    """The kernels of fused operations."""
    return str(made.as_text()).count(" fusion(")


# --- what is a line ---------------------------------------------------------------------------------------------------

FLOATS = jax.ShapeDtypeStruct((8,), np.float32)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda v: v * 1.5 + 2, True),
        (lambda v: 2 - v / 3, True),
        (lambda v: v * v, True),
        (lambda v: v, True),
        (lambda v: jnp.maximum(v - 3, 0.5), True),
        (jax.nn.relu, True),  # calls another function
        (lambda v: v.astype(np.int32).astype(np.float32), True),
        (lambda v: abs(v), False),
        (lambda v: 3 - (-v), False),
        (lambda v: v * -1, False),  # which is -v
        (lambda v: v / -1, False),
        (lambda v: np.float32(-0.0) - v, False),
        (lambda v: jnp.sqrt(v * v), False),  # which is abs(v)
        (lambda v: v * v + v, False),  # two values that may be NaN meet
        (lambda v: v + np.nan, False),
        (lambda v: v + np.arange(8, dtype=np.float32), False),  # not one number
        (lambda v: v.astype(jnp.bfloat16).astype(np.float32), False),
        (jnp.tanh, False),
        (lambda v: v[:4], False),
        (lambda v: v.sum(), False),
        (lambda v: jnp.where(v > 0, v, 0.0), False),
        (lambda v: jnp.ones_like(v) * 2, False),  # does not depend on what it takes
        (lambda v: functools.reduce(lambda v, _: v * 2 + 1, range(MAX_IN_LINE // 2), v), True),
        (lambda v: functools.reduce(lambda v, _: v * 2 + 1, range(MAX_IN_LINE // 2 + 1), v), False),
    ],
)
def test_a_line_is_plain_arithmetic_on_one_array(function: Function, expected: bool) -> None:
    assert lines_among(calls_of([function], FLOATS)) == ({"0"} if expected else set())
    assert not lines_among(calls_of([function], FLOATS, how="export"))


def test_functions_of_two_arrays_of_none_or_of_other_widths_are_no_lines() -> None:
    calls = {
        **calls_of([lambda a, b: a + b], FLOATS, FLOATS),
        "wide": calls_of([lambda v: v + 1], jax.ShapeDtypeStruct((8,), np.float16))["0"],
        "none": calls_of([lambda: np.float32(1)])["0"],
        "whole": calls_of([lambda v: v ^ 5], jax.ShapeDtypeStruct((8,), np.uint32))["0"],
    }
    assert lines_among(calls) == {"whole"}


# --- bits -------------------------------------------------------------------------------------------------------------

SPECIAL = np.array(
    [0x0, 0x80000000, 0x1, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7FC12345, 0x7F7FFFFF],
    np.uint32,
).view(np.float32)
"""Both zeros, the smallest numbers, infinities, three NaNs, the largest number."""


def values(size: int, seed: int) -> np.ndarray[Any, Any]:
    """Numbers of all magnitudes, special ones among them."""
    generator = np.random.default_rng(seed)
    found = generator.standard_normal(size).astype(np.float32) * np.float32(10) ** generator.integers(-30, 30, size)
    found = found.astype(np.float32)
    places = generator.permutation(size)[: len(SPECIAL)]
    found[places] = SPECIAL[: len(places)]
    return found


TWO: list[Callable[[Any, Any], Any]] = [
    lambda v, c: v * c,
    lambda v, c: v * c,
    lambda v, c: v + c,
    lambda v, c: v + c,
    lambda v, c: v - c,
    lambda v, c: c - v,
    lambda v, c: v / c,
    lambda v, c: c / v,
    lambda v, c: v * v,
    lambda v, c: jax.nn.relu(v),
    lambda v, c: jnp.minimum(v, c),
]
"""Operations of a value, or of one and a constant."""


def drawn(generator: random.Random) -> Function:
    """A line of one to four operations."""
    constants = [generator.uniform(-3, 3), 1.0, 0.5, 3.0, 1e-20, np.inf]
    steps = [(generator.choice(TWO), np.float32(generator.choice(constants))) for _ in range(generator.randint(1, 4))]

    def run(v: Any) -> Any:
        for operation, c in steps:
            v = operation(v, c)
        return v

    return run


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_lines_are_one_kernel_with_the_bits_of_each_function_alone(seed: int) -> None:
    generator = random.Random(seed)
    functions = [drawn(generator) for _ in range(generator.choice([3, 9, 32]))]
    value = values(generator.choice([1, 8, 13, 1000, 4096, 100_000]), seed)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype), how="formula")
    assert lines_among(calls) == set(calls)
    made = compiled(chain(len(functions)), [Ref(len(functions) - 1, 0)], calls, value)
    assert kernels(made) <= 1
    assert np.asarray(made(value)[0]).tobytes() == one_by_one(functions, value).tobytes()


def multiplied(v: Any) -> Any:
    return v * np.float32(1.0001)


def added(v: Any) -> Any:
    return v + np.float32(0.1)


@pytest.mark.parametrize("how", ["formula", "export", "member"])
def test_a_multiplication_and_an_addition_are_not_rounded_as_one(how: str) -> None:
    """As they are where nothing lies between them: so a border that XLA sees through would not pass."""
    value = values(1000, 1)
    alone = one_by_one([multiplied, added], value)
    together = jax.jit(lambda v: added(multiplied(v)), compiler_options=OPTIMIZED)
    assert np.asarray(together(value)).tobytes() != alone.tobytes()
    calls = calls_of([multiplied, added], jax.ShapeDtypeStruct(value.shape, value.dtype), how=how)
    made = compiled(chain(2), [Ref(1, 0)], calls, value)
    assert kernels(made) == (1 if how == "formula" else 2)
    assert np.asarray(made(value)[0]).tobytes() == alone.tobytes()


def test_constants_of_two_lines_are_not_put_together() -> None:
    functions = [lambda v: v * np.float32(1e30), lambda v: v * np.float32(1e-30), lambda v: v + 1e8, lambda v: v - 1e8]
    value = np.linspace(1, 1e9, 64, dtype=np.float32)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype))
    made = compiled(chain(4), [Ref(3, 0)], calls, value)
    assert np.asarray(made(value)[0]).tobytes() == one_by_one(functions, value).tobytes()


@pytest.mark.parametrize("how", ["formula", "export", "member"])
def test_values_that_two_parts_take_or_that_are_results_lie_behind_barriers(how: str) -> None:
    """`multiplied` may become one with either `added`, or with both, where it would be rounded with neither."""
    functions: list[Function] = [multiplied, added, lambda v: v + np.float32(0.7), lambda a, b: a * b]
    value = values(512, 2)
    one, two = jax.ShapeDtypeStruct(value.shape, value.dtype), [jax.ShapeDtypeStruct(value.shape, value.dtype)] * 2
    calls = {**calls_of(functions[:3], one, how=how), "3": calls_of(functions[3:], *two, how=how)["0"]}
    taken = [(Ref(-1, 0),), (Ref(0, 0),), (Ref(0, 0),), (Ref(1, 0), Ref(2, 0))]
    parts = [Part(str(k), str(k), refs) for k, refs in enumerate(taken)]
    made = compiled(parts, [Ref(3, 0), Ref(0, 0), Ref(1, 0)], calls, value)
    first = one_by_one([multiplied], value)
    left, right = one_by_one([added], first), one_by_one([functions[2]], first)
    expected = [np.asarray(jax.jit(functions[3])(left, right)), first, left]
    assert [np.asarray(each).tobytes() for each in made(value)[:3]] == [each.tobytes() for each in expected]


def test_lines_between_other_functions_have_the_bits_of_each_alone() -> None:
    functions = [jnp.tanh, multiplied, added, jnp.cumsum, multiplied, added, jnp.sin]
    value = np.linspace(-3, 3, 333, dtype=np.float32)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype))
    assert lines_among(calls) == {"1", "2", "4", "5"}
    made = compiled(chain(7), [Ref(6, 0)], calls, value)
    assert np.asarray(made(value)[0]).tobytes() == one_by_one(functions, value).tobytes()


@pytest.mark.parametrize("how", ["formula", "export", "member"])
@pytest.mark.parametrize("times", [1, 2, 7])
def test_bodies_of_loops_have_the_bits_of_each_function_alone(times: int, how: str) -> None:
    functions = [multiplied, added, lambda v: v / 3, lambda v: 1 - v]
    value = values(1000, 3)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype), how=how)
    loop = Loop(chain(4), times, (Ref(-1, 0),), ((0, Ref(3, 0)),), (Ref(3, 0),))
    made = compiled([loop], [Ref(0, 0)], calls, value)
    assert np.asarray(made(value)[0]).tobytes() == one_by_one(functions * times, value).tobytes()


@pytest.mark.parametrize("how", ["formula", "export", "member"])
def test_chains_over_several_devices_have_the_bits_of_each_function_alone(how: str) -> None:
    functions = [multiplied, added, lambda v: v / 3, jax.nn.relu]
    value = values(4096, 4)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype), how=how)
    made = compiled(chain(4), [Ref(3, 0)], calls, value, devices=4)
    assert kernels(made) == (1 if how == "formula" else 4)
    placed_value = jax.device_put(value, made.input_shardings[0][0])
    assert np.asarray(made(placed_value)[0]).tobytes() == one_by_one(functions, value).tobytes()


@pytest.mark.skipif(os.cpu_count() == 1, reason="there are no other threads")
def test_lines_on_small_arrays_are_not_given_to_other_threads() -> None:
    functions, value = [multiplied, added] * 16, values(1 << 14, 6)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype))
    made = compiled(chain(32), [Ref(31, 0)], calls, value)
    assert "outer_dimension_partitions" not in made.as_text()
    assert np.asarray(made(value)[0]).tobytes() == one_by_one(functions, value).tobytes()
    large = jax.ShapeDtypeStruct((1 << 16,), np.float32)
    made = compiled(chain(32), [Ref(31, 0)], calls_of(functions, large), np.zeros(large.shape, np.float32))
    assert "outer_dimension_partitions" in made.as_text()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("how", ["formula", "export", "member"])
def test_whole_numbers_keep_their_bits(how: str, dtype: Any) -> None:
    functions = [lambda v: v * 1_000_003, lambda v: v + 7, lambda v: ~v, lambda v: v // 1 ^ 0x55, lambda v: v * v]
    value = np.random.default_rng(5).integers(-(2**31), 2**31, 777).astype(dtype)
    calls = calls_of(functions, jax.ShapeDtypeStruct(value.shape, value.dtype), how=how)
    made = compiled(chain(5), [Ref(4, 0)], calls, value)
    assert np.asarray(made(value)[0]).tobytes() == one_by_one(functions, value).tobytes()


def test_members_may_give_several_values_and_what_they_take() -> None:
    """Members are written down without JAX, which knows the types of what they give."""
    value = np.linspace(-3, 3, 333, dtype=np.float32)
    members = [jax.jit(lambda v: (v, v * 2)), jax.jit(lambda v: (v + 1, v))]
    whole = jax.jit(lambda *given: tuple(one(*group) for one, group in zip(members, given, strict=True)))
    joint = joint_of(export.export(whole, platforms=("cpu",))((value,), (value,)))
    calls = {str(k): joint.member(str(k)) for k in range(2)}
    parts = [Part("0", "0", (Ref(-1, 0),)), Part("1", "1", (Ref(0, 1),)), Part("1", "1", (Ref(1, 1),))]
    outputs = [Ref(2, 0), Ref(0, 0), Ref(1, 0), Ref(-1, 0)]
    made = compiled(parts, outputs, calls, value)
    expected = [value * 2 + 1, value, value * 2 + 1, value]
    assert [np.asarray(one).tobytes() for one in made(value)[:4]] == [one.tobytes() for one in expected]


@pytest.mark.parametrize(
    "as_tree", [lambda v: v, lambda v: {"one": [v]}, lambda v: (v,)], ids=["array", "dict", "tuple"]
)
def test_exports_may_give_any_tree(as_tree: Function) -> None:
    """Of its leaves each is a value; of an array that is the whole tree, not each row."""
    value = np.arange(16, dtype=np.float32).reshape(4, 4)
    one = export.export(jax.jit(lambda v: as_tree(v + 1)), platforms=("cpu",))(value)
    made = compiled(chain(2), (Ref(1, 0),), {"0": one, "1": one}, value)
    (found, _) = made(value)
    np.testing.assert_array_equal(found, value + 2)
