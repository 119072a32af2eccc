"""The client's data streams: arrays to hosts and from hosts, never by way of the controller.

One stream per host, opened when first needed. Uploads are acknowledged by each host that holds part of the array;
fetches ask for as few shards as cover the array.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from pathways_ray import limits
from pathways_ray.client.values import dtype_named
from pathways_ray.errors import Failure, PathwaysError, from_failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, shard_boxes
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport import streams
from pathways_ray.transport.messages import (
    FROM_HOST_DATA,
    DataFailed,
    Fetch,
    FetchPart,
    HostAddress,
    Message,
    PutDone,
    PutOpen,
    PutPart,
)
from pathways_ray.transport.tls import Trust

if TYPE_CHECKING:
    from pathways_ray.client.array import Buffer

_WAIT_SLICE_S = 0.5
RECONNECT_LIMIT_S = 30.0
"""A put or fetch waits this long for a host that is down."""

NEWS_LIMIT_S = 10.0
"""How long a broken stream waits for news of its host before it is opened again."""


class Upload:
    """An array on its way to its hosts; `done` once all have it, or one could not take it."""

    __slots__ = ("buffer", "done", "failure", "waiting_for")

    def __init__(self, buffer: Buffer, hosts: set[int]) -> None:
        self.buffer: Buffer | None = buffer
        self.waiting_for = hosts
        self.failure: Failure | None = None
        self.done = False

    def arrived(self, host: int, failure: Failure | None) -> None:
        self.waiting_for.discard(host)
        self.failure = self.failure or failure
        if failure is not None or not self.waiting_for:
            self.done = True


class _Fetching:
    """Shards on their way to the client, from one host."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.missing = set(devices)
        self.parts: dict[int, bytearray] = {}
        self.failure: Failure | None = None

    def add(self, part: FetchPart) -> None:
        buffer = self.parts.setdefault(part.device, bytearray(part.total))
        buffer[part.offset : part.offset + len(part.data)] = part.data
        if part.offset + len(part.data) >= part.total:
            self.missing.discard(part.device)


class _Link:
    """The stream to one incarnation of a host."""

    def __init__(self, owner: DataLinks, address: HostAddress) -> None:
        self.owner = owner
        self.host = address.host
        self.epoch = address.epoch
        self.outbox = streams.ThreadOutbox()
        self.uploads: dict[int, Upload] = {}
        self.fetches: dict[int, _Fetching] = {}
        self.dead: Failure | None = None
        self._channel = streams.channel(address.address, owner.trust)
        metadata = {"session": str(owner.session), "authorization": owner.token}
        self._call = streams.stream_call(self._channel, streams.DATA_STREAM, self.outbox, metadata)
        threading.Thread(target=self._read, name=f"pathways-data-{self.host}", daemon=True).start()

    def _read(self) -> None:
        reason = "it closed the stream"
        try:
            for data in self._call:
                for message in FROM_HOST_DATA.decode_batch(data):
                    self._on_message(message)
        except grpc.RpcError as error:
            reason = str(getattr(error, "details", lambda: "")() or error)
        except PathwaysError as error:
            reason = str(error)
        self.end(reason)

    def _on_message(self, message: Message) -> None:
        match message:
            case PutDone(request):
                self._uploaded(request, None)
            case FetchPart():
                fetching = self.fetches.get(message.request)
                if fetching is not None:
                    fetching.add(message)
                    if not fetching.missing:
                        self.owner.wake()
            case DataFailed(request, failure):
                if request in self.uploads:
                    self._uploaded(request, failure)
                elif request in self.fetches:
                    self.fetches[request].failure = failure
                    self.owner.wake()

    def _uploaded(self, request: int, failure: Failure | None) -> None:
        upload = self.uploads.pop(request, None)
        if upload is not None:
            self.owner.upload_ended(upload, self.host, failure)

    def end(self, reason: str) -> None:
        """Fails all that was under way."""
        self.dead = self.dead or Failure("HostLost", f"host {self.host} is gone: {reason}", host=self.host)
        for request in list(self.uploads):
            self._uploaded(request, self.dead)
        for fetching in list(self.fetches.values()):
            fetching.failure = fetching.failure or self.dead
        self.owner.wake()

    def close(self) -> None:
        self.outbox.close()
        self._call.cancel()
        self._channel.close()


