"""Tenants: each comes in by its own token, sees and names only its own, and gets no more than its quota.

One cluster for the file, in a process of its own, with a table of tenants; this process has no part in it but what its
tokens allow. Raw messages stand for clients that do not keep to the rules.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import itertools
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import context
from pathways_ray.errors import Failure
from pathways_ray.ir.graph import Argument, Compute, Graph, Part, Recipe, Ref, Result
from pathways_ray.ir.types import ArrayType, Layout
from pathways_ray.transport import streams
from pathways_ray.transport.capabilities import data_token, slice_tag
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    REPLY,
    TO_CLIENT,
    VERSION,
    Accepted,
    BuffersLost,
    CloseSession,
    Completed,
    CreateSlice,
    DataFailed,
    EarlyAllowed,
    Explain,
    Fetch,
    FetchPart,
    Free,
    Launch,
    LaunchFailed,
    LocalDoor,
    Message,
    OpenSession,
    Put,
    PutDone,
    PutOpen,
    PutPart,
    Refused,
    Register,
    ReleaseSlice,
    ServeCall,
    SessionEnded,
    SessionOpened,
    SliceCreated,
    Status,
    StatusReply,
    encode,
)
from tests.integration.conftest import linked

V = np.arange(8, dtype=np.float32)
TOKENS = {
    name: f"{name}-token-{hashlib.sha256(name.encode()).hexdigest()}" for name in ("alice", "bob", "carol", "dave")
}
QUOTA = {"devices": 6, "device_bytes": 1 << 20, "nodes": 20, "message_bytes": 100_000}


def table(*names: str) -> bytes:
    """A tenants file; alice's token stands there as it is, those of the others as digests; carol has quotas."""
    entries: list[dict[str, Any]] = []
    for name in names:
        entry: dict[str, Any] = {"name": name, "weight": 2}
        if name == "alice":
            entry["token"] = TOKENS[name]
        else:
            entry["token_sha256"] = hashlib.sha256(TOKENS[name].encode()).hexdigest()
        if name == "carol":
            entry["quota"] = QUOTA
        entries.append(entry)
    return json.dumps({"tenants": entries}).encode()


class Cluster:
    """The cluster of this file, as its operator sees it."""

    def __init__(self, process: Any, file: Path) -> None:
        self.process = process
        self.file = file
        said = process.stdout.readline()
        assert said, process.communicate()[1]
        found = json.loads(said)
        self.url, self.token, self.links = found["url"], found["token"], found["links"]
        self.address = self.url.removeprefix("grpc://")

    def statistics(self) -> list[dict[str, int]]:
        """Of each host."""
        self.process.stdin.write("statistics\n")
        self.process.stdin.flush()
        found: list[dict[str, int]] = json.loads(self.process.stdout.readline())
        return found

    def buffers(self) -> int:
        """In the stores of all hosts."""
        return sum(host["buffers"] for host in self.statistics())

    def status(self) -> dict[str, Any]:
        with grpc.insecure_channel(self.address) as channel:
            reply = ask(channel, Status(0), authorization=self.token)
        assert isinstance(reply, StatusReply)
        found: dict[str, Any] = json.loads(reply.text)
        return found

    def processes(self) -> list[int]:
        """Process ids, which change when a process is restarted."""
        status = self.status()
        hosts = [host for island in status["islands"] for host in island["hosts"]]
        assert all(host["up"] for host in hosts)
        return [status["controller"]["pid"], *(host["pid"] for host in hosts), *(host["epoch"] for host in hosts)]

    def connect(self, name: str, **options: Any) -> pw.Session:
        return pw.connect(self.url, TOKENS[name], name=f"{name}'s", **options)


