"""JAX's own client at a proxy whose session has no cluster behind it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]

HEAD = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
found = {}
"""

SHARDS = """
mesh = Mesh(np.array(jax.devices()), "x")
x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
total = jax.shard_map(lambda v: jax.lax.psum(v.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
found["sum"] = float(jax.jit(total)(x))
found["shards"] = [np.asarray(s.data).tolist() for s in x.addressable_shards]
parts = [s.data + 1 for s in x.addressable_shards]
joined = jax.make_array_from_single_device_arrays((8,), x.sharding, parts)
found["joined"] = np.asarray(jax.jit(lambda v: v * 2)(joined)).tolist()
found["moved"] = np.asarray(jax.device_put(parts[0], jax.devices()[3])).tolist()
kept = x.addressable_shards[0].data
y = jax.jit(lambda v: v + 1, donate_argnums=0)(x)
found["donated"] = [x.is_deleted(), np.asarray(kept).tolist(), float(y[7])]
fresh = jax.device_put(np.arange(8.0, dtype=np.float32) + 1, y.sharding)
part = fresh.addressable_shards[0].data
taken = jax.jit(lambda v: v + 1, donate_argnums=0)(fresh)
found["kept"] = [fresh.is_deleted(), float(taken[0]), np.asarray(part).tolist()]
unused = jax.device_put(np.arange(16.0).reshape(8, 2), x.sharding)
outer = jax.jit(lambda v: v @ v.T, donate_argnums=0)(unused)
found["unused"] = [unused.is_deleted(), float(unused.sum()), float(outer[7, 7])]
square = np.arange(16.0, dtype=np.float32).reshape(4, 4)
def over(order, spec, shape=(4,), axes=("x",)):
    return NamedSharding(Mesh(np.array(jax.devices())[order].reshape(shape), axes), spec)
found["orders"] = []
for order in [3, 2, 1, 0], [1, 2, 3, 0], [0, 2, 1, 3]:
    first = jax.device_put(square, over([0, 1, 2, 3], P("x", "y"), (2, 2), ("x", "y")))
    second = jax.device_put(first, over(order, P("x")))
    rows = {shard.index[0].start: shard.device.id for shard in second.addressable_shards}
    lies = [rows[k] for k in range(4)] == order
    same = all((np.asarray(shard.data) == square[shard.index]).all() for shard in second.addressable_shards)
    back = jax.device_put(second * 2, first.sharding, donate=True)
    found["orders"].append([lies, same, bool((np.asarray(back) == 2 * square).all())])
rows = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
with jax.set_mesh(rows):
    empty = jax.jit(lambda v: v[:, 100:116])(jax.device_put(square, P(None, "x")))
found["empty"] = [empty.shape, str(empty.sharding.spec)]
compiled = jax.jit(lambda v: v @ v).lower(jnp.ones((4, 4))).compile()
found["text"] = "dot" in compiled.as_text()
found["cost"] = compiled.cost_analysis()["flops"] > 0
found["memory"] = compiled.memory_analysis().argument_size_in_bytes
"""

COLOCATED = """
from jax.experimental import colocated_python
rows = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
x = jax.device_put(np.arange(8.0, dtype=np.float32), rows)
@colocated_python.colocated_python
def twice(v):
    return jax.make_array_from_callback(v.shape, v.sharding, lambda at: 2 * np.asarray(v)[at])
found["first"] = np.asarray(twice(x)).tolist()
y = twice(twice(x) + 1)
found["again"] = [np.asarray(y).tolist(), y.sharding == x.sharding]
found["said"] = np.asarray(twice.specialize(out_specs_fn=lambda v: v)(x)).tolist()
@colocated_python.colocated_python_class
class Total:
    def __init__(self, start):
        self.total = start
    def add(self, v):
        self.total += int(np.asarray(v).sum())
        return jax.device_put(np.int32(self.total), NamedSharding(v.sharding.mesh, P()))
total = Total(100)
found["object"] = [int(total.add(x)), int(total.add(x))]
more = colocated_python.colocated_python(lambda v: v + 1)
found["one"] = float(more(jax.device_put(np.float32(2), jax.devices()[2])))
@colocated_python.colocated_python
def wrong(v):
    raise ValueError("no such thing")
try:
    wrong(x)
except jax.errors.JaxRuntimeError as error:
    parts = "INTERNAL: HostFunctionError", "ValueError: no such thing (<string>:"
    found["wrong"] = [part in str(error) for part in parts]
@colocated_python.colocated_python
def nothing(v):
    pass
try:
    nothing(x)
except jax.errors.JaxRuntimeError as error:
    found["nothing"] = "nothing gives no array" in str(error)
"""

