"""The end of a link (`links`) for threads: any of them sends, one reads."""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from pathways_ray import limits
from pathways_ray.transport import streams
from pathways_ray.transport.links import (
    CONNECT_LIMIT_S,
    HELLO_BYTES,
    PING,
    PING_S,
    SILENCE_S,
    Frames,
    Hello,
    LinkLost,
    endpoint,
    frame,
    keep_alive,
)
from pathways_ray.transport.messages import Message, encode
from pathways_ray.transport.tls import Trust, client_context

READ_BYTES = 1 << 18

AT_ONCE = 16
"""Who may not wait writes so many messages at a time: what the kernel does not take is copied."""

LATER_S = 0.005
"""A message that may wait waits so long for one that may not."""


class Outbox:
    """Outgoing messages of one link, put by any thread, also in a destructor.

    `send` writes by itself when nobody else does, little is under way and the kernel takes it, which it does at once or
    not at all; otherwise a thread of its own does. So a lone message leaves without a change of threads.

    Args:
        depth: how many launches are under way beyond the link.
        composed: says the same in fewer messages, where some have gathered.
    """

    def __init__(
        self,
        depth: Callable[[], int] = lambda: 0,
        composed: Callable[[list[Message]], list[Message]] = lambda messages: messages,
    ) -> None:
        self._depth = depth
        self._composed = composed
        self._messages: deque[Message] = deque()
        self._turn = threading.Lock()
        # Putting into a SimpleQueue cannot wait for this very thread, as setting an Event in a destructor could.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._hurry = self._gathering = False
        self._write: Callable[[bytes, bool], bool] | None = None
        self._direct = False
        self._closed = False

    def send(self, message: Message) -> None:
        self._messages.append(message)
        self._send()

    def send_all(self, messages: list[Message]) -> None:
        """Sends messages of which either all or none are to go, should Ctrl-C come in between."""
        self._messages.extend(messages)
        if len(messages) > 2:  # what is big is for the link's own thread
            self._hurry = True
            self._call()
        else:
            self._send()

    def _send(self) -> None:
        if self._direct and self._depth() <= streams.DEEP and self._turn.acquire(blocking=False):
            try:
                written = self._drain(wait=False)
            finally:
                self._turn.release()
            if written and not self._messages:
                return
        self._hurry = True
        self._call()

    def send_later(self, message: Message) -> None:
        """Sends a message that nobody waits for: with the next one, or after `LATER_S`."""
        self._messages.append(message)
        if not self._gathering:
            self._call()

    def close(self) -> None:
        """What was sent before still goes out."""
        self._closed = self._hurry = True
        self._call()

    def _call(self) -> None:
        if self._calls.empty():  # no flag: Ctrl-C between setting it and calling would leave it set
            self._calls.put(None)

    def _drain(self, wait: bool) -> bool:
        """Writes all that is there; False when some of it has to wait and may not. Only for who has the turn."""
        write = self._write
        if write is None:
            return False
        if not write(b"", wait):
            return False  # something from before is not out yet
        while self._messages:
            messages: list[Message] = []
            with contextlib.suppress(IndexError):
                while len(messages) < (4096 if wait else AT_ONCE):
                    messages.append(self._messages.popleft())
            batches = streams.batches(self._composed(messages) if wait else messages)
            written = [write(frame(batch), wait) for batch in batches]  # it keeps what it cannot send
            if not all(written):
                return False
        return True

    def attach(self, write: Callable[[bytes, bool], bool], direct: bool) -> None:
        """Begins to send.

        Args:
            write: takes bytes and whether it may wait; keeps what it cannot send at once, and says False.
            direct: who sends may write; otherwise only the thread that `pump` is run in.
        """
        self._write = write
        self._direct = direct
        self._call()

    def detach(self) -> None:
        """Ends it, once who writes just now is through. A connection is closed behind this: its number in the kernel
        may be another one's then."""
        with self._turn:
            self._write = None

    def pump(self) -> None:
        """Writes what `send` did not, and signs of life, until closed. Run it in a thread."""
        while True:
            try:
                self._calls.get(timeout=PING_S)
            except queue.Empty:
                with self._turn:
                    if self._write is not None:
                        self._write(PING, True)
            # Each flag is taken back before what it stands for is looked at, so that who sets it later calls anew.
            if not self._hurry:
                self._gathering = True
                with contextlib.suppress(queue.Empty):
                    self._calls.get(timeout=LATER_S)
            self._hurry = self._gathering = False
            with self._turn:
                self._drain(wait=True)
                if self._closed:
                    return
            if pause := streams.pause_s(self._depth()):
                time.sleep(pause)


