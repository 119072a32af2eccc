"""Small functions of a program are exported as one, and compute what they compute alone."""

from __future__ import annotations

import functools
import gc
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import codes
from pathways_ray.errors import ProgramRefused, TraceError
from pathways_ray.executor.compile.allowlist import check_function, verdicts
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.functions import lines_among
from pathways_ray.formulas.formula import is_formulas
from pathways_ray.ir.graph import functions_in
from pathways_ray.joint_exports import Packed, only_called
from tests.unit.executor.compile.exports import blob_of, from_text, joint_of
from tests.unit.functions import functions_of

V = np.arange(8, dtype=np.float32)


def built(f: Any, *arguments: Any) -> Any:
    return f.prepared(arguments)._built


def functions(made: Any) -> list[Any]:
    """The parts of the nodes of a program, in order."""
    recipes = [made.graph.recipes[node.recipe] for node in made.graph.nodes if hasattr(node, "recipe")]
    return [part for recipe in recipes for part in functions_in(recipe.parts)]


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_functions_and_operations_of_a_program_are_members_of_one_export(session, spec: P) -> None:
    where = session.virtual_slice((4,), ("x",))
    parts = [pw.compiled(lambda v, k=k: (v * k, v.sum()), slice=where, in_specs=spec, out_specs=P()) for k in range(3)]

    def chain(v: Any) -> Any:
        total = jnp.zeros(1)
        for part in parts:
            v, one = part(v)
            total = jnp.concatenate([total, one[None]])
        return jnp.sin(v)[::-1], total.sum()

    f = pw.program(chain)
    found, wanted = f(pw.put(V, where, spec)), (np.sin(V * 0), np.array(28))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    made = built(f, pw.put(V, where, spec))
    (blob,) = (each for each in made.functions.values() if not is_formulas(each))
    assert {part.digest for part in functions(made)} == set(made.functions)
    assert check_function(blob) in (0, 4)


def test_functions_of_the_same_code_are_one_member(session) -> None:
    """So that calls that repeat each other are found, as where they are exported alone."""
    where = session.virtual_slice((1,), ("x",))
    parts = [pw.compiled(lambda v: jnp.tanh(v) * 2, slice=where) for _ in range(3)]
    f = pw.program(lambda v: parts[2](parts[1](parts[0](v))) + 1)
    names = [part.function for part in functions(built(f, V))]
    assert len(set(names[:3])) == 1
    assert len(set(names)) == 2
    np.testing.assert_allclose(np.asarray(f(V)), np.tanh(2 * np.tanh(2 * np.tanh(V))) * 2 + 1, rtol=1e-6)