BIG = """
def in_a_file(value):
    while value.base is not None and not hasattr(value.base, "_address"):
        value = value.base
    return hasattr(value.base, "_address")
big = np.arange(1 << 20, dtype=np.float64).astype(np.float32).reshape(4, -1)
mesh = Mesh(np.array(jax.devices()), "x")
rows, copies = (NamedSharding(mesh, spec) for spec in (P("x"), P()))
y = np.asarray(jax.device_put(big) + 1)
small = np.asarray(jnp.arange(6.0).reshape(2, 3) + 1)
ahead = jnp.arange(6.0) + 1
ahead.copy_to_host_async()
ahead = np.asarray(ahead)
def comes_as(value):
    while isinstance(value, np.ndarray):
        value = value.base
    return type(value).__name__
found["small"] = [comes_as(small), small.tolist(), float(jnp.float32(2) + 1)]
found["ahead"] = [comes_as(ahead) == "bytes", ahead.tolist()]
found["one"] = [in_a_file(y), bool((y == big + 1).all()), y.flags.writeable]
y = jax.device_put(big, rows)
found["split"] = [in_a_file(np.asarray(y.addressable_shards[2].data)), bool((np.asarray(y) == big).all())]
y.copy_to_host_async()
y = np.asarray(jax.device_put(big, copies))
found["copies"] = [in_a_file(y), bool((y == big).all())]
turned = np.asarray(jax.device_put(big.astype(jnp.bfloat16)).T.block_until_ready())
found["turned"] = [in_a_file(turned), turned.shape, bool((turned == big.astype(jnp.bfloat16).T).all())]
jax.clear_caches()
found["cleared"] = in_a_file(np.asarray(jax.device_put(big * 2)))
def guarded(array):
    with jax.transfer_guard_device_to_host("disallow"):
        try:
            return bool(np.asarray(array)[0, 0] == 0)
        except jax.errors.JaxRuntimeError as error:
            return str(error)[:40]
found["guarded"] = [guarded(jax.device_put(big[:size])) for size in (1, 4)]
gone = jax.device_put(big)
gone.delete()
try:
    np.asarray(gone)
except RuntimeError as error:
    found["deleted"] = "deleted" in str(error)
def broken(v):
    return v * 2
try:
    np.asarray(jax.jit(broken)(big))
except jax.errors.JaxRuntimeError as error:
    found["broken"] = str(error)[:30]
from jax.extend import backend
backend.clear_backends()
found["again"] = in_a_file(np.asarray(jax.device_put(big)))
"""

TOKENS = """
token = jax.lax.create_token(123)
found["made"] = type(jax.jit(lambda x, t: (x + 2, jax.lax.after_all(t)))(7, token)[1]).__name__
kept, other = jax.jit(lambda x, t: (t, x * 3))(5, token)
found["given"] = int(other)
try:
    kept._buf._value
except RuntimeError as error:
    found["value"] = str(error)
kept.block_until_ready()
found["passed"] = int(jax.jit(lambda t, x: x - 1)(kept, other))
"""

ISLANDS = """
from jaxlib import _pathways
devices = jax.devices()
found["islands"] = [device.slice_index for device in devices]
grid = Mesh(np.array(devices).reshape(2, 2), ("i", "x"))
halves = [Mesh(grid.devices[k : k + 1], ("i", "x")) for k in range(2)]
value = np.arange(32, dtype=np.float32).reshape(8, 4)
def same(array, wanted=value):
    return bool((np.asarray(array) == wanted).all())
put = [jax.device_put(value, NamedSharding(grid, spec)) for spec in (P("i", "x"), P(), P(None, "x"))]
found["put"] = [same(array) for array in put] + [put[0].addressable_shards[2].data.tolist()[0]]
there = jax.device_put(jax.device_put(value, NamedSharding(halves[0], P("x"))), NamedSharding(halves[1], P("x")))
found["moved"] = [same(there), same(jax.jit(lambda v: v + 1)(there), value + 1)]
kind = {"sharded_dim_idxs": [0], "mesh_axis_sizes": [2, 2], "mesh_axis_idx": 0, "mesh_axis_sections": [1, 2]}
parts = [NamedSharding(half, P("i", "x")) for half in halves]
((one, two),) = _pathways._split_by_mesh_axis(arrays=[put[0]], submesh_shardings=[parts], donate=False, **kind)
found["split"] = [same(one, value[:4]), same(jax.jit(lambda v: v * 2)(two), value[4:] * 2), put[0].is_deleted()]
(back,) = _pathways._concatenate_by_mesh_axis(
    arrays=[[one, two]], out_shardings=[NamedSharding(grid, P("i", "x"))], donate=True, **kind
)
found["back"] = [same(back), one.is_deleted()]
(turned,) = _pathways._transfer_to_shardings([there], [NamedSharding(halves[0], P(None, "x"))])
found["turned"] = [same(turned), str(turned.sharding.spec)]
try:
    jax.jit(lambda v: v + 1)(put[1])
except jax.errors.JaxRuntimeError as error:
    found["refused"] = str(error)
"""

