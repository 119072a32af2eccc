"""Who comes in: wrong tokens and addresses are refused in bounded time; garbage at any endpoint harms nobody else."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.transport import streams
from pathways_ray.transport.messages import (
    REPLY,
    TO_CLIENT,
    VERSION,
    Fetch,
    Free,
    Launch,
    LaunchFailed,
    Message,
    OpenSession,
    PutOpen,
    PutPart,
    Refused,
    Register,
    ServeCall,
    SessionOpened,
    Status,
    encode,
)
from tests.integration.conftest import linked

GARBAGE = [
    b"",
    b"\x00",
    b"\xff" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x91" * 100_000,  # arrays in arrays
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1 elements, none of them there
    encode([70]),
    encode([70, "version", 7]),
    encode([9999, 1, 2]),
    encode({"message": 70}),
    encode([[1, 1, b"graph", {}], [2, "x", 1, [], 1]]),
    encode([Launch(5, 1, (-5,), -7)]),
    random.Random(1).randbytes(1 << 20),
]
V = np.arange(8, dtype=np.float32)


@pytest.fixture
def free_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound, so nobody else gets it; not listening, so nobody answers


def test_wrong_token(session, within) -> None:
    for token in ("", "wrong", session.token[:-1], session.token + "x", "ü" * 32):
        with within(5), pytest.raises(pw.errors.AuthenticationError, match="the token is missing or wrong"):
            pw.connect(session.url, token)


@pytest.mark.parametrize("url", ["", "localhost:1", "http://localhost:1", "grpc://", "grpc://nowhere", 7, None])
def test_what_is_no_url(session, url) -> None:
    with pytest.raises(pw.errors.UsageError, match="a cluster's address looks like grpc://host:port, not"):
        pw.connect(url, session.token)


def test_nobody_listening(free_port, within) -> None:
    with within(8), pytest.raises(pw.errors.ControllerLost, match=rf"grpc://127.0.0.1:{free_port} does not answer"):
        pw.connect(f"grpc://127.0.0.1:{free_port}", "token", timeout=2.0)


def test_a_host_name_that_does_not_exist(within) -> None:
    with within(8), pytest.raises(pw.errors.ControllerLost, match="does not answer"):
        pw.connect("grpc://no-such-host.invalid:1234", "token", timeout=2.0)


def test_somebody_else_listening(within) -> None:
    """Something accepts the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"grpc://127.0.0.1:{mute.getsockname()[1]}"
        with within(8), pytest.raises(pw.errors.ControllerLost, match="does not answer"):
            pw.connect(url, "token", timeout=2.0)


def test_failed_connect_leaves_the_session_that_was_there(session, slices, equal, within) -> None:
    inc = pw.compiled(lambda v: v + 1, slice=slices.a4)
    equal(inc(V), V + 1)
    before = set(threading.enumerate())
    with pytest.raises(pw.errors.AuthenticationError, match="the token is missing or wrong"):
        pw.connect(session.url, "wrong")
    equal(inc(V), V + 1)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread


# --- garbage ----------------------------------------------------------------------------------------------------------


def endpoints(session: ClusterSession) -> dict[str, str]:
    """All endpoints of the cluster."""
    manager = session.cluster.resource_manager
    schedulers = {f"scheduler {k}": ray.get(manager.lookup.remote(f"scheduler-{k}")) for k in range(2)}
    hosts = {f"host {h.host}": h.address for h in session._data._addresses.values() if h.address}
    links = {"links": ray.get(manager.lookup.remote("controller"))}
    return {"controller": session.url.removeprefix("grpc://"), **links, **schedulers, **hosts}


@pytest.fixture
def channels(session) -> Iterator[dict[str, grpc.Channel]]:
    made = {name: grpc.insecure_channel(address) for name, address in endpoints(session).items()}
    yield made
    for channel in made.values():
        channel.close()


def replies(call: grpc.Call) -> list[bytes]:
    """What a stream says until it ends, in error or not."""
    found = []
    try:
        for data in call:
            found.append(data)
    except grpc.RpcError:
        pass
    return found


METHODS = [streams.CLIENT_STREAM, streams.ISLAND_STREAM, streams.HOST_STREAM, streams.DATA_STREAM, "/no.Such/Method"]


@pytest.mark.parametrize("method", METHODS)
def test_garbage_on_unauthenticated_streams(session, channels, method) -> None:
    identities: list[tuple[tuple[str, str], ...]] = [
        (),
        (("session", "abc"),),
        (("session", "1"), ("authorization", "wrong")),
        (("session", "-1"),),
    ]
    for channel in channels.values():
        for metadata in identities:
            call = channel.stream_stream(method)(iter(GARBAGE), metadata=metadata, timeout=20)
            assert replies(call) == []
    for address in endpoints(session).values():
        for metadata in identities:
            shown: dict[str, Any] = dict(metadata)
            assert linked(address, method, GARBAGE, **shown) == []


def test_garbage_as_calls(session, channels) -> None:
    call = channels["controller"].unary_unary(streams.CALL)
    for token, kind in (("", "AuthenticationError"), ("wrong", "AuthenticationError"), (session.token, "WireError")):
        for data in GARBAGE:
            reply = REPLY.decode(call(data, metadata=(("authorization", token),), timeout=60))
            assert isinstance(reply, Refused)
            assert reply.failure.kind == kind


