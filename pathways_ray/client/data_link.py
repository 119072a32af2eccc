"""The data stream to one host: what a client asks for there, what it sends, and the answers.

One thread of its own reads it. On the host's machine there is a local socket beside it, which files in memory go by.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from pathways_ray import limits
from pathways_ray.client.array_pieces import FetchedArray, Fetching, Given, Pieces
from pathways_ray.client.buffer import Upload
from pathways_ray.client.local_reader import LocalReader
from pathways_ray.client.upload_turns import UploadTurns
from pathways_ray.errors import Failure, PathwaysError, from_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport import messages as wire
from pathways_ray.transport import streams, thread_links
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.local_sockets import Invitation, LocalSocket, NotLocal
from pathways_ray.transport.messages import FROM_HOST_DATA, FetchDone, FetchPart, FetchShards
from pathways_ray.transport.peer_memory import places_of
from pathways_ray.transport.pipes import MIN_READ_BYTES, HostPipe, Pipe, is_pipe
from pathways_ray.transport.shared_memory import SharedFile
from pathways_ray.transport.tls import Trust

SHARED_BYTES = 112 << 10
"""A smaller array goes sooner in one message or over the stream than a file in memory or a pipe is made."""

DOOR_LIMIT_S = 2.0
"""A stream that was just opened waits this long for its host to say where its local socket is."""

_thread = threading.local()
"""`reads` is set in the threads that read streams."""


def may_wait() -> bool:
    """Whether this thread may wait for what the hosts do, or for what the session sends when they have answered."""
    return not getattr(_thread, "reads", False)


Acknowledge = Callable[[Upload, int, Failure | None], None]
"""Called once for each host of an upload, with its failure if it could not take its part."""


class EarlyListener(Protocol):
    """Hears what hosts say of calls that are handed to them."""

    def early_allowed(self, host: int, allowed: bool) -> None: ...

    def early_refused(self, results: int) -> None: ...


class Owner(Protocol):
    """The part of all data streams of a session that one of them uses."""

    session: int
    token: str
    trust: Trust | None
    reader: LocalReader
    early: EarlyListener | None

    def wake(self) -> None: ...


class UploadRequest(NamedTuple):
    """An array that is to be uploaded to the hosts of a slice, as buffer number `buffer`.

    `tag` is the slice's. `begun` is called before the first byte leaves, `acknowledge` once for each host.
    """

    buffer: int
    array: Given
    kind: ArrayType
    spec: Spec
    placed: PlacedSlice
    tag: str
    acknowledge: Acknowledge
    begun: Callable[[Upload], None]


class Sent(NamedTuple):
    """An upload that a host has yet to acknowledge."""

    upload: Upload
    acknowledge: Acknowledge


class DataLink:
    """The stream to one incarnation of a host. It is `tried` where nobody asked for it, until something has come."""

    def __init__(self, owner: Owner, address: wire.HostAddress, tried: bool = False) -> None:
        self.tried = tried
        self.owner = owner
        self.host = address.host
        self.epoch = address.epoch
        self.outbox = thread_links.Outbox()
        self.uploads: dict[int, Sent] = {}
        self.fetches: dict[int, Fetching] = {}
        self.pipes: set[Pipe] = set()
        self._may_read = True
        """Whether the host has not said yet that it may not read in this process's memory."""
        self.passed: dict[int, HostPipe] = {}
        """The ends of pipes that others write to and the host reads, by uploads that it has not stored."""
        self.dead: Failure | None = None
        self._local: LocalSocket | None = None
        self.is_local = False
        """Whether there is a local socket. What was asked by it is answered there also once it has ended."""
        self._settled = threading.Event()
        self._turns = UploadTurns(lambda: self.dead is not None)
        metadata = {"session": str(owner.session), "authorization": owner.token}
        self._wire = thread_links.ThreadLink(
            address.address, streams.DATA_STREAM, metadata, self.outbox, owner.trust, limits.DATA_SILENCE_S
        )
        threading.Thread(target=self._read, name=f"pathways-data-{self.host}", daemon=True).start()

    def _read(self) -> None:
        reason, _thread.reads = "it closed the stream", True
        try:
            for data in self._wire:
                self.tried = False
                for message in FROM_HOST_DATA.decode_batch(data):
                    self._on_message(message)
                self.owner.reader.wake()  # who reads the local sockets may wait for it
        except (LinkLost, PathwaysError) as error:
            reason = str(error)
        except BaseException as error:  # whatever it is: what waits for this thread would wait without end
            reason = f"its messages cannot be read ({type(error).__name__}: {error})"
            self._wire.close()
        self.end(reason)

    def _on_message(self, message: wire.Message) -> None:
        if type(message) is FetchPart or type(message) is FetchDone or type(message) is FetchShards:  # nearly always
            if (fetching := self.fetches.get(message.request)) is None:
                return
            if type(message) is FetchPart:
                is_there = fetching.add(message)
            else:
                is_there = fetching.add_all(message) if type(message) is FetchShards else fetching.end()
            if is_there and (told := fetching.told) is not None:
                told()
            return
        match message:
            case wire.PutDone(request):
                self._uploaded(request, None)
            case wire.LocalDoor():
                if message.name:
                    with contextlib.suppress(NotLocal):
                        local = LocalSocket(Invitation(message.name, message.tag, message.answer))
                        self.owner.reader.add(local.connection, self._take_local)
                        self._local, self.is_local = local, True
                self._settled.set()
                if self.dead is not None:  # it ended meanwhile
                    self.end(self.dead)
            case wire.EarlyAllowed(allowed):
                self._allow(allowed)
            case wire.EarlyRefused(results):
                if self.owner.early is not None:
                    self.owner.early.early_refused(results)
            case wire.DataFailed(request, failure):
                if request in self.uploads:
                    self._uploaded(request, failure)
                elif (failed := self.fetches.get(request)) is not None:
                    failed.failure = failure
                    if (told := failed.told) is not None:
                        told()

    @property
    def broke(self) -> bool:
        """Whether it has ended, and was there before."""
        return self.dead is not None and not self.tried

    def _allow(self, allowed: bool) -> None:
        if self.owner.early is not None:
            self.owner.early.early_allowed(self.host, allowed)

    def _uploaded(self, request: int, failure: Failure | None) -> None:
        sent = self.uploads.get(request)
        self.passed.pop(request, None)
        if request in self._turns:
            self._turns.end(request)
        if sent is None:
            return
        again = False
        try:
            sent.acknowledge(sent.upload, self.host, failure)
        except KeyboardInterrupt:  # the next one who reads says it again
            again = True
            raise
        finally:
            if not again:
                self.uploads.pop(request, None)

    def give_up(self, request: int) -> None:
        """Fails an upload that will not leave, unless it has its outcome."""
        self._uploaded(request, Failure("Cancelled", "the put was interrupted before all of it had left", "put"))

    def end(self, reason: str | Failure) -> None:
        """Fails all that was under way."""
        if isinstance(reason, str):
            reason = Failure("HostLost", f"host {self.host} is gone: {reason}", host=self.host)
        if self.dead is None:
            self._allow(False)  # before there is another stream to the host, which may say otherwise
            self.dead = reason
        self._settled.set()
        for pipe in (*list(self.pipes), *list(self.passed.values())):
            pipe.end()
        self._turns.wake()
        local, self._local, self.is_local = self._local, None, False
        if local is not None:
            self.owner.reader.remove(local.connection)
            local.close()
        for request in list(self.uploads):
            self._uploaded(request, self.dead)
        for fetching in list(self.fetches.values()):
            fetching.failure = fetching.failure or self.dead
            if (told := fetching.told) is not None:
                told()
        self.owner.wake()

    def _take_local(self, data: bytes) -> None:
        try:
            for message in FROM_HOST_DATA.decode_batch(data):
                self._on_message(message)
        except PathwaysError as error:
            self.end(str(error))
        except Exception as error:  # whatever it is: the next thread that reads would come to it again
            self.end(f"its messages cannot be read ({type(error).__name__}: {error})")

    def takes_pipes(self) -> bool:
        """Whether the host is on this machine, and reads ends of pipes. Raises `HostLost` where it is slow to say."""
        if not self._settled.wait(DOOR_LIMIT_S):
            text = f"host {self.host} has not said in {DOOR_LIMIT_S:.0f} s whether it is on this machine; try again"
            raise from_failure(Failure("HostLost", text, host=self.host))
        return self.is_local

    def read(self, found: FetchedArray, pipe: Pipe) -> np.ndarray[Any, Any]:
        """The array that the host writes to a pipe. Raises `HostLost` where it hangs up."""
        try:
            return found.read(pipe)
        except EOFError as error:
            text = f"host {self.host} hung up while it sent an array: {error}"
            raise from_failure(self.dead or Failure("HostLost", text, host=self.host)) from None

    def takes_files(self, size: int) -> bool:
        """Whether an array of `size` bytes goes in a file in memory: it is big, and the host is on this machine."""
        if size < SHARED_BYTES:
            return False
        if not self._settled.is_set():  # a wait enters a lock, in which Ctrl-C may leave it
            self._settled.wait(DOOR_LIMIT_S)
        return self.is_local

    def send_local(self, message: wire.Message, file: SharedFile | None = None) -> bool:
        """Hands a message and a file to the host; False where that cannot be, or not now."""
        local = self._local if self.is_local else None
        if local is None:
            return False
        if local.send(wire.encode(message), file):
            return True
        if local.ended:
            self.is_local = False
        return False

    def ask(self, message: wire.Message, file: SharedFile | None = None) -> None:
        """Sends a question by the local socket, or else by the stream. No order is between the two."""
        if not self.send_local(message, file):
            self.outbox.send(message)

    def launch(self, message: wire.LaunchEarly) -> bool:
        """Hands a call to the host; False where that cannot be now. Calls go by one way, or they would not begin in
        their order."""
        if self.is_local:
            return self.send_local(message)
        self.outbox.send(message)
        return True

    def hand(self, opening: wire.PutOpen, what: Pieces | SharedFile) -> bool:
        """Hands the host an upload with its bytes, when it is its turn; False where that cannot be. Those that go by a
        pipe of this are there when this returns, or will not be, of which the host tells, or it has stopped taking
        them; those by the pipe of somebody else come when he writes them."""
        if self._turns.are_taken and not may_wait():
            return False  # nobody else would read that it is its turn
        # Those in parts go by the stream. Within a quota they may wait for room, and this one must not take what they
        # wait for: it may be freed behind launches with them.
        self._turns.hand(opening.request, behind_parts=opening.living >= 0)
        if isinstance(what, SharedFile) and is_pipe(what):
            self.passed[opening.request] = HostPipe(what)
        sent = self.send_local(opening, what) if isinstance(what, SharedFile) else self._send_by_pipe(opening, what)
        if not sent:
            self.passed.pop(opening.request, None)
            self._turns.end(opening.request)
        return sent

    def send(self, uploads: list[wire.Message]) -> None:
        """Sends uploads that are whole, or in parts, all or none, when it is their turn: copies of many, over a slow
        network, would fill the memory."""
        sizes: dict[int, int] = {}
        for one in uploads:
            if isinstance(one, wire.PutOpen):
                sizes[one.request] = sum(map(len, one.whole))
            elif isinstance(one, wire.PutPart):
                sizes[one.request] += len(one.data)
        self._turns.come(sizes, waits=may_wait())  # else nobody would read that it is their turn
        self.outbox.send_all(uploads)

    def _send_by_pipe(self, opening: wire.PutOpen, arrays: Pieces) -> bool:
        try:
            pipe = Pipe()
        except OSError:
            return False
        size = sum(one.nbytes for one in arrays)
        places = (places_of(arrays) or ()) if self._may_read and size >= MIN_READ_BYTES else ()
        if places:
            opening = msgspec.structs.replace(opening, places=tuple(address for address, _ in places))
        try:
            self.pipes.add(pipe)
            if sent := self.send_local(opening, pipe.other):
                if self.dead is not None:
                    pipe.end()
                if not pipe.write(arrays, partial(self.pipes.discard, pipe), readable=bool(places)):
                    self._may_read = False
        except BaseException:  # as Ctrl-C: the host, which may have its end, would wait for the rest
            pipe.end()
            self.pipes.discard(pipe)
            raise
        if not sent:
            self.pipes.discard(pipe)
        return sent

    def close(self) -> None:
        self._wire.close()
