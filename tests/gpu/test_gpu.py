"""A GPU of this machine, with hosts of the runtime on it. `make test-gpu` runs these; where there is no GPU, they skip.

Two islands of one host each share one GPU, and a third one is of CPUs: Ray is told of two GPUs and made to leave to
processes which they see. (NVIDIA's library for collectives refuses two processes on one GPU: no island has two hosts.)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.client.context import sessions
from tests.gpu.computations import COMPUTATIONS, bits

FILE = Path(__file__).with_name("computations.py")
TOLERANCE = 2e-2
"""Of values whose kernels the compiler chooses anew in each process, tf32 and bfloat16 among them."""

RECOVERED_WITHIN_S = 90.0

TOKEN = "the-token-of-a-stranger"

RANDOM = np.random.default_rng(0)

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
x = jnp.ones((4, 8))
a = jax.random.normal(jax.random.key(0), (16, 16))
a = a @ a.T + 16 * jnp.eye(16)
values, vectors = jnp.linalg.eigh(a)
print(jax.devices()[0].platform, float(x.sum()))
print(np.allclose(np.asarray(vectors) @ np.diag(values) @ np.asarray(vectors).T, a, atol=1e-3))
print(np.allclose(jax.lax.scan(lambda c, v: (c + v, None), jnp.zeros(8), x)[0], 4))
"""
"""An ordinary JAX program."""

pytestmark = [
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterSession]:
    tenants = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants.write_text(json.dumps({"tenants": [{"name": "stranger", "token": TOKEN}]}))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # as `tests/conftest.py` sets it
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        yield from _sessions(str(tenants))


def _sessions(tenants: str) -> Iterator[ClusterSession]:
    islands = [pw.Island("gpu"), pw.Island("gpu"), pw.Island("cpu", devices=4)]
    with pw.init(islands, tenants=tenants, ray_options={"num_gpus": 2, "num_cpus": 8}) as session:
        yield session


@pytest.fixture
def stranger(session: ClusterSession) -> Iterator[pw.Session]:
    """A session of a tenant that the operator does not trust."""
    with pw.connect(session.url, TOKEN) as stranger:
        yield stranger
    sessions.remove(stranger)


@pytest.fixture(scope="module")
def gpu(session: ClusterSession) -> pw.VirtualSlice:
    return pw.virtual_slice((1,), ("x",), island=0)


@pytest.fixture(scope="module")
def other(session: ClusterSession) -> pw.VirtualSlice:
    return pw.virtual_slice((1,), ("x",), island=1)


@pytest.fixture(scope="module")
def cpus(session: ClusterSession) -> pw.VirtualSlice:
    return pw.virtual_slice((4,), ("x",), platform="cpu")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray[Any, Any]]:
    """What plain JAX says, on the same GPU."""
    file = tmp_path_factory.mktemp("gpu") / "expected.npz"
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")}
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([sys.executable, str(FILE), str(file)], env=environment, check=True, timeout=240)
    return dict(np.load(file))


def test_islands_say_what_they_are(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    assert [island["platform"] for island in session.status()["islands"]] == ["gpu", "gpu", "cpu"]
    assert jax.devices()[0].platform == "cpu"  # of this process; the hosts have the GPU


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computations_give_what_plain_jax_gives(
    name: str, session: ClusterSession, gpu: pw.VirtualSlice, expected: dict[str, np.ndarray[Any, Any]]
) -> None:
    run, arguments, close = COMPUTATIONS[name]
    with jax.enable_x64(True):
        results = jax.tree.leaves(pw.compiled(run, slice=gpu)(*arguments))
        found = [np.asarray(value) for value in results]
    assert found
    for k, value in enumerate(found):
        there = expected[f"{name} {k}"]
        if close:
            np.testing.assert_allclose(value.astype(there.dtype), there, rtol=TOLERANCE, atol=TOLERANCE)
        else:
            np.testing.assert_array_equal(bits(value), there)


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_a_tenant_that_is_not_trusted_may_run_them_too(
    name: str, stranger: pw.Session, expected: dict[str, np.ndarray[Any, Any]]
) -> None:
    """Their modules hold kernels of NVIDIA's libraries, as calls that a tenant may make in the forms of JAX alone."""
    run, arguments, _ = COMPUTATIONS[name]
    with stranger.virtual_slice((1,), ("x",), platform="gpu") as where, jax.enable_x64(True):
        found = [np.asarray(value) for value in jax.tree.leaves(pw.compiled(run, slice=where)(*arguments))]
    assert len(found) == sum(key.rpartition(" ")[0] == name for key in expected)


def test_a_slice_moves_to_another_gpu_and_to_cpus_with_what_it_has(session: ClusterSession) -> None:
    where = pw.virtual_slice((1,), ("x",), island=0)
    step = pw.compiled(lambda s: s * 2 + 1, slice=where, donate_argnums=0)
    key = pw.put(jax.random.key(7), slice=where)
    state, expected = pw.put(np.linspace(0, 1, 1 << 20, dtype=np.float32), slice=where), None
    for island in (None, 1, 0, 2, 0):
        if island is not None:
            where.move(island=island)
            assert where.island == island
        plain = np.linspace(0, 1, 1 << 20, dtype=np.float32) if expected is None else expected
        state, expected = step(state), plain * 2 + 1
        np.testing.assert_allclose(np.asarray(state), expected, rtol=1e-6)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))
    where.release()


