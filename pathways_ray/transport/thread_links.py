"""The end of a link (`links`) for threads: any of them sends, one reads."""

from __future__ import annotations

import contextlib
import hmac
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

from pathways_ray import limits
from pathways_ray.transport.batcher import MAX_MESSAGES, Batcher
from pathways_ray.transport.frames import PING, Frames, Handshake, LinkLost, framed
from pathways_ray.transport.links import CONNECT_LIMIT_S, MAX_HANDSHAKE_BYTES, PING_S, SILENCE_S, endpoint
from pathways_ray.transport.messages import Message, encode
from pathways_ray.transport.sockets import EncryptedSocket, PlainSocket, hang_up, keep_alive
from pathways_ray.transport.tls import Trust
from pathways_ray.waits import get_within

MAX_DIRECT_MESSAGES = 64
"""Messages that a sender writes at a time: what the kernel does not take is copied."""

LINGER_S = 0.04
"""A message that is not urgent waits this long for one that is."""

MAX_LINGERING = 66
"""Messages that are not urgent, beyond which they leave."""


class _Thread(threading.local):
    writes = False


_THREAD = _Thread()


def is_writing() -> bool:
    """Whether this thread is amid a write of its own to a link, in which a signal handler or a destructor has
    interrupted it. Nothing else leaves by that link meanwhile."""
    return _THREAD.writes


class Outbox:
    """Outgoing messages of one link, put by any thread, also in a destructor.

    `send` writes by itself when no other thread does, little is under way and the kernel takes it, which it does at
    once or not at all; otherwise the link's own thread writes. So a lone message leaves without a change of threads.

    Args:
        depth: the number of launches under way beyond the link.
        compose: says the same in fewer messages, where some have gathered.
    """

    def __init__(
        self,
        depth: Callable[[], int] = lambda: 0,
        compose: Callable[[list[Message]], list[Message]] | None = None,
    ) -> None:
        self._batcher = Batcher(depth, compose)
        self.put = self._batcher.put
        """Puts a message, to leave with the next one: a function of the interpreter, at which Ctrl-C comes before or
        behind."""
        self._composes = compose is not None
        self._writing = threading.Lock()
        # Putting into a SimpleQueue cannot wait for this very thread, as setting an Event in a destructor could.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._urgent = self._lingering = False
        self._write: Callable[[bytes, bool], bool] | None = None
        self._direct = False
        self._closed = False

    def send(self, message: Message) -> None:
        self.put(message)
        self.leave()

    def send_all(self, messages: list[Message]) -> None:
        """Sends messages of which either all or none are to go, should Ctrl-C come in between."""
        self._batcher.put_all(messages)
        if len(messages) > 2:  # what is big is for the link's own thread
            self._urgent = True
            self._call()
        else:
            self.leave(len(messages))

    def leave(self, count: int = 1) -> None:
        """Sends the last `count` messages that were put, or has the link's own thread do so. That one takes what others
        have put as well, and may say all of it in fewer messages: Ctrl-C amid a write by this thread would lose what is
        not its own, and who put it would not know."""
        alone = len(self._batcher) <= count <= MAX_DIRECT_MESSAGES and self._batcher.lone
        if self._direct and alone and self._written(count) and not self._batcher:
            return
        self._urgent = True
        self._call()

    def _written(self, count: int) -> bool:
        """Writes so many messages at once, where nobody else writes; False where some have to wait. Ctrl-C may come
        right behind the call that takes the lock: `extend` notes what came of that without a step in between."""
        taken: list[bool] = []
        before = _THREAD.writes
        try:
            _THREAD.writes = True  # before it has the lock: a signal handler may come right behind that call, too
            taken.extend(map(self._writing.acquire, (False,)))
            return True in taken and self._drain(count, wait=False)
        finally:
            _THREAD.writes = before
            if True in taken:
                self._writing.release()

    def send_later(self, message: Message) -> None:
        """Sends a message that is not urgent: with the next one, or after `LINGER_S`, or once there are many."""
        self.put(message)
        if not self._lingering or len(self._batcher) > MAX_LINGERING:
            self.linger()

    def linger(self) -> None:
        """Has what was put leave as `send_later` does."""
        if len(self._batcher) > MAX_LINGERING:
            self.hurry()
        elif not self._lingering:
            self._call()

    def hurry(self) -> None:
        """Has what waits for other messages leave now."""
        if self._batcher:
            self._urgent = True
            self._call()

    def close(self) -> None:
        """Ends the link's own thread once the messages sent before have gone out."""
        self._closed = self._urgent = True
        self._call()

    def _call(self) -> None:
        if self._calls.empty():  # no flag: Ctrl-C between setting it and calling would leave it set
            self._calls.put(None)

    def _drain(self, most: int, wait: bool) -> bool:
        """Writes all that is there, or the first `most` messages where it may not `wait`; False when some of these have
        to. The caller holds `_writing`."""
        write = self._write
        if write is None:
            return False
        if not write(b"", wait):
            return False  # something from before is not out yet
        while self._batcher:
            batches = self._batcher.taken(most, compose=wait)
            written = [write(piece, wait) for batch in batches for piece in framed(batch, wait)]  # it keeps the rest
            if not all(written):
                return False
            if not wait:
                break
        return True

    def attach(self, write: Callable[[bytes, bool], bool], direct: bool) -> None:
        """Begins to send.

        Args:
            write: takes bytes and whether it may wait; keeps what it cannot send at once, and returns False.
            direct: whether a sender may write; otherwise only the thread that runs `pump` does.
        """
        self._write = write
        self._direct = direct
        self._call()

    def detach(self) -> None:
        """Stops writing, once a write that is under way has ended. A connection is closed behind this: its number in
        the kernel may be another one's then."""
        with self._writing:
            self._write = None

    def pump(self) -> None:
        """Writes the messages that `send` did not, and pings, until closed. Run it in a thread.

        Where some are to leave it looks again after `LINGER_S`, called or not: to wake it for each message that is not
        urgent would hold up who sends that.
        """
        while True:
            try:
                if not self._lingering:
                    get_within(self._calls, PING_S)
            except queue.Empty:
                with self._writing:
                    if self._write is not None:
                        self._write(PING, True)
            if not self._urgent:
                self._lingering = True
                with contextlib.suppress(queue.Empty):
                    get_within(self._calls, LINGER_S)
            # Each flag is taken back before what it stands for is looked at, so that a later setter calls again.
            self._urgent, self._lingering = False, bool(self._batcher)
            with self._writing:
                self._drain(MAX_MESSAGES, wait=True)
                if self._closed:
                    return
            if pause := self._batcher.gather_s():
                time.sleep(pause)


