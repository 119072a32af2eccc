"""Code of tenants: what would reach the memory of others is refused on a real cluster, for whom the operator does not
trust; and what others compute meanwhile stays right.

One cluster of one island of two hosts: there a collective that one device enters alone would meet the next client's.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from jax import lax
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.cli import commands
from tests.integration.conftest import Scripts

TOKENS = {name: f"token-of-{name}-for-tests" for name in ("alice", "victim", "tom")}
V = np.arange(8, dtype=np.float32).reshape(2, 4)


def table(*trusted: str) -> bytes:
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in TOKENS.items()}
    entries = [{"name": n, "token_sha256": d, "trusted": n in trusted} for n, d in digests.items()]
    return json.dumps({"tenants": entries}).encode()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tenants") / "tenants.json"
    made.write_bytes(table("tom"))
    return made


@pytest.fixture(scope="module")
def runtime(file: Path, python: Scripts) -> Iterator[SimpleNamespace]:
    """Url and operator's token of a cluster of another process."""
    process = python.start("code_cluster", str(file))
    found = json.loads(process.stdout.readline())  # type: ignore[union-attr]
    yield SimpleNamespace(**found)
    python.finish(process)


@pytest.fixture
def tenant(runtime: Any) -> Iterator[Callable[[str], tuple[pw.Session, pw.VirtualSlice]]]:
    """Opens a session by a tenant's token, with a slice over both hosts."""
    opened: list[pw.Session] = []

    def connect(name: str) -> tuple[pw.Session, pw.VirtualSlice]:
        session = pw.connect(runtime.url, TOKENS[name], name=name)
        opened.append(session)
        return session, session.virtual_slice((2,), ("x",))

    yield connect
    for session in opened:
        session.close()


