"""What comes to a proxy that no client of JAX's sends: each call gets an error of its own, and others go on."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import select
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import grpc
import hpack
import jax
import pytest

from pathways_ray.errors import CompileError, SessionClosed
from pathways_ray.proxy import connection, server, wire
from pathways_ray.proxy import events as do
from pathways_ray.proxy.arrays import Sharding, Status
from pathways_ray.proxy.calls import FIRST_VERSION, LAST_VERSION, SERVICE, Attached, Said
from pathways_ray.proxy.carrier import COMPILERS, Carrier
from pathways_ray.proxy.codec import Writer
from pathways_ray.proxy.descriptors import messages
from pathways_ray.proxy.fetching import Fetcher
from pathways_ray.proxy.http2_frames import ACK, END_HEADERS, HEADERS, PING, PREFACE, SETTINGS, frame
from pathways_ray.proxy.programs import OPTIONS, PLUGIN_PROGRAM, PROGRAM
from pathways_ray.proxy.putting import PUTTING
from pathways_ray.proxy.readers import Readers
from pathways_ray.proxy.reading import READING
from pathways_ray.proxy.server import ProxyServer
from tests.unit.proxy.local_session import LocalSession
from tests.waiting import until

jax.config.update("jax_num_cpu_devices", 8)  # as other tests of this process do, which need more

M = messages()
EPOLL = select.epoll
FREED_WITHIN_S = 10.0
ANSWER_LIMIT_S = 20.0
POOLS = {f"pathways-proxy-{what}_0" for what in ("fetch", "compile")} | {"pathways-proxy-close"}
STORE_METADATA = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"


class Door:
    """A proxy in this process, and the sessions that it has opened."""

    def __init__(self, folder: Path) -> None:
        self.sessions: list[LocalSession] = []
        self.socket = str(folder / "s")
        self.server = ProxyServer(self._opened, f"unix:{self.socket}")
        self.server.start()
        self.channel = grpc.insecure_channel(f"unix:{self.socket}")

    def _opened(self) -> Any:
        self.sessions.append(LocalSession(4))
        return self.sessions[-1], [self.sessions[-1].whole()]

    def call(self, name: str, request: Any, answer: Any, **more: Any) -> Any:
        found = self.channel.unary_unary(f"/{SERVICE}/{name}", lambda sent: sent.SerializeToString(), answer.FromString)
        return found(request, timeout=ANSWER_LIMIT_S, **more)

    def store(self, said: Any, *parts: bytes) -> None:
        data = said if isinstance(said, bytes) else said.SerializeToString()
        sent = self.channel.stream_unary(f"/{SERVICE}/HostBufferStore", lambda part: part.SerializeToString(), None)
        sent(
            iter([M.GrpcHostBufferStoreRequest(data=part) for part in parts]),
            metadata=((STORE_METADATA, data),),
            timeout=ANSWER_LIMIT_S,
        )


class Stream:
    """A client's stream of requests, as bytes."""

    def __init__(self, door: Door, channel: grpc.Channel | None = None) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ops = itertools.count(1)
        used = channel or door.channel
        opened = used.stream_stream(f"/{SERVICE}/IfrtSession", lambda sent: sent, M.IfrtResponse.FromString)
        self.call = opened(iter(self._requests.get, None), timeout=60)

    def send(self, data: bytes) -> None:
        self._requests.put(data)

    def finish(self) -> None:
        """Says that nothing more comes."""
        self._requests.put(None)

    def ask(self, kind: str, **fields: Any) -> Any:
        """The answer to a request."""
        request = M.IfrtRequest()
        request.request_metadata.op_id = next(self._ops)
        body = getattr(request, kind)
        body.SetInParent()
        body.CopyFrom(body.__class__(**fields))
        self.send(request.SerializeToString())
        return next(self.call)


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    made = Door(tmp_path_factory.mktemp("p"))
    yield made
    made.channel.close()
    made.server.stop()