def test_what_has_a_loop_says_so(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    loop = pw.compiled(lambda v: jax.lax.fori_loop(0, 3, lambda _, w: w * 2, v), slice=where)
    plain = pw.compiled(lambda v: v + 1, slice=where)
    f = pw.program(lambda v: plain(loop(v)))
    assert [part.has_loop for part in functions(built(f, V))] == [True, False]
    np.testing.assert_array_equal(np.asarray(f(V)), V * 8 + 1)


@pytest.mark.parametrize("devices", [1, 4])
def test_plain_arithmetic_on_one_array_is_a_line_also_where_it_is_alone(session, devices: int) -> None:
    """As hosts find out for themselves, of formulas and of exports."""
    where = session.virtual_slice((devices,), ("x",))
    row, number = jnp.arange(8.0), jnp.float32(3)
    written: list[tuple[Any, bool]] = [
        (lambda v: v * 2 + 1, True),
        (lambda v: jax.nn.relu(v), True),
        (lambda v: -v, False),
        (jnp.tanh, False),
        (lambda v: v.astype(jnp.float16).astype(np.float32), False),
        (lambda v: v.sum() * v, False),
        (lambda v: functools.reduce(lambda v, k: v * k, range(2, 20), v), False),
        (lambda v: v * v, True),
        (lambda v: v + number, True),
        (lambda v: jax.jit(lambda w: 1 - w)(v) / 3, True),
        (lambda v: v * v + v, False),
        (lambda v: v - 0.1 * v, False),
        (lambda v: jax.jit(lambda w: w * (1 + w))(v), False),
        (lambda v: v + row, False),
        (lambda v: jnp.minimum(jax.jit(lambda a, b: a * b)(v, v), 1.0), True),
        *((lambda v, k=k: jax.lax.integer_pow(v, k), k in (-2, 2, 4)) for k in (-3, -2, 2, 3, 4)),
    ]
    expected = [is_line for _, is_line in written]
    parts, others = ([pw.compiled(lambda v, f=f: f(v), slice=where) for f, _ in written] for _ in range(2))
    together = built(pw.program(lambda v: [part(v) for part in parts]), V)
    assert [part.is_line for part in functions(together)] == expected
    programs = [built(pw.program(lambda v, one=one: one(v)), V) for one in others]
    assert [functions(made)[0].is_line for made in programs] == expected
    for made in (together, *programs):
        found = lines_among(functions_of(made.graph, made.functions))
        assert found == {part.function for part in functions(made) if part.is_line}


def test_functions_that_give_what_they_take_or_capture_arrays_compute_the_same(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    table = np.arange(8, dtype=np.float32) ** 2
    same = pw.compiled(lambda v: (v, v, v + 1), slice=where)
    looked_up = pw.compiled(lambda v: v + jnp.asarray(table), slice=where)
    solved = pw.compiled(lambda v: jnp.linalg.cholesky(jnp.eye(2) * (v[0] + 4)), slice=where)
    f = pw.program(lambda v: (*same(v), looked_up(v), solved(v), v * 3))
    expected: list[np.ndarray] = [V, V, V + 1, V + table, np.eye(2) * 2, V * 3]
    for a, b in zip(f(V), expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)


def test_a_function_that_cannot_be_exported_is_named(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    called = pw.compiled(lambda v: jax.pure_callback(lambda w: w, v, v), slice=where)
    plain = pw.compiled(lambda v: v + 1, slice=where)
    with pytest.raises(TraceError, match="calls back to the host"):
        pw.program(lambda v: plain(called(plain(v))))(V)
    with pytest.raises(TraceError, match=r"calls back to the host \(pure_callback at test_joint_exports\.py:\d+\)"):
        jax.jit(lambda v: jax.pure_callback(lambda w: w, V, v))(pw.put(V, where))


MAIN = "func.func public @main(%a: tensor<8xf32>, %b: tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>)"
REST = "func.func private @f(%v: tensor<8xf32>) -> tensor<8xf32> { return %v : tensor<8xf32> }"
F = "func.call @f({}) : (tensor<8xf32>) -> tensor<8xf32>"
GIVE = "return {}, {} : tensor<8xf32>, tensor<8xf32>"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([f"%0 = {F.format('%a')}", f"%1 = {F.format('%b')}", GIVE.format("%0", "%1")], ""),
        ([f"%0 = {F.format('%b')}", f"%1 = {F.format('%a')}", GIVE.format("%0", "%1")], "other values than its arg"),
        ([f"%0 = {F.format('%a')}", f"%1 = {F.format('%0')}", GIVE.format("%0", "%1")], "other values than its arg"),
        ([f"%0 = {F.format('%a')}", f"%1 = {F.format('%b')}", GIVE.format("%1", "%0")], "other values than it has"),
        (
            [f"%0 = {F.format('%a')}", "%1 = stablehlo.add %b, %b : tensor<8xf32>", GIVE.format("%0", "%1")],
            "only calls",
        ),
    ],
)
def test_an_export_that_does_more_than_call_is_none_of_several(body: list[str], why: str) -> None:
    like = export.export(jax.jit(lambda a, b: ((a[0],), (b[0],))), platforms=("cpu",))(*[(jnp.asarray(V),)] * 2)
    text = "module { " + MAIN + " {\n" + "\n".join(body) + "\n} " + REST + " }"
    found = export.deserialize(bytearray(from_text(text, like)))
    if why:
        with pytest.raises(ProgramRefused, match=why):
            joint_of(found)
        return
    joint = joint_of(found)
    assert [joint.member(k).number for k in "01"] == [0, 1]
    for number in ("2", "-1", "", "x", "²"):
        with pytest.raises(ProgramRefused, match="has no number"):
            joint.member(number)


def test_a_sharding_over_other_devices_is_said_of_its_function_alone(session) -> None:
    """On one device JAX is told nothing of shardings, and would take those of any mesh."""
    where = session.virtual_slice((1,), ("x",))
    other = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("d",)), P("d"))
    parts = [pw.compiled(lambda v, k=k: v * k, slice=where) for k in range(3)]

    def elsewhere(v: Any) -> Any:
        return jax.lax.with_sharding_constraint(v + 1, other)

    guilty = pw.compiled(elsewhere, slice=where)
    with pytest.raises(TraceError, match=r"elsewhere.* 2 devices"):
        pw.program(lambda v: guilty(parts[2](parts[1](v))))(V)
    with pytest.raises(TraceError, match=r"elsewhere.* 2 devices"):
        guilty(V)
    for value in (found := pw.program(lambda v: (parts[1](v), parts[2](v)))(V)):
        assert value.shape == V.shape
    np.testing.assert_array_equal(np.asarray(found[1]), V * 2)


