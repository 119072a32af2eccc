"""Links: frames, who may come in, what happens when an end goes, and that no message is lost or doubled on the way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import queue
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pathways_ray.errors import WireError
from pathways_ray.transport import batcher, capabilities, frames, links, thread_links
from pathways_ray.transport.endpoints import Tls
from pathways_ray.transport.frames import AT_ONCE_BYTES, CLOSE_REASON, Frames, Handshake, LinkLost, frame
from pathways_ray.transport.links import AsyncLink
from pathways_ray.transport.loops import stop_on_errors
from pathways_ray.transport.messages import FROM_HOST_DATA, TO_CLIENT, Completed, FetchPart, Message, encode
from pathways_ray.transport.sockets import READ_BYTES
from pathways_ray.transport.tls import Trust, trust_of

LIMIT_S = 20.0
ECHO, LATE, REFUSING = "/a.Test/Echo", "/a.Test/Late", "/a.Test/Refusing"
SHOWN = {"authorization": "secret"}


# --- frames -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 1000])
def test_frames_come_out_whole_however_the_bytes_come(step: int) -> None:
    sent = [b"one", b"x" * 300, b"", b"two", b"y"]
    data = b"".join(map(frame, sent))
    frames = Frames(1000)
    found = [batch for k in range(0, len(data), step) for batch in frames.feed(data[k : k + step])]
    assert found == [batch for batch in sent if batch]  # an empty one says only that the other end lives


@pytest.mark.parametrize("step", [1, 3, 64, 1000])
def test_room_for_a_frame_is_made_as_its_bytes_come(step: int) -> None:
    data = frame(bytes(range(256)) * 3) + frame(b"next")
    frames = Frames(1000)
    frames.at_once = 5
    found = [batch for k in range(0, len(data), step) for batch in frames.feed(data[k : k + step])]
    assert found == [bytes(range(256)) * 3, b"next"]


def test_a_frame_over_the_limit_is_refused_before_it_is_there() -> None:
    frames = Frames(10)
    assert list(frames.feed(frame(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(LinkLost, match="a frame of 11 bytes came; the limit is 10"):
        next(frames.feed((11).to_bytes(4, "big")))


def test_last_words_are_no_batch() -> None:
    frames = Frames(100)
    assert list(frames.feed(frame(b"one") + (3 | CLOSE_REASON).to_bytes(4, "big") + b"why")) == [b"one"]
    assert frames.close_reason == "why"


# --- a server, and who dials it ---------------------------------------------------------------------------------------


class Server:
    """Serves echoes on a loop in a thread of its own. The late one reads once it may; `ended`: a link is over."""

    def __init__(self, tls: Tls | None) -> None:
        self.ended = threading.Event()
        self.link: AsyncLink | None = None
        self.links: list[AsyncLink] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(tls)), daemon=True)
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    async def _main(self, tls: Tls | None) -> None:
        self.loop, self._stop, self._may = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        handlers: dict[str, links.Handler] = {ECHO: self._echo, LATE: self._late, REFUSING: self._refuse}
        handlers = {path: functools.partial(self._noted, handler) for path, handler in handlers.items()}
        server, self.address = await links.serve(handlers, "127.0.0.1", tls=tls)
        self._started.set()
        async with server:
            await self._stop.wait()
        for link in self.links:
            link.close()
            await link.wait_closed()

    async def _noted(self, handler: links.Handler, link: AsyncLink) -> None:
        self.links.append(link)
        await handler(link)

    def may(self) -> None:
        self.loop.call_soon_threadsafe(self._may.set)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    async def _echo(self, link: AsyncLink) -> None:
        self.link = link
        if not capabilities.authorised(link.metadata, "secret"):
            link.refuse("wrong secret")
        while (batch := await link.read()) is not None:
            await link.write(batch)
        self.ended.set()

    async def _late(self, link: AsyncLink) -> None:
        await self._may.wait()
        await self._echo(link)

    async def _refuse(self, link: AsyncLink) -> None:
        link.refuse("not today")


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, certificate: Tls) -> Tls | None:
    return certificate if request.param == "tls" else None


@pytest.fixture
def server(tls: Tls | None) -> Iterator[Server]:
    made = Server(tls)
    yield made
    made.stop()


class Dialled:
    """A link for threads, read by a thread of its own."""

    def __init__(self, address: str, tls: Tls | None, path: str = ECHO, shown: dict[str, str] = SHOWN) -> None:
        self.deep = 0
        self.outbox = thread_links.Outbox(lambda: self.deep)
        self.link = thread_links.ThreadLink(address, path, shown, self.outbox, trust_of(tls))
        self.batches: list[bytes] = []
        self.changed = threading.Condition()
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        reason = "the iteration ended"
        try:
            for batch in self.link:
                with self.changed:
                    self.batches.append(batch)
                    self.changed.notify_all()
        except LinkLost as error:
            reason = str(error)
        with self.changed:
            self.reason = reason
            self.changed.notify_all()

    def wait(self, what: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(what, LIMIT_S), (self.reason, len(self.batches))

    @property
    def launches(self) -> list[int]:
        return [m.launches[0] for batch in self.batches for m in TO_CLIENT.decode_batch(batch)]  # type: ignore[union-attr]

    def close(self) -> None:
        self.link.close()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def dialled(server: Server, tls: Tls | None) -> Iterator[Dialled]:
    made = Dialled(server.address, tls)
    yield made
    made.close()


def test_messages_of_many_threads_come_once_each_in_the_order_of_their_thread(dialled: Dialled) -> None:
    """
    1. Four threads send 2,000 messages each, with little and with much under way beyond the link.
    2. All come back once; those of each thread in the order in which it sent them.
    """
    threads, each = 4, 2000

    def send(number: int) -> None:
        for k in range(each):
            dialled.outbox.send(Completed((number * each + k,)))
            if k % 500 == 0:
                dialled.deep = 0 if dialled.deep else batcher.GATHER_DEPTH + 1

    started = [threading.Thread(target=send, args=(k,)) for k in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(LIMIT_S)
    dialled.wait(lambda: len(dialled.launches) == threads * each)
    for number in range(threads):
        mine = [k for k in dialled.launches if k // each == number]
        assert mine == list(range(number * each, (number + 1) * each))


def test_what_is_sent_before_the_link_is_there_comes_first(server: Server, tls: Tls | None) -> None:
    outbox = thread_links.Outbox()
    for k in range(3):
        outbox.send(Completed((k,)))
    link = thread_links.ThreadLink(server.address, ECHO, SHOWN, outbox, trust_of(tls))
    coming = iter(link)
    assert [m.launches for m in TO_CLIENT.decode_batch(next(coming))] == [(0,), (1,), (2,)]  # type: ignore[union-attr]
    link.close()
    with pytest.raises(LinkLost):
        next(coming)


def test_a_sender_never_waits_for_who_does_not_read(server: Server, tls: Tls | None) -> None:
    """
    1. The other end reads nothing; 32 MiB are sent, more than the kernel takes.
    2. Every `send` returns. Then the other end reads, and all of it comes back as it was.
    """
    dialled = Dialled(server.address, tls, LATE)
    part = bytes(range(256)) * (1 << 14)
    for k in range(8):
        dialled.outbox.send(FetchPart(k, 0, 0, len(part), part))
    server.may()

    def parts() -> list[FetchPart]:
        return [m for batch in dialled.batches for m in FROM_HOST_DATA.decode_batch(batch)]  # type: ignore[misc]

    dialled.wait(lambda: len(parts()) == 8)
    assert [p.request for p in parts()] == list(range(8))
    assert all(p.data == part for p in parts())
    dialled.close()


def test_who_may_not_wait_leaves_a_crowd_of_messages_to_the_thread_of_the_link() -> None:
    taken: list[int] = []

    def write(data: bytes, wait: bool) -> bool:
        taken.append(len(data))
        return not data

    outbox = thread_links.Outbox()
    for number in range(1000):
        outbox.send(Completed((number,)))
    outbox.attach(write, direct=True)
    outbox.send(Completed((1000,)))
    assert sum(taken) < 1000  # each byte of it is copied as often as something is put behind it


@pytest.mark.parametrize("others", [0, 1, 2, thread_links.MAX_DIRECT_MESSAGES])
def test_a_sender_writes_its_own_messages_and_no_others(others: int) -> None:
    """Ctrl-C amid the write loses what is taken: who has put it has to know of that."""
    written: list[tuple[int, ...]] = []

    def write(data: bytes, wait: bool) -> bool:
        written.extend(message.launches for batch in Frames(1 << 20).feed(data) for message in decoded(batch))
        return True

    decoded: Any = TO_CLIENT.decode_batch
    outbox = thread_links.Outbox()
    outbox.attach(write, direct=True)
    for number in range(others):
        outbox.put(Completed((number,)))
    own: list[Message] = [Completed((1000 + k,)) for k in range(2)]
    outbox.send_all(own)
    assert written == ([] if others else [(1000,), (1001,)])
    pump = threading.Thread(target=outbox.pump, daemon=True)
    pump.start()
    outbox.close()
    pump.join(LIMIT_S)
    assert written == [*((number,) for number in range(others)), (1000,), (1001,)]


def test_a_message_behind_one_that_may_be_said_shorter_leaves_with_it_by_the_thread_of_the_link() -> None:
    """1. A lone message leaves at once, as it is. 2. One behind another leaves once both are composed."""
    written: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def write(data: bytes, wait: bool) -> bool:
        if data:
            written.put([message.launches for batch in Frames(1 << 20).feed(data) for message in decoded(batch)])
        return True

    decoded: Any = TO_CLIENT.decode_batch
    outbox = thread_links.Outbox(compose=lambda messages: [Completed((100 + len(messages),))])
    outbox.attach(write, direct=True)
    outbox.send(Completed((1,)))
    assert written.get_nowait() == [(1,)]
    outbox.send_later(Completed((2,)))
    outbox.send(Completed((3,)))
    assert written.empty()
    pump = threading.Thread(target=outbox.pump, daemon=True)
    pump.start()
    assert written.get(timeout=LIMIT_S) == [(102,)]
    outbox.close()
    pump.join(LIMIT_S)
    assert not pump.is_alive()


@contextlib.contextmanager
def pumped() -> Iterator[tuple[thread_links.Outbox, queue.SimpleQueue[bytes]]]:
    """An outbox with the thread of a link, which has ended at the end, and what is written."""
    written: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def write(data: bytes, wait: bool) -> bool:
        if data:
            written.put(data)
        return True

    outbox = thread_links.Outbox()
    outbox.attach(write, direct=True)
    pump = threading.Thread(target=outbox.pump, daemon=True)
    pump.start()
    yield outbox, written
    outbox.close()
    pump.join(LIMIT_S)
    assert not pump.is_alive()


def test_many_messages_that_are_not_urgent_do_not_wait_for_one_that_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_links, "LINGER_S", 3600.0)
    with pumped() as (outbox, written):
        for number in range(thread_links.MAX_LINGERING + 1):
            outbox.send_later(Completed((number,)))
        assert written.get(timeout=LIMIT_S)


def test_each_message_that_is_not_urgent_leaves_whether_those_before_it_have_just_left_or_long_ago(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_links, "LINGER_S", 0.001)
    monkeypatch.setattr(thread_links, "PING_S", 3600.0)  # or this would wake the thread of the link
    with pumped() as (outbox, written):
        for number in range(300):
            outbox.send_later(Completed((number,)))
            assert written.get(timeout=LIMIT_S)
            time.sleep(number % 30 * 1e-4)  # it lingers still, stops just now, or has stopped


def test_who_speaks_before_it_has_shown_that_it_is_the_right_one_is_not_listened_to_for_long() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def chat() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not over.wait(0.05):
                    connection.sendall(frame(b""))

        thread = threading.Thread(target=chat)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(LinkLost, match="another server answers"):
            thread_links.ThreadLink(address, ECHO, SHOWN, thread_links.Outbox()).dial(1.0, b"welcome")
        over.set()
        thread.join(LIMIT_S)


def test_a_message_may_be_sent_from_a_destructor_that_runs_while_one_is_sent(dialled: Dialled) -> None:
    """
    1. Objects that send a message when they are collected lie in cycles; sending goes on while they are.
    2. Nothing waits for itself; all messages come.
    """
    count = 3000

    class Held:
        def __init__(self, number: int) -> None:
            self.number = number
            self.cycle = self

        def __del__(self) -> None:
            dialled.outbox.send(Completed((self.number,)))

    before = gc.get_threshold()
    gc.set_threshold(7)
    try:
        for k in range(0, count, 2):
            Held(k)
            dialled.outbox.send(Completed((k + 1,)))
        gc.collect()
    finally:
        gc.set_threshold(*before)
    dialled.wait(lambda: len(dialled.launches) == count)
    assert sorted(dialled.launches) == list(range(count))


def test_the_reader_learns_that_and_why_the_other_end_hangs_up(server: Server, tls: Tls | None) -> None:
    for path, shown, reason in (
        (ECHO, {"authorization": "wrong"}, "wrong secret"),
        (REFUSING, SHOWN, "not today"),
        ("/no.Such/Link", SHOWN, "no path '/no.Such/Link' is served here"),
    ):
        dialled = Dialled(server.address, tls, path, shown)
        dialled.wait(lambda dialled=dialled: dialled.reason is not None)
        assert dialled.reason == reason
        assert dialled.batches == []


def test_the_other_end_learns_that_a_link_was_closed_after_all_that_was_sent(server: Server, dialled: Dialled) -> None:
    dialled.outbox.send(Completed((7,)))
    dialled.wait(lambda: dialled.launches == [7])
    dialled.link.close()
    assert server.ended.wait(LIMIT_S)
    dialled.outbox.send(Completed((8,)))  # into nothing, without an error
    assert server.link is not None
    assert server.link.reason


def test_nobody_answers(tls: Tls | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    dialled = Dialled(address, tls)
    dialled.wait(lambda: dialled.reason is not None)
    assert dialled.reason is not None
    assert dialled.reason.startswith(f"no answer at {address}: ")
    with pytest.raises(LinkLost, match=f"no answer at {address}: "):
        asyncio.run(links.dial(address, ECHO, SHOWN, trust_of(tls)))


def test_a_loop_dials_a_loop(server: Server, tls: Tls | None) -> None:
    """A batch that is longer than one write, one that is shorter, and the end."""

    async def story() -> list[bytes | None]:
        link = await links.dial(server.address, ECHO, SHOWN, trust_of(tls))
        sent = [encode([Completed((k,))]) for k in range(2)] + [b"x" * (frames.MAX_COPIED_BYTES + 1)]
        for batch in sent:
            await link.write(batch)
        found = [await link.read() for _ in sent]
        assert found == sent
        link.close()
        found.append(await link.read())
        await link.write(b"into nothing")
        await link.wait_closed()
        return found[-1:]

    assert asyncio.run(asyncio.wait_for(story(), LIMIT_S)) == [None]


def test_each_batch_is_taken_as_it_comes_until_the_end(server: Server, tls: Tls | None) -> None:
    """Those that had come before, too. The end is this one's or the other one's."""
    sent = [f"batch {k}".encode() for k in range(8)]

    async def story(hang_up: Callable[[AsyncLink], None]) -> list[bytes]:
        link = await links.dial(server.address, ECHO, SHOWN, trust_of(tls))
        found: list[bytes] = []

        def take(batch: bytes) -> None:
            found.append(batch)
            if batch == sent[-1]:
                hang_up(link)

        for batch in sent[:4]:
            await link.write(batch)
        found += [await link.read() or b"", await link.read() or b""]
        asyncio.get_running_loop().call_later(0.05, lambda: [link.put(batch) for batch in sent[4:]])
        await link.each(take)
        link.close()
        await link.wait_closed()
        return found

    def at_the_other_end(link: AsyncLink) -> None:
        assert server.link is not None
        server.loop.call_soon_threadsafe(server.link.close)

    for hang_up in (AsyncLink.close, at_the_other_end):
        assert asyncio.run(asyncio.wait_for(story(hang_up), LIMIT_S)) == sent


def test_what_taking_a_batch_raises_ends_the_taking(server: Server, tls: Tls | None) -> None:
    async def story() -> list[bytes]:
        link = await links.dial(server.address, ECHO, SHOWN, trust_of(tls))
        found: list[bytes] = []

        def take(batch: bytes) -> None:
            found.append(batch)
            if batch == b"poison":
                raise WireError("not of this protocol")

        for batch in (b"one", b"poison", b"two"):
            asyncio.get_running_loop().call_later(0.02, link.put, batch)
        with pytest.raises(WireError, match="not of this protocol"):
            await link.each(take)
        assert await link.read() == b"two"
        link.close()
        await link.wait_closed()
        return found

    assert asyncio.run(asyncio.wait_for(story(), LIMIT_S)) == [b"one", b"poison"]


def test_what_taking_a_batch_raises_is_known_where_it_has_hung_up_before(server: Server, tls: Tls | None) -> None:
    async def story() -> None:
        link = await links.dial(server.address, ECHO, SHOWN, trust_of(tls))

        def take(batch: bytes) -> None:
            link.close()
            link.eof_received()
            raise WireError("half of it was carried out")

        asyncio.get_running_loop().call_later(0.02, link.put, b"one")
        with pytest.raises(WireError, match="half of it was carried out"):
            await link.each(take)
        await link.wait_closed()

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))


@pytest.mark.parametrize("size", [1, READ_BYTES // 3, READ_BYTES - 4])
def test_others_have_their_turn_between_long_batches_that_are_read_together(size: int) -> None:
    """Some loops read again and again in one step where each reading fills the room, and a batch of the room's size may
    come with each."""

    async def story() -> int:
        link, taken, most = AsyncLink(), 0, 0
        link._frames.at_once = AT_ONCE_BYTES

        def take(batch: bytes) -> None:
            nonlocal taken
            taken += 1

        taking = asyncio.ensure_future(link.each(take, in_turns=True))
        await asyncio.sleep(0)
        for _ in range(20):
            before = taken
            for _ in range(4):  # in one step of the loop
                link.data_received(frame(bytes(size)))
            most = max(most, taken - before)
            for _ in range(20):
                await asyncio.sleep(0)
            assert taken == before + 4
        link.eof_received()
        await taking
        return most

    assert asyncio.run(asyncio.wait_for(story(), LIMIT_S)) == (0 if size > READ_BYTES // 2 else 4)


@pytest.mark.parametrize("end", ["thread", "loop"])
def test_an_end_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Somebody takes the connection, and never says a word."""
    for module in (links, thread_links):
        monkeypatch.setattr(module, "SILENCE_S", 1.0)
        monkeypatch.setattr(module, "PING_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        if end == "thread":
            dialled = Dialled(address, None)
            dialled.wait(lambda: dialled.reason is not None)
            assert dialled.reason == "it was silent for 1 s"
        else:

            async def story() -> str:
                link = await links.dial(address, ECHO, SHOWN)
                assert await link.read() is None
                assert link.given_up
                return link.reason

            assert asyncio.run(asyncio.wait_for(story(), LIMIT_S)) == "it was silent for 1 s"


def test_signs_of_life_keep_a_link_that_carries_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the silence that is allowed passes; then a message goes there and back."""
    for module in (links, thread_links):
        monkeypatch.setattr(module, "SILENCE_S", 2.0)  # ten signs of life: some may be late on a busy machine
        monkeypatch.setattr(module, "PING_S", 0.2)
    server = Server(None)
    dialled = Dialled(server.address, None)
    with dialled.changed:
        assert not dialled.changed.wait_for(lambda: dialled.reason, 4.0)
    dialled.outbox.send(Completed((1,)))
    dialled.wait(lambda: dialled.launches == [1])
    dialled.close()
    server.stop()


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00\x00\x00\x00" * 3 + b"\x00\x00\x00\x05abcde",
    frame(encode(["/a.Test/Echo", 7])),
    frame(encode({"path": ECHO})),
    b"\xff" * 64,
]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_a_connection_that_does_not_begin_with_a_handshake_ends_and_reaches_no_handler(data: bytes) -> None:
    server = Server(None)
    frames = Frames(links.MAX_HANDSHAKE_BYTES)
    with socket.create_connection(links.endpoint(server.address), timeout=LIMIT_S) as peer:
        peer.sendall(data)
        while answer := peer.recv(1 << 16):
            assert list(frames.feed(answer)) == []
    assert frames.close_reason
    assert server.links == []
    dialled = Dialled(server.address, None)  # others are served on
    dialled.outbox.send(Completed((1,)))
    dialled.wait(lambda: dialled.launches == [1])
    dialled.close()
    server.stop()


def test_a_stranger_gets_no_room_for_a_frame_that_he_says_he_sends() -> None:
    """Handshakes without a right, each with the length of a frame of 255 MiB behind it: some 80 bytes."""
    server = Server(None)
    data = frame(encode(Handshake(REFUSING, {}))) + (255 << 20).to_bytes(4, "big")
    tracemalloc.start()
    try:
        for _ in range(4):
            with socket.create_connection(links.endpoint(server.address), timeout=LIMIT_S) as peer:
                peer.sendall(data)
                while peer.recv(1 << 16):
                    pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    server.stop()


def test_a_stranger_who_is_refused_and_stays_is_given_up_without_an_error(
    monkeypatch: pytest.MonkeyPatch, tls: Tls | None
) -> None:
    """
    1. Somebody without a right is refused. He keeps his connection, and says nothing more.
    2. He is given up for his silence; the loop, which an error in a timer would stop, goes on.
    3. Another one, who is refused too, hangs up: no error is printed.
    """
    monkeypatch.setattr(links, "SILENCE_S", 1.0)
    monkeypatch.setattr(links, "PING_S", 0.2)
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    came, over = asyncio.Event(), threading.Event()
    errors: list[dict[str, Any]] = []
    refused: list[AsyncLink] = []

    async def refuse(link: AsyncLink) -> None:
        refused.append(link)
        came.set()
        link.refuse("not today")

    def stranger(address: str) -> None:
        with contextlib.ExitStack() as ended:
            peer = ended.enter_context(socket.create_connection(links.endpoint(address), timeout=LIMIT_S))
            if tls is not None:
                peer = ended.enter_context(unverified.wrap_socket(peer))
            peer.sendall(frame(encode(Handshake(REFUSING, {}))))
            over.wait(LIMIT_S)

    async def story() -> None:
        stop_on_errors(asyncio.get_running_loop())
        server, address = await links.serve({REFUSING: refuse}, "127.0.0.1", tls=tls)
        staying = asyncio.ensure_future(asyncio.to_thread(stranger, address))
        await came.wait()
        await refused[0].wait_closed()
        over.set()
        await staying
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        link = await links.dial(address, REFUSING, {}, trust_of(tls))
        assert await link.read() is None
        assert link.reason == "not today"
        for end in (link, refused[1]):
            end.close()
            await end.wait_closed()
        server.close()

    try:
        asyncio.run(asyncio.wait_for(story(), LIMIT_S))
    finally:
        over.set()
    assert errors == []


def test_unauthenticated_connections_never_close_a_port_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    1. One address has as many as it may have, and comes again: its own oldest goes.
    2. Others come: they are served, and so is that address itself, once it says hello.
    3. All places are taken by other addresses: the oldest of all goes.
    """
    monkeypatch.setattr(links, "MAX_UNAUTHENTICATED", 5)
    monkeypatch.setattr(links, "MAX_UNAUTHENTICATED_OF_ADDRESS", 3)
    server = Server(None)
    place = links.endpoint(server.address)

    def stranger(address: str) -> socket.socket:
        return socket.create_connection(place, LIMIT_S, (address, 0))

    def gone(peer: socket.socket) -> bool:
        with contextlib.suppress(ConnectionError):
            return b"a newer connection took the place" in peer.recv(1 << 16) or peer.recv(1) == b""
        return True

    unknown = [stranger("127.0.0.2") for _ in range(4)]
    assert gone(unknown[0])
    unknown += [stranger(f"127.0.0.{k}") for k in (3, 4, 5)]
    assert gone(unknown[1])
    for peer in (unknown[2], unknown[-1]):
        peer.settimeout(0.1)
        with pytest.raises(TimeoutError):
            peer.recv(1)
    for _ in range(8):  # more than there are places
        dialled = Dialled(server.address, None)
        dialled.outbox.send(Completed((1,)))
        dialled.wait(lambda dialled=dialled: dialled.launches == [1])
        dialled.close()
    for peer in unknown:
        peer.close()
    server.stop()


def test_a_server_without_a_trusted_certificate_gets_no_message(certificate: Tls, tmp_path: Path) -> None:
    """A client that trusts the system's certificates, and one that expects another name, say nothing to the server."""
    server = Server(certificate)
    trust = trust_of(certificate)
    assert trust is not None
    for wrong in (Trust(), Trust(trust.roots, "elsewhere.example")):
        outbox = thread_links.Outbox()
        outbox.send(Completed((1,)))
        with pytest.raises(LinkLost, match=r"certificate|verify"):
            next(iter(thread_links.ThreadLink(server.address, ECHO, SHOWN, outbox, wrong)))
        with pytest.raises(LinkLost, match=r"certificate|verify"):
            asyncio.run(links.dial(server.address, ECHO, SHOWN, wrong))
    assert server.link is None
    server.stop()


def test_a_handshake_is_all_that_is_read_before_it_is_answered() -> None:
    long = Handshake(ECHO, {"authorization": "x" * links.MAX_HANDSHAKE_BYTES})
    frames = Frames(links.MAX_HANDSHAKE_BYTES)
    with pytest.raises(LinkLost, match="the limit is 4096"):
        next(frames.feed(frame(encode(long))[:4]))


def test_a_server_takes_the_first_port_that_is_free() -> None:
    """A firewall opens some ports to clients; servers of one machine share them out."""

    async def serve() -> list[int]:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            first = taken.getsockname()[1]
            ports = (first, min(first + 20, 65535))
            made = [await links.serve({}, "127.0.0.1", ports) for _ in range(3)]
            with pytest.raises(OSError, match="in use"):
                await links.serve({}, "127.0.0.1", (first, first))
        for server, _ in made:
            server.close()
        found = [links.endpoint(address)[1] for _, address in made]
        assert ports[0] < min(found) < max(found) <= ports[1]
        return found

    assert len(set(asyncio.run(serve()))) == 3
