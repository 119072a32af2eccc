"""A client's data streams: the memory and the time that arrays take on their way, and messages that make no sense."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray import limits
from pathways_ray.client import data as data_module
from pathways_ray.client import data_link
from pathways_ray.client.array_pieces import ArrayFile, Copies, FetchedArray, FetchPlan
from pathways_ray.client.data import DataLinks
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.errors import Failure, HostLost, SessionClosed
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.transport import frames
from pathways_ray.transport.messages import FetchPart, FetchShards, HostAddress, PutDone, encode
from pathways_ray.transport.shared_memory import SharedFile, offsets
from tests.waiting import until

MIB = 1 << 20
LIMIT_S = 20.0


def fetched(fetching: FetchedArray, array: np.ndarray[Any, Any], part_bytes: int = limits.PART_BYTES) -> None:
    """Has the shards of an array come, each from host 0, in parts."""
    for device, (box, _) in enumerate(fetching.plan.shards):
        data = np.ascontiguousarray(array[tuple(slice(a, b) for a, b in box)]).tobytes()
        for at in range(0, max(len(data), 1), part_bytes):
            fetching.by_host[0].add(FetchPart(1, device, at, len(data), data[at : at + part_bytes]))


def on_devices(count: int) -> PlacedSlice:
    return PlacedSlice.on(SliceType(1, (count,), ("x",)), 0, tuple(Device(0, k) for k in range(count)))


def plan_of(array: np.ndarray[Any, Any], spec: Any, devices: int) -> FetchPlan:
    return FetchPlan.of_array(ArrayType(array.shape, array.dtype.name), spec, on_devices(devices))


@pytest.mark.parametrize(
    ("spec", "most"), [((), 1.0), ((("x",), ()), 1.0), (((), ("x",)), 1.25)], ids=["whole", "rows", "columns"]
)
def test_a_fetch_takes_once_the_memory_of_its_array(spec: Any, most: float) -> None:
    """Each part comes to its place. Of shards that are not in one piece, one at a time comes to memory of its own."""
    array = np.arange(1 << 22, dtype=np.float32).reshape(2048, 2048)
    fetching = FetchedArray(plan_of(array, spec, 4))
    tracemalloc.start()
    try:
        fetched(fetching, array)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert fetching.is_there
    np.testing.assert_array_equal(fetching.value(), array)
    sent = 3 * array.nbytes // len(fetching.plan.shards)  # what this test makes of a shard
    assert peak < most * array.nbytes + sent + MIB


@given(st.data())
def test_shards_come_to_their_places_in_any_order(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 2, 4, 6]), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    cut = data.draw(st.integers(0, len(shape)))
    spec = tuple(("x",) if k == cut else () for k in range(len(shape)))
    fetching = FetchedArray(plan_of(array, spec, 2))
    parts = []
    for device, (box, _) in enumerate(fetching.plan.shards):
        piece = np.ascontiguousarray(array[tuple(slice(a, b) for a, b in box)]).tobytes()
        step = data.draw(st.integers(1, 64))
        cuts = range(0, max(len(piece), 1), step)
        parts.append([FetchPart(1, device, at, len(piece), piece[at : at + step]) for at in cuts])
    while any(parts):
        fetching.by_host[0].add(data.draw(st.sampled_from([one for one in parts if one])).pop(0))
    assert fetching.is_there
    np.testing.assert_array_equal(fetching.value(), array)


@given(st.data())
def test_small_shards_come_to_their_places_together(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 2, 4, 6]), min_size=1, max_size=3)))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    cut = data.draw(st.integers(0, len(shape)))
    placed = on_devices(2)
    if data.draw(st.booleans()):  # the second shard is on another host, or both are in the other order
        devices = data.draw(st.sampled_from([(Device(0, 0), Device(1, 3)), (Device(0, 1), Device(0, 0))]))
        placed = PlacedSlice.on(SliceType(1, (2,), ("x",)), 0, devices)
    spec = tuple(("x",) if k == cut else () for k in range(len(shape)))
    fetching = FetchedArray(FetchPlan.of_array(ArrayType(array.shape, array.dtype.name), spec, placed))
    boxes = {(device.host, device.index): box for box, device in fetching.plan.shards}
    for host, places in fetching.plan.by_host.items():
        found = [np.ascontiguousarray(array[tuple(slice(*edge) for edge in boxes[host, k])]) for k in places]
        shards = FetchShards(1, b"".join(one.tobytes() for one in found))
        assert not fetching.is_there
        for _ in range(data.draw(st.integers(1, 2))):  # a signal handler may have taken it as well
            assert fetching.by_host[host].add_all(shards)
    assert fetching.is_there
    value = fetching.value()
    np.testing.assert_array_equal(value, array)
    value += 1  # it is the caller's


def test_shards_of_another_size_are_refused() -> None:
    fetching = FetchedArray(plan_of(np.zeros(8, np.float32), (("x",),), 2))
    with pytest.raises(ValueError, match="31 bytes came for shards of 32"):
        fetching.by_host[0].add_all(FetchShards(1, bytes(31)))
    assert not fetching.is_there


@pytest.mark.parametrize("part", [(0, 0, 8), (0, -1, 16), (0, 12, 16), (7, 0, 16)])
def test_a_part_that_belongs_nowhere_is_refused(part: tuple[int, int, int]) -> None:
    device, offset, total = part
    fetching = FetchedArray(plan_of(np.zeros(8, np.float32), (("x",),), 2))
    with pytest.raises((ValueError, KeyError)):
        fetching.by_host[0].add(FetchPart(1, device, offset, total, bytes(8)))


@pytest.mark.parametrize(
    ("shape", "spec", "goes"),
    [
        ((64, 64), (("x",), ()), True),
        ((64, 64), (), True),
        ((1, 64, 64), ((), ("x",), ()), True),
        ((64, 64), ((), ("x",)), False),
        ((6, 7), (("x",), ()), False),  # its second box would not begin where XLA takes it as it is
    ],
)
def test_a_file_in_memory_goes_back_as_it_is_where_its_boxes_lie_so(shape: Any, spec: Any, goes: bool) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    file = SharedFile.create(array.nbytes)
    file.write(array, 0)
    plan = plan_of(array, spec, 2)
    boxes = tuple(dict.fromkeys(box for box, _ in plan.shards))
    made = Copies(ArrayFile(file, shape, array.dtype)).file(boxes)
    assert made is not None
    assert (made is file) is goes
    made.seal()  # nobody has it mapped to write
    size = array.nbytes // len(boxes)
    places, end = offsets([size] * len(boxes))
    whole = made.bytes(end)
    for place, box in zip(places, boxes, strict=True):
        piece = array[tuple(slice(a, b) for a, b in box)]
        assert whole[place : place + size].tobytes() == piece.tobytes()


class Hosts:
    """Hosts that read what comes, keep none of it, and answer each piece with what they are told to say."""

    def __init__(self, count: int, says: bytes = b"") -> None:
        self.read = [0] * count
        self.says = says
        self.go = threading.Event()
        self._servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        for k in range(count):
            threading.Thread(target=self._serve, args=(k,), daemon=True).start()

    def _serve(self, k: int) -> None:
        peer, _ = self._servers[k].accept()
        room = bytearray(1 << 16)
        with peer:
            self.go.wait(LIMIT_S)
            while size := peer.recv_into(room):
                self.read[k] += size
                peer.sendall(self.says)

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def addresses(self) -> tuple[HostAddress, ...]:
        names = [server.getsockname() for server in self._servers]
        return tuple(HostAddress(k, 1, f"{host}:{port}") for k, (host, port) in enumerate(names))


@contextmanager
def links_to(hosts: Hosts) -> Iterator[DataLinks]:
    made = DataLinks(7, "token", hosts.addresses())
    try:
        yield made
    finally:
        made.close(Failure("SessionClosed", "over"))
        hosts.close()


def on_hosts(count: int) -> PlacedSlice:
    return PlacedSlice.on(SliceType(1, (count,), ("x",)), 0, tuple(Device(k, 0) for k in range(count)))


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(((), ()), id="replicated", marks=pytest.mark.slow),
        pytest.param((("x",), ()), id="rows"),
        pytest.param(((), ("x",)), id="columns"),
    ],
)
def test_an_upload_takes_once_the_memory_of_its_array(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is copied once, so that the caller may change it; on four hosts as on one. Parts are made as they leave. The
    hosts never say whether they are on this machine, so that nothing goes in files."""
    monkeypatch.setattr(data_link, "DOOR_LIMIT_S", 0.01)
    array = np.ones((8192, 8192), np.float32)
    hosts = Hosts(4)
    with links_to(hosts) as data:
        tracemalloc.start()
        try:
            kind = ArrayType(array.shape, "float32")
            data.upload(1, array, kind, spec, on_hosts(4), "tag", lambda *_: None)
            hosts.go.set()
            each = array.nbytes if spec == ((), ()) else array.nbytes // 4
            until(lambda: min(hosts.read) >= each)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    under_way = 24 * MIB  # of each host: batches as they are encoded and sent, however big the array is
    assert peak < array.nbytes + 4 * under_way, f"{peak / array.nbytes:.2f} times the array"