def code(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    found: grpc.StatusCode = error.value.code()
    return found


@pytest.mark.parametrize(
    ("first", "last", "chosen"),
    [(16, 25, 25), (18, 99, LAST_VERSION), (1, 16, 16), (1, FIRST_VERSION - 1, 0), (LAST_VERSION + 1, 99, 0)],
)
def test_of_the_versions_that_both_speak_the_last_is_chosen_and_else_the_range_is_said(
    door: Door, first: int, last: int, chosen: int
) -> None:
    asked = M.GrpcGetVersionRequest()
    asked.min_version.protocol_version, asked.max_version.protocol_version = first, last
    if chosen:
        assert door.call("GetVersion", asked, M.GrpcGetVersionResponse).version.protocol_version == chosen
        return
    with pytest.raises(grpc.RpcError, match=f"this proxy {FIRST_VERSION} to {LAST_VERSION}") as error:
        door.call("GetVersion", asked, M.GrpcGetVersionResponse)
    assert code(error) == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("data", [b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", b"\x12"], ids=["bytes", "length", "half"])
def test_requests_that_cannot_be_read_end_their_stream_alone(door: Door, data: bytes) -> None:
    other, bad = Stream(door), Stream(door)
    assert other.ask("init_request").HasField("init_response")
    bad.send(data)
    with pytest.raises(grpc.RpcError):
        next(bad.call)
    assert other.ask("check_future_request", future_handle=3).response_metadata.status.code == 5
    other.call.cancel()


@pytest.mark.parametrize("kind", ["loaded_host_callback_poll_request", "bitcast_arrays_request", "copy_arrays_request"])
def test_what_the_proxy_does_not_do_or_know_is_answered_with_a_status(door: Door, kind: str) -> None:
    stream = Stream(door)
    stream.ask("init_request")
    fields = {"array_handles": [77], "result_handles": [78]} if kind.endswith("arrays_request") else {}
    status = stream.ask(kind, **fields).response_metadata.status
    assert status.code in (5, 12)
    assert "77" in status.message or kind in status.message
    stream.call.cancel()


def test_a_program_for_devices_that_the_client_does_not_have_is_refused(door: Door) -> None:
    stream = Stream(door)
    stream.ask("init_request")
    options = M.XlaCompileOptionsProto()
    assignment = options.compile_options.executable_build_options.device_assignment
    assignment.replica_count, assignment.computation_count = 1, 8
    for device in range(8):
        assignment.computation_devices.add(replica_device_ids=[device])
    said = M.Serialized(type_name="xla::ifrt::XlaCompileOptions", data=options.SerializeToString())
    program = M.Serialized(type_name="xla::ifrt::XlaProgram")
    status = stream.ask("compile_request", program=program, compile_options=said).response_metadata.status
    assert status.message == "the program is for devices [4, 5, 6, 7]; there are 0 to 3"
    other = M.Serialized(type_name="xla::ifrt::IfrtIRProgram")
    status = stream.ask("compile_request", program=other).response_metadata.status
    assert status.message.startswith("programs of type 'xla::ifrt::IfrtIRProgram' are not supported")
    stream.call.cancel()


def test_bytes_that_do_not_belong_to_a_client_or_are_not_as_announced_are_refused(door: Door) -> None:
    stream = Stream(door)
    number = stream.ask("init_request").init_response.session_id
    said = M.GrpcHostBufferStoreMetadata(session_id=number, handle=5, buffer_size=8)
    for wrong, parts, expected in (
        (b"\xff\xff", (b"12345678",), grpc.StatusCode.INVALID_ARGUMENT),
        (
            M.GrpcHostBufferStoreMetadata(session_id=1, handle=5, buffer_size=8),
            (b"12345678",),
            grpc.StatusCode.NOT_FOUND,
        ),
        (said, (b"1234",), grpc.StatusCode.DATA_LOSS),
        (said, (b"1234", b"123456789"), grpc.StatusCode.DATA_LOSS),
    ):
        with pytest.raises(grpc.RpcError) as error:
            door.store(wrong, *parts)
        assert code(error) == expected
    door.store(said, b"1234", b"5678")
    stream.call.cancel()


def put_request(handle: int, device: int = 0) -> bytes:
    """A request for an array of four bytes."""
    request = M.IfrtRequest()
    request.request_metadata.op_id = 1000 + handle
    body = request.make_array_from_host_buffer_request
    body.host_buffer_handle = body.array_handle = handle
    body.dtype.kind = 11
    Writer(M).set_sharding(body.sharding, Sharding.on(device), 0)
    return bytes(request.SerializeToString())


def test_a_request_whose_bytes_fail_has_that_for_an_answer_and_later_ones_go_on(door: Door) -> None:
    stream = Stream(door)
    number = stream.ask("init_request").init_response.session_id
    stream.send(put_request(5))
    with pytest.raises(grpc.RpcError):
        door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=5, buffer_size=4), b"12")
    about = next(stream.call).response_metadata
    assert (about.op_id, about.status.code) == (1005, 15)
    assert about.status.message == "2 bytes came, and 4 were announced"
    ready = stream.ask("check_value_ready_request", value_handles=[5])
    assert ready.response_metadata.status.code == 15
    stream.call.cancel()


@pytest.mark.parametrize("size", [1 << 40, (1 << 62) + 1])
def test_bytes_that_there_is_no_room_for_are_refused_before_they_come(door: Door, size: int) -> None:
    """The request that waits for them hears of it, and what was announced of others that are given up is forgotten."""
    stream = Stream(door)
    number = stream.ask("init_request").init_response.session_id
    client = door.server._attached.connections[number]
    stream.send(put_request(7))
    with pytest.raises(grpc.RpcError, match=f"host buffers of 0 bytes and {size} more") as error:
        door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=7, buffer_size=size), b"1234")
    assert code(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    about = next(stream.call).response_metadata
    assert (about.op_id, about.status.code) == (1007, 8)
    for _ in range(3):
        with pytest.raises(grpc.RpcError):
            door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=8, buffer_size=1 << 35), b"1234")
    door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=9, buffer_size=4), b"1234")
    assert client.host_buffers._bytes == 4
    stream.call.cancel()


