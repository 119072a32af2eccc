"""Small puts that are waited for: an array and its answer go by the local socket, as calls and values do.

Who waits for each value, and uploads something for each call, would wait for two threads of this process and for the
data stream before the call may leave. Where a host takes calls at once (`early`) the array goes there whole, and the
put returns when it is stored: sooner than the threads would have been woken. In a stream of calls puts do not wait.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from functools import partial

import numpy as np

from pathways_ray import limits
from pathways_ray.client.array_pieces import Copies, Given
from pathways_ray.client.buffer import Upload
from pathways_ray.client.data import DataLinks
from pathways_ray.client.data_link import Acknowledge, DataLink, Sent, may_wait
from pathways_ray.client.living import UNSAID
from pathways_ray.client.local_reader import Sleeper
from pathways_ray.errors import Failure
from pathways_ray.ir.plan import PlacedSlice
from pathways_ray.ir.regions import Box, shard_boxes
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from pathways_ray.transport import messages as wire
from pathways_ray.waits import slice_s

_WAIT_SLICE_S = slice_s()


def host_link(data: DataLinks, array: Given, placed: PlacedSlice) -> DataLink | None:
    """The stream to the one host of a slice, where a put to it is to wait for its answer; None where it is not.

    Within a quota none waits: it might wait for frees that leave with what is called next.
    """
    if type(array) is not np.ndarray or array.nbytes > limits.MAX_WHOLE_BYTES or data.living.has_quota:
        return None
    host, *others = placed.hosts
    if others or not data.answers_soon(host) or not may_wait():
        return None
    link = data.link_of(host)
    return link if link is not None and link.is_local else None


@functools.lru_cache(maxsize=256)
def _boxes(kind: ArrayType, spec: Spec, mesh: SliceType) -> tuple[Box, ...]:
    """The boxes of an array that differ."""
    return tuple(dict.fromkeys(shard_boxes(kind, spec, mesh)))


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
    whole = Copies(array).whole(_boxes(kind, spec, placed.mesh))
    opening = wire.PutOpen(data.new_request(), buffer, kind, spec, placed, tag, UNSAID, whole)
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
