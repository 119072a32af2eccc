"""The processes that read programs: what crashes or hangs one is an error of that program, and the next is read."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pathways_ray import limits
from pathways_ray.compat import serialized_module
from pathways_ray.ir.types import ArrayType
from pathways_ray.proxy.arrays import Code, Refused, Sharding
from pathways_ray.proxy.readers import Read, Readers
from tests.drawn import drawn

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

DAMAGED = 80
DEVICES = (0, 1, 2, 3)


def module(devices: int, steps: int = 1) -> bytes:
    """A matrix times itself some times, split by rows, as JAX sends it."""
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices("cpu")[:devices], axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))

    def run(v: jax.Array) -> jax.Array:
        for _ in range(steps):
            v = jax.numpy.tanh(v @ v)
        return v

    exported = export.export(jax.jit(run, in_shardings=rows, out_shardings=rows))(
        jax.ShapeDtypeStruct((8, 8), np.float32)
    )
    return bytes(exported.mlir_module_serialized)


@pytest.fixture(scope="module")
def readers() -> Iterator[Readers]:
    made = Readers(4)
    yield made
    made.close()


def check(readers: Readers) -> None:
    """Has an ordinary program read."""
    found = readers.read(Read(module(4), DEVICES, ("cpu",))).signature
    kind, split = ArrayType((8, 8), "float32"), Sharding(DEVICES, (2, 2), (("f0", "f1"),))
    assert (found.inputs, found.outputs, found.devices) == ((kind,), (kind,), DEVICES)
    assert (found.input_shardings, found.output_shardings) == ((split,), (split,))


def test_a_program_is_read_with_its_shardings_and_looked_at(readers: Readers) -> None:
    check(readers)
    program = readers.read(Read(module(1), (3,), ("cpu",)))
    assert program.signature.input_shardings == (Sharding.on(3),)
    assert readers.cost(program.module, 1)["flops"] >= 2 * 8**3
    assert "HloModule" in readers.text(program.module, 1)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_program_says_in_which_memory_its_results_are(readers: Readers, devices: int) -> None:
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices("cpu")[:devices], axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    kinds = rows.with_memory_kind("pinned_host"), rows, rows.with_memory_kind("unpinned_host")
    lowered = jax.jit(lambda v: (v + 1, v + 2, v + 3), in_shardings=rows, out_shardings=kinds).lower(np.zeros(8))
    data = serialized_module(lowered.compiler_ir("stablehlo"))
    signature = readers.read(Read(data, DEVICES[:devices], ("cpu",))).signature
    assert [one.memory for one in signature.output_shardings] == ["pinned_host", "device", "unpinned_host"]
    assert [one.memory for one in signature.input_shardings] == [""]


def test_a_value_that_nothing_can_hold_is_out_of_memory(readers: Readers) -> None:
    lowered = jax.jit(lambda: jax.numpy.zeros(1 << 45)).lower()
    data = serialized_module(lowered.compiler_ir("stablehlo"))
    with pytest.raises(Refused, match="larger than") as error:
        readers.read(Read(data, (0,), ("cpu",)))
    assert error.value.status.code == Code.RESOURCE_EXHAUSTED


def test_a_function_that_xla_does_not_know_is_not_found(readers: Readers) -> None:
    unknown = jax.ffi.ffi_call("of_nobody", jax.ShapeDtypeStruct((8,), np.float32))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2], axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    lowered = jax.jit(unknown, in_shardings=rows, out_shardings=rows).lower(np.zeros(8, np.float32))
    data = serialized_module(lowered.compiler_ir("stablehlo"))
    with pytest.raises(Refused, match="of_nobody") as error:
        readers.read(Read(data, DEVICES[:2], ("cpu",)))
    assert error.value.status.code == Code.NOT_FOUND


ALWAYS_REFUSES = """
import msgspec, sys, time
from pathways_ray.worker import _read_frame, _write
_read_frame(sys.stdin.buffer)
_write(sys.stdout.buffer, bytes([1]) + msgspec.msgpack.encode([3, "no"]))
time.sleep(1000)
"""


def test_who_asks_when_the_proxy_has_ended_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.proxy.readers.COMMAND", ("-c", ALWAYS_REFUSES))
    made = Readers(4)
    made.close()
    with pytest.raises(Refused, match="no"):
        made.text(b"", 1)
    assert made._all[0]._process is None


MALFORMED: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "text": lambda data: b"module { func.func public @main() { return }",
    "a version to come": lambda data: data[:4] + b"\x7f" + data[5:],
    "nested without end": lambda data: b"module {" * 100_000,
    "no main": lambda data: data.replace(b"main", b"mian"),
    "zeros": lambda data: bytes(len(data)),
    "twice": lambda data: data + data,
}


@pytest.mark.parametrize("how", MALFORMED)
def test_a_malformed_program_is_refused(readers: Readers, how: str) -> None:
    data = module(4)
    damaged = MALFORMED[how](data)
    assert damaged != data
    with pytest.raises(Refused) as error:
        readers.read(Read(damaged, DEVICES, ("cpu",)))
    assert error.value.status.code in (Code.INVALID_ARGUMENT, Code.INTERNAL)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes with some bits turned, some cut out, or some twice."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(found))
        if draw.random() < 0.7:
            found[at] ^= 1 << draw.randrange(8)
        elif draw.random() < 0.5:
            del found[at : at + draw.randint(1, 16)]
        else:
            found[at:at] = found[at : at + draw.randint(1, 16)]
    return bytes(found)


@pytest.mark.timeout(300)
def test_whatever_damaged_programs_do_to_their_reader_the_next_one_is_read(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are read without end: the limit for that is shorter here, which is minutes."""
    for worker in readers._all:
        monkeypatch.setattr(worker, "reply_limit_s", 20.0)
    draw, refused, each = random.Random(17), 0, drawn(DAMAGED) // 2
    for data in (module(4), module(1, steps=3)):
        for _ in range(each):
            try:
                readers.read(Read(damaged(data, draw), DEVICES, ("cpu",)))
            except Refused:
                refused += 1
    assert refused > each
    check(readers)


