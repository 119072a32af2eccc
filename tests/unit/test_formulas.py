"""Formulas that nobody made: each is refused, whatever is wrong with it."""

from __future__ import annotations

import random
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.functions import function_in, read
from pathways_ray.executor.compile.sandbox import Sandbox
from pathways_ray.formulas.calls import FormulaCall, text_of
from pathways_ray.formulas.formula import (
    MAX_BYTES,
    MAX_MEMBERS,
    Constant,
    Formula,
    Kind,
    Operation,
    is_formulas,
    packed,
    unpacked,
)

ARRAY, NUMBER = Kind("float32", True), Kind("float32", False)
TWO = Constant.of(np.array(2, np.float32))
PLAIN = Formula((8,), (ARRAY, NUMBER), (TWO,), (Operation("multiply", (0, 2), "float32"),), (3, 1))


def changed(**fields: Any) -> Formula:
    return msgspec.structs.replace(PLAIN, **fields)


def doing(name: str, operands: tuple[int, ...], dtype: str = "float32", how: str = "") -> Formula:
    return changed(operations=(Operation(name, operands, dtype, how),))


def constrained(spec: tuple[tuple[str, ...], ...], operand: int = 0) -> Formula:
    layout = Operation("sharding_constraint", (operand,), "float32", spec=spec)
    return changed(operations=(layout,), mesh=(("x", 2),))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (changed(shape=(-1,)), "shape"),
        (changed(shape=(1,) * 100), "shape"),
        (changed(shape=(1 << 40, 1 << 40)), "bytes"),
        (changed(arguments=(Kind("complex64", True), NUMBER)), "complex64"),
        (changed(arguments=(Kind("no type" * 100, True), NUMBER)), "no type"),
        (changed(constants=(Constant("float32", b"12345"),)), "5 bytes"),
        (changed(constants=(Constant("object", b"12345678"),)), "object"),
        (changed(arguments=(ARRAY,) * 129), "129 arguments"),
        (changed(results=(0,) * 129), "129 results"),
        (changed(mesh=(("x" * 10_000, 0),)), "mesh"),
        (constrained((("y" * 10_000,),)), "not laid out on its mesh"),
        (changed(constants=(TWO,) * 129), "129 constants"),
        (changed(operations=PLAIN.operations * 129), "129 operations"),
        (changed(mesh=(("x", 0),)), "mesh"),
        (changed(mesh=(("x", 2),) * 100), "mesh"),
        (constrained((("y",),)), "not laid out on its mesh"),
        (constrained((("x",), ("x",))), "fewer"),
        (constrained((("x",) * 60,)), "fewer"),
        (constrained(((), ())), "fewer"),
        (constrained((("x",),), operand=1), "fewer"),
        (changed(results=(4,)), "values gives"),
        (changed(results=(-1,)), "values gives"),
        (doing("multiply", (0, 3)), "that there are not"),
        (doing("multiply", (0, -1)), "that there are not"),
        (doing("multiply", (0,)), "multiply"),
        (doing("multiply", (0, 1), "int32"), "multiply"),
        (doing("custom_call", (0,)), "custom_call"),
        (doing("and", (0, 1)), "and"),
        (doing("compare", (0, 1), "bool", "ABOVE"), "compare"),
        (doing("compare", (0, 1), "float32", "LT"), "compare"),
        (doing("select", (0, 1, 1)), "select"),
        (doing("convert", (0,), "complex64"), "convert"),
        (doing("convert", (0,), "bool"), "convert"),
        (doing("is_finite", (0,)), "is_finite"),
        (doing("broadcast_in_dim", (0,)), "broadcast_in_dim"),
        (doing("broadcast_in_dim", (1,), "int32"), "broadcast_in_dim"),
    ],
)
def test_a_formula_that_makes_no_sense_is_refused(wrong: Formula, why: str) -> None:
    found = read("a#1", packed((PLAIN, wrong)))
    assert function_in(found, "a#0") == FormulaCall.of(PLAIN)
    with pytest.raises(ProgramRefused, match=why) as caught:
        function_in(found, "a#1")
    assert len(str(caught.value)) < 300


