"""Functions from clients: their allowlist; and the safety of reading them, whatever they are."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

from pathways_ray import limits
from pathways_ray.errors import CompileError, ProgramRefused
from pathways_ray.executor.compile import allowlist, confinement, sandbox
from pathways_ray.executor.compile.sandbox import Sandbox
from tests.drawn import some
from tests.unit.executor.compile.exports import MESH, blob_of, exported, from_text, written

FIVE = jax.ShapeDtypeStruct((5,), np.int8)

USUAL: dict[str, Callable[..., Any]] = {
    "linear algebra": lambda v: jnp.linalg.svd(v)[0] + jnp.linalg.inv(v) + jnp.linalg.qr(v)[0] + jnp.linalg.eigh(v)[1],
    "random": lambda v: v + jax.random.normal(jax.random.key(1), (4, 4)),
    "loops": lambda v: jax.lax.scan(lambda c, a: (c + a.sum(), a * c), 0.0, v)[1],
    "branches": lambda v: jax.lax.cond(v[0, 0] > 0, jnp.sin, USUAL["while"], v),
    "while": lambda v: jax.lax.while_loop(jnp.any, jnp.zeros_like, v),
    "special": lambda v: jax.scipy.special.erfinv(v) + jax.scipy.special.digamma(v) + jax.scipy.special.gammaln(v),
    "sorting": lambda v: jnp.sort(v) + jax.lax.top_k(v, 4)[0] + jax.lax.approx_max_k(v, 4)[0],
    "indices": lambda v: v.at[jnp.array([0, 2])].add(1)[::-1],
    "convolution": lambda v: jax.lax.conv(v[None, None], v[None, None], (1, 1), "SAME")[0, 0],
    "constants": lambda v: v + jnp.asarray(np.random.default_rng(0).random((4, 4)), np.float32) + 1j * v,
    "small types": lambda v: v.astype(jnp.int4).astype(jnp.bfloat16),
    "collectives": lambda v: jax.shard_map(
        lambda s: jax.lax.psum(jax.lax.all_gather(s, "x"), "x") + jax.lax.axis_index("x"), mesh=MESH, in_specs=P("x"),
        out_specs=P(None, "x"),
    )(v),
    "derivatives": jax.grad(lambda v: jax.checkpoint(lambda u: jnp.sin(u) @ u)(v).sum()),
}  # fmt: skip


@pytest.mark.parametrize("function", USUAL.values(), ids=USUAL)
def test_what_programs_usually_do_is_allowed(function: Callable[..., Any]) -> None:
    for platforms in (("cpu",), ("cpu", "cuda")):
        assert [refused for refused, _ in allowlist.verdicts([blob_of(exported(function, platforms=platforms))])] == [
            ""
        ]


TALKS = """
%t = stablehlo.create_token : !stablehlo.token
%0:2 = "stablehlo.infeed"(%t) : (!stablehlo.token) -> (tensor<4x4xf32>, !stablehlo.token)
return %0#0 : tensor<4x4xf32> } func.func @other(%arg0: tensor<4x4xf32>) -> tensor<4x4xf32> {
%0 = stablehlo.add %arg0, %arg0 : tensor<4x4xf32>"""
SENDS = """
%t = stablehlo.create_token : !stablehlo.token
%u = "stablehlo.outfeed"(%arg0, %t) : (tensor<4x4xf32>, !stablehlo.token) -> !stablehlo.token
%0 = stablehlo.add %arg0, %arg0 : tensor<4x4xf32>"""
CALLS = "%0 = stablehlo.custom_call @{}(%arg0) : (tensor<4x4xf32>) -> tensor<4x4xf32>"
BODILESS = "func.func private @f(tensor<4x4xf32>) -> tensor<4x4xf32>"
CALL = "%0 = call @f0(%arg0) : (tensor<4x4xf32>) -> tensor<4x4xf32>"


def chain(length: int, calls: int, last: str) -> str:
    """Functions f0, f1, … each of which calls the next one `calls` times; the last one calls `last`, or nobody."""
    found = []
    for number in range(length):
        callee = f"f{number + 1}" if number + 1 < length else last
        lines = [f"%{k} = call @{callee}(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>" for k in range(calls)]
        lines = lines if callee else ["%0 = stablehlo.sine %a : tensor<4x4xf32>"]
        body = "\n".join(lines)
        kind = "(%a: tensor<4x4xf32>) -> tensor<4x4xf32>"
        found.append(f"func.func private @f{number}{kind} {{ {body}\nreturn %0 : tensor<4x4xf32> }}")
    return "\n".join(found)


def nested(depth: int) -> str:
    body = "%i = stablehlo.constant dense<0> : tensor<i32>\n"
    for level in range(depth):
        body += f'%r{level} = "stablehlo.case"(%i) ({{ \n'
    body += "stablehlo.return %arg0 : tensor<4x4xf32>\n"
    for level in reversed(range(depth)):
        body += "}) : (tensor<i32>) -> tensor<4x4xf32>\n"
        body += f"stablehlo.return %r{level} : tensor<4x4xf32>\n" if level else ""
    return body + "%0 = stablehlo.sine %r0 : tensor<4x4xf32>"


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "what waits for the host": (lambda: written(TALKS), r"operation stablehlo\.\w+ (is not|has a value of type)"),
    "what talks to the host": (lambda: written(SENDS), r"operation stablehlo\.create_token is not among those"),
    "a callback": (lambda: written(CALLS.format("xla_ffi_python_cpu_callback")), "custom call 'xla_ffi_python_cpu"),
    "another callback": (lambda: written(CALLS.format("xla_python_gpu_callback")), "calls a Python function, which"),
    "a kernel of the client's": (lambda: written(CALLS.format("tpu_custom_call")), "custom call 'tpu_custom_call' is"),
    "memory of others": (lambda: written(CALLS.format("AllocateBuffer")), "custom call 'AllocateBuffer' is not among"),
    "recursion": (lambda: written(CALL, chain(3, 1, "f0")), "call each other more than 64 deep, or without end"),
    "calls that double": (lambda: written(CALL, chain(40, 2, "")), r"operations when calls are expanded; 262144 are"),
    "deep calls": (lambda: written(CALL, chain(70, 1, "")), "call each other more than 64 deep"),
    "a function without a body": (
        lambda: written("%0 = call @f(%arg0) : (tensor<4x4xf32>) -> tensor<4x4xf32>", BODILESS),
        "a function of it has no body",
    ),
    "a function without a body that nothing calls": (
        lambda: written("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>", BODILESS),
        "a function of it has no body",
    ),
    "a composite of a function without a body": (
        lambda: written(
            '%0 = stablehlo.composite "a.b" %arg0 {decomposition = @f} : (tensor<4x4xf32>) -> tensor<4x4xf32>', BODILESS
        ),
        "a function of it has no body",
    ),
    "deep nesting": (lambda: written(nested(70)), "its operations are nested more than 64 deep"),
    "a shape of data": (
        lambda: written(
            "%d = stablehlo.custom_call @Eigh(%arg0) : (tensor<4x4xf32>) -> tensor<?xf32>\n"
            "%0 = stablehlo.sine %arg0 : tensor<4x4xf32>"
        ),
        r"has a value of type tensor<\?xf32>; only arrays of known shapes",
    ),
    "a value of an exabyte": (
        lambda: written(
            "%c = stablehlo.constant dense<0.0> : tensor<f32>\n"
            "%b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<1099511627776x1048576xf32>\n"
            "%0 = stablehlo.sine %arg0 : tensor<4x4xf32>"
        ),
        "of more than 17592186044416 bytes",
    ),
    "a value without elements whose other sizes overflow": (
        lambda: written(
            "%c = stablehlo.constant dense<0.0> : tensor<f32>\n"
            "%b = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<1099511627776x1048576x0xf32>\n"
            "%0 = stablehlo.sine %arg0 : tensor<4x4xf32>"
        ),
        "of more than 17592186044416 bytes",
    ),
    "another function than it says": (
        lambda: written("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>", in_avals=exported(jnp.abs, FIVE).in_avals),
        r"its code has arguments \(tensor<4x4xf32>\), and it says \(tensor<5xi8>\)",
    ),
    "another result than it says": (
        lambda: written("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>", out_avals=exported(lambda v: v.sum()).out_avals),
        r"its code has results \(tensor<4x4xf32>\), and it says \(tensor<f32>\)",
    ),
    "arguments that are not there": (
        lambda: written("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>", module_kept_var_idx=(7,)),
        r"it keeps arguments \(7,\) of 1",
    ),
    "an old convention": (
        lambda: written("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>", calling_convention_version=1),
        "its calling convention has version 1; this runtime knows",
    ),
    "no StableHLO": (
        lambda: blob_of(dataclasses.replace(exported(jnp.sin), mlir_module_serialized=b"ML\xefR nonsense")),
        "its StableHLO cannot be read",
    ),
    "nothing": (lambda: b"", "it is no exported function"),
    "pickle": (lambda: b"\x80\x04\x95\x0c\0\0\0\0\0\0\0\x8c\x08builtins\x94.", "it is no exported function"),
    "symbolic shapes": (
        lambda: blob_of(
            exported(jnp.sin, jax.ShapeDtypeStruct(export.symbolic_shape("n, 2"), np.float32))
        ),
        r"argument 0 has a shape that depends on others: \(n, 2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("blob", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(blob: Callable[[], bytes], message: str) -> None:
    with pytest.raises(ProgramRefused, match=message):
        allowlist.check_function(blob())


def test_what_is_written_by_hand_is_not_refused_for_that() -> None:
    allowlist.check_function(written("%0 = stablehlo.sine %arg0 : tensor<4x4xf32>"))
    allowlist.check_function(written(CALL, chain(30, 1, "")))
    allowlist.check_function(written(nested(30)))


@pytest.mark.parametrize(
    "said",
    [
        "mhlo.use_auto_spmd_partitioning = true",
        """mhlo.input_output_alias = [
            {alias = {kind = "must_alias", parameter_index = array<i64>, parameter_number = 0 : i64},
             output_index = array<i64: 0>}]""",
        """mhlo.frontend_attributes = {xla.sdy.meshes = "{}"}""",
    ],
)
def test_what_a_module_says_of_itself_is_what_jax_says(said: str) -> None:
    """By the first XLA ends the process that compiles it, by the second it takes the memory of an argument."""
    like = exported(lambda v: v + 1)
    text = like.mlir_module()
    assert text.count("mhlo.num_replicas = 1 : i32}") == 1
    blob = from_text(text.replace("mhlo.num_replicas = 1 : i32}", f"mhlo.num_replicas = 1 : i32, {said}}}"), like)
    with pytest.raises(ProgramRefused, match=rf"its module has the attribute {said.split()[0]}, which"):
        allowlist.check_function(blob)
    assert allowlist.check_function(blob, trusted=True) == 0


def test_limits_of_size(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = np.random.default_rng(0).random((64, 64)).astype(np.float32)
    big = blob_of(exported(lambda v: v + jnp.asarray(constant)[:4, :4]))
    allowlist.check_function(big)
    monkeypatch.setattr(limits, "MAX_CONSTANT_BYTES", 10_000)
    with pytest.raises(ProgramRefused, match=r"its constants have 163.. bytes; 10000 are the limit"):
        allowlist.check_function(big)
    monkeypatch.setattr(limits, "MAX_OPERATIONS", 4)
    with pytest.raises(ProgramRefused, match="operations"):
        allowlist.check_function(blob_of(exported(lambda v: jnp.sin(jnp.cos(jnp.exp(jnp.tanh(v)))))))


# --- the sandbox ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checker() -> Iterator[Sandbox]:
    made = Sandbox(3)
    yield made
    made.close()


def digest(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


def check(checker: Sandbox, *blobs: bytes) -> None:
    functions = {digest(blob): blob for blob in blobs}
    checker.check("f", list(functions), functions)


def test_verdicts_come_from_another_process(checker: Sandbox) -> None:
    good, bad = blob_of(exported(jnp.sin)), written(CALLS.format("evil"))
    check(checker, good)
    with pytest.raises(ProgramRefused, match="f is refused on host 3: custom call 'evil' is not among those"):
        check(checker, bad)
    # Of a program's functions only those that are asked for count; the others are known afterwards.
    other = blob_of(exported(jnp.cos))
    functions = {digest(blob): blob for blob in (other, bad)}
    checker.check("g", [digest(other)], functions)
    with pytest.raises(ProgramRefused, match="g is refused"):
        checker.check("g", [digest(bad)], functions)


def test_functions_ahead_of_their_program_are_refused_with_it() -> None:
    """1. What comes ahead raises nothing. 2. Its verdicts are known to the program: the checker has not to be asked."""
    made = Sandbox(3)
    try:
        good, bad = blob_of(exported(jnp.sin)), written(CALLS.format("evil"))
        for blobs in ([good], [bad]):
            made.check_ahead({digest(blob): blob for blob in blobs}, trusted=False)
    finally:
        made.close()
    check(made, good)
    with pytest.raises(ProgramRefused, match="custom call 'evil'"):
        check(made, bad)


@pytest.mark.slow
def test_some_hundred_broken_functions_harm_nobody(checker: Sandbox) -> None:
    """About one in a hundred would crash this process, or keep it busy, if it read them itself."""
    rng = random.Random(1)
    whole = [blob_of(exported(f)) for f in (jnp.sin, USUAL["random"], USUAL["sorting"])]
    check(checker, whole[0])
    there = checker.worker._process
    found: collections.Counter[str] = collections.Counter()
    for number in range(300):
        data = bytearray(whole[number % 3])
        match rng.randrange(4):
            case 0:
                for _ in range(rng.randint(1, 3)):
                    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case 2:
                at = rng.randrange(len(data))
                data[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 8))
            case _:
                at, to = rng.randrange(len(data)), rng.randrange(len(data))
                data[at : at + 20] = data[to : to + 20]
        try:
            check(checker, bytes(data))
            found["allowed"] += 1
        except ProgramRefused as error:
            found["crashed" if sandbox.UNREAD in str(error) else "refused"] += 1
    print(found)
    assert found["refused"] > 200
    assert checker.worker._process is there, "what crashes is a fork, which is expected to"
    check(checker, whole[1])


TROUBLES = {
    "crash": "import os; os.kill(os.getpid(), 11)",
    "hang": "while True: pass",
    "sleep": "import time; time.sleep(1000)",
    "memory": "x = bytearray(20 << 30)",
    "files": "open(os.environ['HOME'] + '/written-by-a-sandbox', 'w').write('x' * 100000)",
    "exit": "import os; os._exit(0)",
    "reading": "open('/etc/hostname').read()",
    "reading around Python": "ctypes.CDLL(None).open(b'/etc/hostname', 0) >= 0 or os._exit(0)",
    "connecting": "socket.socket().connect(('127.0.0.1', 1))",
    "a signal to its parent": "os.kill(os.getppid(), 9)",
    "a new process": "os.fork()",
    "another program": "os.execv('/bin/true', ['true'])",
    "reading the memory of its parent": "ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)",
    "an answer without end": (
        "pipe = max(fd for fd in range(64) if alive(fd))\n        while os.write(pipe, b'x' * 65536): pass"
    ),
}


@pytest.mark.parametrize("trouble", some(TROUBLES))
def test_a_reader_in_trouble_is_a_refusal(trouble: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The checker's process loads an `allowlist` that does something else; its caller gets a refusal in bounded time,
    and the next program is read as if nothing had been. What was late by the clock alone is not refused for good."""
    package = tmp_path / "sitecustomize.py"
    package.write_text(
        "import ctypes, os, socket, sys, types\n"
        "if 'pathways_ray.executor.compile.sandbox' in ' '.join(sys.orig_argv):\n"
        "    from pathways_ray.executor.compile import sandbox\n"
        "    fake = types.ModuleType('pathways_ray.executor.compile.allowlist')\n"
        "    def alive(fd):\n"
        "        try:\n"
        "            return os.write(fd, b'') == 0\n"
        "        except OSError:\n"
        "            return False\n"
        "    def verdicts(blobs, trusted=False):\n"
        "        if blobs in ([b'good'], [b'']):\n"
        "            return [('', 0)]\n"
        f"        {TROUBLES[trouble]}\n"
        "    fake.verdicts = verdicts\n"
        "    sys.modules['pathways_ray.executor.compile.allowlist'] = fake\n"
        "    import pathways_ray.executor; pathways_ray.executor.compile.allowlist = fake\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    limit = 2.0 if trouble == "sleep" else sandbox.READ_LIMIT_S
    source = f"import pathways_ray.executor.compile.sandbox as s; s.READ_LIMIT_S = {limit}; s.main()"
    made = Sandbox(0, command=("-c", source))
    try:
        made.check("f", ["0"], {"0": b"good"})  # it runs
        start = time.monotonic()
        late = CompileError, "f could not be checked on host 0: it took longer than 2 s, perhaps since its machine is"
        kind, text = late if trouble == "sleep" else (ProgramRefused, "f is refused on host 0")
        with pytest.raises(kind, match=text):
            made.check("f", ["1"], {"1": b"bad"})
        assert time.monotonic() - start < sandbox.READ_LIMIT_S
        made.check("f", ["2"], {"2": b"good"})
        assert made.worker._process is not None
        forks = psutil.Process(made.worker._process.pid).children()
        assert len(forks) <= 1  # that of the last answer, which came before it was over
        assert not psutil.wait_procs(forks, 10)[1]
        written = tmp_path / "written-by-a-sandbox"
        assert not written.exists() or written.stat().st_size == 0
    finally:
        made.close()


def test_a_checker_that_is_killed_is_started_anew(checker: Sandbox) -> None:
    check(checker, blob_of(exported(jnp.sinh)))
    assert checker.worker._process is not None
    checker.worker._process.kill()
    check(checker, blob_of(exported(jnp.cosh)))


def test_without_a_checker_nothing_is_allowed() -> None:
    broken = Sandbox(5, command=("-c", "pass"))
    with pytest.raises(CompileError, match="host 5 cannot check functions: its checker does not run"):
        broken.check("f", ["1"], {"1": b""})
    broken.close()


def test_the_checker_ends_with_its_owner_and_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret of the cluster")
    made = Sandbox(0)
    made.start()
    assert made.worker._process is not None
    process = psutil.Process(made.worker._process.pid)
    deadline = time.monotonic() + 60
    while not (given := process.environ()) and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel shows none while it begins
    assert "secret of the cluster" not in given.values()
    assert "PATH" in given or "PATH" not in os.environ
    made.worker._process.stdin.close()  # type: ignore[union-attr]
    process.wait(60)  # it may still be importing JAX
    made.close()


def test_several_threads_may_ask(checker: Sandbox) -> None:
    blobs = [blob_of(exported(lambda v, k=k: v * k)) for k in range(8)]
    errors: list[BaseException] = []

    def ask(blob: bytes) -> None:
        try:
            check(checker, blob)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(blob,)) for blob in blobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_the_filter_lets_through_what_readers_need_and_no_more() -> None:
    """The packet filter, run by hand: for each architecture, a call of each kind."""
    ends = {0x7FFF0000: "allow", 0x00050001: "fail", 0x80000000: "kill"}

    def run(machine: str, number: int, architecture: int) -> str:
        lines = list(struct.iter_unpack("HBBI", confinement.filter_of(machine)))
        assert max(max(line[1:3]) for line in lines) < 256
        at, loaded = 0, 0
        while True:
            code, if_true, if_false, value = lines[at]
            match code:
                case 0x20:
                    loaded = {0: number, 4: architecture}[value]
                case 0x15:
                    at += if_true if loaded == value else if_false
                case 0x35:
                    at += if_true if loaded >= value else if_false
                case 0x06:
                    return ends[value]
            at += 1

    x86, arm = 0xC000003E, 0xC00000B7
    assert [run("x86_64", n, x86) for n in (0, 1, 9, 231, 2, 257, 41, 42, 57, 59, 62, 101, 310)] == (
        ["allow"] * 4 + ["fail"] * 2 + ["kill"] * 7
    )
    assert [run("aarch64", n, arm) for n in (63, 64, 222, 94, 56, 198, 203, 220, 221, 129, 117, 270)] == (
        ["allow"] * 4 + ["fail"] + ["kill"] * 7
    )
    assert run("x86_64", 0, arm) == run("x86_64", 0x40000000, x86) == "kill"