def test_a_reader_that_crashes_or_takes_too_long_is_an_error_of_its_program(readers: Readers) -> None:
    """Slow ones are killed by the limit, and by hand as a crash does it."""
    check(readers)
    (worker, *_) = readers._all
    slow = Read(module(4, steps=200), DEVICES, ("cpu",))
    with patch.object(worker, "reply_limit_s", 0.05), pytest.raises(Refused, match="it took longer than 0 s"):
        readers.read(slow)
    check(readers)
    process = worker._process
    assert process is not None

    def crash() -> None:
        time.sleep(0.05)
        process.send_signal(signal.SIGSEGV)

    threading.Thread(target=crash).start()
    with pytest.raises(Refused, match="could not be read: its process crashed: SIGSEGV") as error:
        readers.read(slow)
    assert error.value.status.code == Code.INVALID_ARGUMENT
    check(readers)


def test_a_program_that_names_a_function_of_the_client_by_its_address_is_refused(readers: Readers) -> None:
    """XLA would call what lies there in the reader's own process. On one device it calls nothing."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices("cpu")[:4], axis_types=(AxisType.Auto,))

    def run(v: jax.Array) -> jax.Array:
        jax.debug.inspect_array_sharding(v, callback=print)
        return v

    def read(devices: tuple[int, ...]) -> None:
        given = NamedSharding(mesh, PartitionSpec("x")) if len(devices) > 1 else None
        lowered = jax.jit(run, in_shardings=given).lower(jax.ShapeDtypeStruct((8,), np.float32))
        readers.read(Read(serialized_module(lowered.compiler_ir()), devices, ("cpu",)))

    with pytest.raises(Refused, match=r"for jax\.debug\.inspect_array_sharding, and runs in another one") as error:
        read(DEVICES)
    assert error.value.status.code == Code.UNIMPLEMENTED
    read((0,))
    check(readers)


@pytest.mark.parametrize(
    ("dtype", "devices", "said"),
    [
        ("int2", (0,), "results of type int2 are not supported"),
        ("int2", DEVICES, "type int2 over several devices"),
        ("int4", DEVICES, "type int4 over several devices"),
        ("float4_e2m1fn", DEVICES, "type float4_e2m1fn over several devices"),
    ],
)
def test_types_that_cannot_be_are_said(readers: Readers, dtype: str, devices: tuple[int, ...], said: str) -> None:
    """Where they are arguments or results: inside of a program they are XLA's."""

    def read(inside: bool) -> None:
        def run(v: jax.Array) -> jax.Array:
            small = v.astype(dtype)
            return small.astype(np.float32) if inside else small

        lowered = jax.jit(run).lower(jax.ShapeDtypeStruct((8,), np.float32))
        readers.read(Read(serialized_module(lowered.compiler_ir()), devices, ("cpu",)))

    with pytest.raises(Refused, match=said) as error:
        read(inside=False)
    assert error.value.status.code == Code.UNIMPLEMENTED
    if devices == (0,):
        read(inside=True)


def test_too_big_a_program_is_not_sent_to_a_reader(readers: Readers) -> None:
    with patch.object(limits, "MAX_PROGRAM_BYTES", 100), pytest.raises(Refused, match="100 are the limit") as error:
        readers.read(Read(module(4), DEVICES, ("cpu",)))
    assert error.value.status.code == Code.RESOURCE_EXHAUSTED


def test_a_program_waits_for_a_reader_and_a_further_one_is_started_only_then(readers: Readers) -> None:
    check(readers)
    found: list[object] = []

    def read() -> None:
        found.append(readers.read(Read(module(4, steps=100), DEVICES, ("cpu",))).digest)

    before = len(readers._all)
    with patch("pathways_ray.proxy.readers.PATIENCE_S", 0.001):
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert before < len(readers._all) <= 4