def test_formulas_that_are_too_many_or_too_long_are_refused() -> None:
    assert len(unpacked(packed([PLAIN] * MAX_MEMBERS))) == MAX_MEMBERS
    with pytest.raises(ProgramRefused, match="129 formulas come as one; 128 are the limit"):
        unpacked(packed([PLAIN] * (MAX_MEMBERS + 1)))
    with pytest.raises(ProgramRefused, match=f"{MAX_BYTES} are the limit"):
        unpacked(packed([changed(constants=(Constant("float32", bytes(MAX_BYTES)),))]))


def test_the_largest_formulas_that_a_client_makes_are_taken() -> None:
    step = Operation("round_nearest_even", (300,), "bfloat16", spec=(("x", "y"), ("z",)))
    large = Formula(
        (8,) * 8, (Kind("bfloat16", True),) * 128, (Constant("float64", bytes(8)),) * 128, (step,) * 128, ()
    )
    assert len(packed([large] * MAX_MEMBERS)) < MAX_BYTES


def test_a_member_is_named_by_a_number_that_there_is() -> None:
    found = read("a#0", packed((PLAIN,)))
    assert function_in(found, "a#0") == FormulaCall.of(PLAIN)
    for name in ("a#1", "a#-1", "a#", "a#x", "a#²"):
        with pytest.raises(ProgramRefused, match="has the number"):
            function_in(found, name)
    with pytest.raises(ProgramRefused, match="names none of them"):
        read("a", packed((PLAIN,)))


def test_the_checker_leaves_formulas_to_the_host() -> None:
    """It has no process here: nothing else may be asked of it."""
    sandbox = Sandbox(0, command=("no such command",))
    blob = packed((PLAIN,))
    sandbox.check("f", ["a"], {"a": blob})
    sandbox.check_ahead({"a": blob}, trusted=False)


def test_bytes_that_were_turned_are_refused_or_are_formulas() -> None:
    """What is let in is written down, verified and compiled like any other."""
    generator, blob = random.Random(1), packed((PLAIN, doing("compare", (0, 1), "bool", "LT")))
    mark = blob.index(b"\n") + 1
    taken = 0
    for _ in range(3000):
        turned = bytearray(blob)
        for _ in range(generator.randint(1, 3)):
            turned[generator.randrange(mark, len(turned))] = generator.randrange(256)
        if generator.random() < 0.1:
            turned = turned[: generator.randrange(len(turned))]
        if not is_formulas(bytes(turned)):
            continue
        try:
            assert text_of(unpacked(bytes(turned)))
        except ProgramRefused:
            continue
        taken += 1
    assert taken > 30


def test_a_formula_whose_types_are_not_those_of_the_graph_is_refused() -> None:
    devices = jax.local_devices()[:1]
    compiler = Compiler(0, devices, {0: devices})
    blob = packed((PLAIN,))
    assert compiler._function("a#0", {"a": blob}).in_avals[1].shape == ()
    assert compiler._function("a#0", {}) == FormulaCall.of(PLAIN)  # it was read before


def test_a_formula_for_another_mesh_is_refused() -> None:
    call = FormulaCall.of(constrained((("x",),)))
    call.check_mesh(("x",), (2,))
    FormulaCall.of(PLAIN).check_mesh(("x", "y"), (2, 2))
    for axes, sizes in ((("x",), (4,)), (("y",), (2,)), (("x", "y"), (2, 1))):
        with pytest.raises(ProgramRefused, match="for the mesh"):
            call.check_mesh(axes, sizes)


def test_lines_are_told_by_their_formulas() -> None:
    one = changed(arguments=(ARRAY,), operations=(Operation("multiply", (0, 1), "float32"),), results=(2,))
    assert one.is_line
    assert not PLAIN.is_line
    for number in (-1, np.nan):
        wrong = Constant.of(np.array(number, np.float32))
        assert not msgspec.structs.replace(one, constants=(wrong,)).is_line
    assert not msgspec.structs.replace(one, operations=(Operation("add", (0, 0), "float32"),) * 17).is_line
    assert not msgspec.structs.replace(one, results=(0,)).is_line
    assert not msgspec.structs.replace(one, operations=(Operation("tanh", (0,), "float32"),)).is_line