@pytest.fixture(scope="module")
def cluster(python, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("operator") / "tenants.json"
    file.write_bytes(table("alice", "bob", "carol", "dave"))
    process = python.start("tenants_cluster", str(file))
    yield Cluster(process, file)
    python.finish(process)  # it ends with its input, and without an error


@pytest.fixture
def whole(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards it computes, and no process was restarted."""
    before = cluster.processes()
    yield cluster
    assert_computes(cluster, "bob")
    assert cluster.processes() == before


def assert_computes(cluster: Cluster, name: str) -> None:
    """A tenant comes, runs a program over both islands, and goes."""
    with (
        cluster.connect(name) as session,
        session.virtual_slice((4,), ("x",), island=0) as a,
        session.virtual_slice((4,), ("x",), island=1) as b,
    ):
        here = pw.compiled(lambda v: v + 1.0, slice=a, in_specs=P("x"), out_specs=P("x"))
        there = pw.compiled(lambda v: v * 2.0, slice=b, in_specs=P("x"), out_specs=P("x"))
        x = pw.put(V, slice=a, spec=P("x"))
        np.testing.assert_array_equal(np.asarray(pw.program(lambda v: there(here(v)))(x)), (V + 1) * 2)


def eventually(holds: Callable[[], bool], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_sessions_of_a_tenant_have_one_copy_of_what_they_upload_alike(whole: Cluster) -> None:
    """
    1. Two sessions of a tenant and one of another put the same array on the same devices.
    2. Their host keeps one for the two, and one for the other.
    3. A call of the first session takes its memory: it has the right value, and the others' arrays stay.
    4. The two end, and what a third session uploads is kept.
    """
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)

    def shared() -> int:
        return sum(host["shared"] for host in whole.statistics())

    before = shared()
    with contextlib.ExitStack() as stack:
        given, steps = [], []
        for name in ("alice", "alice", "bob"):
            session = stack.enter_context(whole.connect(name))
            where = stack.enter_context(session.virtual_slice((4,), ("x",), island=0))
            steps.append(pw.compiled(lambda w: w * 2.0, slice=where, out_specs=P("x"), donate_argnums=0))
            given.append(pw.put(weights, slice=where, spec=P("x")))
            given[-1].block_until_ready()
        assert shared() - before == 1
        made = steps[0](given[0])
        np.testing.assert_array_equal(np.asarray(made), weights * 2)
        for array in given[1:]:
            np.testing.assert_array_equal(np.asarray(array), weights)
        made = steps[1](given[1])
        np.testing.assert_array_equal(np.asarray(made), weights * 2)
        np.testing.assert_array_equal(np.asarray(given[2]), weights)
    with whole.connect("alice") as session, session.virtual_slice((4,), ("x",), island=0) as where:
        np.testing.assert_array_equal(np.asarray(pw.put(weights, slice=where, spec=P("x"))), weights)


# --- clients that say what they like ----------------------------------------------------------------------------------


def ask(channel: grpc.Channel, request: Message | bytes, **metadata: str) -> Message:
    data = request if isinstance(request, bytes) else encode(request)
    return REPLY.decode(channel.unary_unary(streams.CALL)(data, metadata=tuple(metadata.items()), timeout=20))


def said(channel: grpc.Channel, method: str, batches: list[bytes], **metadata: str) -> list[bytes]:
    """All that a stream answers."""
    found: list[bytes] = []
    with contextlib.suppress(grpc.RpcError):
        for data in channel.stream_stream(method)(iter(batches), metadata=tuple(metadata.items()), timeout=20):
            found.append(data)
    return found


class Raw:
    """A session of a tenant, driven by hand."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        self.channel = grpc.insecure_channel(cluster.address)
        opened = ask(self.channel, OpenSession(VERSION, "raw"), authorization=token)
        assert isinstance(opened, SessionOpened), opened
        self.opened = opened
        self.id = opened.session
        self.shown = {"session": str(self.id), "authorization": opened.secret}
        self.hosts = {h.host: h.address for h in opened.hosts}
        self._more: Any = None

    def slice(self, size: int, island: int = -1) -> Message:
        return ask(self.channel, CreateSlice(self.id, (size,), ("x",), island, "", ""), **self.shown)

    def talk(self, *messages: Message, answers: int) -> list[Message]:
        """Sends messages on the hot stream, waits for `answers` in return, and ends the stream, thus the session. A
        message about several launches counts as several."""
        found: list[Message] = []
        with_room = itertools.chain(map(encode, [[m] for m in messages]), self._wait())
        call = self.channel.stream_stream(streams.CLIENT_STREAM)(
            with_room, metadata=tuple(self.shown.items()), timeout=60
        )
        try:
            for data in call:
                found += TO_CLIENT.decode_batch(data)
                if sum(len(m.launches) if isinstance(m, Completed) else 1 for m in found) >= answers:
                    break
        except grpc.RpcError:
            pass
        self._more = True
        call.cancel()
        return found

    def _wait(self) -> Iterator[bytes]:
        while not self._more:
            time.sleep(0.02)
        yield from ()

    def data(
        self, *messages: Message, answers: int = 1, host: int = 0, limit_s: float = 20.0, **other: str
    ) -> list[Message]:
        """Answers of a host on the data stream: this many messages, or 0 for all until it has read the others."""
        shown = {"session": str(self.id), "authorization": self.opened.data_token, **other}

        def decoded(batches: list[bytes]) -> list[Message]:
            found = [message for batch in batches for message in FROM_HOST_DATA.decode_batch(batch)]
            return [message for message in found if not isinstance(message, LocalDoor | EarlyAllowed)]

        enough = (lambda batches: len(decoded(batches)) >= answers) if answers else None
        sent = [encode(messages)]
        return decoded(linked(self.hosts[host], streams.DATA_STREAM, sent, enough, limit_s, **shown))

    def close(self) -> None:
        ask(self.channel, CloseSession(self.id), **self.shown)
        self.channel.close()


@pytest.fixture
def raw(cluster: Cluster) -> Iterator[Callable[[str], Raw]]:
    made: list[Raw] = []

    def make(name: str) -> Raw:
        made.append(Raw(cluster, TOKENS[name]))
        return made[-1]

    yield make
    for one in made:
        one.close()


def failed(found: Sequence[Message]) -> Failure:
    (message,) = found
    assert isinstance(message, LaunchFailed | DataFailed | BuffersLost), message
    return message.failure


# --- who comes in -----------------------------------------------------------------------------------------------------


def test_a_tenant_computes_and_another_too(whole: Cluster) -> None:
    assert_computes(whole, "alice")
    with whole.connect("alice"), whole.connect("bob"):
        assert_computes(whole, "bob")
        assert {(s["tenant"], s["name"]) for s in whole.status()["sessions"]} >= {
            ("alice", "alice's"),
            ("bob", "bob's"),
        }


def test_every_endpoint_serves_nobody_without_the_right_token(whole: Cluster, raw) -> None:
    """1. Two sessions, of alice and of bob, with all their secrets; bob's has ended. 2. Every endpoint is called with
    nothing, with something wrong, with what belongs to alice, or to a session that ended, or elsewhere. 3. Nobody is
    served."""
    alice, gone = raw("alice"), Raw(whole, TOKENS["bob"])
    bob = raw("bob")
    placed = bob.slice(2)
    assert isinstance(placed, SliceCreated)
    assert ask(gone.channel, CloseSession(gone.id), **gone.shown) == Accepted()
    secrets = {
        "none": "",
        "wrong": "0" * 32,
        "another's secret": alice.opened.secret,
        "another's data token": alice.opened.data_token,
        "its own data token": bob.opened.data_token,
        "another tenant's token": TOKENS["alice"],
        "its own token": TOKENS["bob"],
        "the operator's token": whole.token,
        "one that has ended": gone.opened.secret,
        "nearly": bob.opened.secret[:-1],
    }
    requests = [
        CreateSlice(bob.id, (1,), ("x",), -1, "", ""),
        ReleaseSlice(bob.id, placed.placed.mesh.id),
        CloseSession(bob.id),
        Explain(bob.id, -1, b""),
        Status(bob.id),
    ]
    served: list[Any] = []
    for what, secret in secrets.items():
        for request in requests:
            for metadata in ({}, {"session": str(bob.id)}, {"session": str(alice.id)}, {"session": str(gone.id)}):
                if metadata.get("session") == str(alice.id) and secret == alice.opened.secret:
                    continue  # that is alice, who asks for something of bob's: below
                reply = ask(bob.channel, request, authorization=secret, **metadata)
                served += [(what, request, reply)] if not isinstance(reply, Refused) else []
        links = streams.ISLAND_STREAM, streams.HOST_STREAM, streams.LOG_STREAM
        for method in (streams.CLIENT_STREAM, *links, streams.DATA_STREAM):
            if method == streams.DATA_STREAM and what == "its own data token":
                continue
            batch = encode([Fetch(1, 1, (0,))] if method == streams.DATA_STREAM else [Free((1,))])
            shown = {"session": str(bob.id), "authorization": secret}
            served += [(what, method, data) for data in said(bob.channel, method, [batch], **shown)]
            for address in (*bob.hosts.values(), *whole.links):
                served += [(what, method, data) for data in linked(address, method, [batch], **shown)]
    for address in (*bob.hosts.values(), *whole.links):  # gRPC refuses to send what is not ASCII; a link carries it
        for method, message in ((streams.CLIENT_STREAM, Free((1,))), (streams.DATA_STREAM, Fetch(1, 1, (0,)))):
            shown = {"session": str(bob.id), "authorization": "ü" * 32}
            answers = linked(address, method, [encode([message])], **shown)
            served += [("not ASCII", method, data) for data in answers]
    for request in requests:  # alice by her own secret
        served += [r for r in [ask(bob.channel, request, **alice.shown)] if not isinstance(r, Refused)]
    for token in ("", "x" * 64, TOKENS["alice"][:-1], TOKENS["alice"].upper(), alice.opened.secret):
        reply = ask(bob.channel, OpenSession(VERSION, ""), authorization=token)
        served += [("open", token, reply)] if not isinstance(reply, Refused) else []
    for token in ("", "wrong"):
        reply = ask(bob.channel, Status(0), authorization=token)
        served += [("status", token, reply)] if not isinstance(reply, Refused) else []
    for name, token in TOKENS.items():  # what is its own a tenant sees without a session, and nothing else
        reply = ask(bob.channel, Status(0), authorization=token)
        shown_of = (
            {one["tenant"] for one in json.loads(reply.text)["sessions"]} if isinstance(reply, StatusReply) else ()
        )
        served += [("status", name, other) for other in shown_of if other != name]
    assert served == []
    assert isinstance(ask(bob.channel, Status(bob.id), **bob.shown), StatusReply), "bob himself is served"


def test_a_token_of_a_session_that_ended_opens_no_data_stream(whole: Cluster, raw) -> None:
    bob = raw("bob")
    created = bob.slice(1, island=0)
    assert isinstance(created, SliceCreated)
    assert eventually(lambda: whole.buffers() == 0), "those before are gone"
    kind = ArrayType((2,), "float32")
    put = [PutOpen(1, 5, kind, (), created.placed, created.slice_tag), PutPart(1, 0, 0, bytes(8))]
    assert bob.data(*put) == [PutDone(1)]
    assert isinstance(bob.data(Fetch(2, 5, (0,)))[0], FetchPart)
    assert whole.buffers() == 1
    ask(bob.channel, CloseSession(bob.id), **bob.shown)
    assert eventually(lambda: whole.buffers() == 0)
    assert bob.data(*put) == []
    assert bob.data(Fetch(2, 5, (0,))) == []


def test_a_session_has_one_stream(whole: Cluster, raw) -> None:
    """The first is known to be there by its answer to a launch of what was never registered."""
    bob = raw("bob")
    shown = tuple(bob.shown.items())
    asking = itertools.chain([encode([Launch(1, 1, (), 2)])], bob._wait())
    first = bob.channel.stream_stream(streams.CLIENT_STREAM)(asking, metadata=shown, timeout=60)
    assert failed(TO_CLIENT.decode_batch(next(first))).kind == "WireError"
    second = bob.channel.stream_stream(streams.CLIENT_STREAM)(iter(()), metadata=shown, timeout=60)
    assert second.code() is grpc.StatusCode.ALREADY_EXISTS
    bob._more = True
    first.cancel()


def test_status_shows_a_tenant_its_own(whole: Cluster) -> None:
    with (
        whole.connect("alice") as alice,
        whole.connect("bob") as bob,
        alice.virtual_slice((4,), ("x",), island=0, name="hers"),
        bob.virtual_slice((4,), ("x",), island=0, name="his"),
    ):
        found = bob.status()
        assert [s["name"] for s in found["slices"]] == ["his"]
        assert {s["tenant"] for s in found["sessions"]} == {"bob"}
        assert [t["tenant"] for t in found["tenants"]] == ["bob"]
        device = found["islands"][0]["hosts"][0]["devices"][0]
        assert sorted(device["slices"]) == sorted([f"session {bob.id}: his", "somebody"])
        assert "hers" not in json.dumps(found)
        assert "alice" not in json.dumps(found)
        assert "pid" not in json.dumps(found).replace('"pid": 0', "")
        seen = json.dumps(whole.status())
        assert all(word in seen for word in ("hers", "his", "alice", "bob"))
        assert not any(token in seen for token in (*TOKENS.values(), whole.token))


# --- what is another's ------------------------------------------------------------------------------------------------


def one_step(slice_id: Any, function: str, arguments: int = 1, kind: ArrayType | None = None) -> bytes:
    """A program of one node over a slice."""
    kind = kind or ArrayType((8,), "float32")
    layout = Layout(slice_id.id, ())
    nodes = [Argument(k, kind, layout) for k in range(arguments)]
    refs = tuple(Ref(k) for k in range(arguments))
    part = Part("step", function, tuple(Ref(-1, k) for k in range(arguments)))
    compute = Compute("step", 0, slice_id.id, refs, (layout,) * arguments, (kind,), (layout,), (), "user.py:1")
    recipes = (Recipe((part,), (Ref(0),)),)
    return encode(Graph("raw", (slice_id,), recipes, (*nodes, compute, Result((Ref(arguments),)))))


def exported(
    function: Callable[..., Any],
    kind: ArrayType,
    allow: tuple[str, ...] = (),
    platforms: tuple[str, ...] = ("cpu",),
) -> tuple[str, bytes]:
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in allow]
    aval = jax.ShapeDtypeStruct(kind.shape, kind.dtype)
    blob = bytes(export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(aval).serialize())
    return hashlib.sha256(blob).hexdigest(), blob


def test_what_is_another_tenants_cannot_be_named(whole: Cluster, raw) -> None:
    """1. Alice has a slice, a program and an array; bob knows all their numbers. 2. Whatever he asks for under them, he
    gets nothing, and alice loses nothing."""
    with whole.connect("alice") as alice, alice.virtual_slice((2,), ("x",), island=0) as hers:
        inc = pw.compiled(lambda v: v + 1, slice=hers)
        x = pw.put(V, slice=hers)
        np.testing.assert_array_equal(np.asarray(inc(x)), V + 1)
        bob = raw("bob")
        digest, blob = exported(lambda v: v * 3, ArrayType((8,), "float32"))
        number = x._buffer.id
        # Her slice: to put on, to run on, to release.
        forged = [
            PutOpen(1, 7, x._type.array, (), hers.placed, hers.tag),
            PutOpen(1, 7, x._type.array, (), hers.placed, ""),
            PutOpen(1, 7, x._type.array, (), hers.placed, slice_tag("guess", bob.id, hers.placed)),
        ]
        for put in forged:
            failure = failed(bob.data(put, PutPart(1, 0, 0, V.tobytes())))
            assert (failure.kind, "the tag is wrong" in failure.message) == ("AuthenticationError", True)
        ask(bob.channel, ReleaseSlice(bob.id, hers.id), **bob.shown)
        assert any(s["slice"] == hers.id for s in whole.status()["slices"])
        explained = ask(bob.channel, Explain(bob.id, -1, one_step(hers.type, digest)), **bob.shown)
        assert isinstance(explained, Refused)
        assert "which this session does not hold" in explained.failure.message
        # Her array: to fetch, in his name and with his token in hers.
        assert bob.data(Fetch(2, number, (0,)), limit_s=5.0) == []
        assert bob.data(Fetch(2, number, (0,)), session=str(alice.id)) == []
        token = data_token("guess", alice.id, None)
        assert bob.data(Fetch(2, number, (0,)), session=str(alice.id), authorization=token) == []
        # Her program: to be served with her array, or with his own bytes.
        calls = [ServeCall(key, (number,), (key,), ((0,),)) for key in range(1, 50)]
        calls += [ServeCall(key, (0,), (key,), ((0,),), ((0, V.tobytes()),)) for key in range(50, 100)]
        for answer in bob.data(*calls, answers=99):
            assert isinstance(answer, DataFailed)
            assert answer.failure.kind == "NotServed"
        # Her program and her array: to launch, to free, to say that he put it.
        answers = bob.talk(
            Free((number,)),
            Put(number, hers.id, x._type.array, ()),
            Launch(1, 1, (number,), 50),
            Register(9, one_step(hers.type, digest), {digest: blob}),
            Launch(2, 9, (number,), 60),
            answers=2,
        )
        kinds = {m.launch: m.failure for m in answers if isinstance(m, LaunchFailed)}
        assert kinds[1].kind == "WireError"
        assert "never registered" in kinds[1].message
        assert kinds[2].kind == "GraphError"
        assert "which this session does not hold" in kinds[2].message
        np.testing.assert_array_equal(np.asarray(inc(x)), V + 1)
        np.testing.assert_array_equal(np.asarray(x), V)


def test_ten_thousand_guesses(whole: Cluster, raw) -> None:
    """Data tokens and tags, guessed and changed a little: none opens anything."""
    bob, rng = raw("bob"), random.Random(3)
    created = bob.slice(1, island=0)
    assert isinstance(created, SliceCreated)
    kind = ArrayType((1,), "float32")

    def guess(text: str) -> str:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice("0123456789abcdef".replace(text[at], "")) + text[at + 1 :]

    puts = [PutOpen(k, k, kind, (), created.placed, guess(created.slice_tag)) for k in range(1, 10_001)]
    answers = bob.data(*puts, answers=10_000, limit_s=60.0)
    assert len(answers) == 10_000
    assert {answer.failure.kind for answer in answers if isinstance(answer, DataFailed)} == {"AuthenticationError"}
    assert not any(isinstance(answer, PutDone) for answer in answers)
    for _ in range(200):
        assert bob.data(Fetch(1, 1, (0,)), answers=0, authorization=guess(bob.opened.data_token)) == []
    # The allowance is signed as well.
    for number in ("-1", "1", "9" * 15, "00"):
        token = f"{number}.{bob.opened.data_token.partition('.')[2]}"
        if token != bob.opened.data_token:
            assert bob.data(Fetch(1, 1, (0,)), answers=0, authorization=token) == []


def test_an_upload_with_a_gap_is_refused(whole: Cluster, raw) -> None:
    """Memory that nobody has written would show what others left there."""
    bob = raw("bob")
    created = bob.slice(1, island=0)
    assert isinstance(created, SliceCreated)
    opened = PutOpen(1, 1, ArrayType((4,), "float32"), (), created.placed, created.slice_tag)
    for parts in ([PutPart(1, 0, 0, bytes(8))] * 2, [PutPart(1, 0, 8, bytes(8)), PutPart(1, 0, 0, bytes(8))]):
        failure = failed(bob.data(opened, *parts))
        assert (failure.kind, "does not go on at" in failure.message) == ("WireError", True)


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_quota_of_devices(whole: Cluster) -> None:
    with whole.connect("carol") as carol, whole.connect("carol") as again:
        held = carol.virtual_slice((4,), ("x",))
        text = r"tenant 'carol' asks for a slice of 4 devices and holds 4 in other slices; 6 are allowed"
        with pytest.raises(pw.errors.QuotaExceeded, match=text):
            again.virtual_slice((4,), ("x",))
        with pytest.raises(pw.errors.QuotaExceeded, match=text):
            again.virtual_slice()  # all of an island: how many that is turns out later
        with again.virtual_slice((2,), ("x",)):
            pass
        held.release()
        again.virtual_slice((4,), ("x",)).release()
    assert not any(s["session"] in (carol.id, again.id) for s in whole.status()["slices"])


def test_quota_of_nodes(whole: Cluster) -> None:
    with whole.connect("carol") as carol, carol.virtual_slice((2,), ("x",)) as s:
        inc = pw.compiled(lambda v: v + 1, slice=s)

        def many(v):
            for _ in range(30):
                v = inc(v)
            return v

        text = r"program 'many' of tenant 'carol' has 32 nodes; 20 are allowed in a program"
        with pytest.raises(pw.errors.QuotaExceeded, match=text):
            np.asarray(pw.program(many)(V))
        with pytest.raises(pw.errors.QuotaExceeded, match=text):
            pw.program(many).lower(V).explain()
        np.testing.assert_array_equal(np.asarray(inc(V)), V + 1)


def test_quota_of_message_bytes(whole: Cluster) -> None:
    """A program that is too big is refused; a later one with the same function too, and others are not."""
    with whole.connect("carol") as carol, carol.virtual_slice((2,), ("x",)) as s:
        constant = np.random.default_rng(1).random(50_000).astype(np.float32)
        big = pw.compiled(lambda v: v + jnp.asarray(constant)[:8], slice=s)
        text = r"a program of 20\d{4} bytes from tenant 'carol' is too big: 100000 are allowed in a message"
        for use in (big, pw.program(lambda v: big(v) * 2)):
            with pytest.raises(pw.errors.QuotaExceeded, match=text):
                np.asarray(use(V))
        inc = pw.compiled(lambda v: v + 1, slice=s)
        np.testing.assert_array_equal(np.asarray(inc(V)), V + 1)


def test_quota_of_message_bytes_of_other_messages(whole: Cluster, raw) -> None:
    carol = raw("carol")
    reply = ask(carol.channel, Explain(carol.id, -1, bytes(200_000)), **carol.shown)
    assert isinstance(reply, Refused)
    assert reply.failure.kind == "QuotaExceeded"
    assert "a call of 2000" in reply.failure.message
    (ended,) = carol.talk(Free(tuple(range(1 << 20, (1 << 20) + 100_000))), answers=1)
    assert isinstance(ended, SessionEnded)
    assert "Expected `array` of length <= 4096" in ended.reason, "no message but a program gets that far"


def test_quota_of_device_bytes(whole: Cluster, raw) -> None:
    """The controller refuses what would be too much; a host does, before it allocates, whatever the client tells the
    controller. Which of the two a client hears first is open: both name what is asked for, held and allowed."""
    with whole.connect("carol") as carol, carol.virtual_slice((1,), ("x",), island=0) as s:
        half = pw.put(np.zeros((1 << 19) // 4, np.float32), slice=s)
        np.asarray(half)
        host = "an upload asks for 1000000 bytes on .* where uploads of the tenant hold 524288; 1048576 are allowed"
        controller = "may hold 1048576 bytes on devices; it holds 524288 and asks for 1000000 more"
        with pytest.raises(pw.errors.QuotaExceeded, match=f"{host}|{controller}"):
            np.asarray(pw.put(np.zeros(250_000, np.float32), slice=s))
        half.delete()
        assert eventually(lambda: whole.buffers() == 0)
        np.asarray(pw.put(np.zeros(250_000, np.float32), slice=s))
    liar = raw("carol")
    created = liar.slice(4, island=0)
    assert isinstance(created, SliceCreated)
    for shape, kind in (((1 << 18,), "QuotaExceeded"), ((1 << 40,), "QuotaExceeded"), ((1 << 62, 1 << 62), "TooLarge")):
        # Replicated: each device of the host holds all of it.
        failure = failed(liar.data(PutOpen(1, 1, ArrayType(shape, "float32"), (), created.placed, created.slice_tag)))
        assert failure.kind == kind
    odd: list[tuple[int, ...]] = [(0, 1 << 62, 1 << 62), (1,) * 40, (-1,), (-(1 << 40), -(1 << 40))]
    for sizes in odd:
        failure = failed(liar.data(PutOpen(1, 1, ArrayType(sizes, "float32"), (), created.placed, created.slice_tag)))
        assert failure.kind in ("TooLarge", "GraphError")


@pytest.mark.parametrize("size", [300_000, 200_000], ids=["by-a-pipe", "by-the-stream"])
@pytest.mark.parametrize("donated", [(), (0,)], ids=["dropped", "donated"])
def test_a_loop_that_uploads_stays_within_its_quota(whole: Cluster, size: int, donated: tuple[int, ...]) -> None:
    """Uploads run ahead of what frees those before: they wait for that, and each result is there."""
    with whole.connect("carol") as carol, carol.virtual_slice((1,), ("x",), island=0) as s:
        total = pw.compiled(lambda v: v.sum(), slice=s, donate_argnums=donated)
        values = [total(pw.put(np.full(size // 4, k, np.float32), slice=s)) for k in range(60)]
        assert [float(value) for value in values] == [float(k * (size // 4)) for k in range(60)]
    assert eventually(lambda: whole.buffers() == 0)


def test_loops_of_several_threads_stay_within_a_quota(whole: Cluster) -> None:
    """Small arrays go by the stream, many at a time, and big ones by pipes: these do not take what those wait for."""
    with whole.connect("carol") as carol, carol.virtual_slice((1,), ("x",), island=0) as s:
        total = pw.compiled(lambda v: v.sum(), slice=s)

        def loop(size: int) -> list[float]:
            values = [total(pw.put(np.full(size // 4, k, np.float32), slice=s)) for k in range(60)]
            return [float(value) / (size // 4) for value in values]

        with ThreadPoolExecutor(3) as pool:
            sizes = (200_000, 280_000, 100_000)
            begun = [pool.submit(contextvars.copy_context().run, loop, size) for size in sizes]
            assert [one.result() for one in begun] == [[float(k) for k in range(60)]] * len(sizes)


def test_uploads_that_never_come_are_bounded_without_a_quota_too(whole: Cluster, raw) -> None:
    bob = raw("bob")
    created = bob.slice(1, island=0)
    assert isinstance(created, SliceCreated)
    opened = [
        PutOpen(k, k, ArrayType(((1 << 30) // 4,), "float32"), (), created.placed, created.slice_tag)
        for k in range(1, 101)
    ]
    answers = bob.data(*opened, answers=100 - 64)
    assert {(type(a), a.failure.kind) for a in answers} == {(DataFailed, "QuotaExceeded")}
    assert len(answers) == 100 - 64


# --- programs ---------------------------------------------------------------------------------------------------------


def refused(session: Raw, blob: bytes, kind: ArrayType, said_kind: ArrayType | None = None) -> Failure:
    """How a function is refused that a session registers and launches."""
    created = session.slice(1, island=0)
    assert isinstance(created, SliceCreated)
    digest = hashlib.sha256(blob).hexdigest()
    graph = one_step(created.placed.mesh, digest, kind=said_kind or kind)
    parts = PutPart(1, 0, 0, bytes((said_kind or kind).nbytes))
    assert session.data(PutOpen(1, 1, said_kind or kind, (), created.placed, created.slice_tag), parts) == [PutDone(1)]
    put = Put(1, created.placed.mesh.id, said_kind or kind, ())
    return failed(session.talk(Register(1, graph, {digest: blob}), put, Launch(1, 1, (1,), 2), answers=1))


def test_functions_that_do_more_than_compute_are_refused(whole: Cluster, raw) -> None:
    kind = ArrayType((8,), "float32")
    aval = jax.ShapeDtypeStruct((8,), np.float32)
    _, evil = exported(lambda v: jax.ffi.ffi_call("evil_target", aval)(v), kind, allow=("evil_target",))
    failure = refused(raw("bob"), evil, kind)
    assert failure.kind == "ProgramRefused"
    assert "step is refused on host 0: custom call 'evil_target' is not among those" in failure.message
    _, empty = exported(lambda v: v + jax.lax.empty((8,), np.float32), kind, platforms=("cpu", "cuda"))
    assert "custom call 'AllocateBuffer' is not among those" in refused(raw("bob"), empty, kind).message
    failure = refused(raw("bob"), b"no function at all", kind)
    assert failure.kind == "ProgramRefused"
    assert "it is no exported function" in failure.message


def test_functions_that_are_not_what_the_graph_says_are_refused(whole: Cluster, raw) -> None:
    _, blob = exported(lambda v: v * 2, ArrayType((8,), "float32"))
    failure = refused(raw("bob"), blob, ArrayType((8,), "float32"), ArrayType((4,), "float32"))
    assert failure.kind == "ProgramRefused"
    assert failure.message.startswith("step takes (float32[8]), but the program gives it (float32[4])")
    _, blob = exported(lambda v: jnp.concatenate([v, v]), ArrayType((8,), "float32"))
    failure = refused(raw("bob"), blob, ArrayType((8,), "float32"))
    assert failure.message.startswith("step gives (float32[16]); the program says output 0 is float32[8]")


@pytest.mark.slow
def test_broken_functions_end_no_host(whole: Cluster, raw) -> None:
    """Reading about one in a hundred of these would crash who reads them."""
    kind, rng = ArrayType((8,), "float32"), random.Random(11)
    _, blob = exported(lambda v: jnp.sort(v) + jax.random.normal(jax.random.key(0), (8,)), kind)
    session = raw("bob")
    created = session.slice(1, island=0)
    assert isinstance(created, SliceCreated)
    messages: list[Message] = []
    for number in range(1, 201):
        broken = bytearray(blob)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        digest = hashlib.sha256(broken).hexdigest()
        graph = one_step(created.placed.mesh, digest, arguments=0, kind=kind)
        messages += [Register(number, graph, {digest: bytes(broken)}), Launch(number, number, (), 1000 + number)]
    found = session.talk(*messages, answers=200)
    outcomes = [m for m in found if isinstance(m, LaunchFailed)]
    kinds = {m.failure.kind for m in outcomes}
    assert kinds <= {"ProgramRefused", "CompileError"}
    assert len(outcomes) + sum(len(m.launches) for m in found if isinstance(m, Completed)) == 200


# --- the table changes ------------------------------------------------------------------------------------------------


def test_the_table_is_read_again(whole: Cluster) -> None:
    """1. The file is broken: the last good table holds, and status says so. 2. Dave is removed: his session ends, with
    the reason; others go on. 3. He is back."""
    good = whole.file.read_bytes()
    with whole.connect("alice") as alice, whole.connect("dave") as dave:
        assert dave.status()["sessions"]
        whole.file.write_bytes(b'{"tenants": [{"name": "alice", "token": "' + b"x" * 20 + b'"')
        assert eventually(lambda: whole.status()["tenants_file"]["problem"] != "")
        problem = whole.status()["tenants_file"]["problem"]
        assert "is not a table of tenants" in problem
        assert "xxxx" not in problem
        assert dave.status()["sessions"], "he is there still"
        with whole.connect("dave"):
            pass
        whole.file.write_bytes(table("alice", "bob", "carol"))
        assert eventually(lambda: bool(dave.closed_because))
        assert "tenant 'dave' is not in the table of tenants any more" in dave.closed_because
        with pytest.raises(pw.errors.SessionClosed, match="is not in the table of tenants any more"):
            dave.virtual_slice((1,), ("x",))
        with pytest.raises(pw.errors.AuthenticationError, match="the token is missing or wrong"):
            whole.connect("dave")
        assert alice.status()["sessions"]
        whole.file.write_bytes(good)
        assert eventually(lambda: whole.status()["tenants_file"]["problem"] == "")

        def back() -> bool:
            try:
                whole.connect("dave").close()
            except pw.errors.AuthenticationError:
                return False
            return True

        assert eventually(back)
    with contextlib.suppress(pw.errors.NotInitialized):
        assert context.current_session() is not dave, "a session that was left is not used any more"


# --- clients that stop ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_client_loses_all_and_a_busy_one_nothing(whole: Cluster, python) -> None:
    """
    1. A client with slices, arrays and queued launches is stopped; another one holds Python's lock for 12 s.
    2. Within 10 s the first one has nothing any more, in status and on the hosts. A third one computes meanwhile.
    3. The first one goes on, and gets typed errors. The second one never noticed anything.
    """
    before = whole.buffers()
    busy = python.start("tenants_busy_client", whole.url, TOKENS["alice"])
    stopped = python.start("tenants_stopped_client", whole.url, TOKENS["bob"])
    assert stopped.stdout.readline() == "holding\n"
    assert busy.stdout.readline() == "busy\n"
    assert any(s["name"] == "stopped" for s in whole.status()["sessions"])
    stopped.send_signal(signal.SIGSTOP)
    start = time.monotonic()

    def gone() -> bool:
        found = whole.status()
        return not any(s["name"].startswith("stopped") for s in [*found["sessions"], *found["slices"]])

    with ThreadPoolExecutor(1) as pool:  # first come, first served: she may have to wait until the queue is dropped
        third = pool.submit(assert_computes, whole, "alice")
        in_time = eventually(gone, 10 - (time.monotonic() - start))
        print(f"gone after {time.monotonic() - start:.1f} s")
        third.result()
    assert in_time
    assert_computes(whole, "alice")
    stopped.send_signal(signal.SIGCONT)
    stopped.stdin.write("go on\n")
    stopped.stdin.flush()
    assert [stopped.stdout.readline().strip() for _ in range(2)] == ["ControllerLost", "SessionClosed"]
    python.finish(stopped)
    assert busy.stdout.readline() == f"{[float(k + 2) for k in range(8)]}\n"
    python.finish(busy)
    assert eventually(lambda: whole.buffers() <= before, 60), "launches that ran are over, and left nothing"


# --- garbage from tenants ---------------------------------------------------------------------------------------------


def broken(data: bytes, rng: random.Random) -> bytes:
    """With bits turned, cut off, spliced, or nested deeply."""
    kind = rng.randrange(5)
    if kind == 0:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    at = rng.randrange(len(data))
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.randint(1, 6)) + data[at + 1 :]
    if kind == 3:
        return data[:at] + data[rng.randrange(len(data)) :]
    return data[:at] + b"\x91" * rng.randint(1, 3000) + data[at:]


@pytest.mark.slow
def test_four_thousand_broken_messages_from_tenants(whole: Cluster, raw) -> None:
    """Each endpoint gets broken messages from a session that is let in; the cluster computes as if nothing had been."""
    rng = random.Random(5)
    kind = ArrayType((8,), "float32")
    digest, blob = exported(lambda v: v * 2, kind)
    bob = raw("bob")
    created = bob.slice(2, island=0)
    assert isinstance(created, SliceCreated)
    mesh, placed, tag = created.placed.mesh, created.placed, created.slice_tag
    data: list[list[Message]] = [
        [PutOpen(1, 1, kind, (("x",),), placed, tag), PutPart(1, 0, 0, bytes(16)), PutPart(1, 1, 0, bytes(16))],
        [Fetch(2, 1, (0, 1))],
    ]
    for number in range(1500):
        batch = broken(encode(data[number % 2]), rng)
        shown = {**bob.shown, "authorization": bob.opened.data_token}
        linked(bob.hosts[number % 2], streams.DATA_STREAM, [batch], **shown)
    calls = [
        CreateSlice(bob.id, (1,), ("x",), -1, "", ""),
        ReleaseSlice(bob.id, mesh.id),
        Explain(bob.id, -1, one_step(mesh, digest)),
        Status(bob.id),
        OpenSession(VERSION, "name"),
    ]
    for number in range(1500):
        ask(bob.channel, broken(encode(calls[number % len(calls)]), rng), **bob.shown)
    hot: list[list[Message]] = [
        [Register(1, one_step(mesh, digest), {digest: blob})],
        [Put(1, mesh.id, kind, ()), Launch(1, 1, (1,), 2), Free((1, 2))],
    ]
    for number in range(1000):
        one = Raw(whole, TOKENS["bob"])
        said(one.channel, streams.CLIENT_STREAM, [broken(encode(hot[number % 2]), rng)], **one.shown)
        one.channel.close()
    assert eventually(lambda: sum(s["tenant"] == "bob" for s in whole.status()["sessions"]) <= 1)
