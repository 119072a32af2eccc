"""The client's data streams: arrays to hosts and from hosts, never by way of the controller.

One stream per host, opened when first needed. Uploads are acknowledged by each host that holds part of the array;
fetches ask for as few shards as cover the array.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from pathways_ray import limits
from pathways_ray.client.buffer import Upload
from pathways_ray.errors import Failure, PathwaysError, from_failure
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, shard_boxes, shard_shape
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.jax_types import dtype_named
from pathways_ray.transport import messages as wire
from pathways_ray.transport import streams, thread_links
from pathways_ray.transport.frames import LinkLost
from pathways_ray.transport.tls import Trust

_WAIT_SLICE_S = 0.5
"""Waits wake up this often, so that Ctrl-C is seen."""

RECONNECT_LIMIT_S = 10.0
"""A put or fetch waits this long for a host that is down, or whose stream broke and of which there is no news yet.
Other calls of its thread wait meanwhile."""


Acknowledge = Callable[[Upload, int, Failure | None], None]
"""Called once for each host of an upload, with its failure if it could not take its part."""


class _Sent(NamedTuple):
    """An upload that a host has yet to acknowledge."""

    upload: Upload
    acknowledge: Acknowledge


class _Fetching:
    """Shards on their way to the client, from one host."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self.missing = set(devices)
        self.parts: dict[int, bytearray] = {}
        self.failure: Failure | None = None

    def add(self, part: wire.FetchPart) -> None:
        buffer = self.parts.get(part.device)
        if buffer is None:
            buffer = self.parts[part.device] = bytearray(part.total)
        buffer[part.offset : part.offset + len(part.data)] = part.data
        if part.offset + len(part.data) >= part.total:
            self.missing.discard(part.device)


class FetchPlan:
    """Shards that make up what is fetched: their boxes, devices, and the requests to each host."""

    @classmethod
    def of_array(cls, kind: ArrayType, spec: Spec, placed: PlacedSlice) -> FetchPlan:
        """The fewest shards that cover an array."""
        ordinals: dict[Box, int] = {}
        for ordinal, box in enumerate(shard_boxes(kind, spec, placed.mesh)):
            ordinals.setdefault(box, ordinal)
        return cls(kind, [(box, placed.devices[ordinal]) for box, ordinal in ordinals.items()])

    @classmethod
    def of_shard(cls, kind: ArrayType, spec: Spec, placed: PlacedSlice, place: int) -> FetchPlan:
        """One shard, on device number `place`."""
        shape = shard_shape(kind, spec, placed.mesh)
        return cls(ArrayType(shape, kind.dtype), [(tuple((0, size) for size in shape), placed.devices[place])])

    def __init__(self, kind: ArrayType, shards: list[tuple[Box, Device]]) -> None:
        self.shape, self.dtype, self.shards = kind.shape, dtype_named(kind.dtype), shards
        by_host: dict[int, list[int]] = {}
        for _, device in self.shards:
            by_host.setdefault(device.host, []).append(device.index)
        self.by_host = {host: tuple(indices) for host, indices in by_host.items()}

    def assembled(self, received: dict[int, _Fetching]) -> np.ndarray[Any, Any]:
        """The array, from what each host sent."""

        def shard(box: Box, device: Device) -> np.ndarray[Any, Any]:
            return np.frombuffer(received[device.host].parts[device.index], self.dtype).reshape(box_shape(box))

        if len(self.shards) == 1:
            return shard(*self.shards[0])
        whole = np.empty(self.shape, self.dtype)
        for box, device in self.shards:
            whole[tuple(slice(a, b) for a, b in box)] = shard(box, device)
        return whole


class _Link:
    """The stream to one incarnation of a host."""

    def __init__(self, owner: DataLinks, address: wire.HostAddress) -> None:
        self.owner = owner
        self.host = address.host
        self.epoch = address.epoch
        self.outbox = thread_links.Outbox()
        self.uploads: dict[int, _Sent] = {}
        self.fetches: dict[int, _Fetching] = {}
        self.dead: Failure | None = None
        metadata = {"session": str(owner.session), "authorization": owner.token}
        self._wire = thread_links.ThreadLink(
            address.address, streams.DATA_STREAM, metadata, self.outbox, owner.trust, limits.DATA_SILENCE_S
        )
        threading.Thread(target=self._read, name=f"pathways-data-{self.host}", daemon=True).start()

    def _read(self) -> None:
        reason = "it closed the stream"
        try:
            for data in self._wire:
                for message in wire.FROM_HOST_DATA.decode_batch(data):
                    self._on_message(message)
        except (LinkLost, PathwaysError) as error:
            reason = str(error)
        except Exception as error:  # whatever it is: what waits for this thread would wait without end
            reason = f"its messages cannot be read ({type(error).__name__}: {error})"
            self._wire.close()
        self.end(reason)

    def _on_message(self, message: wire.Message) -> None:
        match message:
            case wire.PutDone(request):
                self._uploaded(request, None)
            case wire.FetchPart():
                fetching = self.fetches.get(message.request)
                if fetching is not None:
                    fetching.add(message)
                    if not fetching.missing:
                        self.owner.wake()
            case wire.DataFailed(request, failure):
                if request in self.uploads:
                    self._uploaded(request, failure)
                elif request in self.fetches:
                    self.fetches[request].failure = failure
                    self.owner.wake()

    def _uploaded(self, request: int, failure: Failure | None) -> None:
        sent = self.uploads.pop(request, None)
        if sent is not None:
            sent.acknowledge(sent.upload, self.host, failure)

    def end(self, reason: str | Failure) -> None:
        """Fails all that was under way."""
        if isinstance(reason, str):
            reason = Failure("HostLost", f"host {self.host} is gone: {reason}", host=self.host)
        self.dead = self.dead or reason
        for request in list(self.uploads):
            self._uploaded(request, self.dead)
        for fetching in list(self.fetches.values()):
            fetching.failure = fetching.failure or self.dead
        self.owner.wake()

    def close(self) -> None:
        self._wire.close()