def test_a_message_that_makes_no_sense_ends_what_waits() -> None:
    """A part that is longer than its array is no error of the protocol's own; the reader ends by it all the same."""
    sense = frames.frame(b"\x91" + encode(FetchPart(1, 0, 0, -5, b"x")))
    hosts = Hosts(1, says=sense)
    hosts.go.set()
    cover = FetchPlan.of_array(ArrayType((4,), "float32"), ((),), on_hosts(1))
    with links_to(hosts) as data, pytest.raises(HostLost, match="its messages cannot be read"):
        data.fetch(1, cover, lambda: None)


def test_whatever_ends_the_thread_that_reads_ends_the_stream() -> None:
    """As what is called when an upload has come, and raises what is no `Exception`."""
    hosts = Hosts(1, says=frames.frame(b"\x91" + encode(PutDone(1))))
    called: list[Failure | None] = []

    def acknowledge(_upload: Any, _host: int, failure: Failure | None) -> None:
        called.append(failure)
        raise SystemExit(3)

    with links_to(hosts) as data:
        link, deadline = data.link_to(0), time.monotonic() + LIMIT_S
        data.upload(1, np.ones(4, np.float32), ArrayType((4,), "float32"), ((),), on_hosts(1), "tag", acknowledge)
        hosts.go.set()
        while link.dead is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert called == [None]
        assert "its messages cannot be read (SystemExit: 3)" in link.dead.message