class ThreadLink:
    """A link that a process dials for its threads: iterate it for the batches that come in.

    It is dialled when the iteration begins, and ends with it. What `outbox` holds goes out as soon as it is there.

    Raises:
        LinkLost: while iterating, when nobody answers, or the other end is silent or hangs up.
    """

    def __init__(
        self,
        address: str,
        path: str,
        metadata: dict[str, str],
        outbox: Outbox,
        trust: Trust | None = None,
        silence: float = 0.0,
    ) -> None:
        self.address = address
        self._silence = silence or SILENCE_S
        self._hello = frame(encode(Hello(path, metadata)))
        self._outbox = outbox
        self._trust = trust
        self._host, self._port = endpoint(address)
        self._connection: socket.socket | None = None
        self._wire: _Plain | _Encrypted
        self._frames = Frames(limits.MAX_MESSAGE_BYTES)
        self._early: list[bytes] = []
        self._closed = False

    def dial(self, timeout: float = CONNECT_LIMIT_S, welcome: bytes = b"") -> None:
        """Connects and says hello, which iterating does by itself.

        Args:
            timeout: seconds for each step.
            welcome: the first batch that has to come, where anybody else might answer at the address.

        Raises:
            LinkLost: nobody answers, or somebody else.
        """
        try:
            connection = socket.create_connection((self._host, self._port), timeout)
        except OSError as error:
            raise LinkLost(f"nobody answers at {self.address}: {error}") from None
        try:
            keep_alive(connection)
            if self._trust is None:
                self._wire = _Plain(connection)
            else:
                self._wire = _Encrypted(connection, self._trust, self._trust.name or self._host, timeout)
            self._wire.limit(timeout)
            self._wire.write(self._hello, True)
            if welcome:
                self._expect(welcome, time.monotonic() + timeout)
            self._wire.limit(self._silence)
        except OSError as error:
            connection.close()
            raise error if isinstance(error, LinkLost) else LinkLost(str(error) or type(error).__name__) from None
        self._connection = connection

    def _expect(self, welcome: bytes, deadline: float) -> None:
        self._frames.limit = HELLO_BYTES
        while not self._early:
            if time.monotonic() > deadline:
                raise LinkLost(f"somebody else answers at {self.address}")
            data = self._wire.read()
            for batch in self._frames.feed(data):
                self._frames.limit = limits.MAX_MESSAGE_BYTES
                self._early.append(batch)
            if not data or self._frames.last_words is not None:
                raise LinkLost(self._frames.last_words or "it closed the connection")
        if not hmac.compare_digest(self._early.pop(0), welcome):
            raise LinkLost(f"somebody else answers at {self.address}")

    def close(self) -> None:
        """Hangs up, whatever was not sent yet; any thread may."""
        self._closed = True
        self._outbox.close()
        if self._connection is not None:
            _end(self._connection)

    def __iter__(self) -> Iterator[bytes]:
        if self._connection is None:
            self.dial()
        connection = self._connection
        assert connection is not None
        with connection:
            if self._closed:
                raise LinkLost("it was closed")
            try:
                yield from self._batches()
            except LinkLost:
                raise
            except OSError as error:
                raise LinkLost(str(error) or type(error).__name__) from None
            finally:
                self._outbox.close()
                _end(connection)  # also a write that waits
                self._outbox.detach()

    def _batches(self) -> Iterator[bytes]:
        self._outbox.attach(self._wire.write, direct=self._trust is None)
        threading.Thread(target=self._outbox.pump, name="pump", daemon=True).start()
        yield from self._early
        while data := self._wire.read():
            yield from self._frames.feed(data)
            if self._frames.last_words is not None:
                raise LinkLost(self._frames.last_words)
        raise LinkLost("it closed the connection")


