"""What sorts compare by: the orders that JAX writes pass, and nothing by which XLA would leave the arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile import allowlist
from tests.unit.executor.compile.exports import blob_of, exported, from_text

SIZE = 1024
VECTOR = jax.ShapeDtypeStruct((SIZE,), np.float32)
TYPES = ("bool", "int8", "uint32", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128")

SORT = """%0 = "stablehlo.sort"(%arg0) <{{dimension = 0 : i64, is_stable = {stable}}}> ({{
^bb0(%a: tensor<f32>, %b: tensor<f32>):
{body}
stablehlo.return %c : tensor<i1>
}}) : (tensor<1024xf32>) -> tensor<1024xf32>"""
COMPARES = "%c = stablehlo.compare {} : (tensor<f32>, tensor<f32>) -> tensor<i1>"
ALWAYS = "%c = stablehlo.constant dense<true> : tensor<i1>"
DRAWS = """%l = stablehlo.constant dense<0.0> : tensor<f32>
%u = stablehlo.constant dense<1.0> : tensor<f32>
%s = stablehlo.constant dense<> : tensor<0xi64>
%r = "stablehlo.rng"(%l, %u, %s) <{rng_distribution = #stablehlo<rng_distribution UNIFORM>}>
  : (tensor<f32>, tensor<f32>, tensor<0xi64>) -> tensor<f32>
%c = stablehlo.compare LT, %r, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>"""
EITHER = """%x = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
%y = stablehlo.compare {}, %a, %b, {} : (tensor<f32>, tensor<f32>) -> tensor<i1>
%z = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
%w = stablehlo.and %y, %z : tensor<i1>
%c = stablehlo.or %x, %w : tensor<i1>"""

UNSTABLE: dict[str, tuple[str, bool]] = {
    "less in total": (COMPARES.format("LT, %a, %b, TOTALORDER"), True),
    "more in total": (COMPARES.format("GT, %a, %b, TOTALORDER"), True),
    "equal, and then less": (EITHER.format("EQ", "TOTALORDER"), True),
    "equal otherwise, and then less": (EITHER.format("EQ", "FLOAT"), False),
    "unequal, and then less": (EITHER.format("NE", "TOTALORDER"), False),
    "not more": (COMPARES.format("LE, %a, %b, TOTALORDER"), False),
    "unequal": (COMPARES.format("NE, %a, %b, TOTALORDER"), False),
    "less, and of NaN never": (COMPARES.format("LT, %a, %b, FLOAT"), False),
    "the other one": (COMPARES.format("LT, %b, %a, TOTALORDER"), False),
    "itself": (COMPARES.format("LT, %a, %a, TOTALORDER"), False),
    "another value": (COMPARES.format("LT, %a, %other, TOTALORDER"), False),
    "always": (ALWAYS, False),
    "by chance": (DRAWS, False),
}


def sort(body: str, stable: bool) -> bytes:
    body = SORT.format(body=body, stable=str(stable).lower())
    head = "%other = stablehlo.constant dense<0.5> : tensor<f32>"
    return from_text(
        f"module {{ func.func public @main(%arg0: tensor<1024xf32>) -> tensor<1024xf32> {{\n{head}\n{body}\n"
        "return %0 : tensor<1024xf32> } }",
        exported(lambda v: v + 1, VECTOR),
    )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stable", [False, True])
def test_what_jax_sorts_by_passes(dtype: str, stable: bool) -> None:
    def sorts(*given: Any) -> Any:
        return jax.lax.sort((*given, given[0]), num_keys=len(given), is_stable=stable)

    def arguments(x: Any) -> Any:
        return jnp.argsort(x, descending=True, stable=stable)

    with jax.enable_x64():
        array = jax.ShapeDtypeStruct((30, 4), jnp.dtype(dtype))
        blobs = [blob_of(exported(sorts, *[array] * keys)) for keys in (1, 2, 5)]
        blobs.append(blob_of(exported(arguments, array)))
    assert [refused for refused, _ in allowlist.verdicts(blobs)] == [""] * 4


@pytest.mark.parametrize(("body", "passes"), UNSTABLE.values(), ids=UNSTABLE)
def test_a_sort_that_is_not_stable_needs_an_order(body: str, passes: bool) -> None:
    """By `a <= b`, XLA on CPU sorts what lies behind the array too, until the process ends."""
    (refused, _), (trusted, _) = (allowlist.verdicts([sort(body, stable=False)], trust)[0] for trust in (False, True))
    assert ("compares by what is not sure to be an order" in refused) is not passes
    assert not trusted


@pytest.mark.parametrize("body", [COMPARES.format("LE, %a, %b"), COMPARES.format("NE, %a, %b"), ALWAYS])
def test_a_stable_sort_stays_in_its_array_whatever_it_sorts_by(body: str) -> None:
    blob = sort(body, stable=True)
    assert allowlist.verdicts([blob]) == [("", 0)]
    run = jax.jit(jax.export.deserialize(bytearray(blob)).call)
    for values in (np.ones(SIZE, np.float32), np.random.default_rng(0).integers(0, 9, SIZE).astype(np.float32)):
        assert sorted(np.asarray(run(values))) == sorted(values)


def test_a_stable_sort_by_chance_is_refused() -> None:
    with pytest.raises(ProgramRefused, match=r"a sort compares by a function with the operation stablehlo\.rng"):
        allowlist.check_function(sort(DRAWS, stable=True))


def test_an_expression_that_doubles_is_looked_at_once() -> None:
    lines = [
        f"%{x}{k + 1} = stablehlo.select %t, %{x}{k}, %{x}{k} : tensor<i1>, tensor<f32>"
        for x in ("x", "y")
        for k in range(200)
    ]
    begin = ["%t = stablehlo.constant dense<true> : tensor<i1>"]
    begin += [f"%{x}0 = stablehlo.select %t, %{v}, %{v} : tensor<i1>, tensor<f32>" for x, v in (("x", "a"), ("y", "b"))]
    body = "\n".join([*begin, *lines, COMPARES.format("LT, %x200, %y200, TOTALORDER")])
    assert allowlist.verdicts([sort(body, stable=False)]) == [("", 0)]


def test_the_largest_values_are_found_as_jax_does() -> None:
    for find in (jax.lax.approx_max_k, jax.lax.approx_min_k):
        made = exported(lambda v, find=find: find(v, 9)[0], VECTOR)
        assert allowlist.verdicts([blob_of(made)]) == [("", 0)]
        for was, now in (("GT, %arg0, %arg1", "GE, %arg0, %arg1"), ("T, %arg0, %arg1", "T, %arg1, %arg0")):
            text = made.mlir_module().replace("LT, %arg0", "GT, %arg0")
            assert was in text
            with pytest.raises(ProgramRefused, match="compares by a function that is not as JAX makes it"):
                allowlist.check_function(from_text(text.replace(was, now), made))