PUTS = """
import sys
value = np.full((1 << 20,), int(sys.argv[1]), np.int32)
found["right"] = all(
    bool((np.asarray(jax.device_put(value + k) + 1) == value + k + 1).all()) for k in range(12)
)
"""

PIPES = """
import threading
from pathways_ray.proxy.putting import BigPuts
put, puts = BigPuts.put, []
def counted(*arguments):
    made = put(*arguments)
    puts.append(made is not None)
    return made
BigPuts.put = counted
def by_pipe():
    taken, puts[:] = list(puts), []
    return taken
big = np.arange(3 << 20, dtype=np.float32).reshape(3, -1)
def same(array, wanted=big):
    return bool((np.asarray(array) == wanted).all())
value = big.copy()
y = jax.device_put(value)
value[:] = 0
found["one"] = [same(y), y.committed, same(jax.jit(lambda v: v + 1)(y), big + 1), by_pipe()]
y = jax.device_put(big.astype(np.int32), jax.devices()[2])
found["there"] = [same(y), y.committed, y.devices() == {jax.devices()[2]}, by_pipe()]
rows = NamedSharding(Mesh(np.array(jax.devices()[:3]), "x"), P("x"))
found["converted"] = [same(jax.device_put(big.astype(np.float64))), by_pipe()]
others = big.T, big[:, ::2], big.astype(jnp.bfloat16), big[:1]
found["others"] = [same(jax.device_put(value), value) for value in others] + [same(jax.device_put(big, rows))]
found["others"].append(by_pipe())
def guarded():
    with jax.transfer_guard_host_to_device("disallow_explicit"):
        try:
            jax.device_put(big)
        except jax.errors.JaxRuntimeError as error:
            return "Disallowed host-to-device" in str(error)
found["guarded"] = [guarded(), by_pipe()]
right = []
def several(start):
    for k in range(start, start + 4):
        right.append(same(jax.device_put(big + k), big + k))
threads = [threading.Thread(target=several, args=(10 * k,)) for k in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found["threads"] = [right, by_pipe()]
from jax.extend import backend
backend.clear_backends()
found["again"] = [same(jax.device_put(big)), by_pipe()]
class Interrupted:
    def send(self, *message):
        raise KeyboardInterrupt
from pathways_ray.proxy import reading
reader = reading.install.__wrapped__.__globals__["BigValues"]
import gc
(puts_here,) = [each.puts for each in gc.get_objects() if type(each) is reader and each.puts._programs]
puts_here._socket = Interrupted()
try:
    jax.device_put(big)
except KeyboardInterrupt:
    found["interrupted"] = [same(jax.device_put(big)), by_pipe()]
"""

FAILURES = """
def broken(v):
    return v + 1
step = jax.jit(broken)
def text(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:60]
x = jnp.ones(4)
bad = step(x)
after = bad * 2
found["broken"] = [text(bad.block_until_ready), text(lambda: np.asarray(after))]
found["others"] = float((x + 1).sum())
def callback(v):
    return jax.pure_callback(lambda w: w, jax.ShapeDtypeStruct((4,), np.float32), v)
found["callback"] = text(lambda: jax.jit(callback)(x))[:34]
from jax.experimental.serialize_executable import serialize
compiled = step.lower(x).compile()
found["saved"] = [text(lambda: serialize(compiled))[:30], text(compiled.runtime_executable().serialize)[:30]]
"""