def test_a_put_to_a_host_that_does_not_come_back_is_a_typed_error_in_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    1. The stream to a host breaks, and nothing is heard of the host: a put waits for news.
    2. Half the limit later the host is known to be down; it is waited for no longer than what is left of the limit.
    """
    monkeypatch.setattr(limits, "HOST_ABSENCE_LIMIT_S", 1.0)
    hosts = Hosts(1)
    hosts.go.set()
    array, kind = np.ones(4, np.float32), ArrayType((4,), "float32")
    with links_to(hosts) as data:
        data.upload(1, array, kind, ((),), on_hosts(1), "tag", lambda *_: None)
        data._links[0].end("its connection broke")
        threading.Timer(0.5, data.host_changed, (HostAddress(0, 1, ""),)).start()
        begun = time.monotonic()
        with pytest.raises(HostLost, match="host 0 is down, and was not back in 1 s"):
            data.upload(2, array, kind, ((),), on_hosts(1), "tag", lambda *_: None)
        assert time.monotonic() - begun >= 0.9


@pytest.mark.parametrize("how", ["its outcome comes", "it fails"])
def test_a_wait_for_a_host_ends_when_there_is_nothing_to_wait_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never answers. Waits have no slices, so only a look ends this one."""
    monkeypatch.setattr(data_module, "_WAIT_SLICE_S", LIMIT_S)
    hosts, over = Hosts(1), threading.Event()
    ended: list[str] = []

    def is_over() -> bool:
        if over.is_set() and how == "it fails":
            raise HostLost("gone")
        return over.is_set()

    def wait() -> None:
        try:
            data.await_values([1], (0,), is_over)
            ended.append("its outcome comes")
        except HostLost:
            ended.append("it fails")

    with links_to(hosts) as data:
        data.open(0)
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        until(lambda: data.awaited)
        data.look()
        assert not ended
        over.set()
        data.look()
        waiting.join(LIMIT_S / 2)
        assert ended == [how]
        assert data.awaited == {}


