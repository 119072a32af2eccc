"""Small puts: each array goes whole, in one message. Those of a tree leave together.

One by itself is waited for, and goes by the local socket as its answer does, like calls and values. Who waits for each
value, and uploads something for each call, would wait for two threads of this process and for the data stream before
the call may leave. Where a host takes calls at once (`early`) the put returns when the array is stored: sooner than
the threads would have been woken. In a stream of calls puts do not wait.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pathways_ray import limits
from pathways_ray.client.array_pieces import Copies, Given
from pathways_ray.client.buffer import Upload
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import Acknowledge, DataLink, Sent, UploadRequest, may_wait
from pathways_ray.client.living import UNSAID
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, box_shape, shard_boxes
from pathways_ray.ir.types import ArrayType, Spec
from pathways_ray.transport import messages as wire
from pathways_ray.waits import slice_s

_WAIT_SLICE_S = slice_s()

MAX_TOGETHER = 64
"""Arrays that leave as one batch, which has no more than 4 MiB then."""


def is_small(data: DataLinks, array: Given) -> bool:
    """Whether an array goes to its hosts in one message. Within a quota none does, for each may have to wait for frees
    that leave with what is called next."""
    return type(array) is np.ndarray and array.nbytes <= limits.MAX_WHOLE_BYTES and not data.living.has_quota


def host_link(data: DataLinks, array: Given, placed: PlacedSlice) -> DataLink | None:
    """The stream to the one host of a slice, where a put to it is to wait for its answer; None where it is not."""
    if not is_small(data, array):
        return None
    host, *others = placed.hosts
    if others or not data.answers_soon(host) or not may_wait():
        return None
    link = data.link_of(host)
    return link if link is not None and link.is_local else None


@functools.lru_cache(maxsize=1024)
def _boxes(kind: ArrayType, spec: Spec, placed: PlacedSlice) -> tuple[tuple[int, tuple[Box, ...]], ...]:
    """For each host the boxes of an array that differ there, none where it is all of it. Several uploads wait for hosts
    in one order."""
    found: dict[int, dict[Box, None]] = {host: {} for host in sorted(placed.hosts)}
    for box, device in zip(shard_boxes(kind, spec, placed.mesh), placed.devices, strict=True):
        found[device.host][box] = None
    return tuple((host, () if _is_all(boxes, kind) else tuple(boxes)) for host, boxes in found.items())


def _is_all(boxes: Iterable[Box], kind: ArrayType) -> bool:
    """Whether the first of these boxes is the whole array."""
    return box_shape(next(iter(boxes))) == kind.shape


def _whole(array: np.ndarray[Any, Any], boxes: tuple[Box, ...]) -> tuple[bytes | memoryview, ...]:
    """A copy of some boxes of an array, or of all of it."""
    return Copies(array).whole(boxes) if boxes else (array.tobytes(),)


def put_together(data: DataLinks, several: Sequence[UploadRequest]) -> None:
    """Uploads small arrays in one batch to each host, as `DataLinks.upload` does them one by one. Raises as it does."""
    links: dict[int, DataLink] = {}
    leaving: dict[int, list[wire.Message]] = {}
    uploads: list[tuple[UploadRequest, Sent, list[tuple[DataLink, int]]]] = []
    for one in several:
        assert isinstance(one.array, np.ndarray)
        asked = []
        for host, boxes in _boxes(one.kind, one.spec, one.placed):
            if (link := links.get(host)) is None:
                link = links[host] = data.link_to(host)
                leaving[host] = []
            what = one.buffer, one.kind, one.spec, one.placed, one.tag, UNSAID, _whole(one.array, boxes)
            leaving[host].append(opening := wire.PutOpen(data.new_request(), *what))
            asked.append((link, opening.request))
        upload = Upload(set(one.placed.hosts), {link.host: link.epoch for link, _ in asked})
        uploads.append((one, Sent(upload, one.acknowledge), asked))
    try:
        for one, sent, asked in uploads:
            for link, request in asked:
                link.uploads[request] = sent
            one.begun(sent.upload)
        for host, link in links.items():
            link.send(leaving[host])
            if link.dead is not None:
                link.end("it went while arrays were on their way")
    except BaseException:  # as Ctrl-C: who waits for all hosts would wait without end
        for _, _, asked in uploads:
            for link, request in asked:
                link.give_up(request)
        raise


def put(
    data: DataLinks,
    link: DataLink,
    buffer: int,
    array: Given,
    kind: ArrayType,
    spec: Spec,
    placed: PlacedSlice,
    tag: str,
    acknowledge: Acknowledge,
    begun: Callable[[Upload], None],
) -> None:
    """Uploads an array as `DataLinks.upload` does, to one host, and waits for its answer, or for the end of the link:
    `acknowledge` gets either."""
    ((_, boxes),) = _boxes(kind, spec, placed)
    assert isinstance(array, np.ndarray)
    opening = wire.PutOpen(data.new_request(), buffer, kind, spec, placed, tag, UNSAID, _whole(array, boxes))
    sleeper = Sleeper()

    def acknowledged(upload: Upload, host: int, failure: Failure | None) -> None:
        acknowledge(upload, host, failure)
        sleeper.wake()
        data.reader.wake()

    sent = Sent(Upload({link.host}, {link.host: link.epoch}), acknowledged)
    waiting = partial(data.reader.wait, lambda: sent.upload.done, sleeper, _WAIT_SLICE_S)
    try:
        link.uploads[opening.request] = sent
        begun(sent.upload)
        link.ask(opening)
        if link.dead is not None:
            link.end("it went while an array was on its way")
    except BaseException:  # as Ctrl-C: who waits for the host would wait without end
        link.give_up(opening.request)
        raise
    try:
        waiting()
    except BaseException:  # as Ctrl-C: it has left, and what is called behind it waits for the answer as well
        with contextlib.suppress(RuntimeError):  # there is no thread left: the next one who waits reads it
            threading.Thread(target=waiting, name="pathways-put", daemon=True).start()
        raise