OPTIONS = """
from jax.experimental.layout import Format, Layout
x = jnp.arange(6.0).reshape(2, 3)
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
turned = jax.jit(lambda v: v + 1, out_shardings=Format(Layout((1, 0)), one))
y = turned(x)
found["turned"] = [y.format.layout.major_to_minor, np.asarray(y).tolist(), float(jax.jit(lambda v: v[1, 2])(y))]
auto = jax.jit(lambda v: v.T, in_shardings=Format(Layout.AUTO, one), out_shardings=Format(Layout.AUTO, one))
formats = auto.lower(jax.ShapeDtypeStruct((2, 3), np.float32)).compile()
found["auto"] = formats.input_formats[0][0].layout.major_to_minor == formats.output_formats.layout.major_to_minor[::-1]
try:
    jax.jit(lambda v: v, compiler_options={"no_such_option": True})(x)
except Exception as error:
    found["option"] = str(error)[:60]
found["known"] = float(jax.jit(lambda v: v.sum(), compiler_options={"xla_embed_ir_in_executable": True})(x))
"""

BESIDE = """
cpu, far = jax.devices("cpu"), jax.devices()
found["devices"] = [len(far), far[0] in cpu, jax.local_devices(backend="cpu") == cpu]
found["memory"] = [far[0].memory_stats(), cpu[0].memory_stats()]
x = jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(Mesh(np.array(far), "x"), P("x")))
here = jax.device_put(x, cpu[0])
found["here"] = [here.devices() == {cpu[0]}, np.asarray(here * 2).tolist()]
back = jax.device_put(here, far[1])
found["back"] = [back.devices() == {far[1]}, float(back.sum())]
with jax.default_device(cpu[0]):
    found["default"] = (jnp.ones(2) * 2).devices() == {cpu[0]}
    found["printed"] = float(jax.jit(lambda v: jax.pure_callback(np.sin, v, v))(jnp.float32(0.0)))
step = jax.jit(lambda v: v + 1)
found["jit"] = [step(here).devices() == {cpu[0]}, float(step(1.0))]
"""

LOST = """
from jax.extend import backend
def lose(v):
    return v + 1
x = jnp.ones(4)
try:
    for _ in range(50):
        x = jax.jit(lose)(x)
        x.block_until_ready()
except Exception as error:
    found["lost"] = str(error)[:11]
backend.clear_backends()
found["again"] = float(jnp.ones(3).sum())
"""