def test_bytes_whose_connection_breaks_come_no_more_and_those_behind_them_do_not_wait(door: Door) -> None:
    """1. A client attaches on one connection, and brings bytes on a second. 2. That breaks in the midst of them. 3. The
    request for them fails, and nothing is counted of what was announced."""
    stream = Stream(door)
    number = stream.ask("init_request").init_response.session_id
    client = door.server._attached.connections[number]
    stream.send(put_request(7))
    said = M.GrpcHostBufferStoreMetadata(session_id=number, handle=7, buffer_size=1 << 30).SerializeToString()
    headers = [
        (":method", "POST"),
        (":path", f"/{SERVICE}/HostBufferStore"),
        (STORE_METADATA, b64encode(said).decode()),
    ]
    opened = frame(HEADERS, END_HEADERS, 1, bytes(hpack.Encoder().encode(headers)))
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(door.socket)
        sock.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + opened + frame(PING, 0, 0, b"12345678"))
        came = b""
        while frame(PING, ACK, 0, b"12345678") not in came:
            came += sock.recv(1 << 16)
        assert client.host_buffers._bytes == 1 << 30
    about = next(stream.call).response_metadata
    assert (about.op_id, about.status.code) == (1007, 1)
    assert client.host_buffers._bytes == 0
    stream.call.cancel()