def test_an_ordinary_export_has_no_members() -> None:
    plain = export.export(jax.jit(lambda v: v + 1), platforms=("cpu",))(jnp.asarray(V))
    with pytest.raises(ProgramRefused, match="only calls"):
        joint_of(plain)
    with pytest.raises(ProgramRefused, match="no members"):
        Packed.read(blob_of(plain))


def broken(blob: bytes) -> dict[str, bytes]:
    """Joint exports that nobody made."""
    whole = Packed.read(blob)
    code = whole.code
    mark = blob[: -len(msgspec.msgpack.encode(whole))]
    plain = export.export(jax.jit(lambda v: v + 1), platforms=("cpu",))(jnp.asarray(V))
    return {
        "cut": blob[:-1],
        "longer": blob + b"0",
        "nothing": mark,
        "an export": mark + blob_of(plain),
        "other fields": mark + msgspec.msgpack.encode((["cpu"], "one", code)),
        "no code": msgspec.structs.replace(whole, code=b"").packed(),
        "code cut": msgspec.structs.replace(whole, code=code[: len(code) // 2]).packed(),
        "text for code": msgspec.structs.replace(whole, code=b"module {}").packed(),
    }


def test_a_joint_export_that_cannot_be_read_is_refused(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    parts = [pw.compiled(lambda v, k=k: v * v.sum() * k, slice=where) for k in range(3)]
    (blob,) = built(pw.program(lambda v: [part(v) for part in parts]), V).functions.values()
    assert verdicts([blob]) == [("", 0)]
    for name, one in broken(blob).items():
        ((refused, _),) = verdicts([one])
        assert refused, name


def test_a_host_reads_an_export_as_what_its_sandbox_has_read_it() -> None:
    """Or its code would not be the one that was checked."""
    devices = jax.local_devices()[:1]
    compiler = Compiler(0, devices, {0: devices})
    plain = export.export(jax.jit(lambda v: (v + 1,)), platforms=("cpu",))(jnp.asarray(V))
    functions = {"a": blob_of(plain), "b": Packed(("cpu",), 1, plain.mlir_module_serialized).packed()}
    assert len(compiler._function("a", functions).out_avals) == 1
    with pytest.raises(ProgramRefused, match="no members"):
        compiler._function("a#0", functions)
    with pytest.raises(ProgramRefused, match="names none of them"):
        compiler._function("b", functions)
    with pytest.raises(ProgramRefused, match="only calls"):
        compiler._function("b#0", functions)


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint8", "int64", "bfloat16", "float8_e4m3fn", "complex64"])
def test_members_take_and_give_what_their_code_says(dtype: str) -> None:
    kind = jax.core.ShapedArray((3, 0, 2), jnp.dtype(dtype))
    member = jax.jit(lambda v: (v, v.reshape(-1)))
    with jax.enable_x64(True):
        whole = jax.jit(lambda a, b: (member(*a), member(*b)))
        joint = joint_of(export.export(whole, platforms=("cpu",))((kind,), (kind,)))
    found = joint.member("1")
    assert [(one.shape, one.dtype) for one in found.in_avals] == [((3, 0, 2), kind.dtype)]
    assert [(one.shape, one.dtype) for one in found.out_avals] == [((3, 0, 2), kind.dtype), ((0,), kind.dtype)]


def random_numbers(v: Any) -> Any:
    return jax.random.uniform(jax.random.key(0), v.shape) + v @ jnp.eye(8) * 0


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("setting", "function"),
    [
        (lambda: jax.threefry_partitionable(False), random_numbers),
        (lambda: jax.default_prng_impl("rbg"), random_numbers),
        (lambda: jax.enable_x64(True), lambda v: jnp.sum(v.astype(float) + 1 / 3)),
        (lambda: jax.default_matmul_precision("highest"), lambda v: v @ jnp.ones((8, 8))),
    ],
)
def test_code_is_made_under_the_settings_of_its_trace_and_of_what_was_traced(session, count, setting, function) -> None:
    """Code is made after the program's own function has ended, which may have set them for a part of itself."""
    where = session.virtual_slice((1,), ("x",))
    runs: list[int] = []

    def noted(v: Any) -> Any:
        runs.append(1)
        return function(v)

    inside = [pw.compiled(noted, slice=where) for _ in range(count)]
    outside = pw.compiled(function, slice=where)

    @pw.program
    def f(v: Any) -> Any:
        with setting():
            made = [one(v) for one in inside]
        return (*made, outside(v + 1))

    *found, last = f(V)
    with setting():
        wanted = np.asarray(jax.jit(lambda v: function(v))(V))  # a new function: JAX may know the other one
    for one in found:
        assert one.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(one), wanted)
    np.testing.assert_array_equal(np.asarray(last), jax.jit(lambda v: function(v))(V + 1))
    assert len(runs) == count


def test_members_keep_their_code_while_another_thread_makes_that_of_some(session, monkeypatch) -> None:
    """The order in which it went wrong: the second mesh's functions got code while the first's was made."""
    slices = [session.virtual_slice((n,), ("x",)) for n in (1, 2)]
    parts = [[pw.compiled(lambda v, k=k: v[::-1] + k, slice=where) for k in range(3)] for where in slices]
    other = pw.program(lambda v: parts[1][0](v))
    waiting: list[threading.Thread] = []
    joint = codes._export_as_one

    def slowly(given: Any) -> None:
        if not waiting:
            waiting.append(threading.Thread(target=lambda: other.prepared((V,))))
            waiting[0].start()
            waiting[0].join(0.5)
        joint(given)

    monkeypatch.setattr(codes, "_export_as_one", slowly)
    f = pw.program(lambda a, b: (*(one(a) for one in parts[0]), *(one(b) for one in parts[1])))
    for k, one in enumerate(f(V, V)):
        np.testing.assert_array_equal(np.asarray(one), V[::-1] + k % 3)
    waiting[0].join()


def refusable() -> dict[str, Any]:
    summed = jax.shard_map(
        lambda v: jax.lax.psum(v, "x"),
        mesh=jax.sharding.AbstractMesh((2,), ("x",)),
        in_specs=P("x"),
        out_specs=P(),
        check_vma=False,
    )
    return {"shard_map": summed, "custom call": lambda v: jnp.linalg.cholesky(jnp.outer(v, v) + jnp.eye(8))}


@pytest.mark.parametrize("kind", refusable())
def test_what_a_host_may_refuse_is_exported_alone(session, kind: str) -> None:
    """It refuses an export as a whole."""
    where = session.virtual_slice((2,), ("x",))
    strange = pw.compiled(refusable()[kind], slice=where)
    plain = [pw.compiled(lambda v, k=k: v[::-1] * k, slice=where) for k in range(2)]
    f = pw.program(lambda v: (*(one(v) for one in plain), strange(v)))
    first, second, alone = [part.function for part in functions(built(f, V))]
    assert first.partition("#")[0] == second.partition("#")[0] != alone.partition("#")[0]
    assert "#" in first
    assert "#" not in alone


def test_what_makes_huge_values_is_exported_alone(session) -> None:
    where = session.virtual_slice((1,), ("x",))
    huge = pw.compiled(lambda v: jnp.broadcast_to(v[0], (1 << 23, 1 << 23)).sum(), slice=where)
    plain = [pw.compiled(lambda v, k=k: v * k, slice=where) for k in range(2)]
    f = pw.program(lambda v: (*(one(v) for one in plain), huge(v)))
    assert ["#" in part.function for part in functions(built(f, V))] == [True, True, False]


def test_many_functions_are_several_exports_that_a_host_takes(session) -> None:
    where = session.virtual_slice((1,), ("x",))

    def drawn(seed: Any, k: int) -> Any:
        key = jax.random.key(seed)
        return sum(jax.random.bits(jax.random.fold_in(key, number), (2,)) for number in range(12)) + k

    parts = [pw.compiled(functools.partial(drawn, k=k), slice=where) for k in range(40)]
    f = pw.program(lambda seed: tuple(one(seed) for one in parts))
    made = built(f, np.uint32(1))
    assert len(made.functions) > 1
    for blob in made.functions.values():
        assert check_function(blob) == 0


def test_what_is_compiled_depends_on_the_members_that_are_called_alone() -> None:
    """So that what is kept on disk is found again after another member has changed."""

    def compiled_text(first: Any) -> str:
        members = [jax.jit(first), jax.jit(lambda v: (jnp.linalg.norm(v) + jnp.sin(v),))]
        whole = jax.jit(lambda *given: tuple(one(*group) for one, group in zip(members, given, strict=True)))
        joint = joint_of(export.export(whole, platforms=("cpu",))((jnp.asarray(V),), (jnp.asarray(V),)))
        called = only_called(jax.jit(lambda v: joint.member("1").call(v)).lower(V))
        np.testing.assert_allclose(called.compile()(V)[0], np.linalg.norm(V) + np.sin(V), rtol=1e-6)
        text: str = called.as_text()
        return text

    text = compiled_text(lambda v: (v * 2,))
    assert compiled_text(lambda v: (jnp.tanh(v) + 3,)) == text
    assert "stablehlo.sine" in text


def thresholds(test: Any) -> Any:
    """Has what a test sets of Python's collections be as before at its end."""

    @functools.wraps(test)
    def run() -> None:
        before = gc.get_threshold()
        try:
            test()
        finally:
            gc.set_threshold(*before)

    return run


@thresholds
def test_a_child_forked_while_a_program_is_traced_collects_garbage_as_before() -> None:
    before = gc.get_threshold()
    with codes.few_collections(), codes.few_collections():
        assert gc.get_threshold()[2] > before[2]
        if not (child := os.fork()):
            with codes.few_collections():
                pass
            os._exit(gc.get_threshold() != before)
        assert gc.get_threshold()[2] > before[2]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == before


@thresholds
def test_what_the_user_says_about_collections_while_a_program_is_traced_stays() -> None:
    with codes.few_collections():
        gc.set_threshold(10, 20, 30)
    assert gc.get_threshold() == (10, 20, 30)
    gc.set_threshold(0)
    with codes.few_collections():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