class DataLinks:
    """All data streams of a session."""

    def __init__(
        self,
        session: int,
        token: str,
        hosts: tuple[HostAddress, ...],
        uploads_changed: Callable[[], None],
        trust: Trust | None = None,
    ) -> None:
        self.session = session
        self.token = token
        self.trust = trust
        self._uploads_changed = uploads_changed
        self._addresses = {h.host: h for h in hosts}
        self._links: dict[int, _Link] = {}
        self._requests = itertools.count(1)
        self._changed = threading.Condition()
        self._closed = False

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def host_changed(self, address: HostAddress) -> None:
        """A host went down (empty address), or came up under a new epoch."""
        with self._changed:
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

    def _link(self, host: int) -> _Link:
        """The stream to a host; waits for a host that is starting anew."""
        with self._changed:
            # A stream that broke is the first sign of a host's death; the news of it, or of the successor, follows.
            self._changed.wait_for(lambda: self._closed or not self._is_dead(host), NEWS_LIMIT_S)
            self._changed.wait_for(lambda: self._closed or self._address(host), RECONNECT_LIMIT_S)
            address = self._addresses.get(host)
            if address is None or not address.address:
                raise from_failure(Failure("HostLost", f"host {host} is down", host=host))
            link = self._links.get(host)
            if link is None or link.dead is not None:
                link = self._links[host] = _Link(self, address)
            return link

    def _address(self, host: int) -> str:
        known = self._addresses.get(host)
        return known.address if known is not None else ""

    def _is_dead(self, host: int) -> bool:
        """Whether the stream to the host's present incarnation broke."""
        link = self._links.get(host)
        return link is not None and link.dead is not None

    # --- put ----------------------------------------------------------------------------------------------------------

    def upload(
        self,
        buffer: Buffer,
        array: np.ndarray[Any, Any],
        kind: ArrayType,
        spec: Spec,
        placed: PlacedSlice,
        proof: str,
    ) -> Upload:
        """Starts an upload. The bytes are copied before it returns, so the caller may change the array."""
        upload = Upload(buffer, set(placed.hosts))
        boxes = shard_boxes(kind, spec, placed.mesh)
        for host in placed.hosts:
            link = self._link(host)
            request = next(self._requests)
            link.uploads[request] = upload
            link.outbox.send(PutOpen(request, buffer.id, kind, spec, placed, proof))
            held = dict.fromkeys(b for b, d in zip(boxes, placed.devices, strict=True) if d.host == host)
            for number, box in enumerate(held):
                data = _bytes_of(array, box)
                for offset in range(0, len(data), limits.PART_BYTES):
                    part = bytes(data[offset : offset + limits.PART_BYTES])
                    link.outbox.send(PutPart(request, number, offset, part))
            if link.dead is not None:
                link.end("it went while an array was on its way")
        return upload

    def upload_ended(self, upload: Upload, host: int, failure: Failure | None) -> None:
        upload.arrived(host, failure)
        if upload.done:
            buffer = upload.buffer
            if buffer is not None and upload.failure is not None:
                buffer.failure, buffer.state = upload.failure, 2
            elif buffer is not None and buffer.state == 0:
                buffer.state = 1
            # A cycle would keep the buffer until the garbage collector comes by.
            upload.buffer = None
            self.wake()
            self._uploads_changed()

    # --- fetch --------------------------------------------------------------------------------------------------------

    def fetch(
        self, buffer: Buffer, kind: ArrayType, spec: Spec, placed: PlacedSlice, check: Callable[[], None]
    ) -> np.ndarray[Any, Any]:
        """The whole array as NumPy. `check` raises when there is no more point in waiting."""
        boxes = shard_boxes(kind, spec, placed.mesh)
        chosen: dict[Box, int] = {}
        for ordinal, box in enumerate(boxes):
            chosen.setdefault(box, ordinal)
        by_host: dict[int, list[int]] = {}
        for ordinal in chosen.values():
            by_host.setdefault(placed.devices[ordinal].host, []).append(placed.devices[ordinal].index)
        asked: list[tuple[_Link, int, _Fetching]] = []
        try:
            for host, devices in by_host.items():
                check()
                link = self._link(host)
                request, fetching = next(self._requests), _Fetching(tuple(devices))
                link.fetches[request] = fetching
                asked.append((link, request, fetching))
                link.outbox.send(Fetch(request, buffer.id, tuple(devices)))
                if link.dead is not None:
                    fetching.failure = link.dead
            self._wait_for([fetching for _, _, fetching in asked], check)
        finally:
            for link, request, _ in asked:
                link.fetches.pop(request, None)
        received = {link.host: fetching for link, _, fetching in asked}
        return _assembled(kind, chosen, placed, received)

    def _wait_for(self, fetches: list[_Fetching], check: Callable[[], None]) -> None:
        with self._changed:
            while any(f.missing for f in fetches):
                for fetching in fetches:
                    if fetching.failure is not None:
                        raise from_failure(fetching.failure)
                check()
                self._changed.wait(_WAIT_SLICE_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
            self._changed.notify_all()
        for link in links:
            link.end("the session ended")
            link.close()


def _bytes_of(array: np.ndarray[Any, Any], box: Box) -> memoryview:
    piece = np.ascontiguousarray(array[tuple(slice(a, b) for a, b in box)])
    return memoryview(piece.reshape(-1).view(np.uint8).data) if piece.size else memoryview(b"")


def _assembled(
    kind: ArrayType, chosen: dict[Box, int], placed: PlacedSlice, received: dict[int, _Fetching]
) -> np.ndarray[Any, Any]:
    dtype = dtype_named(kind.dtype)

    def shard(box: Box, ordinal: int) -> np.ndarray[Any, Any]:
        device = placed.devices[ordinal]
        return np.frombuffer(received[device.host].parts[device.index], dtype).reshape(box_shape(box))

    if len(chosen) == 1:
        ((box, ordinal),) = chosen.items()
        return shard(box, ordinal)
    whole = np.empty(kind.shape, dtype)
    for box, ordinal in chosen.items():
        whole[tuple(slice(a, b) for a, b in box)] = shard(box, ordinal)
    return whole
