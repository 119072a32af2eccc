"""Batches: the messages that wait for one stream, and for how long it gathers them. Pure; carriers do the talking.

A sender puts messages in at any time; all that is there when the stream is free leaves as one batch. A batch costs
both ends some 20 us (a link) to 100 us (gRPC) of Python whatever is in it, so a stream with plenty of work under way
beyond it (`depth`) gathers for a millisecond between two batches: nothing downstream can run dry in that time. A lone
message, or one of few, leaves at once.

The carriers: `outboxes` for processes whose decisions run on an event loop, `thread_links` for threads, `grpc_streams`
for clients that reach no link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat

from pathways_ray import limits
from pathways_ray.errors import TooLarge
from pathways_ray.transport.messages import Message, Put, PutDone, Stored, encode

MAX_BATCH_BYTES = 8 << 20
"""A batch is closed when it reaches this size, so that arrays do not pile up in one message."""

MAX_MESSAGES = 4096
"""Messages that are taken out at a time."""

SMALL = frozenset((Put, PutDone, Stored))
"""Messages of which many come together, and that carry no bytes of arrays, nor programs: a batch of them is encoded in
one step, since all of it may be there at once."""

MAX_HEADER_BYTES = 5
"""Bytes of a batch beside its messages."""

GATHER_DEPTH = 8
"""Launches under way beyond a stream above which its messages are gathered."""

GATHER_S = 0.001

LONG_GATHER_DEPTH = 64
"""Launches under way above which the devices have work for longer than the long time."""

LONG_GATHER_S = 0.003
"""Not for a stream that opens the window of an island (`outboxes.FanOut`): it would run dry."""


class Batcher:
    """The messages that wait for one stream. Any thread may put, also in a destructor; one at a time takes.

    Args:
        depth: the number of launches under way beyond the stream.
        compose: says the same in fewer messages, where some have gathered.
        long_gather_s: seconds of gathering with very many launches under way.
        fewest: messages from which `compose` can.
    """

    def __init__(
        self,
        depth: Callable[[], int] = lambda: 0,
        compose: Callable[[list[Message]], list[Message]] | None = None,
        long_gather_s: float = LONG_GATHER_S,
        fewest: int = 1,
    ) -> None:
        self.depth = depth
        self._compose, self._fewest = compose, fewest
        self._long_gather_s = long_gather_s
        self.waiting: deque[Message] = deque()
        self.put = self.waiting.append
        self.put_all = self.waiting.extend

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self, most: int = MAX_MESSAGES, compose: bool = True) -> list[bytes]:
        """Up to `most` messages as batches; empty when none waits.

        Args:
            compose: whether they may be said in fewer messages.
        """
        return list(self.taken(most, compose))

    def taken(self, most: int = MAX_MESSAGES, compose: bool = True) -> Iterator[bytes]:
        """The batches of `take`, each encoded when it is asked for: an array's bytes are not all there twice."""
        waiting, composing = self.waiting, self._compose if compose else None
        if len(waiting) < self._fewest:
            composing = None
        if len(waiting) == 1 and composing is None:  # a lone message, whose sender is waited for
            return iter((_LONE + encode(waiting.popleft()),))
        messages = list(map(_first, repeat(waiting, min(len(waiting), most))))
        if composing is not None:
            messages = composing(messages)
        if messages and SMALL.issuperset(map(type, messages)):
            whole = encode(messages)
            if len(whole) <= MAX_BATCH_BYTES:
                return iter((whole,))
        return batches(messages)

    def clear(self) -> None:
        """Forgets the messages that wait."""
        self.waiting.clear()

    @property
    def lone(self) -> bool:
        """Whether a message leaves at once, since little is under way."""
        return self.depth() <= GATHER_DEPTH

    def gather_s(self) -> float:
        """Seconds to gather after a batch has left; 0 when messages leave as they come."""
        depth = self.depth()
        if depth <= GATHER_DEPTH:
            return 0.0
        return GATHER_S if depth <= LONG_GATHER_DEPTH else self._long_gather_s


def batches(messages: Iterable[Message]) -> Iterator[bytes]:
    """Encodes messages into as few batches as `MAX_BATCH_BYTES` allows: MessagePack arrays, header first."""
    return _grouped(map(encode, messages), _batch)


def joined_batches(several: Iterable[bytes]) -> Iterator[bytes]:
    """The same messages as fewer batches."""
    return _grouped(several, _joined)


def _grouped(parts: Iterable[bytes], join: Callable[[list[bytes]], bytes]) -> Iterator[bytes]:
    """Joins encoded messages, or batches, into batches."""
    group: list[bytes] = []
    size = 0
    for part in parts:
        size += len(part)
        if size > MAX_BATCH_BYTES and group:
            whole = join(group)
            group, size = [], len(part)  # before the batch is sent, which may take its time
            yield whole
            del whole
        group.append(part)
    if group:
        yield join(group)


def _batch(messages: list[bytes]) -> bytes:
    return b"".join((_header(len(messages)), *messages))


def _joined(several: list[bytes]) -> bytes:
    counts, bodies = zip(*map(_counted, several), strict=True)
    return b"".join((_header(sum(counts)), *bodies))


_LONE = bytes((0x91,))
_first = deque.popleft


def _header(count: int) -> bytes:
    """The header of a MessagePack array."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _counted(batch: bytes) -> tuple[int, bytes]:
    """The number of messages in a batch that was made here, and their bodies."""
    if batch[0] < 0xDC:
        return batch[0] & 0x0F, batch[1:]
    size = 3 if batch[0] == 0xDC else 5
    return int.from_bytes(batch[1:size], "big"), batch[size:]


# --- batches of clients -----------------------------------------------------------------------------------------------

_ARRAY_16, _ARRAY_32 = 0xDC, 0xDD


def check_batch(data: bytes, most: int = limits.MAX_CLIENT_BATCH_MESSAGES) -> None:
    """Looks at a batch before it is decoded, which would take long for one that is not a client's of this project.

    Args:
        most: messages in one.

    Raises:
        TooLarge: it has too many messages, or too many bytes for a batch that is not a single program.
    """
    count = _count(data)
    if count > most:
        raise TooLarge(f"a batch of {count} messages; the limit is {most}")
    # An array of four elements, of which the first is the tag of `Register`.
    if len(data) > limits.MAX_CLIENT_BATCH_BYTES + MAX_HEADER_BYTES and data[:3] != b"\x91\x94\x01":
        raise TooLarge(
            f"a batch of {len(data)} bytes; without a program of its own {limits.MAX_CLIENT_BATCH_BYTES} are the limit"
        )


def _count(data: bytes) -> int:
    """The number of messages in a batch, by its header; 0 for what is no batch."""
    first = data[0] if data else 0
    if first == _ARRAY_16:
        return int.from_bytes(data[1:3], "big")
    if first == _ARRAY_32:
        return int.from_bytes(data[1:5], "big")
    return first & 0x0F if first & 0xF0 == 0x90 else 0