FORKS = """
import os, sys, warnings
warnings.simplefilter("ignore")
@jax.jit
def more(v):
    return v + 1
x, big = more(jnp.ones(3)), jax.device_put(np.ones(3 << 20, np.float32))
np.asarray(big)
found["ends"] = []
for status in (0, 3):
    child = os.fork()
    if child == 0:
        del x
        sys.exit(status)
    found["ends"].append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
found["here"] = [more(x).tolist(), float(np.asarray(jax.device_put(np.asarray(big)) + 1).sum())]
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("proxy")) as found:
        yield found


@contextlib.contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """The environment of programs that use a proxy."""
    command = [sys.executable, "-m", "tests.unit.proxy.local_proxy", str(folder / "s"), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        variables = json.loads(server.stdout.readline())["env"]
        clean = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
        yield clean | variables
        server.stdin.close()


def started(env: dict[str, str], body: str, *arguments: str) -> subprocess.Popen[str]:
    program = HEAD + body + "\nprint(json.dumps(found))\n"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(process: subprocess.Popen[str]) -> Any:
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error[-3000:]
    return json.loads(out.splitlines()[-1])


def run(env: dict[str, str], body: str) -> Any:
    return printed(started(env, body))


def test_shards_are_named_put_together_moved_and_given_away(env: dict[str, str]) -> None:
    assert run(env, SHARDS) == {
        "sum": 28.0,
        "shards": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]],
        "joined": [2.0 * (k + 1) for k in range(8)],
        "moved": [1.0, 2.0],
        "donated": [True, [0.0, 1.0], 8.0],
        "kept": [True, 2.0, [1.0, 2.0]],
        "unused": [False, 120.0, 421.0],
        "orders": [[True, True, True]] * 3,
        "empty": [[4, 0], "P(None, 'x')"],
        "text": True,
        "cost": True,
        "memory": 64,
    }


def test_big_arrays_go_by_pipes_and_what_cannot_goes_as_ever(env: dict[str, str]) -> None:
    """What is turned, of a type that NumPy has not, or smaller, and what is split over devices, goes as ever; so does
    all behind a put that was interrupted, since client and proxy may count otherwise from then on."""
    assert run(env, PIPES) == {
        "one": [True, False, True, [True]],
        "there": [True, True, True, [True]],
        "converted": [True, [True]],
        "others": [True] * 5 + [[]],
        "guarded": [True, []],
        "threads": [[True] * 12, [True] * 12],
        "again": [True, [True]],
        "interrupted": [True, [False]],
    }


def test_functions_and_objects_in_python_run_beside_the_devices(env: dict[str, str]) -> None:
    assert run(env, COLOCATED) == {
        "first": [2.0 * k for k in range(8)],
        "again": [[2.0 * (2 * k + 1) for k in range(8)], True],
        "said": [2.0 * k for k in range(8)],
        "object": [128, 156],
        "one": 3.0,
        "wrong": [True, True],
        "nothing": True,
    }


def test_big_values_come_in_files_and_what_cannot_come_says_why(env: dict[str, str]) -> None:
    assert run(env, BIG) == {
        "small": ["bytes", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 3.0],
        "ahead": [False, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]],
        "one": [True, True, False],
        "split": [True, True],
        "copies": [True, True],
        "turned": [True, [1 << 18, 4], True],
        "cleared": True,
        "guarded": ["INVALID_ARGUMENT: Disallowed device-to-h"] * 2,
        "deleted": True,
        "broken": "UNAVAILABLE: HostLost: host 0 ",
        "again": True,
    }


def test_programs_at_the_same_time_put_big_arrays_of_their_own(env: dict[str, str]) -> None:
    """They count their arrays alike, and so the files that they leave for the proxy."""
    both = [started(env, PUTS, number) for number in ("1000", "2000")]
    assert [printed(process) for process in both] == [{"right": True}] * 2


def test_arrays_lie_over_two_islands_and_go_between_them(tmp_path: Path) -> None:
    with serving(tmp_path, "4", "2") as env:
        found = run(env, ISLANDS)
    assert found == {
        "islands": [0, 0, 1, 1],
        "put": [True, True, True, [16.0, 17.0]],
        "moved": [True, True],
        "split": [True, True, False],
        "back": [True, True],
        "turned": [True, "P(None, 'x')"],
        "refused": "UNIMPLEMENTED: devices (0, 1, 2, 3) are on several islands; use those of one",
    }


def test_tokens_go_in_and_out(env: dict[str, str]) -> None:
    assert run(env, TOKENS) == {
        "made": "Token",
        "given": 15,
        "passed": 14,
        "value": "INVALID_ARGUMENT: Cannot convert a token-shape buffer to a numpy array.",
    }


def test_layouts_in_memory_are_said_as_asked_for_and_options_of_the_compiler_are_checked(env: dict[str, str]) -> None:
    assert run(env, OPTIONS) == {
        "turned": [[1, 0], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 6.0],
        "auto": True,
        "option": "INVALID_ARGUMENT: XLA refuses the program: INVALID_ARGUMENT:",
        "known": 15.0,
    }


def test_devices_of_the_program_itself_are_beside_those_of_the_proxy(env: dict[str, str]) -> None:
    assert run(env, BESIDE) == {
        "devices": [4, False, True],
        "memory": [None, None],
        "here": [True, [0.0, 2.0, 4.0, 6.0]],
        "back": [True, 6.0],
        "default": True,
        "printed": 0.0,
        "jit": [True, 2.0],
    }


def test_forks_end_and_what_they_were_forked_from_goes_on(env: dict[str, str]) -> None:
    assert run(env, FORKS) == {"ends": [0, 3], "here": [[3.0] * 3, float(6 << 20)]}


def test_failures_come_with_the_values_and_others_live_on(env: dict[str, str]) -> None:
    found = run(env, FAILURES)
    gone = "JaxRuntimeError: UNAVAILABLE: HostLost: host 0 is gone"
    assert found["broken"] == [gone, gone]
    assert found["others"] == 8.0
    assert found["callback"] == "JaxRuntimeError: UNIMPLEMENTED: Un"
    assert found["saved"] == ["JaxRuntimeError: UNIMPLEMENTED"] * 2


def test_a_program_attaches_again_after_the_session_was_lost(env: dict[str, str]) -> None:
    assert run(env, LOST) == {"lost": "UNAVAILABLE", "again": 3.0}