def test_a_checker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "REPLY_LIMIT_S", 0.5)
    stuck = Sandbox(5, command=("-c", "import time; time.sleep(1000)"))
    with pytest.raises(CompileError, match="host 5 cannot check functions: its checker does not run"):
        stuck.check("f", ["1"], {"1": b"x" * (1 << 20)})
    stuck.close()


def test_a_function_for_another_number_of_devices_is_refused(checker: Sandbox) -> None:
    mapped = jax.shard_map(lambda s: jax.lax.psum(s, "x"), mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=False)
    blob = blob_of(exported(mapped))
    checker.check("f", [digest(blob)], {digest(blob): blob}, devices=4)
    with pytest.raises(ProgramRefused, match="f is refused on host 3: it was exported for 4 devices; its slice has 8"):
        checker.check("f", [digest(blob)], {digest(blob): blob}, devices=8)


def test_trust_is_not_mixed_up(checker: Sandbox) -> None:
    blob = blob_of(exported(lambda v: v + jax.lax.empty((4, 4), np.float32), platforms=("cuda",)))
    for _ in range(2):
        checker.check("f", [digest(blob)], {digest(blob): blob}, trusted=True)
        with pytest.raises(ProgramRefused, match="custom call 'AllocateBuffer' is not among those"):
            checker.check("f", [digest(blob)], {digest(blob): blob})