class _Plain:
    """A connection that is not encrypted. One thread reads, one at a time writes."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._silence = 0.0
        self._connection = connection
        self._unsent: tuple[memoryview, list[int]] = memoryview(b""), []

    def limit(self, silence: float) -> None:
        """How many seconds a read or a write may wait. By the kernel, which costs no call beside each of them."""
        self._silence = silence
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds = struct.pack("ll", int(silence), int(silence % 1 * 1e6))
            self._connection.setsockopt(socket.SOL_SOCKET, option, seconds)

    def read(self) -> bytes:
        """What has come; b"" at the end. Raises `OSError` after too long a silence."""
        try:
            return self._connection.recv(READ_BYTES)
        except BlockingIOError:
            raise OSError(f"it said nothing for {self._silence:.0f} s") from None

    def write(self, data: bytes, wait: bool) -> bool:
        """Sends `data` behind what is left from before. Says False, and keeps it, where that would take waiting.

        Ctrl-C may end this at any step, in the thread of a user who sends. What is left is known nevertheless: `extend`
        calls `send` and notes how much it took without a step in between.
        """
        whole, sent = self._unsent
        if before := whole[sum(sent) :]:
            data = bytes(before) + data
        self._unsent = whole, sent = memoryview(data), []
        while rest := whole[sum(sent) :]:
            try:
                sent.extend(map(self._connection.send, (rest,), (0 if wait else socket.MSG_DONTWAIT,)))
            except BlockingIOError:
                if wait:  # it took nothing for as long
                    _end(self._connection)
                return False
            except OSError:
                self._unsent = memoryview(b""), []
                _end(self._connection)
                return False
        return True


class _Encrypted:
    """The same with TLS. OpenSSL is not for two threads at a time, so bytes go through memory, under a lock."""

    def __init__(self, connection: socket.socket, trust: Trust, name: str, timeout: float) -> None:
        self._silence = timeout
        self._connection = connection
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = client_context(trust).wrap_bio(self._coming, self._going, server_hostname=name)
        self._lock = threading.Lock()
        connection.settimeout(timeout)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if not (data := connection.recv(READ_BYTES)):
                    raise OSError("it hung up while encryption was agreed on") from None
                self._coming.write(data)
        self._flush()

    def limit(self, silence: float) -> None:
        self._silence = silence
        self._connection.settimeout(silence)

    def _flush(self) -> None:
        if self._going.pending:
            self._connection.sendall(self._going.read())

    def read(self) -> bytes:
        while True:
            with self._lock, contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                if data := self._tls.read(READ_BYTES):
                    return data
            try:
                received = self._connection.recv(READ_BYTES)
            except TimeoutError:
                raise OSError(f"it said nothing for {self._silence:.0f} s") from None
            if not received:
                return b""
            with self._lock:
                self._coming.write(received)

    def write(self, data: bytes, wait: bool) -> bool:
        """Always waits: only the link's own thread writes."""
        try:
            if data:
                with self._lock:
                    self._tls.write(data)
                    encrypted = self._going.read()
                rest = memoryview(encrypted)
                while rest:  # `sendall` would have to be through within the time that one step may take
                    rest = rest[self._connection.send(rest) :]
        except OSError:
            _end(self._connection)
            return False
        return True


def _end(connection: socket.socket) -> None:
    """Ends a connection that cannot be written to any more; so its reader learns of it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
