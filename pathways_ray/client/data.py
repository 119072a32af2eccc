"""The client's data streams: arrays to hosts and from hosts, never by way of the controller.

One stream per host, opened when first needed. Uploads are acknowledged by each host that holds part of the array;
fetches ask for as few shards as cover the array. A big array goes to a host of this machine by a pipe
(`transport.pipes`), and comes from there by one or in a file in memory (`transport.shared_memory`); other arrays go in
parts over the stream.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from pathways_ray import limits
from pathways_ray.client.ahead import Ahead, Asked, came_along
from pathways_ray.client.array_pieces import THERE, Copies, FetchedArray, Fetching, FetchPlan, Given, Kept, Pieces
from pathways_ray.client.buffer import BufferRecord, Upload
from pathways_ray.client.data_link import SHARED_BYTES, Acknowledge, DataLink, EarlyListener, Sent, may_wait
from pathways_ray.client.living import UNSAID, LivingUploads
from pathways_ray.client.local_reader import LocalReader, Sleeper
from pathways_ray.errors import Failure, PathwaysError, from_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, shard_boxes
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport import messages as wire
from pathways_ray.transport.pipes import Pipe
from pathways_ray.transport.shared_memory import SharedFile
from pathways_ray.transport.tls import Trust
from pathways_ray.waits import slice_s

T = TypeVar("T")
Asking = tuple[DataLink, int, Fetching]  # with the number of the question
Check = Callable[[], bool | None]
_MISSING = attrgetter("missing")

_WAIT_SLICE_S = slice_s()
"""Waits look again this often, whether woken or not."""

MAX_FILES = 16
"""Fetches that wait with a file in memory; further ones go over the stream. Each is a descriptor of this process."""

NEWS_LIMIT_S = 10.0
"""A put or fetch waits this long for news of a host whose stream broke, before it connects to it again."""


class DataLinks:
    """All data streams of a session."""

    def __init__(
        self, session: int, token: str, hosts: tuple[wire.HostAddress, ...], trust: Trust | None = None
    ) -> None:
        self.session, self.token, self.trust = session, token, trust
        self._addresses = {h.host: h for h in hosts}
        self._links: dict[int, DataLink] = {}
        self._requests, self.changing = itertools.count(1), threading.RLock()
        self._changed = threading.Condition(self.changing)
        self._closed: Failure | None = None
        self._with_files: set[Sleeper] = set()  # no semaphore, in which a signal handler may interrupt its thread
        self.reader, self.ahead, self.living = LocalReader(), Ahead(), LivingUploads(token)
        self.early: EarlyListener | None = None
        self.answers_soon: Callable[[int], bool] = lambda host: False
        self.awaited: dict[int, tuple[Callable[[], bool], Callable[[], None]]] = {}

    def wake(self) -> None:
        with self.changing:
            self._changed.notify_all()
        self.reader.wake_all()

    def host_changed(self, address: wire.HostAddress) -> None:
        """A host went down (empty address), or came up under a new epoch."""
        with self.changing:
            self._addresses[address.host] = address
            link = self._links.get(address.host)
            if link is not None and (not address.address or link.epoch != address.epoch):
                del self._links[address.host]
            else:
                link = None
            self._changed.notify_all()
        if link is not None:
            link.end("its process was lost")
            link.close()

    def link_to(self, host: int) -> DataLink:
        """The stream to a host; waits for a host that is starting again."""
        with self.changing:
            # A stream that broke is the first sign of a host's death; the news of it, or of the successor, follows.
            limit, since, known = limits.HOST_ABSENCE_LIMIT_S, time.monotonic(), self._links.get
            self._changed.wait_for(lambda: self._closed or not ((link := known(host)) and link.broke), NEWS_LIMIT_S)
            self._changed.wait_for(lambda: self._closed or self._is_up(host), since + limit - time.monotonic())
            if self._closed is not None:
                raise from_failure(self._closed)
            if (link := self.link_of(host) or self._opened(host)) is None:
                text = f"host {host} is down, and was not back in {limit:.0f} s; call again once it is"
                raise from_failure(Failure("HostLost", text, host=host))
            return link

    def _opened(self, host: int, tried: bool = False) -> DataLink | None:
        if self._is_up(host):
            self._links[host] = DataLink(self, self._addresses[host], tried)
        return self._links.get(host)

    def _is_up(self, host: int) -> bool:
        return host in self._addresses and bool(self._addresses[host].address)

    def open(self, host: int) -> None:
        """Opens the stream to a host that was not spoken to yet, and waits for nothing."""
        with self.changing, contextlib.suppress(RuntimeError):  # there is no thread left
            if host not in self._links and self._closed is None:
                self._opened(host, tried=True)

    def link_of(self, host: int) -> DataLink | None:
        """The stream to a host, where there is one that is alive."""
        link = self._links.get(host)
        return link if link is not None and link.dead is None else None

    def is_near(self, host: int) -> bool:
        """Whether a host takes files and ends of pipes. Raises `HostLost` where it is down, or has not said so yet."""
        return self.link_to(host).takes_pipes()

    def new_request(self) -> int:
        """The number of a further question or upload."""
        return next(self._requests)

    def launch_early(
        self, host: int, message: wire.LaunchEarly, record: BufferRecord | None = None, program: int = 0
    ) -> bool:
        """Hands a call to a host, and asks for a result of it, if that is to be asked for (see `Ahead`); false where
        there is no stream to it, or it takes nothing now."""
        link = self._links.get(host)
        if link is None or link.dead is not None:
            return False
        asked, handed = None, False
        try:
            if record is None or (asked := self.ahead.ask(link, record, self._requests, program)) is None:
                return link.launch(message)
            handed = link.launch(asked.along_with(message, record.id))
        finally:
            if asked is not None and not handed:  # also at Ctrl-C: who looks at the value asks for it
                self.ahead.withdraw(asked)
        if handed:  # no sooner: another thread would wait for what has not been asked
            self.ahead.enter(record.id, asked)
        return handed

    def await_values(
        self, buffers: Sequence[int], hosts: Sequence[int], is_over: Callable[[], bool], until: float | None = None
    ) -> bool:
        """Waits until hosts have these values, or it `is_over`, as seen at a `look`, or the time of `time.monotonic`
        has come; returns whether hosts have them. Raises what either fails with."""
        buffer, sleeper = buffers[0], Sleeper()
        told = sleeper.wake
        if (ahead := self.ahead.take(buffer)) is not None:
            ahead.fetching.told = told
            self.awaited[ahead.request] = is_over, told
            try:
                self.wait_for([ahead.fetching], sleeper, is_over, until)
            finally:
                self.awaited.pop(ahead.request, None)
                self.ahead.keep(buffer, ahead)
            return not ahead.fetching.missing
        links = [link for host in hosts if (link := self.link_of(host)) is not None]
        if len(links) < len(hosts) or (until is not None and time.monotonic() >= until):  # no answer would be heard
            return False
        asked: list[Asking] = []
        also = tuple([(0, other) for other in buffers[1:]])
        try:
            for link in links:
                request, fetching = self.new_request(), Fetching(None, link.host, THERE, told)
                asked.append((link, request, fetching))  # first: Ctrl-C ends what is in it
                link.fetches[request] = fetching
                link.ask(wire.Fetch(request, buffer, (), also))
                if link.dead is not None:  # else one that has come meanwhile would be lost
                    fetching.failure = link.dead
                self.awaited[request] = is_over, told
            self.wait_for(fetches := [fetching for _, _, fetching in asked], sleeper, is_over, until)
            self._end(asked)
        except BaseException:  # also Ctrl-C in the midst of that
            self._end(asked)
            raise
        return not any(map(_MISSING, fetches))

    def look(self) -> None:
        """Has those wait no longer who wait for what is over otherwise."""
        for is_over, told in list(self.awaited.values()):
            with contextlib.suppress(PathwaysError):  # it is raised where it is waited for
                if not is_over():
                    continue
            told()
            self.reader.wake()

    def _end(self, asked: Sequence[Asking], along: Collection[tuple[int, Any]] = (), pipe: Pipe | None = None) -> None:
        """Ends questions and those `along` with each, and takes those back that have no answer."""
        for link, request, fetching in asked:
            link.fetches.pop(request, None)
            for other, _ in along:
                link.fetches.pop(other, None)
            self.awaited.pop(request, None)
            if pipe is not None:
                pipe.end()  # a host that writes to it stops
                link.pipes.discard(pipe)
            if fetching.missing and fetching.failure is None:
                link.outbox.send(wire.CancelFetch(request))

    # --- put ----------------------------------------------------------------------------------------------------------

    def upload(
        self,
        buffer: int,
        array: Given,
        kind: ArrayType,
        spec: Spec,
        placed: PlacedSlice,
        tag: str,
        acknowledge: Acknowledge,
        begun: Callable[[Upload], None] = lambda upload: None,
    ) -> Upload:
        """Starts an upload. The bytes are copied before it returns, so the caller may change the array. One that comes
        by a pipe the host reads.

        Args:
            begun: called before the first byte leaves: what goes by a pipe of this is there when this returns.

        Raises:
            HostLost: a host of the slice is down and does not come back in time.
            NotLocal: the array comes by a pipe, of which nothing was read, and the host does not take it.
        """
        boxes = shard_boxes(kind, spec, placed.mesh)
        copies = Copies(array)
        asked: list[tuple[DataLink, wire.PutOpen, tuple[Box, ...], Pieces | SharedFile | list[wire.Message]]] = []
        for host in sorted(placed.hosts):  # several uploads wait for hosts in one order
            living = self.living.bytes_on(host) if may_wait() else UNSAID
            opening = wire.PutOpen(next(self._requests), buffer, kind, spec, placed, tag, living)
            own = [box for box, device in zip(boxes, placed.devices, strict=True) if device.host == host]
            self.living.enter(host, buffer, own, kind.dtype)
            held = tuple(dict.fromkeys(own))
            link = self.link_to(host)
            local = link.takes_files(copies.size(held)) and (copies.pieces(held) or copies.file(held))
            asked.append((link, opening, held, local or copies.messages(opening, held)))
        sent = Sent(Upload(set(placed.hosts), {link.host: link.epoch for link, *_ in asked}), acknowledge)
        try:  # each host gets all of it, or, at Ctrl-C, nothing: it would keep half an upload with its session
            for link, opening, *_ in asked:
                link.uploads[opening.request] = sent
            begun(sent.upload)  # no sooner: what is noted has an outcome, also at Ctrl-C
            for link, opening, held, what in asked:
                if isinstance(what, list):
                    link.send(what)
                elif not link.hand(opening, what):
                    link.outbox.send_all(copies.messages(opening, held))
                if link.dead is not None:
                    link.end("it went while an array was on its way")
        except BaseException:  # who waits for all hosts would wait without end
            for link, opening, *_ in asked:
                link.give_up(opening.request)
            raise
        return sent.upload

    # --- fetch --------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        buffer: int,
        cover: FetchPlan,
        check: Callable[[], None],
        also: Mapping[int, FetchPlan] | None = None,
        early: dict[int, np.ndarray[Any, Any]] | None = None,
        into: SharedFile | None = None,
    ) -> np.ndarray[Any, Any]:
        """An array, or a shard of one, as NumPy.

        Args:
            check: raises when there is no more point in waiting.
            also: further buffers, on the same devices, which may come along.
            early: takes those that did.
            into: a file in memory of its size, which has it afterwards.
        """
        if into is None and (asked := self.ahead.take(buffer, cover)) is not None:
            return self._asked_ahead(asked, check, early)
        along = {n: (next(self._requests), FetchedArray(plan)) for n, plan in also.items()} if also else {}
        found, file = self._fetched(buffer, cover, check, along, into, into is None)
        came_along(along, early)
        return file if isinstance(file, np.ndarray) else found.value(file)

    def fetch_to_keep(self, buffer: int, cover: FetchPlan, check: Callable[[], None]) -> Kept:
        """The whole array for an upload to come: the file in memory in which it came, if it did."""
        found, file = self._fetched(buffer, cover, check, {})
        assert not isinstance(file, np.ndarray)
        return found.kept(file)

    def _fetched(
        self,
        buffer: int,
        cover: FetchPlan,
        check: Callable[[], None],
        along: Mapping[int, tuple[int, FetchedArray]],
        into: SharedFile | None = None,
        by_pipe: bool = False,
    ) -> tuple[FetchedArray, SharedFile | np.ndarray[Any, Any] | None]:
        """An array that has come, and the file that has it, or the array itself where it came by a pipe, as it may with
        `by_pipe`; `along` has further requests and arrays by their buffers."""
        sleeper = Sleeper()
        found = FetchedArray(cover, sleeper.wake)
        asked: list[Asking] = []
        file: SharedFile | None = None
        pipe: Pipe | None = None
        value: np.ndarray[Any, Any] | None = None
        try:
            links = {}
            for host in cover.by_host:
                check()
                links[host] = self.link_of(host) or self.link_to(host)
            shared = cover.nbytes >= SHARED_BYTES and all(link.takes_files(cover.nbytes) for link in links.values())
            if by_pipe and shared and cover.goes_by_pipe:
                pipe = self._new(sleeper, Pipe)
            else:
                file = into or (self._new(sleeper, lambda: SharedFile.create(cover.nbytes)) if shared else None)
            for host, devices in cover.by_host.items():
                link, request, fetching = links[host], next(self._requests), found.by_host[host]
                asked.append((link, request, fetching))  # first: Ctrl-C ends what is in it
                link.fetches[request] = fetching
                for other, array in along.values():
                    link.fetches[other] = array.by_host[host]
                question = wire.Fetch(request, buffer, devices, tuple([(one[0], n) for n, one in along.items()]))
                if pipe is not None:
                    link.pipes.add(pipe)
                link.ask(question, pipe.other if pipe is not None else file if shared else None)
                if link.dead is not None:
                    fetching.failure = link.dead
            self.wait_for([fetching for _, _, fetching in asked], sleeper, check)
            if pipe is not None and asked[0][2].in_file:
                value = asked[0][0].read(found, pipe)
            self._end(asked, along.values(), pipe)
        except BaseException:  # also Ctrl-C in the midst of that
            self._end(asked, along.values(), pipe)
            raise
        finally:
            self._with_files.discard(sleeper)
        return found, file if value is None else value

    def _asked_ahead(
        self, asked: Asked, check: Callable[[], None], early: dict[int, np.ndarray[Any, Any]] | None
    ) -> np.ndarray[Any, Any]:
        """An array that was asked for with its call, once it has come; `early` takes what came along."""
        try:
            if asked.fetching.missing:
                sleeper = Sleeper()
                asked.fetching.told = sleeper.wake
                self.wait_for([asked.fetching], sleeper, check)
            else:
                check()
        finally:
            self.ahead.withdraw(asked)  # where it has not come
        if asked.along:
            came_along(asked.along, early)
        return asked.array.array()

    def _new(self, waiting: Sleeper, make: Callable[[], T]) -> T | None:
        """A file in memory or a pipe, as one of `MAX_FILES`, for who then leaves `_with_files`, also at Ctrl-C."""
        self._with_files.add(waiting)
        if len(self._with_files) <= MAX_FILES:
            with contextlib.suppress(OSError):
                return make()
        self._with_files.discard(waiting)
        return None

    def wait_for(self, fetches: list[Fetching], sleeper: Sleeper, check: Check, until: float | None = None) -> None:
        """Waits for fetches, perhaps only `until` some time: one of the threads that wait reads the local sockets for
        all. `check` raises, or says that they are not needed any more."""

        def is_over() -> bool:
            if not any(map(_MISSING, fetches)):  # no generator: it is looked at several times for each value
                return True
            for fetching in fetches:
                if fetching.failure is not None:
                    raise from_failure(fetching.failure)
            return bool(check())

        self.reader.wait(is_over, sleeper, _WAIT_SLICE_S, until)

    def close(self, why: Failure) -> None:
        """Ends all streams: the session is over, which is what goes wrong with all that was under way."""
        with self.changing:
            self._closed = why
            links = list(self._links.values())
            self._links.clear()
            self._changed.notify_all()
        for link in links:
            link.end(why)
            link.close()
