"""Custom calls: whatever JAX emits passes; anything that differs from it in a size, type, attribute or use does not."""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.lax import linalg as la
from jaxlib.mlir.ir import MLIRError

from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.allowlist import check_function, verdicts
from pathways_ray.executor.compile.custom_calls import EXPANDED, KERNELS, OTHERS
from tests.drawn import some
from tests.unit.executor.compile.exports import SQUARE, blob_of, exported, from_text, written

RAW_QR = functools.partial(jnp.linalg.qr, mode="raw")

PLATFORMS = {
    "cpu": (np.float32, np.float64, np.complex64, np.complex128),
    "cuda": (np.float32, np.complex128),
    "rocm": (np.float64,),
    "tpu": (np.float32,),
}
SHAPES = ((5, 5), (2, 3, 5, 5), (6, 4), (2, 4, 6), (0, 0), (3, 0), (0, 3, 3), (1, 1), (40, 36))


def array(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_platform(platform: str, dtype: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """What JAX's linear algebra has for a platform: a name, a function, and its arguments."""
    cpu, gpu = platform == "cpu", platform in ("cuda", "rocm")
    for shape in SHAPES:
        a, (m, n) = array(*shape, dtype=dtype), shape[-2:]
        yield "lu", la.lu, (a,)
        yield "qr", functools.partial(jnp.linalg.qr, mode="complete"), (a,)
        yield "raw qr", RAW_QR, (a,)
        for full, uv in itertools.product((False, True), repeat=2):
            algorithms = [la.SvdAlgorithm.DEFAULT]
            algorithms += [la.SvdAlgorithm.QR] if gpu else []
            algorithms += [la.SvdAlgorithm.DIVIDE_AND_CONQUER] if platform == "rocm" else []
            for chosen in algorithms:
                yield "svd", functools.partial(la.svd, full_matrices=full, compute_uv=uv, algorithm=chosen), (a,)
        if m != n:
            continue
        yield "cholesky", la.cholesky, (a,)
        yield "solve", jnp.linalg.solve, (a, a)
        for lower in (False, True):
            yield "eigh", functools.partial(la.eigh, lower=lower), (a,)
            if (cpu or gpu) and m:
                yield "tridiagonal", functools.partial(la.tridiagonal, lower=lower), (a,)
        if cpu:
            yield from _of_cpu(a)
    for batch, rows, left in (((), 5, False), ((), 1, True), ((2, 3), 5, True)):
        a, b = array(*batch, rows, rows, dtype=dtype), array(*batch, *((rows, 3) if left else (3, rows)), dtype=dtype)
        for lower, transpose, conjugate, unit in itertools.product((False, True), repeat=4):
            options = {"lower": lower, "transpose_a": transpose, "conjugate_a": conjugate, "unit_diagonal": unit}
            yield "triangular", functools.partial(la.triangular_solve, left_side=left, **options), (a, b)
        diagonal = array(*batch, rows, dtype=dtype)
        yield (
            "tridiagonal solve",
            la.tridiagonal_solve,
            (diagonal, diagonal, diagonal, array(*batch, rows, 3, dtype=dtype)),
        )


def _of_cpu(a: Any) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    for left, right in itertools.product((False, True), repeat=2):
        yield (
            "eig",
            functools.partial(la.eig, compute_left_eigenvectors=left, compute_right_eigenvectors=right),
            (a,),
        )
    for vectors in (False, True):
        yield "schur", functools.partial(la.schur, compute_schur_vectors=vectors), (a,)
    if a.shape[-1]:
        yield "hessenberg", la.hessenberg, (a,)


@pytest.fixture
def wide_types() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def in_one(cases: list[tuple[str, Callable[..., Any], tuple[Any, ...]]], platform: str) -> bytes:
    """Many cases as one function: exporting costs more than checking."""
    avals = [aval for _, _, given in cases for aval in given]

    def run(*arguments: Any) -> list[Any]:
        rest = iter(arguments)
        return [leaf for _, f, given in cases for leaf in jax.tree.leaves(f(*(next(rest) for _ in given)))]

    # JAX emits one of them for ROCm, and does not promise that it stays.
    return blob_of(exported(run, *avals, platforms=(platform,), unchecked=platform == "rocm"))


def targets_of(blob: bytes) -> set[str]:
    return set(re.findall(r"custom_call @(\w+)", export.deserialize(bytearray(blob)).mlir_module()))


@pytest.mark.usefixtures("wide_types")
def test_all_of_linear_algebra_passes() -> None:
    """All kernels of the table are used, with the layouts and sharding rules that JAX gives them."""
    seen: set[str] = set()
    for platform, dtypes in PLATFORMS.items():
        for dtype in dtypes:
            cases = list(of_platform(platform, dtype))
            blob = in_one(cases, platform)
            assert verdicts([blob]) == [("", 0)], (platform, dtype)
            seen |= targets_of(blob)
    for platform in ("cpu", "tpu"):
        blob = blob_of(exported(TOP_K, array(30, 70), array(3, 700, dtype=np.float16), platforms=(platform,)))
        check_function(blob)
        seen |= targets_of(blob)
    placed = blob_of(exported(lambda v: jax.device_put(v, jax.memory.Space.Host), SQUARE, platforms=("tpu",)))
    check_function(placed)
    seen |= targets_of(placed)
    unseen = {name for name in (*KERNELS, *EXPANDED, *OTHERS) if name not in seen}
    # JAX has them for a type or platform that is not in the sample, or behind a flag.
    assert {re.sub("^(cu|hip)", "", name) for name in unseen} <= {"_threefry2x32_ffi", "solver_gesdd_ffi"}


def TOP_K(v: Any, w: Any) -> list[Any]:
    return [
        *jax.lax.approx_max_k(v, 4),
        *jax.lax.approx_min_k(v, 3, reduction_dimension=0, recall_target=0.5),
        *jax.lax.approx_max_k(w, 5, aggregate_to_topk=False),
    ]


def test_the_kernel_of_random_numbers_passes() -> None:
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        blob = blob_of(exported(lambda v: v + jax.random.normal(jax.random.key(1), (4, 4)), platforms=("cuda",)))
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", False)
    assert targets_of(blob) == {"cu_threefry2x32_ffi"}
    check_function(blob)


def test_linear_algebra_over_a_mesh_passes() -> None:
    def body(v: Any) -> Any:
        return jnp.linalg.svd(v)[0] + jnp.linalg.cholesky(v @ v.mT) + jnp.linalg.eigh(v)[1]

    mapped = jax.shard_map(body, in_specs=jax.P("x"), out_specs=jax.P("x"), check_vma=False)
    assert check_function(blob_of(exported(mapped, array(8, 4, 4)))) == 4
    sharded = lambda v: body(jax.lax.with_sharding_constraint(v, jax.P("x")))  # noqa: E731
    check_function(blob_of(exported(sharded, array(8, 4, 4))))


# --- mutations --------------------------------------------------------------------------------------------------------

SUBJECTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "potrf": (la.cholesky, (array(2, 5, 5),), "cpu"),
    "getrf": (la.lu, (array(2, 4, 6),), "cpu"),
    "geqrf": (RAW_QR, (array(6, 4),), "cpu"),
    "orgqr": (la.householder_product, (array(2, 6, 4), array(2, 3)), "cpu"),
    "syevd": (la.eigh, (array(2, 5, 5),), "cpu"),
    "gesdd": (functools.partial(la.svd, full_matrices=True), (array(2, 6, 4),), "cpu"),
    "gesdd S": (functools.partial(la.svd, full_matrices=False), (array(6, 4),), "cpu"),
    "gesdd N": (functools.partial(la.svd, compute_uv=False), (array(6, 4),), "cpu"),
    "geev": (la.eig, (array(2, 5, 5),), "cpu"),
    "gees": (la.schur, (array(5, 5),), "cpu"),
    "sytrd": (functools.partial(la.tridiagonal, lower=True), (array(5, 5),), "cpu"),
    "gehrd": (la.hessenberg, (array(5, 5),), "cpu"),
    "trsm": (functools.partial(la.triangular_solve, left_side=True), (array(2, 5, 5), array(2, 5, 3)), "cpu"),
    "gtsv": (la.tridiagonal_solve, (array(5), array(5), array(5), array(5, 3)), "cpu"),
    "cu getrf": (la.lu, (array(2, 6, 4),), "cuda"),
    "cu gesvdj": (functools.partial(la.svd, full_matrices=True), (array(2, 6, 4),), "cuda"),
    "cu gesvd": (functools.partial(la.svd, algorithm=la.SvdAlgorithm.QR), (array(4, 6),), "cuda"),
    "cu syevd": (la.eigh, (array(5, 5),), "cuda"),
    "pivots": (functools.partial(la.lu_pivots_to_permutation, permutation_size=9), (array(4, dtype=np.int32),), "cuda"),
    "gtsv2": (la.tridiagonal_solve, (array(5), array(5), array(5), array(5, 3)), "cuda"),
    "Qr": (RAW_QR, (array(6, 4),), "tpu"),
    "Eigh": (la.eigh, (array(5, 5),), "tpu"),
    "LuDecomposition": (la.lu, (array(6, 4),), "tpu"),
    "ApproxTopK": (lambda v: jax.lax.approx_max_k(v, 4), (array(30, 70),), "cpu"),
}  # fmt: skip

CALL = re.compile(r"^.* = (stablehlo\.custom_call @.*)$", re.MULTILINE)


def call_of(made: export.Exported) -> tuple[str, str]:
    """The first custom call of a module, without its sharding rule; and the function that it calls, if it does."""
    text = re.sub(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", made.mlir_module())
    found = CALL.search(text)
    assert found is not None
    called = re.search(r"func\.func (?:private |public )?@top_k.*?^  }", text, re.MULTILINE | re.DOTALL)
    return re.sub(r", sdy\.sharding_rule = .*?custom>", "", found[1]), called[0] if called else ""


def alone(call: str, called: str = "") -> str:
    """A module of one custom call: its operands are made of nothing and nobody uses what it gives, so only its own form
    decides."""
    given, results = call.rsplit(" : ", 1)[1].split("->")
    kinds = re.findall(r"tensor<[^>]*>+", given)
    operands = [f"%o{k} = stablehlo.constant dense<{zero(kind)}> : {kind}" for k, kind in enumerate(kinds)]
    names = ", ".join(f"%o{k}" for k in range(len(kinds)))
    call = re.sub(r"(custom_call @\w+)\(.*?\)", rf"\1({names})", call, count=1)
    count = results.count("tensor<")
    body = "\n".join([*operands, f"%r{f':{count}' if count > 1 else ''} = {call}"])
    return (
        "module { func.func public @main(%arg0: tensor<4x4xf32>) -> tensor<4x4xf32> {\n"
        f"{body}\nreturn %arg0 : tensor<4x4xf32> }}\n{called} }}"
    )


def zero(kind: str) -> str:
    if "complex" in kind:
        return "(0.0, 0.0)"
    return "0.0" if "f" in kind.rsplit("x", 1)[-1] else "0"


CHANGES = {
    "dimension": r"(?<=[<x])\d+(?=x[\dfci])",
    "type": r"\b(?<=[x<])(f32|i32)(?=>)",
    "number": r"\d+(?= : (?:u?i\d+)\b)|(?<=operand_index = )\d+",
    "flag": r"\b(true|false)\b",
    "layout": r"(?<=dense<\[)\d+(, \d+)*",
    "attribute": r"(?<= = \{)\w+(?= = )|num_batch_dims",
}


def changed(call: str, rng: random.Random) -> str:
    """The call with one thing changed: a dimension, a type, an attribute, a layout, or an alias."""
    types = call.rindex(" : (")
    places = [
        (kind, found)
        for kind, pattern in CHANGES.items()
        for found in re.finditer(pattern, call)
        if (found.start() > types) == (kind in ("dimension", "type"))
    ]
    kind, found = rng.choice(places)
    match kind:
        case "dimension" | "number":
            new = str(max(0, int(found[0]) + rng.choice((-1, 1))))
        case "flag":
            new = "false" if found[0] == "true" else "true"
        case "type":
            new = {"f32": "f64", "i32": "i64"}[found[0]]
        case "layout":
            new = ", ".join(reversed(found[0].split(", "))) if "," in found[0] else "1"
        case _:
            new = found[0] + "_"
    return call[: found.start()] + new + call[found.end() :]


@pytest.mark.parametrize("subject", some(SUBJECTS))
def test_whatever_differs_from_what_jax_emits_is_refused(subject: str) -> None:
    """Each dimension one up or down, each type, attribute, layout and alias: what still passes is what JAX emits for
    other arguments."""
    function, avals, platform = SUBJECTS[subject]
    call, called = call_of(exported(lambda *v: jax.tree.leaves(function(*v)), *avals, platforms=(platform,)))
    like = exported(lambda v: v + 1)
    check_function(from_text(alone(call, called), like))
    rng, refused, passed = random.Random(subject), 0, set()
    for _ in range(50):
        other = changed(call, rng)
        if other == call:
            continue
        try:
            blob = from_text(alone(other, called), like)
        except MLIRError:
            continue
        if verdicts([blob])[0][0]:
            refused += 1
        else:
            passed.add(other)
    assert refused >= 10
    assert all(legal(subject, other) for other in passed), passed


def legal(subject: str, call: str) -> bool:
    """Whether JAX emits this call too, for other arguments."""
    modes = {"uplo": {76, 85}, "diag": {78, 85}, "trans_x": {67, 78, 84}}
    letters = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+) : ui8", call)}
    if subject == "ApproxTopK":
        return True  # its sizes follow from its attributes, which are checked together
    if subject == "cu syevd":
        return letters["algorithm"] in (0, 1, 2)
    if subject == "pivots":
        return True  # a permutation of any size that is not less than the pivots'
    if any(word in call for word in ("lower = ", "full_matrices = ", "compute_uv = ")):
        return True  # of square sizes, or of results that nobody uses
    return all(value in modes.get(name, {value}) for name, value in letters.items())


READS = """%x = stablehlo.constant dense<1.0> : tensor<1x1xf32>
%y = stablehlo.constant dense<1.0> : tensor<64x1xf32>
%z = stablehlo.custom_call @lapack_strsm_ffi(%x, %y) {mhlo.backend_config = {diag = 85 : ui8, side = 76 : ui8,
trans_x = 78 : ui8, uplo = 76 : ui8}, operand_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<[0, 1]> :
tensor<2xindex>], result_layouts = [dense<[0, 1]> : tensor<2xindex>]} : (tensor<1x1xf32>, tensor<64x1xf32>) ->
tensor<64x1xf32>
%0 = stablehlo.sine %arg0 : tensor<4x4xf32>"""
WRITES = """%z:3 = stablehlo.custom_call @lapack_sgetrf_ffi(%arg0) {mhlo.backend_config = {}, operand_layouts =
[dense<[0, 1]> : tensor<2xindex>], result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<0> : tensor<1xindex>,
dense<> : tensor<0xindex>]} : (tensor<4x4xf32>) -> (tensor<1x1xf32>, tensor<4xi32>, tensor<i32>)
%0 = stablehlo.sine %arg0 : tensor<4x4xf32>"""
SVD = """%z:5 = stablehlo.custom_call @lapack_sgesdd_ffi(%arg0) {{mhlo.backend_config = {{mode = {mode} : ui8}},
operand_layouts = [dense<[0, 1]> : tensor<2xindex>], result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<0> :
tensor<1xindex>, dense<[0, 1]> : tensor<2xindex>, dense<[0, 1]> : tensor<2xindex>, dense<> : tensor<0xindex>]}} :
(tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4xf32>, tensor<{u}xf32>, tensor<4x4xf32>, tensor<i32>)
%0 = stablehlo.add %z#{used}, %arg0 : tensor<4x4xf32>"""
EVIL = "%z = stablehlo.custom_call @lapack_strsm_ffi(%a, %a) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>"
KIND = "(tensor<4x4xf32>) -> tensor<4x4xf32>"
INSIDE = f"func.func private @f(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {{ {EVIL}\nreturn %z : tensor<4x4xf32> }}"

UNSAFE = {
    "reading beyond an operand": (READS, "", "'lapack_strsm_ffi' .* operand 1 is tensor<64x1xf32>; .* tensor<1x1"),
    "writing beyond a result": (WRITES, "", r"'lapack_sgetrf_ffi' .* result 0 is tensor<1x1xf32>; .* tensor<4x4xf32>"),
    "a result that is not written": (SVD.format(mode=78, u="4x4", used=2), "", "result 2 is used, though its kernel"),
    "one of any size": (SVD.format(mode=78, u="512x512", used=0), "", r"result 2 is tensor<512x512xf32>"),
    "a result of a failure": (SVD.format(mode=65, u="4x4", used=2), "", "result 2 is used without a select by info"),
    "a mode that JAX does not know": (SVD.format(mode=79, u="4x4", used=0), "", r"its mode is 79 : ui8"),
    "inside a function": (f"%0 = call @f(%arg0) : {KIND}", INSIDE, "'lapack_strsm_ffi'"),
    "inside a composite": (
        f'%0 = stablehlo.composite "a.b" %arg0 {{decomposition = @f}} : {KIND}',
        INSIDE,
        "'lapack_strsm_ffi'",
    ),
    "inside a branch": (
        '%i = stablehlo.constant dense<0> : tensor<i32>\n%0 = "stablehlo.case"(%i) ({\n'
        f"{EVIL.replace('%a', '%arg0')}\nstablehlo.return %z : tensor<4x4xf32>}}) : (tensor<i32>) -> tensor<4x4xf32>",
        "",
        "'lapack_strsm_ffi'",
    ),
    "without Shardy": (
        f'%0 = stablehlo.custom_call @SPMDFullToShardShape(%arg0) {{mhlo.sharding = "{{manual}}"}} : {KIND}',
        "",
        "has the attribute mhlo.sharding; export with Shardy",
    ),
    "as another custom call": (
        f"%0 = stablehlo.custom_call @SPMDFullToShardShape(%arg0) : {KIND}", "", "is not among those that programs"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "rest", "message"), UNSAFE.values(), ids=UNSAFE)
def test_what_would_reach_other_memory_is_refused(body: str, rest: str, message: str) -> None:
    blob = written(body.replace("\n(", " ("), rest)
    with pytest.raises(ProgramRefused, match=message):
        check_function(blob)


def test_batches_are_partitioned_along_batch_dimensions_only() -> None:
    """A rule for Shardy that splits the matrices would give the kernel shapes that do not fit each other."""
    call, _ = call_of(exported(la.lu, array(2, 4, 4)))
    like = exported(lambda v: v + 1)
    rules = {
        "#sdy.op_sharding_rule<([i, j, k])->([i, l, m], [i, n], [i]) {i=2, j=4, k=4, l=4, m=4, n=4}, custom>": "",
        "#sdy.op_sharding_rule<([i, j, k])->([i, j, l], [i, m], [i]) {i=2, j=4, k=4, l=4, m=4}, custom>": "partitions",
    }
    for rule, message in rules.items():
        text = alone(call.replace("result_layouts", f"sdy.sharding_rule = {rule}, result_layouts"))
        assert message in verdicts([from_text(text, like)])[0][0]
        assert bool(message) == bool(verdicts([from_text(text, like)])[0][0])
    wrong = alone(call.replace('num_batch_dims = "1"', 'num_batch_dims = "3"'))
    assert "its frontend attributes are" in verdicts([from_text(wrong, like)])[0][0]


def test_trusted_tenants_may_use_other_custom_calls_but_no_callbacks() -> None:
    pivoted = exported(lambda v: jax.scipy.linalg.qr(v, pivoting=True), unchecked=True)
    with pytest.raises(
        ProgramRefused, match="custom call 'lapack_sgeqp3_ffi' is not among those that programs may use"
    ):
        check_function(blob_of(pivoted))
    check_function(blob_of(pivoted), trusted=True)
    check_function(
        blob_of(exported(lambda v: v + jax.lax.empty((4, 4), np.float32), platforms=("cuda",))), trusted=True
    )
    call = written("%0 = stablehlo.custom_call @xla_ffi_python_cpu_callback(%arg0) : " + KIND)
    with pytest.raises(ProgramRefused, match="calls a Python function, which is in the process that exported it"):
        check_function(call, trusted=True)
