"""The threads of a host, without the rest of a runtime: messages in, computations on real devices, reports out."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import export

from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data.buffer_store import BufferStore
from pathways_ray.executor.profiling.profiler import LaunchTrace
from pathways_ray.executor.run.dispatcher import Dispatcher
from pathways_ray.transport.messages import (
    Done,
    Drop,
    IslandLaunch,
    IslandLaunchFailed,
    Message,
    Peers,
    Program,
    Ready,
    ToHost,
)
from tests.unit.helpers import SCALAR, Sketch

LIMIT_S = 60.0


class NoPeers:
    """Transfers of a host that is alone."""

    def own(self, array: Any) -> Any:
        return array

    def copy(self, array: Any) -> Any:
        return jnp.copy(array)

    def set_peers(self, peers: Any) -> None:
        """The host is alone."""


class Served:
    """A dispatcher with its scheduler."""

    def __init__(self) -> None:
        jax.config.update("jax_enable_x64", True)
        self.sent: queue.SimpleQueue[Message] = queue.SimpleQueue()
        devices = jax.local_devices()[:1]
        self.store = BufferStore()
        compiler = Compiler(0, devices, {0: devices})
        self.dispatcher = Dispatcher(0, compiler, self.store, NoPeers(), self.sent.put, (0,))  # type: ignore[arg-type]
        self.dispatcher.start()
        self.store.put(1, 1, jax.device_put(np.uint64(1), devices[0]))

    def receive(self, *messages: ToHost) -> None:
        self.dispatcher.inbox.put(list(messages))

    def next(self) -> Any:
        return self.sent.get(timeout=LIMIT_S)

    def ended(self, count: int) -> list[int]:
        """The next launches that are done."""
        found: list[int] = []
        while len(found) < count:
            message = self.next()
            assert isinstance(message, Done)
            found += message.sequences
        return found


def program(number: int, function: Any, digest: str = "f") -> Program:
    """A call of a function of a scalar on device 0.0."""
    sketch = Sketch()
    here = sketch.slice("0.0")
    result = sketch.call(digest, sketch.argument(here, type=SCALAR), slice=here, outputs=(SCALAR,))
    plan = sketch.planned(result).plans[0]
    exported = export.export(jax.jit(function))(jax.ShapeDtypeStruct((), np.uint64)).serialize()
    return Program(number, msgspec.msgpack.encode(plan), {digest: bytes(exported)})


@pytest.fixture(scope="module")
def host() -> Iterator[Served]:
    before = jax.config.jax_enable_x64
    made = Served()
    made.receive(Peers(()), program(1, lambda x: (x + 1,)))
    ready = made.next()
    assert isinstance(ready, Ready)
    assert ready.failure is None
    yield made
    jax.config.update("jax_enable_x64", before)


def test_a_chain_of_launches_gives_its_values_and_one_report_each(host: Served) -> None:
    host.receive(*[IslandLaunch(k, 1, 1, (1 if k == 10 else k - 1,), k) for k in range(10, 20)])
    assert host.ended(10) == list(range(10, 20))
    assert np.asarray(host.store.get(1, 19)) == 11
    host.receive(Drop(1, tuple(range(10, 20))), IslandLaunch(20, 1, 1, (1,), 20))
    assert host.ended(1) == [20]
    assert host.store.get(1, 19) is None


def test_a_lost_argument_fails_the_launch(host: Served) -> None:
    host.receive(IslandLaunch(30, 1, 1, (999,), 30))
    failed = host.next()
    assert isinstance(failed, IslandLaunchFailed)
    assert (failed.sequence, failed.failure.kind) == (30, "BufferLost")


def test_a_program_that_cannot_be_compiled_is_reported(host: Served) -> None:
    wrong = program(2, lambda x: (x + 1,), digest="g")
    host.receive(msgspec.structs.replace(wrong, functions={"g": b"no function"}))
    ready = host.next()
    assert isinstance(ready, Ready)
    assert ready.failure is not None
    assert ready.failure.kind in ("ProgramRefused", "CompileError")


def test_an_observer_sees_the_launches_while_it_is_there(host: Served) -> None:
    trace = LaunchTrace()
    host.dispatcher.observe(trace)
    host.receive(IslandLaunch(40, 1, 1, (1,), 40))
    assert host.ended(1) == [40]
    host.dispatcher.release(trace)
    host.receive(IslandLaunch(41, 1, 1, (1,), 41))
    assert host.ended(1) == [41]
    assert [(ran.sequence, ran.session) for ran in trace.entries] == [(40, 1)]
