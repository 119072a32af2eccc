"""Trees that another host of the machine sends: what comes lands in the arrays at once."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pathways_ray.errors import Failure
from pathways_ray.executor.compile.compiler import Compiler
from pathways_ray.executor.data import edges, near_offers, near_pulls
from pathways_ray.executor.data.arriving import Landing
from pathways_ray.executor.data.device_transfer import DeviceTransfer
from pathways_ray.executor.data.edges import Incoming, Outgoing
from pathways_ray.ir.plan import Bundle, Edge
from pathways_ray.ir.types import ArrayType, Layout, Spec
from pathways_ray.jax_arrays import shards_of
from pathways_ray.transport import neighbours, peer_memory
from pathways_ray.transport.messages import Peer
from pathways_ray.transport.shared_memory import aligned
from tests.unit.helpers import placed, spec
from tests.waiting import until

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

SOURCE, TARGET = placed(1, ["0.0", "0.1", "0.2", "0.3"]), placed(2, ["1.0", "1.1", "1.2", "1.3"])
ROWS, COLUMNS = spec("x"), spec("- x")
TYPES = [
    ArrayType(shape, dtype)
    for dtype in ("float32", "bfloat16", "int8", "bool")
    for shape in ((8, 4), (12, 8), (400, 320), (8, 4, 3))
]


def compilers() -> list[Compiler]:
    devices = jax.local_devices()
    of = {0: devices[:4], 1: devices[4:8]}
    return [Compiler(host, of[host], of) for host in (0, 1)]


def hosts() -> tuple[DeviceTransfer, DeviceTransfer]:
    client, machine = jax.local_devices()[0].client, neighbours.machine()
    made = [DeviceTransfer(host, client, "127.0.0.1", "the link secret", machine) for host in (0, 1)]
    for one in made:
        one.set_peers(tuple(Peer(k, 1, other.address, machine=machine) for k, other in enumerate(made)))
    sender, receiver = made
    return sender, receiver


class Moves:
    """A tree of these types, of which host 0 has arrays, and which host 1 takes; there nothing is to be joined unless
    it `joins`."""

    def __init__(self, types: list[ArrayType], before: Spec, after: Spec, joins: bool) -> None:
        bundle = Bundle(1, 2, tuple(Edge(kind, Layout(1, before), Layout(2, after)) for kind in types))
        (ours, theirs), (self.sender, self.receiver) = compilers(), hosts()
        self.outgoing = Outgoing(bundle, 0, SOURCE, TARGET, 0, ours)
        self.incoming = Incoming(bundle, 0, SOURCE, TARGET, 1, theirs)
        if not joins:
            self.incoming.joins.clear()
        self.types, self.put, self.get = types, ours.sharding(SOURCE, before), theirs.sharding(TARGET, after)

    def run(self, launch: int) -> tuple[list[Any], list[Any]]:
        """Values, and the arrays that they are on the other host."""
        random = np.random.default_rng(launch)
        values = [random.integers(0, 100, kind.shape).astype(jnp.dtype(kind.dtype)) for kind in self.types]
        pulled = self.incoming.post(launch, self.receiver)
        assert isinstance(pulled[0], list), pulled
        with pytest.raises(RuntimeError, match="not here yet"):
            pulled[0][0].arrays()
        self.outgoing.send([jax.device_put(value, self.put) for value in values], launch, self.sender)
        until(pulled[0][0].is_ready, "nothing came")
        made = self.incoming.assemble(pulled, None)
        assert not isinstance(made, Failure), made
        assert all(array.sharding == self.get for array in made)
        return values, list(made)


def check(moves: Moves) -> None:
    """Arrays come, and stay as they are when others do."""
    came = [moves.run(launch) for launch in (1, 2, 3)]
    for values, arrays in came:
        for value, array in zip(values, arrays, strict=True):
            np.testing.assert_array_equal(np.asarray(array), value)


@pytest.mark.parametrize("way", ["read", "in parts", "by two threads", "piped", "in a message"])
def test_what_lies_in_one_piece_there_is_not_joined(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    types = TYPES
    if way == "in parts":
        monkeypatch.setattr(peer_memory, "MAX_PLACES", 3)
    elif way == "by two threads":
        monkeypatch.setattr(peer_memory, "SHARE_BYTES", 1000)
        monkeypatch.setattr(peer_memory, "HELPED_BYTES", 1000)
    elif way == "piped":
        monkeypatch.setattr(near_offers, "places_of", lambda arrays: None)
    elif way == "in a message":
        types = [kind for kind in TYPES if kind.shape[0] < 100]
    for before, after in ((ROWS, COLUMNS), (ROWS, ROWS)):
        check(moves := Moves(types, before, after, joins=False))
        assert [landing.keeps for landing in moves.incoming.landings.values()] == [True]


@pytest.mark.parametrize(("before", "after"), [(COLUMNS, ROWS), (ROWS, spec("")), (spec(""), ROWS)])
def test_other_layouts_come_as_well(before: Spec, after: Spec) -> None:
    check(Moves(TYPES, before, after, joins=True))


@pytest.mark.parametrize(("dtype", "keeps"), [("float32", True), ("int4", False)])
def test_only_arrays_that_keep_the_memory_are_made_before_it_is_filled(dtype: str, keeps: bool) -> None:
    """XLA has two numbers of four bits in a byte, NumPy one."""
    where = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    kinds = [jax.ShapeDtypeStruct((8, 4), jnp.dtype(kind), sharding=where) for kind in (dtype, "int32")]
    landing = Landing(kinds, made=kinds)
    landing.arrays([aligned(size) for size in landing.rooms])
    assert landing.keeps is keeps
    rooms = [aligned(size) for size in landing.rooms]
    for room in rooms:
        room[:] = 0
    arrays = landing.arrays(rooms)
    for part in landing.buffers(rooms):
        part[:] = 1
    for array, kept in zip(arrays, (keeps, True), strict=True):
        assert (np.asarray(array).tobytes() == b"\1" * array.size * array.dtype.itemsize) == kept


def test_an_array_that_cannot_be_made_before_it_comes_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(TYPES, ROWS, COLUMNS, joins=False)
    moves.run(1)

    def none(self: Landing, rooms: Any) -> Any:
        raise RuntimeError("no array can be made")

    with monkeypatch.context() as patched:
        patched.setattr(Landing, "arrays", none)
        pulled = moves.incoming.post(2, moves.receiver)
    failure = moves.incoming.assemble(pulled, None)
    assert isinstance(failure, Failure)
    assert "no array can be made" in failure.message
    values, arrays = moves.run(3)
    np.testing.assert_array_equal(np.asarray(arrays[0]), values[0])


def test_arrays_that_came_together_can_be_overwritten_one_by_one() -> None:
    values, (first, second) = Moves([ArrayType((400, 320), "float32")] * 2, ROWS, COLUMNS, joins=False).run(1)
    jax.block_until_ready(jax.jit(lambda v: v * 0 - 1, donate_argnums=0)(first))
    assert first.is_deleted()
    np.testing.assert_array_equal(np.asarray(second), values[1])
    assert [shard.shape for shard in shards_of(second)] == [(400, 80)] * 4


def test_of_large_arrays_and_of_whole_shards_nothing_is_made_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA overwrites in place what it has joined. Of whole shards nothing is joined."""
    small, whole = ArrayType((400, 320), "float32"), ArrayType((800, 400), "float32")
    assert Moves([small], ROWS, COLUMNS, joins=True).incoming.lands_joined
    assert not Moves([whole], ROWS, ROWS, joins=True).incoming.lands_joined, "each piece is a shard"
    monkeypatch.setattr(edges, "LANDED_BYTES", 400 * 80 * 4 - 1)
    for types, after in (([small], COLUMNS), ([ArrayType((8, 4), "int8"), small], COLUMNS), ([whole], ROWS)):
        check(moves := Moves(types, ROWS, after, joins=True))
        assert not moves.incoming.lands_joined
        assert [landing.keeps for landing in moves.incoming.landings.values()] == [False]