def test_a_host_that_cannot_confine_its_checker_allows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from pathways_ray.executor.compile import confinement as c, sandbox as s\nc._PR_SET_SECCOMP = 9999\ns.main()"
    )
    made = Sandbox(3, command=("-c", source))
    with pytest.raises(ProgramRefused, match=r"its kernel takes no filter of system calls \(Invalid argument\)"):
        check(made, blob_of(exported(jnp.sin)))
    made.close()


def test_reading_opens_nothing(tmp_path: Any) -> None:
    """What is opened late would fail in a confined process, again and again."""
    for number, function in enumerate(USUAL.values()):
        (tmp_path / str(number)).write_bytes(blob_of(exported(function)))
    source = (
        "import pathlib, sys\n"
        "from pathways_ray.executor.compile.sandbox import load\n"
        "allowlist, opened = load(), []\n"
        "blobs = [path.read_bytes() for path in pathlib.Path(sys.argv[1]).iterdir()]\n"
        "sys.addaudithook(lambda name, given: opened.append(given[0]) if name in ('open', 'import') else None)\n"
        "assert [refused for refused, _ in allowlist.verdicts([*blobs, b'broken'])][:-1] == [''] * len(blobs)\n"
        "assert not opened, opened\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", source, str(tmp_path)], check=True, env=environment)
