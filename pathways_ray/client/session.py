"""A session: the client's end of a cluster.

Nothing here waits for a reply on the way of a launch. Ids of programs, launches and buffers are made here; launches,
uploads and frees go into one queue in the order of the user's calls, and what may leave moves into the stream to the
controller. A launch may leave once the arrays uploaded for it have arrived, so that a slow client holds up nobody's
devices but its own calls.

Outcomes come back on the same stream, read by one thread, which wakes those who wait. Where the controller's second
port can be reached, the messages travel by a link beside the stream (`transport.links`), in a fraction of the time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import grpc
import numpy as np

from pathways_ray import limits
from pathways_ray.client.argument_types import ArgumentType, array_type, to_numpy
from pathways_ray.client.array import DELETED, FAILED, PENDING, READY, Array, Buffer
from pathways_ray.client.coalesce import Runs
from pathways_ray.client.data import DataLinks, FetchPlan, Upload
from pathways_ray.client.slices import VirtualSlice, island_of, mesh_of
from pathways_ray.errors import (
    AuthenticationError,
    BufferDeleted,
    ControllerLost,
    Failure,
    ForeignArray,
    PathwaysError,
    SessionClosed,
    UsageError,
    WaitTimeout,
    from_failure,
)
from pathways_ray.ir.graph import Graph
from pathways_ray.ir.types import Spec, check_layout
from pathways_ray.transport import grpc_streams, links, streams, thread_links
from pathways_ray.transport.capabilities import link_tags
from pathways_ray.transport.endpoints import joined
from pathways_ray.transport.messages import (
    REPLY,
    TO_CLIENT,
    VERSION,
    BuffersLost,
    CloseSession,
    Completed,
    CreateSlice,
    Explain,
    Explained,
    Free,
    HostAddress,
    Launch,
    LaunchFailed,
    Message,
    OpenSession,
    Prepared,
    Put,
    Refused,
    Register,
    ReleaseSlice,
    Reply,
    SessionEnded,
    SessionOpened,
    SliceCreated,
    Status,
    StatusReply,
    encode,
)
from pathways_ray.transport.tls import Trust, client_roots

_EXPORT_PLATFORMS = {"gpu": "cuda"}
"""What `jax.export` calls a platform that is named otherwise for devices."""

_CAUSE_LIMIT_S = 10.0
"""How long a fetch that failed waits for the controller to name the cause."""

_LINK_LIMIT_S = 2.0
"""A port that does not answer within this time is taken for out of reach."""

_LAST_WORDS_S = 2.0
"""A session whose stream has ended hears for so long what comes on its link."""

_WAIT_SLICE_S = 0.5
"""Waits wake up this often, so that Ctrl-C is seen and a dead reader cannot leave anybody waiting."""


class Session:
    """A connection to a cluster. Made by `pw.init` and `pw.connect`; a context manager that closes itself.

    Args:
        url: `grpc://host:port` of the controller.
        token: a tenant's, or the operator's.
        ca: see `pw.connect`.

    Raises:
        AuthenticationError: the token is wrong.
        ControllerLost: nobody answers at `url` within `timeout` seconds.
    """

    def __init__(
        self,
        url: str,
        token: str,
        name: str = "",
        timeout: float = 10.0,
        ca: str | bytes | os.PathLike[str] | None = None,
    ) -> None:
        self.url = url
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise AuthenticationError("the token is missing or wrong; it is printed where the cluster was started")
        address, trust = _endpoint(url, ca)
        self._channel = grpc_streams.channel(address, trust)
        self._token = token
        self._unary = self._channel.unary_unary(streams.CALL)
        opened = self._call(OpenSession(VERSION, name), timeout, token)
        assert isinstance(opened, SessionOpened)
        self.id = opened.session
        self.platforms = tuple(_EXPORT_PLATFORMS.get(name, name) for name in opened.platforms)
        self._secret = opened.secret
        self._max_launches = opened.max_launches
        self.closed = False
        self._process = os.getpid()
        self.closed_because = ""
        self._end_kind = "ControllerLost"
        self.owner: Any = None

        self._launches = itertools.count(1)
        self._buffers = itertools.count(1)
        self._programs = itertools.count(1)
        self._sent_functions: set[str] = set()
        self._default_slice: VirtualSlice | None = None
        self._changed = threading.Condition()
        self._pending: dict[int, tuple[int, int]] = {}
        self._named: dict[int, weakref.ref[Buffer]] = {}
        self._lock = threading.Lock()
        self._queue: deque[tuple[Message, tuple[Upload, ...], tuple[Buffer, ...]]] = deque()
        # Hosts show the certificate that the controller has shown, at addresses that need not be in it.
        there = trust if trust is None else Trust(trust.roots, trust.name or address.rpartition(":")[0].strip("[]"))
        self._data = DataLinks(self.id, opened.data_token, opened.hosts, self._uploads_changed, there)
        metadata = {"session": str(self.id), "authorization": self._secret}
        self._runs = Runs(self._programs.__next__)
        self._outbox: grpc_streams.GrpcOutbox | thread_links.Outbox
        self._quiet = grpc_streams.GrpcOutbox(self._pending.__len__, self._runs.composed)
        self._link = self._dialled(address, trust, opened.link_port, timeout)
        if self._link is None:
            self._outbox = self._quiet
        else:
            metadata["link"] = "1"  # the stream carries nothing then; it shows that this client lives
        self._stream = grpc_streams.stream_call(self._channel, streams.CLIENT_STREAM, self._quiet, metadata)
        self._readers = [threading.Thread(target=self._read, name="pathways-reader", daemon=True)]
        if self._link is not None:
            self._readers.append(threading.Thread(target=self._read_link, name="pathways-link", daemon=True))
        for reader in reversed(self._readers):  # the first waits for the last words of the second
            reader.start()

    def _dialled(self, address: str, trust: Trust | None, port: int, timeout: float) -> thread_links.ThreadLink | None:
        """A link for the messages of the stream, and their outbox; None where the controller has none, or where it is
        out of reach, since a gateway may let one port through: then the stream carries them."""
        if not port:
            return None
        outbox = thread_links.Outbox(self._pending.__len__, self._runs.composed)
        there = joined(links.endpoint(address)[0], port)
        tag, answer = link_tags(self._secret, self.id)
        shown = {"session": str(self.id), "authorization": tag}
        link = thread_links.ThreadLink(there, streams.CLIENT_STREAM, shown, outbox, trust, limits.LINK_SILENCE_S)
        try:
            link.dial(min(timeout, _LINK_LIMIT_S), answer.encode())
        except links.LinkLost:
            return None
        self._outbox = outbox
        return link

    # --- calls with a reply -------------------------------------------------------------------------------------------

    def _call(self, request: Any, timeout: float = limits.DEFAULT_TIMEOUT_S, secret: str | None = None) -> Reply:
        if secret is None:
            self.check_open()
            metadata: tuple[tuple[str, str], ...] = (("authorization", self._secret), ("session", str(self.id)))
        else:
            metadata = (("authorization", secret),)
        try:
            reply = REPLY.decode(self._unary(encode(request), timeout=timeout, metadata=metadata))
        except grpc.RpcError as error:
            raise ControllerLost(f"the controller at {self.url} does not answer: {_details(error)}") from None
        if isinstance(reply, Refused):
            raise from_failure(reply.failure)
        return reply

    def virtual_slice(
        self,
        shape: Sequence[int] | None = None,
        axes: Sequence[str] | None = None,
        *,
        island: int | None = None,
        platform: str | None = None,
        name: str = "",
    ) -> VirtualSlice:
        """See `pw.virtual_slice`."""
        sizes, names = mesh_of(shape, axes)
        number = island_of(island)
        if not isinstance(name, str) or not isinstance(platform, str | None):
            raise UsageError(f"name= and platform= of a slice are text, not {name!r} and {platform!r}")
        reply = self._call(CreateSlice(self.id, sizes, names, number, platform or "", name))
        assert isinstance(reply, SliceCreated)
        return VirtualSlice(self, reply.placed, name, reply.slice_tag)

    def release_slice(self, held: VirtualSlice) -> None:
        if not self.closed_because:
            self._call(ReleaseSlice(self.id, held.id))

    def default_slice(self) -> VirtualSlice:
        """All devices of one island on one axis `x`; made when first needed."""
        with self._lock:
            if self._default_slice is None:
                self._default_slice = self.virtual_slice(None, ("x",), name="default")
            return self._default_slice

    def status(self) -> dict[str, Any]:
        """Islands, devices, slices, sessions and the number of live buffers of the whole cluster."""
        reply = self._call(Status(self.id))
        assert isinstance(reply, StatusReply)
        found: dict[str, Any] = json.loads(reply.text)
        return found

    def explain(self, program: int, graph: bytes) -> Explained:
        """How the controller places a program; waits until it is compiled when it is registered."""
        self.flush()
        reply = self._call(Explain(self.id, program, graph), timeout=180.0)
        assert isinstance(reply, Explained)
        return reply

    # --- programs, launches, buffers ----------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self.closed_because:
            raise SessionClosed(f"the session is closed: {self.closed_because}")

    def _check_held(self) -> None:
        """Raises why the session has ended, which took its arrays with it: the same for those that were ready and those
        that were not."""
        if self.closed_because:
            raise from_failure(self._closed_failure())

    def register(self, graph: Graph, encoded: bytes, functions: dict[str, bytes]) -> int:
        """Sends a program ahead of its first launch; returns its number."""
        self.check_open()
        number = next(self._programs)
        self._runs.add(number, graph)
        with self._lock:
            fresh = {digest: blob for digest, blob in functions.items() if digest not in self._sent_functions}
            self._sent_functions.update(fresh)
        self._enqueue(Register(number, encoded, fresh))
        return number

    def launch(self, program: int, arguments: list[Buffer], results: tuple[ArgumentType, ...]) -> list[Array]:
        """Sends one launch on its way, behind the uploads of its arguments; returns handles to its results at once.

        Waits only when the session has too many launches without an outcome.
        """
        self.check_open()
        failure = None
        uploads: tuple[Upload, ...] = ()
        for buffer in arguments:
            failure = failure or buffer.failure
            if buffer.upload is not None and not buffer.upload.done:
                uploads += (buffer.upload,)
        if len(self._pending) >= self._max_launches:
            self._wait_for_room()
        arrays = [Array(self._new_buffer(), kind) for kind in results]
        base = arrays[0]._buffer.id if arrays else 0
        if failure is not None:
            for array in arrays:
                array._buffer.failure, array._buffer.state = failure, FAILED
            return arrays
        launch = next(self._launches)
        self._pending[launch] = (base, len(arrays))
        message = Launch(launch, program, tuple([buffer.id for buffer in arguments]), base)
        if uploads or self._queue:
            self._enqueue(message, uploads, tuple(arguments))
        else:
            self._outbox.send(message)
        if self.closed_because:
            self._fail_pending(launch, self._closed_failure())
        return arrays

    def _new_buffer(self) -> Buffer:
        buffer = Buffer(self, next(self._buffers))
        # Weak: a buffer nobody holds any more needs no outcome.
        self._named[buffer.id] = weakref.ref(buffer)
        return buffer

    def put(self, value: Any, where: VirtualSlice, spec: Spec) -> Array:
        """Uploads an array to the devices of a slice; the handle may be used at once."""
        self.check_open()
        if where.released:
            raise UsageError(f"{where} was released; nothing can be put there")
        array, weak = to_numpy(value)
        kind = ArgumentType.of(array_type(array), weak, where, spec)
        check_layout(kind.array, spec, where.type, "put")
        buffer = self._new_buffer()
        buffer.upload = self._data.upload(buffer, array, kind.array, spec, where.placed, where.tag)
        self._enqueue(Put(buffer.id, where.id, kind.array, spec))
        return Array(buffer, kind)

    def free(self, number: int, upload: Upload | None) -> None:
        """Tells the cluster that nobody holds a buffer any more, once its upload has ended; safe in a destructor."""
        self._named.pop(number, None)
        if self.closed_because:
            return
        message = Free((number,))
        if upload is not None and not upload.done:
            self._queue.append((message, (upload,), ()))
        elif self._queue:
            self._queue.append((message, (), ()))
        else:
            self._outbox.send_later(message)

    def check_mine(self, buffer: Buffer) -> None:
        """Raises unless the buffer may be an argument of a launch of this session."""
        if buffer.session is not self:
            raise ForeignArray("the array belongs to another session; fetch it there and pass the NumPy array here")
        if buffer.state == DELETED:
            raise BufferDeleted(f"the array cannot be an argument: {buffer.why_deleted}")

    def _enqueue(self, message: Message, uploads: tuple[Upload, ...] = (), keep: tuple[Buffer, ...] = ()) -> None:
        self._queue.append((message, uploads, keep))
        self._uploads_changed()

    def _uploads_changed(self) -> None:
        """Moves from the queue to the stream what may leave: everything up to the first unfinished upload."""
        with self._lock:
            while self._queue:
                message, uploads, arguments = self._queue[0]
                if not all(upload.done for upload in uploads):
                    break
                failure = next((u.failure for u in uploads if u.failure is not None), None)
                if failure is None and arguments:
                    failure = next((b.failure for b in arguments if b.failure is not None), None)
                # A launch that is called once the queue is empty goes by itself. So what it consumes has to be on its
                # way by then, or to have failed: the controller would not know a result of what was never sent.
                try:
                    if failure is not None and isinstance(message, Launch):
                        self._fail_pending(message.launch, failure)
                    else:
                        self._outbox.send(message)
                finally:  # also when Ctrl-C comes behind it: it must not go twice
                    self._queue.popleft()

    def flush(self, timeout: float = limits.DEFAULT_TIMEOUT_S) -> None:
        """Waits until everything that was called before is on its way."""
        deadline = time.monotonic() + timeout
        while self._queue:
            self.check_open()
            if time.monotonic() > deadline:
                raise WaitTimeout(f"uploads did not finish within {timeout:.0f} s")
            time.sleep(0.0005)
            self._uploads_changed()

    def _wait_for_room(self) -> None:
        # For room for many: one launch for each outcome would have them leave one by one.
        most = self._max_launches - self._max_launches // 8
        with self._changed:
            while len(self._pending) >= most and not self.closed_because:
                self._changed.wait(_WAIT_SLICE_S)
        self.check_open()

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def wait(self, buffer: Buffer, timeout: float | None = None) -> None:
        """Waits until a buffer has an outcome; raises the failure if that is what it is.

        Once the session has ended nothing is left to wait for, not even what was ready before.
        """
        self._check_held()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while buffer.state == PENDING:
                if self.closed_because:
                    raise from_failure(self._closed_failure())
                left = _WAIT_SLICE_S if deadline is None else min(_WAIT_SLICE_S, deadline - time.monotonic())
                if left <= 0:
                    raise WaitTimeout(f"the array was not ready within {timeout} s")
                self._changed.wait(left)
        if buffer.failure is not None:
            raise from_failure(buffer.failure)
        if buffer.state == DELETED:
            raise BufferDeleted(f"the array was deleted while it was waited for: {buffer.why_deleted}")

    def fetch(self, array: Array) -> np.ndarray[Any, Any]:
        """The array's value. The request goes to the hosts at once and is answered when the data is there."""
        self._check_held()
        buffer, kind = array._buffer, array._type
        if self._queue:
            self.flush()
        if kind.cover is None:
            assert kind.slice is not None
            kind.cover = FetchPlan(kind.array, kind.spec, kind.slice.placed)
        try:
            return self._data.fetch(buffer, kind.cover, lambda: self._check_fetch(buffer))
        except PathwaysError as error:
            # The host saw a symptom; the controller knows the cause, and tells shortly after.
            if error.failure is not None and (buffer.state == PENDING or error.failure.kind == "HostLost"):
                with self._changed:
                    self._changed.wait_for(lambda: buffer.failure or self.closed_because, _CAUSE_LIMIT_S)
            if buffer.failure is not None:
                raise from_failure(buffer.failure) from None
            raise

    def _check_fetch(self, buffer: Buffer) -> None:
        if buffer.failure is not None:
            raise from_failure(buffer.failure)
        if buffer.state == DELETED:
            raise BufferDeleted(f"the array was deleted while it was fetched: {buffer.why_deleted}")
        self._check_held()

    def _read(self) -> None:
        reason = "the controller closed the stream"
        try:
            for data in self._stream:
                for message in TO_CLIENT.decode_batch(data):
                    self._on_message(message)
        except grpc.RpcError as error:
            reason = _details(error)
        except PathwaysError as error:
            reason = str(error)
        if self._link is not None:
            self._readers[1].join(_LAST_WORDS_S)  # it may have a better reason
        self._end(f"the controller is gone ({reason})")

    def _read_link(self) -> None:
        assert self._link is not None
        try:
            for data in self._link:
                for message in TO_CLIENT.decode_batch(data):
                    self._on_message(message)
        except (links.LinkLost, PathwaysError) as error:
            self._end(f"the controller is gone ({error})")

    def _on_message(self, message: Message) -> None:
        match message:
            case Completed():
                self._runs.ended(message.launches, message.device_us, message.contended)
                with self._changed:
                    for launch in message.launches:
                        for buffer in self._results_of(launch):
                            buffer.state = READY
                    self._changed.notify_all()
            case LaunchFailed():
                self._fail_pending(message.launch, message.failure)
            case BuffersLost():
                with self._changed:
                    for number in message.buffers:
                        self._lost(number, message.failure)
                    self._changed.notify_all()
            case HostAddress():
                self._data.host_changed(message)
            case SessionEnded():
                self._end(message.reason, "SessionClosed")
            case Prepared():
                self._runs.prepared(message)

    def _results_of(self, launch: int) -> list[Buffer]:
        """The results of a launch that ends now and that somebody still waits for."""
        for other in self._runs.covered(launch):
            self._pending.pop(other, None)  # nobody has its results any more
        base, count = self._pending.pop(launch, (0, 0))
        found = []
        for number in range(base, base + count):
            reference = self._named.get(number)
            buffer = reference() if reference is not None else None
            if buffer is not None and buffer.state == PENDING:
                found.append(buffer)
        return found

    def _lost(self, number: int, failure: Failure) -> None:
        reference = self._named.get(number)
        buffer = reference() if reference is not None else None
        if buffer is not None and buffer.state in (PENDING, READY):
            buffer.failure, buffer.state = failure, FAILED

    def _fail_pending(self, launch: int, failure: Failure) -> None:
        with self._changed:
            for buffer in self._results_of(launch):
                buffer.failure, buffer.state = failure, FAILED
            self._changed.notify_all()
        self._data.wake()

    def _fail_all(self, failure: Failure) -> None:
        for launch in list(self._pending):
            self._fail_pending(launch, failure)

    def _closed_failure(self) -> Failure:
        return Failure(self._end_kind, f"the session ended: {self.closed_because}")

    def _end(self, reason: str, kind: str = "ControllerLost") -> None:
        if not self.closed_because:
            if self.closed:  # the stream may end before the call that ends it is answered
                kind, reason = "SessionClosed", "it was shut down"
            # First what is under way: who waits for it is to hear why, and not only that the session is closed.
            self._fail_all(Failure(kind, f"the session ended: {reason}"))
            self._end_kind, self.closed_because = kind, reason
        self._fail_all(self._closed_failure())
        with self._changed:
            self._changed.notify_all()
        self._data.close(self._closed_failure())

    def leave_to_parent(self) -> None:
        """This process is a fork: it has the sockets of the session, which its parent goes on writing to, and none of
        the threads that read them. Takes no lock, since a thread that is not here any more may have it."""
        self._end_kind = "SessionClosed"
        self.closed_because = (
            "it is that of the process that this one is a fork of; use multiprocessing's 'spawn', and pw.connect there"
        )

    def close(self) -> None:
        """Ends the session: what it holds on the cluster is freed, its open futures fail with `SessionClosed`."""
        if self.closed or os.getpid() != self._process:
            return  # a fork has the sockets of its parent, whose session goes on
        self.closed = True
        # Before hosts hear of it and hang up: what is under way ends with the session, and not for the loss of a host.
        self._fail_all(Failure("SessionClosed", "the session ended: it was shut down"))
        with contextlib.suppress(PathwaysError):  # the stream's end has the same effect
            self._call(CloseSession(self.id), timeout=5.0)
        self._end("it was shut down")
        self._quiet.close()
        self._stream.cancel()
        if self._link is not None:
            self._link.close()
        self._channel.close()
        for reader in self._readers:
            reader.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _endpoint(url: str, ca: str | bytes | os.PathLike[str] | None) -> tuple[str, Trust | None]:
    """The address in a URL, and whom to trust there; None where the connection is not encrypted."""
    for scheme in ("grpc://", "grpcs://"):
        if isinstance(url, str) and url.startswith(scheme) and ":" in url.removeprefix(scheme):
            # The variable is a default for URLs that ask for TLS; it does not turn it on.
            roots = client_roots(ca) if ca is not None or scheme == "grpcs://" else None
            encrypted = roots is not None or scheme == "grpcs://"
            return url.removeprefix(scheme), Trust(roots or b"") if encrypted else None
    raise UsageError(f"a cluster's address looks like grpc://host:port, not {url!r}")


def _details(error: grpc.RpcError) -> str:
    return str(getattr(error, "details", lambda: "")() or error)
