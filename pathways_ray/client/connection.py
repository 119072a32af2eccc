"""A client's connection to the controller: calls with a reply, and the messages of the session in both directions.

Messages go by a gRPC stream at first. Where the controller has a second port and it can be reached, the client dials a
direct link (`transport.links`) there, which takes a fraction of the time for a message, and both ends move to it:

1. The link is open, and each end has shown that it knows the session's secret. The client sends `Upgrade` as its last
   message on the stream; what it sends from then on goes by the link.
2. The controller reads everything before `Upgrade`, sends `Upgraded` as its last message on the stream, and reads and
   writes the link. The client reads the link from `Upgraded` on.

So no message is lost, doubled or overtaken. The stream stays open without messages: gRPC's own threads answer the
controller's pings on it, however busy Python is, which shows that the client lives. A gateway may let one port through;
then the dial fails and the stream carries messages for good.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from typing import Any

import grpc

from pathways_ray import limits
from pathways_ray.client.asking import check_port, hint
from pathways_ray.client.ending import ONCE
from pathways_ray.errors import AuthenticationError, ControllerLost, PathwaysError, UsageError, WireError, from_failure
from pathways_ray.transport import frames, grpc_streams, links, streams, thread_links
from pathways_ray.transport import messages as wire
from pathways_ray.transport.capabilities import link_tags
from pathways_ray.transport.endpoints import joined
from pathways_ray.transport.tls import Trust, client_roots

LINK_DIAL_LIMIT_S = 2.0
"""A port for direct links that does not answer within this time counts as unreachable."""

CLOSE_REASON_LIMIT_S = 2.0
"""A session whose stream has ended waits this long for its link to end with a better reason."""

NOTICE_LIMIT_S = 1.0
"""The end of a controller is noticed by the stream within about this time of a call that fails of it."""

JOIN_LIMIT_S = 5.0
"""Closing waits this long for each thread that reads."""


class Channel(Enum):
    """The state of the connection: the carrier of messages in each direction."""

    ON_STREAM = auto()
    UPGRADING = auto()  # sends by the link, receives by the stream
    ON_LINK = auto()
    CLOSED = auto()


class Step(Enum):
    """An event in the life of the connection."""

    LINK_OPENED = auto()
    LINK_FAILED = auto()
    STREAM_MESSAGE = auto()
    UPGRADED = auto()
    STREAM_ENDED = auto()
    LINK_ENDED = auto()


TRANSITIONS: dict[Channel, dict[Step, Channel]] = {
    Channel.ON_STREAM: {
        Step.STREAM_MESSAGE: Channel.ON_STREAM,
        Step.LINK_OPENED: Channel.UPGRADING,
        Step.LINK_FAILED: Channel.ON_STREAM,
        Step.STREAM_ENDED: Channel.CLOSED,
    },
    Channel.UPGRADING: {
        Step.STREAM_MESSAGE: Channel.UPGRADING,
        Step.UPGRADED: Channel.ON_LINK,
        Step.STREAM_ENDED: Channel.CLOSED,
    },
    Channel.ON_LINK: {
        Step.STREAM_ENDED: Channel.CLOSED,
        Step.LINK_ENDED: Channel.CLOSED,
    },
    Channel.CLOSED: dict.fromkeys(Step, Channel.CLOSED),
}
"""The state after a step. A step that has no entry is against the protocol and ends the session."""


def after(state: Channel, step: Step) -> Channel:
    """The state after a step.

    Raises:
        WireError: the controller may not do this in that state.
    """
    following = TRANSITIONS[state].get(step)
    if following is None:
        raise WireError(f"the controller broke the upgrade to a direct link: {step.name} in state {state.name}")
    return following


class Connection:
    """The connection of one session. `open_session` comes first, then `start`.

    Args:
        url: `grpc://host:port`, or `grpcs://` with TLS.
        token: a tenant's or the operator's.
        ca: see `pw.connect`.

    Raises:
        AuthenticationError: the token has characters that no token has.
        UsageError: the URL is invalid.
    """

    def __init__(self, url: str, token: str, ca: str | bytes | os.PathLike[str] | None = None) -> None:
        self.url = url
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():
            raise AuthenticationError("the token is missing or wrong; it is printed where the cluster was started")
        self._address, self._trust = _endpoint(url, ca)
        self.token = token
        self._channel = grpc_streams.channel(self._address, self._trust)
        self._unary = self._channel.unary_unary(streams.CALL)
        self._session, self._secret, self._link_port = 0, "", 0
        self.state = Channel.ON_STREAM
        self._lock = threading.Lock()
        self.outbox: grpc_streams.GrpcOutbox | thread_links.Outbox = grpc_streams.GrpcOutbox()
        self._stream: Any = None
        self._stream_outbox: grpc_streams.GrpcOutbox | None = None
        self._link: thread_links.ThreadLink | None = None
        self._readers: list[threading.Thread] = []
        self._settled = threading.Event()
        self._settled.set()
        self._starts = 0
        self.refused: Callable[[int], None] = lambda program: None
        """Called with a program that has to be registered again before anybody asks for it."""

    @property
    def data_trust(self) -> Trust | None:
        """The trust for hosts: they show the certificate of the controller, at addresses that need not be in it."""
        if self._trust is None:
            return None
        return Trust(self._trust.roots, self._trust.name or self._address.rpartition(":")[0].strip("[]"))

    # --- calls with a reply -------------------------------------------------------------------------------------------

    def open_session(self, name: str, timeout: float) -> wire.SessionOpened:
        """Raises `AuthenticationError` for an unknown token, `ControllerLost` when there is no answer in time."""
        opened = self._call(wire.OpenSession(wire.VERSION, name), timeout, (("authorization", self.token),))
        assert isinstance(opened, wire.SessionOpened)
        self._session, self._secret, self._link_port = opened.session, opened.secret, opened.link_port
        return opened

    def call(self, request: Any, timeout: float = limits.DEFAULT_TIMEOUT_S, patient: bool = True) -> wire.Reply:
        """One request and its reply. While the controller is away, it waits for the successor; one that may be made
        twice is made again there.

        Args:
            patient: whether it waits so. Who keeps the session's calls must not: the way to the successor needs them.

        Raises:
            ControllerLost: there is no controller, or it does not answer in time.
            PathwaysError: what the controller answers with.
        """
        if not patient:
            if not self._settled.is_set():
                raise ControllerLost("the controller is gone, and its successor is looked for")
            return self._call(request, timeout, self._shown())
        deadline, starts = time.monotonic() + timeout, self._starts
        self._settled.wait(timeout)
        try:
            return self._call(request, timeout, self._shown())
        except ControllerLost:
            if isinstance(request, ONCE) or not self._is_back(starts, deadline):
                raise
        return self._call(request, max(1.0, deadline - time.monotonic()), self._shown())

    def _shown(self) -> tuple[tuple[str, str], ...]:
        return ("authorization", self._secret), ("session", str(self._session))

    def _is_back(self, starts: int, deadline: float) -> bool:
        """Whether the connection was lost, and there is another one."""
        noticed = min(time.monotonic() + NOTICE_LIMIT_S, deadline)
        while self._starts == starts and self._settled.is_set() and time.monotonic() < noticed:
            time.sleep(NOTICE_LIMIT_S / 20)
        self._settled.wait(max(0.0, deadline - time.monotonic()))
        return self._starts > starts

    # --- another controller -------------------------------------------------------------------------------------------

    def unsettle(self) -> None:
        """The controller is lost, and its successor looked for: calls wait."""
        self._settled.clear()

    def settle(self) -> None:
        """There is a connection to the successor."""
        self._settled.set()

    give_up = settle

    @property
    def is_over(self) -> bool:
        """Whether the stream or the link has ended."""
        return self.state is Channel.CLOSED

    def resume_session(self, request: wire.ResumeSession, timeout: float) -> wire.SessionResumed:
        """Opens the session again at the controller that answers now; `start` comes next. Raises the errors of
        `open_session`, and `SessionClosed` where it is not to be resumed."""
        self._hang_up()
        self._channel = grpc_streams.channel(self._address, self._trust)
        self._unary = self._channel.unary_unary(streams.CALL)
        resumed = self._call(request, timeout, (("authorization", self.token),))
        assert isinstance(resumed, wire.SessionResumed)
        self._secret, self._link_port = resumed.secret, resumed.link_port
        return resumed

    def _call(self, request: Any, timeout: float, metadata: tuple[tuple[str, str], ...]) -> wire.Reply:
        self.outbox.hurry()  # what was called before comes no later, or hardly
        try:
            data = self._unary(wire.encode(request), timeout=timeout, metadata=metadata)
        except (grpc.RpcError, ValueError) as error:  # gRPC's ValueError: it was hung up meanwhile
            details = _details(error)
            text = f"the controller at {self.url} does not answer: {details}{hint(self.url, details)}"
            raise ControllerLost(text) from None
        reply = wire.REPLY.decode(data)
        if isinstance(reply, wire.Refused):
            self.refused(reply.again)
            raise from_failure(reply.failure)
        return reply

    # --- messages -----------------------------------------------------------------------------------------------------

    def start(
        self,
        depth: Callable[[], int],
        compose: Callable[[list[wire.Message]], list[wire.Message]],
        receive: Callable[[Iterable[Any]], None],
        lost: Callable[[str], None],
        timeout: float,
    ) -> None:
        """Opens the stream, and the direct link where it can be reached; then `outbox` takes messages.

        Args:
            depth: launches under way.
            compose: sees each batch before it leaves.
            receive: gets messages of the controller that come together, in a thread of the connection.
            lost: gets the reason when the connection has ended; may be called twice.
            timeout: seconds for each step of a dial.
        """
        self._receive, self._lost = receive, lost
        self._starts += 1
        self.state, self._readers, self._link = Channel.ON_STREAM, [], None
        self.outbox = self._stream_outbox = grpc_streams.GrpcOutbox(depth, compose)
        metadata = {"session": str(self._session), "authorization": self._secret}
        self._stream = grpc_streams.stream_call(self._channel, streams.CLIENT_STREAM, self._stream_outbox, metadata)
        self._start_thread("pathways-reader", self._read_stream)
        outbox = thread_links.Outbox(depth, compose)
        link = self._dial(outbox, min(timeout, LINK_DIAL_LIMIT_S))
        self._link = link
        if self._step(Step.LINK_FAILED if link is None else Step.LINK_OPENED) is Channel.UPGRADING:
            self._stream_outbox.send(wire.Upgrade())
            self.outbox = outbox
        elif link is not None:  # the stream has ended meanwhile
            _abandon(link)

    def _dial(self, outbox: thread_links.Outbox, timeout: float) -> thread_links.ThreadLink | None:
        """An open direct link to the same controller; None where it has no port for links, or that is unreachable."""
        if not self._link_port:
            return None
        address = joined(links.endpoint(self._address)[0], self._link_port)
        tag, answer = link_tags(self._secret, self._session)
        shown = {"session": str(self._session), "authorization": tag}
        link = thread_links.ThreadLink(
            address, streams.CLIENT_STREAM, shown, outbox, self._trust, limits.LINK_SILENCE_S
        )
        try:
            link.dial(timeout, answer.encode())
        except frames.LinkLost:
            return None
        return link

    def _step(self, step: Step) -> Channel:
        with self._lock:
            self.state = after(self.state, step)
            return self.state

    def _start_thread(self, name: str, run: Callable[[int], None]) -> None:
        """Has a thread read. It gets the number of its connection: one that outlives that leaves the next one alone."""
        thread = threading.Thread(target=run, args=(self._starts,), name=name, daemon=True)
        self._readers.append(thread)
        thread.start()

    def _read_stream(self, start: int) -> None:
        reason = "the controller closed the stream"
        try:
            for data in self._stream:
                for message in wire.TO_CLIENT.decode_batch(data):
                    if start != self._starts:
                        return
                    if type(message) is wire.Upgraded:
                        self._step(Step.UPGRADED)
                        self._start_thread("pathways-link", self._read_link)
                    else:
                        self._step(Step.STREAM_MESSAGE)
                        self._receive((message,))
        except grpc.RpcError as error:
            reason = _details(error)
            error.__traceback__ = None  # the error is the stream: in a cycle, it would stay until the interpreter ends
        except BaseException as error:
            if start == self._starts:
                self._unreadable(error)
        if start != self._starts:
            return
        self._step(Step.STREAM_ENDED)
        for reader in self._readers[1:]:
            reader.join(CLOSE_REASON_LIMIT_S)
        self._lost(f"the controller is gone ({reason})")

    def _read_link(self, start: int) -> None:
        assert self._link is not None
        try:
            for data in self._link:
                self._receive(self._present(wire.TO_CLIENT.decode_batch(data), start))
        except BaseException as error:
            if start == self._starts:
                self._step(Step.LINK_ENDED)
                self._unreadable(error)

    def _present(self, messages: Iterable[Any], start: int) -> Iterator[Any]:
        """The messages of a link, as long as it is that of the present connection."""
        for message in messages:
            if start != self._starts:
                return
            if type(message) is wire.Upgraded:
                self._step(Step.UPGRADED)
            yield message

    def _unreadable(self, error: BaseException) -> None:
        """Ends the session, whatever went wrong: no thread reads any more, so what waits would wait without end."""
        known = isinstance(error, frames.LinkLost | PathwaysError)
        self._lost(f"the controller is gone ({error if known else f'{type(error).__name__}: {error}'})")
        if (stream := self._stream) is not None:
            stream.cancel()  # the controller sees that too, and frees what the session has

    def close(self) -> None:
        """Hangs up, and waits for the threads that read."""
        self._settled.set()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._stream_outbox is not None:
            self._stream_outbox.close()
        if self._stream is not None:
            self._stream.cancel()
        if self._link is not None:
            if len(self._readers) > 1:
                self._link.close()
            else:
                _abandon(self._link)
        self._channel.close()
        for reader in self._readers:
            reader.join(JOIN_LIMIT_S)
        # Its destructor takes a lock that threads of gRPC take too. At the end of the interpreter they stand still, and
        # one that has the lock keeps it: the process would not end.
        self._stream = None


def _abandon(link: thread_links.ThreadLink) -> None:
    """Closes a link that is not read."""
    link.close()
    with contextlib.suppress(frames.LinkLost):
        next(iter(link))  # a closed link raises here, and gives its socket back


def _endpoint(url: str, ca: str | bytes | os.PathLike[str] | None) -> tuple[str, Trust | None]:
    """The address in a URL, and the trust for it; None where the connection is not encrypted."""
    for scheme in ("grpc://", "grpcs://"):
        if isinstance(url, str) and url.startswith(scheme) and ":" in url.removeprefix(scheme):
            # The variable is a default for URLs that ask for TLS; it does not turn it on.
            check_port(url)
            roots = client_roots(ca) if ca is not None or scheme == "grpcs://" else None
            encrypted = roots is not None or scheme == "grpcs://"
            return url.removeprefix(scheme), Trust(roots or b"") if encrypted else None
    raise UsageError(f"a cluster's address looks like grpc://host:port, not {url!r}")


def _details(error: Exception) -> str:
    return str(getattr(error, "details", lambda: "")() or error)
