"""Collectives: refused where some devices of a group may not enter them; and nowhere else."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pathways_ray.compat import module_of
from pathways_ray.errors import ProgramRefused
from pathways_ray.executor.compile.allowlist import check_function
from pathways_ray.executor.compile.partitions import UNIFORM, Partitions
from tests.unit.executor.compile.exports import SQUARE, blob_of, exported, from_text

MESH = AbstractMesh((2, 2), ("x", "y"))
BOTH = ("x", "y")


def mapped(
    body: Callable[..., Any], ins: Any = P("x", "y"), outs: Any = P("x", "y"), **options: Any
) -> Callable[..., Any]:
    return jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False, **options)


def partly(body: Callable[..., Any]) -> Callable[..., Any]:
    """By `x` alone: along `y` XLA partitions by itself."""
    return mapped(body, P("x"), P("x"), axis_names={"x"})


def product(v: Any) -> Any:
    """What XLA needs a collective for."""
    return lax.with_sharding_constraint(v, NamedSharding(MESH, P("x"))) @ v


def check(function: Callable[..., Any], *avals: Any) -> int:
    return check_function(blob_of(exported(function, *avals or (SQUARE,), mesh=MESH)))


ENTERED_BY_ALL: dict[str, Callable[[Any], Any]] = {
    "a sum": mapped(lambda v: lax.psum(v, "x") + lax.pmax(v, BOTH) + lax.axis_index(BOTH)),
    "in a scan": mapped(lambda v: lax.scan(lambda c, i: (c * i + lax.psum(c, "x"), None), v, jnp.arange(3.0))[0]),
    "in a fori_loop": mapped(lambda v: lax.fori_loop(0, 3, lambda i, c: c * i + lax.ppermute(c, "y", [(0, 1)]), v)),
    "in a scan with remat": mapped(
        lambda v: jax.grad(
            lambda w: lax.scan(
                jax.checkpoint(lambda c, i: (jnp.sin(c) + lax.psum(c, "x") * i, None)), w, jnp.arange(3.0)
            )[0].sum()
        )(v)
    ),
    "until a sum is small": mapped(
        lambda v: lax.while_loop(lambda c: lax.psum(jnp.sum(c**2), BOTH) > 1, lambda c: c / 2 + lax.pmean(c, "y"), v)
    ),
    "until a sum over the group is small": mapped(
        lambda v: lax.while_loop(lambda c: lax.psum(jnp.sum(c**2), "x") > 1, lambda c: c / 2 + lax.pmean(c, "x"), v)
    ),
    "by a value that came in replicated": lambda v: mapped(
        lambda u, w: lax.cond(w[0] > 0, lambda u: lax.psum(u, "x"), lambda u: u, u), (P("x", "y"), P())
    )(v, v[0]),
    "by a gathered value": mapped(
        lambda v: lax.cond(lax.all_gather(v[0, 0], BOTH).sum() > 0, lambda u: lax.psum(u, "x"), lambda u: u, v)
    ),
    "by the number of a round": mapped(
        lambda v: lax.scan(
            lambda c, i: (lax.cond(i % 2 == 0, lambda u: lax.psum(u, "x"), lambda u: u, c), None), v, jnp.arange(5)
        )[0]
    ),
    "by another axis": mapped(lambda v: lax.cond(lax.axis_index("x") == 0, lambda u: lax.psum(u, "y"), lambda u: u, v)),
    "by a value of an operation that exports write down as a composite": mapped(
        lambda v: lax.cond(lax.psum(lax.erf(v).sum(), BOTH) > 0, lambda u: lax.psum(lax.erf(u), "x"), lambda u: u, v)
    ),
    "by another axis, of which a composite takes the number": mapped(
        lambda v: lax.cond(lax.erf(lax.axis_index("x") * 1.0) > 0, lambda u: lax.psum(u, "y"), lambda u: u, v)
    ),
    "by a random number of all": mapped(
        lambda v: lax.cond(jax.random.uniform(jax.random.key(0)) > 0.5, lambda u: lax.psum(u, "x"), lambda u: u, v)
    ),
    "a branch without collectives": mapped(lambda v: lax.cond(lax.axis_index("x") == 0, jnp.sin, jnp.cos, v)),
    "a loop without collectives": mapped(lambda v: lax.while_loop(lambda c: jnp.sum(c**2) > 1, lambda c: c / 2, v)),
    "groups": mapped(lambda v: lax.psum(v, "x", axis_index_groups=[[0], [1]])),
    "scattered": mapped(lambda v: lax.psum_scatter(jnp.tile(v, (2, 1)), "x", tiled=True)),
    "exchanged": mapped(lambda v: lax.all_to_all(v, "y", 0, 1, tiled=True).reshape(2, 2)),
    "derived": jax.grad(lambda v: mapped(lambda q: lax.psum(jnp.sin(q), "x"))(v).sum()),
    "in a scan outside": lambda v: lax.scan(lambda c, _: (mapped(lambda q: lax.psum(q, "x"))(c), None), v, None, 3)[0],
    "by an array": lambda v: lax.cond(v[0, 0] > 0, product, lambda u: u, v),
    "by an array of a shard_map": lambda v: lax.cond(mapped(lambda q: q * 2)(v)[0, 0] > 0, product, lambda u: u, v),
    "by a sum of a shard_map": lambda v: lax.cond(
        mapped(lambda q: lax.psum(q.sum(), BOTH), outs=P())(v) > 0, product, lambda u: u, v
    ),
    "along one axis": partly(lambda v: lax.psum(v, "x") + lax.axis_index("x")),
    "a number along one axis": partly(lambda v: v * lax.cond(lax.axis_index("x") == 0, lambda: 1.0, lambda: 2.0)),
}


@pytest.mark.parametrize("function", ENTERED_BY_ALL.values(), ids=ENTERED_BY_ALL)
def test_what_all_devices_enter_passes(function: Callable[[Any], Any]) -> None:
    assert check(function) in (0, 4)


AGAIN = jax.jit(lambda u: lax.psum(u, BOTH))
SOME = "may be entered by some of devices"
ENTERED_BY_SOME: dict[str, tuple[Callable[[Any], Any], str]] = {
    "by the device's place": (
        mapped(lambda v: lax.cond(lax.axis_index("x") == 0, lambda u: lax.psum(u, "x"), lambda u: u, v)),
        r"stablehlo.all_reduce \(.*test_uniformity.py:\d+\) may be entered by some of devices \[0, 2\] only: the "
        r"predicate of stablehlo.case \(.*test_uniformity.py:\d+\) may differ among them. Devices that wait there "
        r"would meet other computations; move the collective out of the branch or loop, or make the predicate equal",
    ),
    "in a function": (
        mapped(lambda v: lax.cond(lax.axis_index("y") == 0, jax.jit(lambda u: lax.psum(u, BOTH)), lambda u: u, v)),
        SOME,
    ),
    "in a function that others call as well": (
        mapped(
            lambda v: (
                lax.cond(lax.axis_index("y") == 0, AGAIN, lambda u: u, v)
                + lax.cond(lax.psum(v.sum(), BOTH) > 0, AGAIN, lambda u: u, v)
            )
        ),
        SOME,
    ),
    "in one of several branches": (
        mapped(lambda v: lax.switch(lax.axis_index("y"), [lambda u: lax.all_gather(u, "y")[0], jnp.sin], v)),
        SOME,
    ),
    "until the device's own part is small": (
        mapped(lambda v: lax.while_loop(lambda c: jnp.sum(c**2) > 1, lambda c: c / 2 + lax.pmean(c, "y"), v)),
        SOME,
    ),
    "until a sum over others is small": (
        mapped(lambda v: lax.while_loop(lambda c: lax.psum(jnp.sum(c**2), "y") > 1, lambda c: lax.pmean(c, "x"), v)),
        SOME,
    ),
    "as a condition": (
        mapped(lambda v: lax.while_loop(lambda c: lax.pmax(c, "x").sum() > lax.axis_index("x"), lambda c: c / 2, v)),
        SOME,
    ),
    "after some rounds": (
        mapped(
            lambda v: lax.fori_loop(
                0,
                3,
                lambda i, c: (lax.axis_index("x"), lax.cond(c[0] > 0, lambda u: lax.psum(u, "x"), lambda u: u, c[1])),
                (0, v),
            )[1]
        ),
        SOME,
    ),
    "by a sharded value": (
        lambda v: mapped(
            lambda u, w: lax.cond(w[0] > 0, lambda u: lax.psum(u, "x"), lambda u: u, u), (P("x", "y"), P("x"))
        )(v, v[0]),
        SOME,
    ),
    "by what was sent": (
        mapped(
            lambda v: lax.cond(lax.ppermute(v, "x", [(0, 1)])[0, 0] > 0, lambda u: lax.psum(u, "y"), lambda u: u, v)
        ),
        SOME,
    ),
    "by a random number of each": (
        mapped(lambda v: lax.cond(lax.rng_uniform(0.0, 1.0, ()) > 0.5, lambda u: lax.psum(u, "x"), lambda u: u, v)),
        SOME,
    ),
    "what all meet in, by another axis": (
        mapped(lambda v: lax.cond(lax.axis_index("x") == 0, lambda u: lax.ppermute(u, "y", [(0, 1)]), lambda u: u, v)),
        SOME,
    ),
    "what XLA inserts, by a value that is called replicated": (
        lambda v: lax.cond(mapped(lambda q: lax.axis_index("x"), outs=P())(v) == 0, product, lambda u: u, v),
        "may need collectives that some devices only would enter",
    ),
    "by the next program, of a result that is called replicated": (
        mapped(lambda q: lax.axis_index("x"), outs=P()),
        "its result 0 may differ among devices that should hold the same of it: out_specs of a jax.shard_map",
    ),
    "by the next program, of a result that lacks an axis": (
        mapped(lambda q: lax.psum(q, "x"), outs=P("x")),
        "its result 0 may differ among devices that should hold the same",
    ),
    "what XLA inserts along other axes": (
        partly(lambda v: lax.cond(lax.axis_index("x") == 0, lambda u: u @ u.T @ u, lambda u: u, v)),
        "may need collectives that some devices only would enter",
    ),
    "what XLA inserts in a loop": (
        partly(lambda v: lax.while_loop(lambda c: c.sum() < lax.axis_index("x"), lambda c: c @ c.T @ c, v)),
        "may need collectives that some devices only would enter",
    ),
}


@pytest.mark.parametrize(("function", "message"), ENTERED_BY_SOME.values(), ids=ENTERED_BY_SOME)
def test_what_some_devices_may_enter_is_refused(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ProgramRefused, match=message):
        check(function)
    check_function(blob_of(exported(function, mesh=MESH)), trusted=True)


CHANGED: dict[str, tuple[Callable[[str], str], str]] = {
    "groups that leave devices out": (
        lambda t: t.replace("[[0, 2], [1, 3]]", "[[0, 1]]").replace("2x2xi64", "1x2xi64"),
        "has groups",
    ),
    "groups of other devices": (
        lambda t: t.replace("[[0, 2], [1, 3]]", "[[0, 2], [1, 3], [4, 5]]").replace("2x2xi64", "3x2xi64"),
        "has groups",
    ),
    "a mesh in another order": (
        lambda t: t.replace('<["x"=2, "y"=2]>', '<["x"=2, "y"=2], device_ids=[3, 2, 1, 0]>', 1),
        "",
    ),
    "a mesh of more devices": (
        lambda t: t.replace("sdy.mesh", 'sdy.mesh @many = <["z"=80000]>\nsdy.mesh', 1),
        "80000 devices; 16384 are",
    ),
    "meshes that differ": (
        lambda t: t.replace("sdy.mesh", 'sdy.mesh @many = <["z"=8]>\nsdy.mesh', 1),
        r"have \[4, 8\] devices",
    ),
    "no groups by devices": (lambda t: t.replace(", use_global_device_ids", ""), "does not name its groups by devices"),
    "no channel": (
        lambda t: t.replace("channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, ", "").replace(
            ", use_global_device_ids", ""
        ),
        "has no channel",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGED.values(), ids=CHANGED)
def test_collectives_that_were_written_by_hand(change: Callable[[str], str], message: str) -> None:
    whole = exported(mapped(lambda v: lax.psum(v, "x")), mesh=MESH)
    text = re.sub(r"^#loc.*$", "", whole.mlir_module(), flags=re.MULTILINE)
    text = re.sub(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", text)
    other = change(text)
    assert other != text
    if not message:
        assert check_function(from_text(other, whole)) == 4
        return
    with pytest.raises(ProgramRefused, match=message):
        check_function(from_text(other, whole))


@pytest.mark.parametrize("decomposition", ["return %a", "%c = stablehlo.constant dense<0.0> : tensor<f32>\nreturn %c"])
@pytest.mark.parametrize("by", ["a predicate", "a result"])
def test_a_composite_is_what_xla_makes_of_its_name(by: str, decomposition: str) -> None:
    """Not what its decomposition says: that of `chlo.erf` is dropped."""

    def body(v: Any) -> Any:
        number = lax.axis_index("x").astype(jnp.float32)
        return number if by == "a result" else lax.cond(number > 0.5, lambda u: lax.psum(u, "x"), lambda u: u, v)

    whole = exported(mapped(body, outs=P() if by == "a result" else P("x", "y")), mesh=MESH)
    text = module_of(whole.mlir_module_serialized).operation.get_asm(enable_debug_info=False)
    found = re.search(r"(%\w+) = stablehlo.convert (%\w+) : \(tensor<i32>\) -> tensor<f32>", text)
    assert found is not None
    text = text.replace(
        found[0],
        f"%given = stablehlo.convert {found[2]} : (tensor<i32>) -> tensor<f32>\n"
        f'{found[1]} = stablehlo.composite "chlo.erf" %given {{decomposition = @made, version = 1 : i32}} : '
        "(tensor<f32>) -> tensor<f32>",
    )
    made = f"func.func private @made(%a: tensor<f32>) -> tensor<f32> {{ {decomposition} : tensor<f32> }}"
    with pytest.raises(ProgramRefused, match="its result 0 may differ among devices" if by == "a result" else SOME):
        check_function(from_text(f"{text.rstrip().removesuffix('}')}{made} }}", whole))


@pytest.mark.parametrize("channel", [0, -1, 2**63 - 1])
def test_a_channel_is_one_that_xla_keeps(channel: int) -> None:
    """Without one it would be among replicas, of which there is one: each device would keep what it has."""
    whole = exported(mapped(lambda v: lax.ppermute(v, "x", [(0, 0)])), mesh=MESH)
    text = module_of(whole.mlir_module_serialized).operation.get_asm(enable_debug_info=False)
    assert check_function(from_text(text, whole)) == 4
    assert text.count("handle = 1,") == 1
    with pytest.raises(ProgramRefused, match=r"collective_permute .*has no channel"):
        check_function(from_text(text.replace("handle = 1,", f"handle = {channel},"), whole))


ALONE = """module {{ func.func public @main(%arg0: tensor<4x4xf32>) -> tensor<4x4xf32> {{
{}
return %0 : tensor<4x4xf32> }} }}"""
OUTSIDE = {
    "a collective": (
        '%0 = "stablehlo.all_gather"(%arg0) <{all_gather_dim = 0 : i64, replica_groups = dense<[[0]]> : '
        "tensor<1x1xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, "
        "use_global_device_ids}> : (tensor<4x4xf32>) -> tensor<4x4xf32>",
        1,
    ),
    "a branch by the device, without a mesh": (
        "%p = stablehlo.partition_id : tensor<ui32>\n%i = stablehlo.convert %p : (tensor<ui32>) -> tensor<i32>\n"
        '%0 = "stablehlo.case"(%i) ({ %s = stablehlo.sine %arg0 : tensor<4x4xf32>\nstablehlo.return %s : '
        "tensor<4x4xf32> }, { stablehlo.return %arg0 : tensor<4x4xf32> }) : (tensor<i32>) -> tensor<4x4xf32>",
        1,
    ),
    "nothing of the kind": ("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>", 0),
}
MORE = 'sdy.mesh @mesh = <["x"=2]>'


@pytest.mark.parametrize(("body", "devices"), OUTSIDE.values(), ids=OUTSIDE)
def test_outside_of_manual_computations_they_are_for_one_device(body: str, devices: int) -> None:
    """So a host refuses them on a slice of several."""
    like, text = exported(lambda v: v + 1), ALONE.format(body)
    assert check_function(from_text(text, like)) == devices
    if devices:
        with pytest.raises(ProgramRefused, match=r"stands outside of a manual computation|may need collectives"):
            check_function(from_text(text.replace("module {", f"module {{ {MORE}\n"), like))


def test_a_mesh_of_one_device() -> None:
    mesh = AbstractMesh((1, 1), BOTH)
    body = lambda v: lax.cond(lax.axis_index("x") == 0, lambda u: lax.psum(u, BOTH), lambda u: u, v)  # noqa: E731
    function = jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    assert check_function(blob_of(exported(function, mesh=mesh))) == 1


def test_partitions() -> None:
    made = Partitions(4)
    rows, columns = made.of("aabb"), made.of("abab")
    assert made.of("xxyy") == rows
    assert made.of("zzzz") == UNIFORM
    assert made.labels(made.join(rows, columns)) == (0, 1, 2, 3)
    assert made.join(rows, UNIFORM, rows) == rows
    assert made.equal_on(rows, [0, 1])
    assert not made.equal_on(rows, [1, 2])


def test_a_large_program_takes_little_time() -> None:
    """Loops inside of loops, each analysed until nothing changes; and thousands of operations under a mesh."""

    def body(v: Any) -> Any:
        def nested(depth: int) -> Callable[[Any], Any]:
            if not depth:
                return lambda c: jnp.sin(c) + lax.psum(c, "x")
            return lambda c: lax.fori_loop(0, 2, lambda i, u: nested(depth - 1)(u) * i, c)

        for _ in range(300):
            v = jnp.sin(v) * jnp.cos(v) + lax.psum(v, "y")
        return nested(6)(v)

    blob = blob_of(exported(mapped(body), mesh=MESH))
    start = time.process_time()
    check_function(blob)
    assert time.process_time() - start < 2.0
