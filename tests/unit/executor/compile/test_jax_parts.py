"""A program's compiled parts on a host: what is told of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from pathways_ray.executor.compile import analysis, jax_parts
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.ir.graph import Part, Recipe
from pathways_ray.ir.types import ArrayType, Layout
from tests.unit.helpers import placed, spec


def compiled_parts(*codes: str) -> jax_parts.CompiledParts:
    """The parts of a plan of one computation for each code."""

    def compiled(code: str) -> Any:
        return SimpleNamespace(as_text=lambda: code)

    parts = jax_parts.CompiledParts.__new__(jax_parts.CompiledParts)
    recipe = Recipe((Part("f", "digest", ()),), ())
    parts.plan = SimpleNamespace(executables=[SimpleNamespace(recipe=recipe)] * len(codes))  # type: ignore[assignment]
    parts.compiler = SimpleNamespace(cost_of=lambda _: {"flops": 1.0})  # type: ignore[assignment]
    parts._executables = [compiled(code) for code in codes]
    return parts


def test_the_code_of_all_computations_is_cut_so_that_a_report_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within its own limit; together they are beyond that of a report, and the later ones are cut."""
    monkeypatch.setattr(jax_parts, "MAX_REPORT_TEXT", 100)
    assert analysis.MAX_REPORT_TEXT <= 32 << 20
    found = compiled_parts("a" * 60, "b" * 60, "c" * 60).analyses({0: 1, 1: 1, 2: 1}, text=True)
    assert [one.text for one in found] == [
        "a" * 60,
        "b" * 40 + "\n… cut: 60 characters in all",
        "\n… cut: 60 characters in all",
    ]
    assert [one.cost for one in found] == [{"flops": 1.0}] * 3
    assert [one.text for one in compiled_parts("a", "b").analyses({}, text=False)] == ["", ""]


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "float64", "complex64", "bfloat16"])
@pytest.mark.parametrize(("shape", "cut"), [((4, 6), ""), ((4, 6), "x"), ((4, 6), "- x"), ((), ""), ((1,), "")])
def test_an_argument_is_made_of_its_bytes_as_a_put_makes_it(dtype: str, shape: tuple[int, ...], cut: str) -> None:
    devices = jax.local_devices()[:2]
    compiler = Compiler(0, devices, {0: devices})
    where = placed(1, [f"0.{k}" for k in range(len(devices))])
    parts = jax_parts.CompiledParts.__new__(jax_parts.CompiledParts)
    parts.plan = SimpleNamespace(placed=lambda _: where)  # type: ignore[assignment]
    parts.compiler = compiler
    value = np.arange(np.prod(shape, dtype=int)).astype(getattr(ml_dtypes, dtype, dtype)).reshape(shape)
    made = parts.argument(ArrayType(shape, dtype), Layout(1, spec(cut)))(value.tobytes())
    assert (made.dtype, made.sharding) == (value.dtype, compiler.sharding(where, spec(cut)))
    assert np.asarray(made).tobytes() == value.tobytes()