class ThreadLink:
    """A link that a process dials for its threads: iterate it for the batches that come in.

    It is dialled when the iteration begins, and ends with it. The messages of `outbox` go out as soon as it is there.

    Raises:
        LinkLost: while iterating, when there is no answer, or the other end is silent or hangs up.
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
        self._handshake = b"".join(framed(encode(Handshake(path, metadata))))
        self._outbox = outbox
        self._trust = trust
        self._host, self._port = endpoint(address)
        self._connection: socket.socket | None = None
        self._wire: PlainSocket | EncryptedSocket
        self._frames = Frames(limits.MAX_MESSAGE_BYTES)
        self._early: list[bytes] = []
        self._closed = False

    def dial(self, timeout: float = CONNECT_LIMIT_S, answer: bytes = b"") -> None:
        """Connects and sends the handshake, which iterating does by itself.

        Args:
            timeout: seconds for each step.
            answer: the first batch that has to come, where another server might answer at the address.

        Raises:
            LinkLost: there is no answer, or one of another server.
        """
        try:
            connection = socket.create_connection((self._host, self._port), timeout)
        except OSError as error:
            raise LinkLost(f"no answer at {self.address}: {error}") from None
        try:
            keep_alive(connection)
            if self._trust is None:
                self._wire = PlainSocket(connection)
            else:
                self._wire = EncryptedSocket(connection, self._trust, self._trust.name or self._host, timeout)
            self._wire.limit(timeout)
            self._wire.write(self._handshake, True)
            if answer:
                self._expect(answer, time.monotonic() + timeout)
            self._wire.limit(self._silence)
        except OSError as error:
            connection.close()
            raise error if isinstance(error, LinkLost) else LinkLost(str(error) or type(error).__name__) from None
        self._connection = connection

    def _expect(self, answer: bytes, deadline: float) -> None:
        self._frames.limit = MAX_HANDSHAKE_BYTES
        while not self._early:
            if time.monotonic() > deadline:
                raise LinkLost(f"another server answers at {self.address}")
            data = self._wire.read()
            for batch in self._frames.feed(data):
                self._frames.limit = limits.MAX_MESSAGE_BYTES
                self._early.append(batch)
            if not data or self._frames.close_reason is not None:
                raise LinkLost(self._frames.close_reason or "it closed the connection")
        if not hmac.compare_digest(self._early.pop(0), answer):
            raise LinkLost(f"another server answers at {self.address}")

    @property
    def close_reason(self) -> str | None:
        """The reason with which the other end hung up; None where it gave none, as when its process died."""
        return self._frames.close_reason

    def close(self) -> None:
        """Hangs up, with messages unsent or not; any thread may call it."""
        self._closed = True
        self._outbox.close()
        if self._connection is not None:
            hang_up(self._connection)

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
                hang_up(connection)  # also a write that waits
                self._outbox.detach()

    def _batches(self) -> Iterator[bytes]:
        self._outbox.attach(self._wire.write, direct=self._trust is None)
        threading.Thread(target=self._outbox.pump, name="pump", daemon=True).start()
        yield from self._early
        while data := self._wire.read():
            yield from self._frames.feed(data)
            if self._frames.close_reason is not None:
                raise LinkLost(self._frames.close_reason)
        raise LinkLost("it closed the connection")
