"""Arrays that have the memory of shards in common: what one is overwritten for, the others keep."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.compile.jax_parts import CompiledParts
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.executor.data.edges import Incoming, Outgoing
from pathways_ray.executor.data.equal_uploads import EqualUploads
from pathways_ray.executor.data.shared_shards import OnTheWay
from pathways_ray.ir.plan import Bundle, Edge, PlacedSlice, Regroup
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.jax_arrays import shards_of
from pathways_ray.transport.messages import Peer
from tests.unit.executor.data.uploads import uploaded
from tests.unit.helpers import placed, spec

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

TYPE = ArrayType((8, 6), "float32")
V = np.arange(48, dtype=np.float32).reshape(8, 6)


class Place(NamedTuple):
    """A layout on devices of host 0, or of others."""

    devices: tuple[str, ...]
    cut: str = ""
    shape: tuple[int, ...] = ()

    def slice(self, number: int) -> PlacedSlice:
        return placed(number, self.devices, self.shape)


FOUR = Place(("0.0", "0.1", "0.2", "0.3"))
TWO = Place(("0.0", "0.1"))
ONE = Place(("0.1",))
PLACES = [
    FOUR,
    FOUR._replace(cut="x"),
    FOUR._replace(cut="x", shape=(2, 2)),
    TWO,
    TWO._replace(cut="x"),
    TWO._replace(devices=("0.1", "0.2"), cut="x"),
    ONE,
]


@functools.cache
def compiler() -> Compiler:
    devices = jax.local_devices()
    return Compiler(0, devices[:4], {0: devices[:4], 1: devices[4:8]})


def transfer() -> DeviceTransfer:
    return DeviceTransfer(0, jax.local_devices()[0].client, "127.0.0.1", "the link secret")


def array(place: Place) -> Any:
    """What a computation gave."""
    where = compiler().sharding(place.slice(1), spec(place.cut))
    return jax.jit(lambda v: v + 0, out_shardings=where)(V)


def edge(source: Place, target: Place) -> tuple[Outgoing, Incoming]:
    a, b = source.slice(1), target.slice(2)
    bundle = Bundle(1, 2, (Edge(TYPE, Layout(1, spec(source.cut)), Layout(2, spec(target.cut))),))
    return Outgoing(bundle, 0, a, b, 0, compiler()), Incoming(bundle, 0, a, b, 0, compiler())


def assembled(incoming: Incoming, local: Any) -> Any:
    made = incoming.assemble({}, local)
    assert not isinstance(made, Failure)
    return made[0]


def moved(x: Any, source: Place, target: Place, host: DeviceTransfer) -> Any:
    outgoing, incoming = edge(source, target)
    return assembled(incoming, outgoing.send([x], 1, host))


def memory(x: Any) -> set[int]:
    return {shard.unsafe_buffer_pointer() for shard in shards_of(x)}


def overwrite(x: Any, host: DeviceTransfer) -> None:
    owned = host.own(x)
    jax.block_until_ready(jax.jit(lambda v: v * 0 - 1, donate_argnums=0)(owned))
    assert owned.is_deleted()


def is_whole(x: Any) -> bool:
    return not any(shard.is_deleted() for shard in shards_of(x)) and np.asarray(x).tobytes() == V.tobytes()


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(PLACES, 2)))
def test_what_overwrites_one_end_of_a_transfer_leaves_the_other(source: Place, target: Place) -> None:
    host = transfer()
    for number in (0, 1):
        ends = [x := array(source), moved(x, source, target, host)]
        del x
        common = bool(memory(ends[0]) & memory(ends[1]))
        assert common == (host.own(ends[number]) is not ends[number]), "a copy is made where there is need of one"
        overwrite(ends.pop(number), host)
        assert is_whole(ends[0])


@pytest.mark.parametrize("given", range(4))
def test_so_do_longer_ways_and_several_of_one_source(given: int) -> None:
    host = transfer()
    x = array(FOUR)
    y, other = moved(x, FOUR, TWO, host), moved(x, FOUR, TWO, host)
    arrays = [x, y, other, moved(y, TWO, FOUR, host)]
    assert memory(x) & memory(y) & memory(other) & memory(arrays[3])
    overwrite(arrays.pop(given), host)
    assert all(map(is_whole, arrays))


@pytest.mark.parametrize("kept", ["source", "target"])
def test_the_last_one_that_has_memory_is_overwritten_in_place(kept: str) -> None:
    host = transfer()
    x = array(FOUR)
    y = moved(x, FOUR, TWO, host)
    last = x if kept == "source" else y
    assert host.own(last) is not last
    del x, y
    assert host.own(last) is last
    overwrite(last, host)


def test_what_is_on_its_way_is_copied_before_it_is_overwritten() -> None:
    host, x = transfer(), array(FOUR)
    outgoing, incoming = edge(FOUR, TWO)
    local = outgoing.send([x], 1, host)
    assert isinstance(local, OnTheWay)
    overwrite(x, host)
    y = assembled(incoming, local)
    assert is_whole(y)
    del local
    assert host.own(y) is not y, "its source is there"
    del x
    assert host.own(y) is y


def test_what_peers_read_is_copied_as_long_as_anybody_has_it() -> None:
    host, x = transfer(), array(FOUR)
    host.set_peers((Peer(1, 1, "127.0.0.1:1"),))
    away, _ = edge(FOUR, Place(("1.0", "1.1", "1.2", "1.3")))
    y = moved(x, FOUR, TWO, host)
    assert away.send([x], 2, host) == []
    for number in (0, 1):
        assert host.own((x, y)[number]) is not (x, y)[number]
    del x
    assert host.own(y) is not y


def test_another_session_keeps_what_it_has_uploaded_alike() -> None:
    """1. Two sessions of a tenant have one array. 2. The first one takes it to another slice, drops it, and has what
    came there overwritten."""
    host, one = transfer(), Place(("0.0",))
    uploads = EqualUploads(compiler().devices)
    host.take_out = uploads.take_out
    value = np.random.default_rng(0).standard_normal(1 << 12).astype(np.float32)
    first, second = (uploads.one_of("a", session, *uploaded(value, shared=False)) for session in (1, 2))
    assert first is second
    bundle = Bundle(1, 2, (Edge(ArrayType(value.shape, "float32"), Layout(1, spec("x")), Layout(2, ())),))
    ends = one.slice(1), FOUR.slice(2)
    outgoing, incoming = Outgoing(bundle, 0, *ends, 0, compiler()), Incoming(bundle, 0, *ends, 0, compiler())
    y = assembled(incoming, outgoing.send([first], 1, host))
    assert memory(y) & memory(first)
    del first
    overwrite(y, host)
    assert np.asarray(second).tobytes() == value.tobytes()


def regrouping(shards: tuple[tuple[int, int], ...], target: Place) -> Callable[..., Any]:
    slices = {1: FOUR.slice(1), 2: target.slice(2)}
    parts = CompiledParts.__new__(CompiledParts)
    parts.plan = SimpleNamespace(placed=slices.__getitem__, slots=(1, 1, 2))  # type: ignore[assignment]
    parts.compiler = compiler()
    return parts.regroup(Regroup(0, (0, 1), shards, TYPE, Layout(2, spec(target.cut)), 2))


@pytest.mark.parametrize("given", range(3))
def test_sources_and_result_of_a_regroup_keep_their_memory(given: int) -> None:
    host = transfer()
    x, y = array(FOUR), array(FOUR)
    arrays = [x, y, regrouping(((0, 0), (1, 1)), TWO)(x, y)]
    assert is_whole(arrays[2])
    assert memory(x) & memory(arrays[2])
    assert memory(y) & memory(arrays[2])
    del x, y
    overwrite(arrays.pop(given), host)
    assert all(map(is_whole, arrays))
    last = arrays.pop()
    arrays.clear()
    assert host.own(last) is last