def test_so_many_fetches_have_files_and_who_gets_none_keeps_none_from_others() -> None:
    def full() -> object:
        raise OSError("no space left")

    links = DataLinks(1, "", ())
    waiting = [Sleeper() for _ in range(data_module.MAX_FILES + 1)]
    assert links._new(waiting[0], full) is None
    assert [links._new(one, lambda: 1) for one in waiting] == [1] * data_module.MAX_FILES + [None]
    links._with_files.discard(waiting[3])
    assert links._new(waiting[-1], lambda: 1) == 1


def test_no_stream_is_opened_behind_the_end_of_a_session() -> None:
    """Nobody would close it."""
    links = DataLinks(1, "", (HostAddress(0, 1, "127.0.0.1:1"),))
    links.close(Failure("SessionClosed", "the session was closed"))
    with pytest.raises(SessionClosed, match="the session was closed"):
        links.is_near(0)
    links.open(0)
    assert links.link_of(0) is None


def test_a_stream_that_was_tried_in_vain_holds_nobody_up() -> None:
    """No host was there that might have died: who needs the stream dials again at once."""
    data = DataLinks(1, "", (HostAddress(0, 1, "127.0.0.1:1"),))
    data.open(0)
    tried = data._links[0]
    until(lambda: tried.dead is not None)
    needed = threading.Thread(target=data.link_to, args=(0,), daemon=True)
    needed.start()
    needed.join(data_module.NEWS_LIMIT_S / 2)
    assert not needed.is_alive()
    assert data._links[0] is not tried
    data.close(Failure("SessionClosed", "the session was closed"))


def test_a_host_whose_stream_works_may_have_died_when_it_breaks() -> None:
    hosts = Hosts(1, b"".join(frames.framed(encode([PutDone(9)]))))
    with links_to(hosts) as data:
        data.open(0)
        link = data._links[0]
        assert link.tried
        hosts.go.set()
        until(lambda: not link.tried)
        assert not link.broke
        link.end("its connection broke")
        assert link.broke


def test_a_stream_is_opened_once_to_a_host_that_is_up_and_nobody_waits_for_it() -> None:
    """One that broke stays so until there is news of its host: a put or a fetch waits for that."""
    data = DataLinks(1, "", (HostAddress(0, 1, "127.0.0.1:1"), HostAddress(1, 1, "")))
    try:
        for host in (0, 0, 1, 2):
            data.open(host)
        assert [*data._links] == [0]
        link = data._links[0]
        until(lambda: link.dead is not None)  # nobody listens there
        data.open(0)
        assert data._links == {0: link}
        data.host_changed(HostAddress(0, 2, "127.0.0.1:1"))
        data.open(0)
        assert data._links[0].epoch == 2
    finally:
        data.close(Failure("SessionClosed", "the session was closed"))