def test_who_waits_for_a_value_as_the_session_ends_waits_no_longer(door: Door) -> None:
    """The value is asked for on a connection of its own, which lives on."""
    with (
        patch.object(Fetcher, "fetch", lambda *_: None),  # as one that stands behind another array
        grpc.insecure_channel(f"unix:{door.socket}", (("grpc.use_local_subchannel_pool", 1),)) as channel,
    ):
        stream = Stream(door, channel)
        number = stream.ask("init_request").init_response.session_id
        door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=1, buffer_size=4), b"1234")
        stream.send(put_request(1))
        next(stream.call)
        stream.ask("copy_to_host_buffer_request", array_handle=1, host_buffer_handle=2)
        expected = door.server._attached.connections[number].host_buffers._expected
        asked = door.channel.unary_stream(f"/{SERVICE}/HostBufferLookup", lambda sent: sent.SerializeToString(), None)
        answer = asked(M.GrpcHostBufferLookupRequest(session_id=number, handle=2), timeout=ANSWER_LIMIT_S)
        until(lambda: expected[2], within_s=ANSWER_LIMIT_S)
        door.sessions[-1].end("the controller is gone")
        with pytest.raises(grpc.RpcError, match="the session of the client is over") as error:
            next(answer)
        assert code(error) == grpc.StatusCode.UNAVAILABLE


def test_a_request_whose_bytes_never_come_is_given_up_and_what_comes_late_is_not_kept(tmp_path: Path) -> None:
    with patch.object(server, "LOOK_S", 0.05), patch.object(connection, "BYTES_LIMIT_S", 0.2):
        door = Door(tmp_path)
        stream = Stream(door)
        number = stream.ask("init_request").init_response.session_id
        stream.send(put_request(6))
        later = stream.ask("check_future_request", future_handle=3)
        assert later.response_metadata.op_id == 1006
        assert later.response_metadata.status.message == "the bytes of host buffer 6 did not come; none came for 0 s"
        assert next(stream.call).response_metadata.status.code == 5
        door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=6, buffer_size=4), b"1234")
        (client,) = door.server._attached.connections.values()
        assert client.host_buffers._bytes == 0
        door.channel.close()
        door.server.stop()


def test_what_stands_behind_bytes_that_never_come_keeps_no_other_client_out(tmp_path: Path) -> None:
    """1. The request is given up, and what is carried out then waits. 2. Another client attaches meanwhile."""
    reached, goes_on = threading.Event(), threading.Event()

    def waits(*_: Any) -> None:
        reached.set()
        goes_on.wait(20)

    with (
        patch.object(server, "LOOK_S", 0.05),
        patch.object(connection, "BYTES_LIMIT_S", 0.2),
        patch.object(connection.Connection, "_carry_out", waits),
    ):
        door = Door(tmp_path)
        stream = Stream(door)
        stream.ask("init_request")
        stream.send(put_request(6))
        assert reached.wait(20)
        other = Stream(door)
        assert other.ask("init_request").init_response.session_id
        goes_on.set()
        door.channel.close()
        door.server.stop()


@pytest.mark.timeout(120)
def test_a_program_that_cannot_be_read_is_refused_and_its_client_goes_on(door: Door) -> None:
    stream = Stream(door)
    stream.ask("init_request")
    options = M.Serialized(type_name=OPTIONS, data=M.XlaCompileOptionsProto().SerializeToString())
    for data in (b"", b"ML\xefR", b"ML\xefR\x0dStableHLO_v1.7.0\x00" + b"\xff" * 100):
        program = M.Serialized(type_name=PROGRAM, data=data)
        status = stream.ask("compile_request", program=program, compile_options=options).response_metadata.status
        assert status.code in (3, 13)
        assert "program" in status.message
    assert stream.ask("check_future_request", future_handle=3).response_metadata.status.code == 5
    stream.call.cancel()


def test_a_program_that_hosts_cannot_compile_is_dropped() -> None:
    """Its client has no executable, and so unloads none. Hosts are asked to compile it as its calls take arguments."""
    readers = Mock(**{"read.return_value.signature.donated": frozenset((2, 0))})
    session = Mock(**{"explain.side_effect": CompileError("no"), "register.return_value": 7, "platforms": ("cpu",)})
    carrier = Carrier(session, (), Mock(), readers, Mock(), Mock(), tell := Mock(), Mock(), Mock())
    loaded = Mock(registered={})
    with (
        patch("pathways_ray.proxy.carrier.Loaded", return_value=loaded),
        patch("pathways_ray.proxy.carrier.encode"),
        patch.object(Carrier, "slice_of"),
        patch("pathways_ray.proxy.carrier.programs.devices_of", return_value=((), {})),
    ):
        carrier._compiled(do.Compile(3, Mock(type_name=PROGRAM, data=b""), None))
    assert isinstance(tell.call_args.args[0].signature, Status)
    session.unregister.assert_called_once_with(7)
    assert loaded.registered == {(0, 2): 7}
    assert carrier.loaded == {}
    carrier.close()