def test_a_suspended_session_leaves_the_gpu_and_comes_back(session: ClusterSession, stranger: pw.Session) -> None:
    where = stranger.virtual_slice((1,), ("x",), island=1)
    step = pw.compiled(lambda v: v + 1, slice=where)
    first = step(pw.put(np.arange(16 << 20, dtype=np.float32), slice=where))
    stranger.suspend()
    assert not [one for one in session.status()["slices"] if one["session"] == stranger.id]
    stranger.resume()
    np.testing.assert_array_equal(np.asarray(step(first)), np.arange(16 << 20, dtype=np.float32) + 2)


@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20, 64 << 20])
def test_bytes_go_there_and_back(size: int, session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    value = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    placed = pw.put(value, slice=gpu)
    np.testing.assert_array_equal(np.asarray(placed), value)
    np.testing.assert_array_equal(np.asarray(pw.compiled(lambda v: v + 1, slice=gpu)(placed)), value + np.uint8(1))


def test_arrays_go_from_gpu_to_gpu_and_to_cpus(
    session: ClusterSession, gpu: pw.VirtualSlice, other: pw.VirtualSlice, cpus: pw.VirtualSlice
) -> None:
    there = pw.compiled(lambda v: v * 2, slice=other)
    spread = pw.compiled(lambda v: v + 1, slice=cpus, in_specs=P("x"), out_specs=P("x"))
    back = pw.compiled(lambda v: v - 3, slice=gpu)
    round_trip = pw.program(lambda v: back(spread(there(v))))
    for size in (4, 1024, 1 << 22):
        value = np.arange(size, dtype=np.float32)
        np.testing.assert_array_equal(np.asarray(round_trip(pw.put(value, slice=gpu))), value * 2 - 2)
    ints = np.arange(64, dtype=np.int8)
    np.testing.assert_array_equal(np.asarray(round_trip(pw.put(ints, slice=gpu))), ints * 2 - 2)


def test_a_tree_of_leaves_goes_to_another_island(
    session: ClusterSession, gpu: pw.VirtualSlice, other: pw.VirtualSlice
) -> None:
    tree = {str(k): np.full((k + 1, 3), k, np.float32) for k in range(20)}
    there = pw.compiled(lambda t: jax.tree.map(lambda v: v + 1, t), slice=other)
    moved = pw.program(lambda t: there(t))(pw.put(tree, slice=gpu))
    for k, value in jax.device_get(moved).items():
        np.testing.assert_array_equal(value, tree[k] + 1)


def test_streams_of_launches_are_exact(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    step = pw.compiled(lambda v: v + 1, slice=gpu)
    turns = [pw.compiled(run, slice=gpu) for run in (lambda v: v * 2, lambda v: v - 1, lambda v: v / 2 + 0.5)]
    value = pw.put(np.zeros(8, np.float32), slice=gpu)
    for _ in range(3000):
        value = step(value)
    np.testing.assert_array_equal(np.asarray(value), np.full(8, 3000.0))
    for _ in range(1000):
        for turn in turns:
            value = turn(value)
    np.testing.assert_array_equal(np.asarray(value), np.full(8, 3000.0))


def test_composed_functions_round_as_single_ones(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    """A multiplication and an addition in one kernel would become one instruction with one rounding."""
    square = pw.compiled(lambda v: v * v, slice=gpu)
    less = pw.compiled(lambda v, w: v - w, slice=gpu)
    chained = pw.program(lambda v, w: less(square(less(square(v), w)), w))
    v, w = RANDOM.standard_normal((2, 1024)).astype(np.float32)
    assert chained.lower(v, w).as_text("plan").count("execute") == 1
    one = np.asarray(less(np.asarray(square(v)), w))
    np.testing.assert_array_equal(np.asarray(chained(v, w)), np.asarray(less(np.asarray(square(one)), w)))


@pytest.mark.parametrize("names", ["f" * 40, "fg" * 20], ids=["one", "two in turn"])
def test_repetitions_round_as_single_calls(session: ClusterSession, gpu: pw.VirtualSlice, names: str) -> None:
    """They run as loops, in which XLA sees a multiplication and the next round's addition side by side."""
    functions = {
        "f": pw.compiled(lambda v, w: v * w + w * 3, slice=gpu),
        "g": pw.compiled(lambda v, w: v - w * v, slice=gpu),
    }
    v, w = np.tanh(RANDOM.standard_normal((2, 1000))).astype(np.float32)
    alone = v
    for name in names:
        alone = np.asarray(functions[name](alone, w))

    @pw.program
    def together(value: Any, other: Any) -> Any:
        for name in names:
            value = functions[name](value, other)
        return value

    np.testing.assert_array_equal(np.asarray(together(v, w)), alone)
    stream, other = pw.put(v, slice=gpu), pw.put(w, slice=gpu)
    for name in names:
        stream = functions[name](stream, other)
    np.testing.assert_array_equal(np.asarray(stream), alone)


def test_arrays_compute_outside_of_programs(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    x = pw.put(np.arange(8, dtype=np.float32), slice=gpu)
    np.testing.assert_array_equal(np.asarray((x * 2 + 1)[2:5].sum()), np.float32(5 + 7 + 9))
    assert jax.device_get({"a": x.max(), "b": [x[k] for k in range(8)]}) == {"a": 7.0, "b": list(range(8))}


def test_a_jax_program_runs_on_the_gpu_through_a_proxy(session: ClusterSession, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    with session.proxy(devices=1) as proxy:
        done = subprocess.run(
            [sys.executable, str(file)], env=os.environ | proxy.env, capture_output=True, text=True, timeout=240
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["gpu", "32.0", "True", "True"]


def test_a_donated_argument_is_used_up(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    step = pw.compiled(lambda v: v + 1, slice=gpu, donate_argnums=0)
    value = pw.put(np.zeros(1 << 20, np.float32), slice=gpu)
    for _ in range(50):
        before, value = value, step(value)
    with pytest.raises(pw.errors.BufferDeleted):
        np.asarray(before)
    assert float(value[0]) == 50.0


def test_a_loop_decides_on_the_gpu(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    half = pw.compiled(lambda v: v / 2, slice=gpu)
    large = pw.compiled(lambda v: v.max() > 1, slice=gpu)
    halved = pw.program(lambda v: pw.while_loop(large, half, v))
    assert float(np.asarray(halved(np.full(4, 1024.0, np.float32)))[0]) == 1.0


def test_an_error_comes_to_who_waits_and_the_gpu_goes_on(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    """More memory than any GPU has, and a value that is not finite where that is an error."""
    huge = pw.compiled(lambda v: jnp.broadcast_to(v, (1 << 20, 1 << 20)) + jnp.arange(1 << 20), slice=gpu)
    with pytest.raises(pw.errors.PathwaysError):
        np.asarray(huge(np.float32(1)))
    assert float(np.asarray(pw.compiled(lambda v: v + 1, slice=gpu)(np.float32(1)))) == 2.0


def test_a_host_function_takes_what_the_gpu_made(session: ClusterSession, gpu: pw.VirtualSlice) -> None:
    made = pw.compiled(lambda v: v + 1, slice=gpu)
    kind = jax.ShapeDtypeStruct((1,), np.float32)
    total = pw.host(lambda v: np.asarray(v).sum(keepdims=True), slice=gpu, result=kind)
    found = pw.program(lambda v: made(total(made(v))))(np.zeros(4, np.float32))
    assert float(np.asarray(found)[0]) == 5.0


def test_a_host_that_ends_comes_back_with_its_gpu(session: ClusterSession, other: pw.VirtualSlice) -> None:
    step = pw.compiled(lambda v: v + 1, slice=other)
    assert float(np.asarray(step(np.float32(1)))) == 2.0
    (host,) = next(one for one in session.status()["islands"] if one["island"] == other.island)["hosts"]
    os.kill(host["pid"], 9)
    until = time.monotonic() + RECOVERED_WITHIN_S
    while True:
        try:
            assert float(np.asarray(step(np.float32(1)))) == 2.0
            return
        except pw.errors.PathwaysError:
            assert time.monotonic() < until, "the host did not come back"
            time.sleep(0.5)


def test_ray_sees_the_processes_on_the_gpu(session: ClusterSession) -> None:
    assert ray.cluster_resources()["GPU"] == 2.0