def test_connections_with_bytes_of_another_protocol_end(session) -> None:
    """Every endpoint hangs up, with all that came read or not; none waits for more."""
    draw = random.Random(2)
    for address in endpoints(session).values():
        host, port = address.rsplit(":", 1)
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            draw.randbytes(1 << 16),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(999),
        ):
            with (
                socket.create_connection((host, int(port)), timeout=5) as connection,
                contextlib.suppress(ConnectionError),  # but no TimeoutError
            ):
                connection.sendall(data)
                while connection.recv(1 << 16):
                    pass
    assert [host["up"] for island in session.status()["islands"] for host in island["hosts"]] == [True, True]


def test_requests_with_somebody_elses_session(session, channels) -> None:
    call = channels["controller"].unary_unary(streams.CALL)
    for number in (session.id, 0, -1, 10**6):
        for metadata in ({"authorization": "wrong"}, {"authorization": "wrong", "session": str(number)}):
            reply = REPLY.decode(call(encode(Status(number)), metadata=tuple(metadata.items()), timeout=60))
            assert isinstance(reply, Refused)
            assert reply.failure.kind in ("SessionClosed", "AuthenticationError")
    old = REPLY.decode(
        call(encode(OpenSession(VERSION + 1, "")), metadata=(("authorization", session.token),), timeout=60)
    )
    assert isinstance(old, Refused)
    assert old.failure.kind == "WireError"
    assert f"speaks protocol version {VERSION + 1}, this cluster {VERSION}" in old.failure.message


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_from_a_client_ends_its_session_and_no_other(session, channels, data) -> None:
    channel = channels["controller"]
    opened = REPLY.decode(
        channel.unary_unary(streams.CALL)(
            encode(OpenSession(VERSION, "garbage")), metadata=(("authorization", session.token),), timeout=10
        )
    )
    assert isinstance(opened, SessionOpened)
    assert any(s["name"] == "garbage" for s in session.status()["sessions"])
    metadata = (("session", str(opened.session)), ("authorization", opened.secret))
    said = replies(channel.stream_stream(streams.CLIENT_STREAM)(iter([data]), metadata=metadata, timeout=60))
    assert len(said) <= 1
    assert not any(s["name"] == "garbage" for s in session.status()["sessions"])


def test_well_formed_nonsense_from_a_client(session, channels, slices) -> None:
    """Programs that are none, buffers that do not exist, launches of what was never registered."""
    channel = channels["controller"]
    opened = REPLY.decode(
        channel.unary_unary(streams.CALL)(
            encode(OpenSession(VERSION, "nonsense")), metadata=(("authorization", session.token),), timeout=10
        )
    )
    assert isinstance(opened, SessionOpened)
    messages = [
        Register(1, b"garbage", {}),
        Launch(1, 1, (), 1),
        Register(2, encode({"name": "x", "slices": [], "recipes": [], "nodes": []}), {}),
        Launch(2, 2, (), 2),
        Register(3, b"", {"digest": b"not its content"}),
        Launch(3, 3, (), 3),
        Launch(4, 99, (1, 2, 3), 4),
        Free((1, 2, 3, 10**9)),
    ]
    stop = threading.Event()

    def requests() -> Iterator[bytes]:
        yield encode(messages)
        stop.wait(60)

    metadata = (("session", str(opened.session)), ("authorization", opened.secret))
    call = channel.stream_stream(streams.CLIENT_STREAM)(requests(), metadata=metadata, timeout=60)
    failures = {}
    for data in call:
        for message in TO_CLIENT.decode_batch(data):
            assert isinstance(message, LaunchFailed)
            failures[message.launch] = message.failure.kind
        if len(failures) == 4:
            break
    stop.set()
    call.cancel()
    assert failures == {1: "WireError", 2: "GraphError", 3: "WireError", 4: "WireError"}


def test_nonsense_on_a_data_stream(session, slices, equal) -> None:
    """From a client that may put and fetch: devices that are not there, parts out of bounds, buffers of nobody."""
    x = pw.put(V, slice=slices.a4, spec=P("x"))
    equal(x, V)
    placed, kind, tag = slices.a4.placed, x._type.array, slices.a4.tag
    far = slices.b4
    messages: list[list[Message]] = [
        [PutOpen(1, 900001, kind, (("x",),), far.placed, far.tag)],
        [PutOpen(2, 900002, kind, (("nope",),), placed, tag)],
        [PutOpen(3, 900003, kind, (("x",),), placed, tag), PutPart(3, 99, 0, b"1234")],
        [PutOpen(4, 900004, kind, (("x",),), placed, tag), PutPart(4, 0, 1 << 40, b"1234")],
        [PutPart(5, 0, 0, b"1234")],
        [Fetch(6, x._buffer.id, (99,))],
        [Fetch(7, x._buffer.id, (-1,))],
        [ServeCall(key, (x._buffer.id,), (8,), ((99,),)) for key in range(50)],
        [ServeCall(1, (), (), ()), ServeCall(1, (1,) * 5000, (9,) * 64, ((0,) * 4096,) * 64)],
    ]
    metadata = {"session": str(session.id), "authorization": session._data.token}
    for data in [*map(encode, messages), *GARBAGE]:
        linked(endpoints(session)["host 0"], streams.DATA_STREAM, [data], **metadata)
    equal(x, V)