def plugin_program(data: bytes) -> Any:
    """A program that the proxy carries out itself."""
    return M.Serialized(type_name=PLUGIN_PROGRAM, data=data)


def test_what_the_proxy_carries_out_itself_waits_for_no_compilation(tmp_path: Path) -> None:
    """All threads that compile wait for hosts."""
    goes_on = threading.Event()
    data = PUTTING + b'{"shape": [2], "dtype": "int8", "device": 0}'
    with patch.object(Carrier, "_loaded", lambda *_: goes_on.wait(ANSWER_LIMIT_S)):
        door = Door(tmp_path)
        stream = Stream(door)
        stream.ask("init_request")
        (client,) = door.server._attached.connections.values()
        for k in range(2 * COMPILERS):
            client.carrier.carry_out(do.Compile(1000 + k, M.Serialized(type_name=PROGRAM), None))
        try:
            for program in (plugin_program(READING), plugin_program(data)):
                assert not stream.ask("compile_request", program=program).response_metadata.status.code
            door.sessions[0].near = False
            status = stream.ask("compile_request", program=plugin_program(data)).response_metadata.status
            assert (status.code, "on another machine" in status.message) == (12, True)
        finally:
            goes_on.set()
            door.channel.close()
            door.server.stop()


def test_a_client_that_dies_in_the_middle_of_anything_leaves_nothing(door: Door) -> None:
    """1. A client has stored bytes that no array is made of, and waits for an array whose bytes never come. 2. It is
    gone. 3. So are its session and its threads."""
    threads = set(threading.enumerate())
    stream = Stream(door)
    number = stream.ask("init_request").init_response.session_id
    session, before = door.sessions[-1], door.server.clients
    door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=1, buffer_size=4), b"1234")
    request = M.IfrtRequest()
    body = request.make_array_from_host_buffer_request
    body.host_buffer_handle, body.array_handle = 2, 2
    stream.send(request.SerializeToString())
    stream.call.cancel()
    until(
        lambda: session.closed_because and not {t.name for t in threading.enumerate() if t not in threads} & POOLS,
        "the session of a client that is gone is still there",
        FREED_WITHIN_S,
    )
    assert door.server.clients == before - 1