def test_what_comes_twice_is_read_once_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in use would change."""
    moves = Moves([ArrayType((400, 320), "float32")], ROWS, COLUMNS, joins=False)
    moves.run(1)
    reading, may_go_on, begun = peer_memory.PeerMemory.read, threading.Event(), list[int]()
    keep = near_offers.NearOffers._keep

    def waits(self: peer_memory.PeerMemory, *args: Any) -> None:
        begun.append(1)
        may_go_on.wait(60)
        reading(self, *args)

    def twice(self: near_offers.NearOffers, connection: Any, name: int, offer: Any) -> bool:
        return all(keep(self, connection, name, offer) for _ in range(2))

    with monkeypatch.context() as patched:
        patched.setattr(near_pulls, "READ_AT_ONCE_BYTES", 0)
        patched.setattr(peer_memory.PeerMemory, "read", waits)
        patched.setattr(near_offers.NearOffers, "_keep", twice)
        pulled = moves.incoming.post(2, moves.receiver)
        moves.outgoing.send([jnp.zeros((400, 320), "float32", device=moves.put)], 2, moves.sender)
        assert isinstance(pulled[0], list)
        until(pulled[0][0].is_ready, "nothing came")
        may_go_on.set()
        failure = moves.incoming.assemble(pulled, None)
    assert isinstance(failure, Failure)
    assert failure.kind == "HostLost"
    assert len(begun) <= 1
    values, arrays = moves.run(3)
    np.testing.assert_array_equal(np.asarray(arrays[0]), values[0])


def test_what_is_read_at_once_is_not_read_again_where_it_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves([ArrayType((400, 320), "float32")], ROWS, COLUMNS, joins=False)
    moves.run(1)
    reading, begun, keep = peer_memory.PeerMemory.read, list[int](), near_offers.NearOffers._keep

    def counted(self: peer_memory.PeerMemory, *args: Any) -> None:
        begun.append(1)
        reading(self, *args)

    def twice(self: near_offers.NearOffers, connection: Any, name: int, offer: Any) -> bool:
        return all(keep(self, connection, name, offer) for _ in range(2))

    with monkeypatch.context() as patched:
        patched.setattr(peer_memory.PeerMemory, "read", counted)
        patched.setattr(near_offers.NearOffers, "_keep", twice)
        values, arrays = moves.run(2)
    np.testing.assert_array_equal(np.asarray(arrays[0]), values[0])
    assert begun == [1]