def over(where: pw.VirtualSlice, body: Callable[..., Any]) -> Callable[..., Any]:
    mapped = jax.shard_map(body, mesh=where.mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return pw.compiled(mapped, slice=where, in_specs=P("x"), out_specs=P("x"))


def only_first(v: Any) -> Any:
    return lax.cond(lax.axis_index("x") == 0, lambda u: lax.psum(u, "x"), lambda u: u, v)


def all_by_luck(v: Any) -> Any:
    return lax.cond(lax.axis_index("x") >= 0, lambda u: lax.psum(u, "x"), lambda u: u, v)


def value(array: Any) -> np.ndarray:
    return np.asarray(array.block_until_ready(timeout=60))


def put(session: pw.Session, where: pw.VirtualSlice) -> Any:
    return pw.put(V, where, P("x"))


def test_a_collective_that_one_device_enters_is_refused(tenant: Any) -> None:
    attacker, theirs = tenant("alice")
    victim, mine = tenant("victim")
    secret = put(victim, mine)
    add = over(mine, lambda v: lax.psum(v, "x"))
    expected = np.broadcast_to(V.sum(0), (2, 4))
    np.testing.assert_array_equal(value(add(secret)), expected)
    stolen = over(theirs, only_first)(put(attacker, theirs))
    sums = [add(secret) for _ in range(3)]
    with pytest.raises(pw.errors.ProgramRefused) as refused:
        value(stolen)
    for words in (
        "stablehlo.all_reduce",
        "test_code.py:",
        "may be entered by some of devices [0, 1] only",
    ):
        assert words in str(refused.value)
    for each in sums:
        np.testing.assert_array_equal(value(each), expected)
    # The same tenant's code goes on, where all devices enter.
    again = over(theirs, lambda v: lax.fori_loop(0, 3, lambda _, c: lax.psum(c, "x") / 2, v))
    np.testing.assert_allclose(value(again(put(attacker, theirs))), expected / 2)


def test_a_kernel_that_would_read_beyond_its_operand_is_refused(tenant: Any) -> None:
    _, where = tenant("alice")

    @pw.compiled(slice=where, in_specs=P(), out_specs=P())
    def reads_beyond(x: Any, y: Any) -> Any:
        call = jax.ffi.ffi_call("lapack_strsm_ffi", jax.ShapeDtypeStruct((64, 1), np.float32))
        letters = {
            name: np.uint8(ord(letter))
            for name, letter in zip(("side", "uplo", "trans_x", "diag"), "LUNU", strict=True)
        }
        return call(x, y, **letters)

    with pytest.raises(pw.errors.ProgramRefused, match=r"lapack_strsm_ffi.*operand 1 is tensor<64x1xf32>"):
        value(reads_beyond(np.ones((1, 1), np.float32), np.ones((64, 1), np.float32)))

    @pw.compiled(slice=where, in_specs=P(), out_specs=P())
    def honest(a: Any) -> Any:
        return jnp.linalg.svd(a, compute_uv=False), jnp.linalg.solve(a, a)

    a = np.eye(4, dtype=np.float32) * 3
    singular, one = honest(a)
    np.testing.assert_allclose(value(singular), [3, 3, 3, 3], rtol=1e-5)
    np.testing.assert_allclose(value(one), np.eye(4), atol=1e-5)


def test_a_trusted_tenant_decides_for_itself(tenant: Any, runtime: Any) -> None:
    def pivoted(a: Any) -> Any:
        return jax.scipy.linalg.qr(a, pivoting=True)[1]  # type: ignore[misc]

    for name, trusted in (("tom", True), ("alice", False)):
        session, where = tenant(name)
        sums = over(where, all_by_luck)(put(session, where))
        factor = pw.compiled(pivoted, slice=where, in_specs=P(), out_specs=P())
        if trusted:
            np.testing.assert_array_equal(value(sums), np.broadcast_to(V.sum(0), (2, 4)))
            np.testing.assert_allclose(np.abs(value(factor(np.eye(4, dtype=np.float32)))), np.eye(4), atol=1e-6)
            continue
        with pytest.raises(pw.errors.ProgramRefused, match="may be entered by some of devices"):
            value(sums)
        with pytest.raises(pw.errors.TraceError, match="custom calls whose targets have no compatibility guarantees"):
            factor(np.eye(4, dtype=np.float32))


def test_only_a_trusted_tenant_may_have_hosts_run_python(tenant: Any) -> None:
    """A client that says of itself that it is trusted is not: the controller refuses, whatever the client checks."""
    for name in ("tom", "alice"):
        session, where = tenant(name)
        session.trusted = True
        like = jax.ShapeDtypeStruct(V.shape, V.dtype)
        grade = pw.host(lambda v: v + 1, slice=where, in_specs=P("x"), out_specs=P("x"), result=like)
        if name == "tom":
            np.testing.assert_array_equal(value(grade(V)), V + 1)
            continue
        with pytest.raises(pw.errors.ProgramRefused, match="hosts run Python only of tenants that the operator trusts"):
            value(grade(V))


def test_status_warns_of_whom_the_operator_trusts_and_trust_can_end(tenant: Any, runtime: Any, file: Path) -> None:
    def shown(token: str) -> str:
        return CliRunner().invoke(commands, ["status", "--url", runtime.url, "--token", token]).output

    assert "warning: code of tom runs unchecked (trusted tenants)" in shown(runtime.token)
    assert "warning" not in shown(TOKENS["alice"])
    session, where = tenant("tom")
    alice, _ = tenant("alice")
    file.write_bytes(table())
    end = time.monotonic() + 20
    while not session.closed_because and time.monotonic() < end:
        time.sleep(0.1)
    assert session.closed_because == "tenant 'tom' is not trusted any more"
    assert not alice.closed_because
    again, where = tenant("tom")
    with pytest.raises(pw.errors.ProgramRefused, match="may be entered by some of devices"):
        value(over(where, all_by_luck)(put(again, where)))
    assert "warning" not in shown(runtime.token)