def test_half_a_connection_ends_nothing(door: Door) -> None:
    """Sockets that say nothing, half of a preface, and half of a frame, and stay open."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    kept = []
    for data in (b"", preface[:9], preface + b"\x00\x00\x40\x04\x00\x00", preface + bytes(9)):
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].connect(door.socket)
        kept[-1].sendall(data)
    stream = Stream(door)
    assert len(stream.ask("init_request").init_response.all_devices) == 4
    stream.call.cancel()
    for sock in kept:
        sock.close()


def test_connections_on_which_nobody_attaches_keep_no_client_out(tmp_path: Path) -> None:
    """1. All places are taken by connections that say nothing. 2. As many clients as there are places attach, and one
    more does not."""
    with patch.object(server, "MAX_CONNECTIONS", 3):
        door = Door(tmp_path)
        kept = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for sock in kept:
            sock.connect(door.socket)
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(f"unix:{door.socket}", own) for _ in range(4)]
        streams = [Stream(door, channel) for channel in channels[:3]]
        for stream in streams:
            assert stream.ask("init_request").HasField("init_response")
        with pytest.raises(grpc.RpcError):
            Stream(door, channels[3]).ask("init_request")
        for stream in streams:
            assert stream.ask("check_future_request", future_handle=3).response_metadata.status.code == 5
        for channel in (*channels, door.channel):
            channel.close()
        door.server.stop()
        for sock in kept:
            sock.close()


def test_silent_connections_put_out_none_with_bytes_of_a_client_nor_one_that_has_asked(tmp_path: Path) -> None:
    """A client attaches on one connection, brings bytes on a second, and another has asked for a version on a third:
    as jaxlib's client, which has one for requests and one for bytes. Then many connect that say nothing."""
    with patch.object(server, "MAX_CONNECTIONS", 4):
        door = Door(tmp_path)
        own = [("grpc.use_local_subchannel_pool", 1)]
        attaching, asking = (grpc.insecure_channel(f"unix:{door.socket}", own) for _ in range(2))
        stream = Stream(door, attaching)
        number = stream.ask("init_request").init_response.session_id
        door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=5, buffer_size=4), b"1234")
        states: list[grpc.ChannelConnectivity] = []
        for channel in (attaching, asking, door.channel):
            grpc.channel_ready_future(channel).result(ANSWER_LIMIT_S)
            channel.subscribe(states.append)
        version = M.GrpcGetVersionRequest.SerializeToString, M.GrpcGetVersionResponse.FromString
        with pytest.raises(grpc.RpcError, match="versions"):
            asking.unary_unary(f"/{SERVICE}/GetVersion", *version)(M.GrpcGetVersionRequest(), timeout=ANSWER_LIMIT_S)
        silent = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        for sock in silent:
            sock.settimeout(ANSWER_LIMIT_S)
            sock.connect(door.socket)
        for sock in silent[:-1]:
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 10):
                    pass
        assert stream.ask("check_future_request", future_handle=3).response_metadata.status.code == 5
        assert set(states) == {grpc.ChannelConnectivity.READY}
        for channel in (attaching, asking, door.channel):
            channel.close()
        door.server.stop()
        for sock in silent:
            sock.close()


class LatePoll:
    """An epoll that gives what came within some time at once, and after the sockets that hung up have been closed."""

    def __init__(self) -> None:
        self._real = EPOLL()
        self.unregister = self._real.unregister
        self._files: dict[int, int] = {}

    def register(self, file: int | socket.socket, events: int) -> None:
        """The number of a socket that is closed may be that of another one of this process at once."""
        number = file if isinstance(file, int) else file.fileno()
        self._files[number] = os.fstat(number).st_ino
        self._real.register(number, events)

    def poll(self, limit_s: float) -> list[tuple[int, int]]:
        found = dict(self._real.poll(limit_s))
        until = time.monotonic() + 0.05
        while found and time.monotonic() < until:
            found |= {number: what for number, what in self._real.poll(0) if number not in found}
        until = time.monotonic() + FREED_WITHIN_S
        for number, what in found.items():
            with contextlib.suppress(OSError):
                while what & select.EPOLLRDHUP and time.monotonic() < until:
                    if os.fstat(number).st_ino != self._files[number]:
                        break
        return list(found.items())

    def __enter__(self) -> LatePoll:
        return self

    def __exit__(self, *_: object) -> None:
        self._real.close()


def test_a_connection_is_not_hung_up_on_for_another_whose_number_it_gets(tmp_path: Path) -> None:
    """1. One hangs up right after a further one has asked to come in. 2. The first is closed before the second is
    taken, which so gets its number."""
    with patch.object(select, "epoll", LatePoll):
        door = Door(tmp_path)
        door.channel.close()
        for _ in range(8):
            with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
                first.connect(door.socket)
                first.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
                assert first.recv(1 << 16)
                second.connect(door.socket)
                first.close()
                second.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + frame(PING, 0, 0, b"12345678"))
                second.settimeout(FREED_WITHIN_S)
                said = b""
                while frame(PING, ACK, 0, b"12345678") not in said:
                    came = second.recv(1 << 16)
                    assert came
                    said += came
        door.server.stop()