class DataLinks:
    """All data streams of a session."""

    def __init__(
        self,
        session: int,
        token: str,
        hosts: tuple[wire.HostAddress, ...],
        trust: Trust | None = None,
    ) -> None:
        self.session = session
        self.token = token
        self.trust = trust
        self._addresses = {h.host: h for h in hosts}
        self._links: dict[int, _Link] = {}
        self._requests = itertools.count(1)
        self._changed = threading.Condition()
        self._closed = False

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def host_changed(self, address: wire.HostAddress) -> None:
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
        """The stream to a host; waits for a host that is starting again."""
        with self._changed:
            # A stream that broke is the first sign of a host's death; the news of it, or of the successor, follows.
            known = RECONNECT_LIMIT_S + time.monotonic()
            self._changed.wait_for(lambda: self._closed or not self._is_dead(host), RECONNECT_LIMIT_S)
            self._changed.wait_for(lambda: self._closed or self._address(host), known - time.monotonic())
            address = self._addresses.get(host)
            if address is None or not address.address:
                text = f"host {host} is down, and was not back in {RECONNECT_LIMIT_S:.0f} s; call again once it is"
                raise from_failure(Failure("HostLost", text, host=host))
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
        buffer: int,
        array: np.ndarray[Any, Any],
        kind: ArrayType,
        spec: Spec,
        placed: PlacedSlice,
        tag: str,
        acknowledge: Acknowledge,
    ) -> Upload:
        """Starts an upload. The bytes are copied before it returns, so the caller may change the array.

        Raises:
            HostLost: a host of the slice is down and does not come back in time.
        """
        upload = Upload(set(placed.hosts))
        sent = _Sent(upload, acknowledge)
        boxes = shard_boxes(kind, spec, placed.mesh)
        copies = {box: _copy_of(array, box) for box in dict.fromkeys(boxes)}  # replicas on several hosts share one
        asked: list[tuple[_Link, int, list[wire.Message]]] = []
        for host in placed.hosts:
            request = next(self._requests)
            messages: list[wire.Message] = [wire.PutOpen(request, buffer, kind, spec, placed, tag)]
            held = dict.fromkeys(b for b, d in zip(boxes, placed.devices, strict=True) if d.host == host)
            for number, box in enumerate(held):
                data = copies[box]
                for offset in range(0, len(data), limits.PART_BYTES):
                    # A view: a part is copied when it is encoded, right before it leaves.
                    part = cast(bytes, data[offset : offset + limits.PART_BYTES])
                    messages.append(wire.PutPart(request, number, offset, part))
            asked.append((self._link(host), request, messages))
        # All of it, or, should Ctrl-C have come before, nothing: a host would keep half an upload with its session.
        for link, request, messages in asked:
            link.uploads[request] = sent
            link.outbox.send_all(messages)
            if link.dead is not None:
                link.end("it went while an array was on its way")
        return upload

    # --- fetch --------------------------------------------------------------------------------------------------------

    def fetch(self, buffer: int, cover: FetchPlan, check: Callable[[], None]) -> np.ndarray[Any, Any]:
        """The whole array as NumPy. `check` raises when there is no more point in waiting."""
        asked: list[tuple[_Link, int, _Fetching]] = []
        try:
            for host, devices in cover.by_host.items():
                check()
                link = self._link(host)
                request, fetching = next(self._requests), _Fetching(devices)
                link.fetches[request] = fetching
                asked.append((link, request, fetching))
                link.outbox.send(wire.Fetch(request, buffer, devices))
                if link.dead is not None:
                    fetching.failure = link.dead
            self._wait_for([fetching for _, _, fetching in asked], check)
        finally:
            for link, request, fetching in asked:
                link.fetches.pop(request, None)
                if fetching.missing and fetching.failure is None:
                    link.outbox.send(wire.CancelFetch(request))
        return cover.assembled({link.host: fetching for link, _, fetching in asked})

    def _wait_for(self, fetches: list[_Fetching], check: Callable[[], None]) -> None:
        with self._changed:
            while any(f.missing for f in fetches):
                for fetching in fetches:
                    if fetching.failure is not None:
                        raise from_failure(fetching.failure)
                check()
                self._changed.wait(_WAIT_SLICE_S)

    def close(self, why: Failure) -> None:
        """Ends all streams: the session is over, which is what goes wrong with all that was under way."""
        with self._changed:
            self._closed = True
            links = list(self._links.values())
            self._links.clear()
            self._changed.notify_all()
        for link in links:
            link.end(why)
            link.close()


def _copy_of(array: np.ndarray[Any, Any], box: Box) -> memoryview:
    """The bytes of a box, in C order, in memory of their own."""
    piece = np.array(array[tuple(slice(a, b) for a, b in box)], order="C")
    return memoryview(piece.reshape(-1).view(np.uint8).data) if piece.size else memoryview(b"")