def test_a_connection_for_which_there_is_no_thread_is_hung_up_on_and_further_ones_are_served(tmp_path: Path) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "pathways-proxy-client":
            raise RuntimeError("can't start new thread")
        start(thread)

    door = Door(tmp_path)
    with patch.object(threading.Thread, "start", refused), socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_LIMIT_S)
        sock.connect(door.socket)
        assert sock.recv(1) == b""
        until(lambda: not door.server._calls, within_s=FREED_WITHIN_S)
    assert Stream(door).ask("init_request").HasField("init_response")
    door.channel.close()
    door.server.stop()


def test_a_connection_for_which_there_is_no_descriptor_is_looked_at_now_and_then(tmp_path: Path) -> None:
    """1. Somebody connects while the process has no descriptor left. 2. Nobody hangs up, and he is served later."""
    tried = threading.Semaphore(0)

    class Listener:
        """A socket that listens, on which nobody can be taken."""

        def __init__(self, real: socket.socket) -> None:
            self.fileno, self.accept = real.fileno, self._refuse

        def _refuse(self) -> None:
            tried.release()
            raise OSError(errno.EMFILE, "Too many open files")

    door = Door(tmp_path)
    listener = door.server._listener
    with patch.object(server, "ACCEPT_PAUSE_S", 0.2):
        door.server._listener = Listener(listener)  # type: ignore[assignment]
        stream = Stream(door)
        began = time.monotonic()
        for _ in range(4):
            assert tried.acquire(timeout=ANSWER_LIMIT_S)
        assert time.monotonic() - began > 0.3
        door.server._listener = listener
        assert stream.ask("init_request").HasField("init_response")
    door.channel.close()
    door.server.stop()


def test_a_client_that_cannot_be_served_leaves_no_session(door: Door) -> None:
    readers = Readers(4)
    attached = Attached(door._opened, readers, "")
    attached.handovers.close()  # so that none is opened
    with pytest.raises(RuntimeError, match="closed"):
        attached.attach(Said(), *[lambda *_: None] * 4)
    assert door.sessions[-1].closed_because
    readers.close()


def test_a_client_that_goes_while_the_session_holds_it_up_is_freed(door: Door) -> None:
    """1. The session takes no more of a client, as when it has too many launches under way: nothing is read from it.
    2. The client is killed. 3. Its session ends, which ends the wait."""
    with grpc.insecure_channel(f"unix:{door.socket}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
        stream = Stream(door, channel)
        number = stream.ask("init_request").init_response.session_id
        session, waiting, over = door.sessions[-1], threading.Event(), threading.Event()

        def upload(*_: Any) -> None:
            waiting.set()
            over.wait(3 * FREED_WITHIN_S)
            raise SessionClosed(session.closed_because)

        session.upload = upload  # type: ignore[assignment]

        def close() -> None:
            LocalSession.close(session)
            over.set()

        session.close = close  # type: ignore[method-assign]
        door.store(M.GrpcHostBufferStoreMetadata(session_id=number, handle=1, buffer_size=4), b"1234")
        stream.send(put_request(1))
        assert waiting.wait(FREED_WITHIN_S)
    assert over.wait(FREED_WITHIN_S)
    assert session.closed_because


def test_a_client_that_is_silent_and_answers_no_ping_is_freed(door: Door) -> None:
    headers = [(":method", "POST"), (":path", f"/{SERVICE}/IfrtSession")]
    opened = frame(HEADERS, END_HEADERS, 1, bytes(hpack.Encoder().encode(headers)))
    with patch.object(wire, "PING_S", 0.05), socket.socket(socket.AF_UNIX) as sock:
        before, threads = len(door.sessions), set(threading.enumerate())
        sock.connect(door.socket)
        sock.settimeout(FREED_WITHIN_S)
        sock.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + opened)
        while sock.recv(1 << 16):
            pass
        (session,) = door.sessions[before:]
        until(lambda: session.closed_because, within_s=FREED_WITHIN_S)
        for thread in set(threading.enumerate()) - threads:
            if thread.name == "pathways-proxy-client":
                thread.join(FREED_WITHIN_S)
                assert not thread.is_alive()
