"""Frames of a link: its batches as bytes.

A frame is its length in four bytes, then a batch. An empty frame is a ping. The highest bit of the length marks a close
reason: why the other end hangs up. The first frame of the end that dials is a `Handshake`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import msgspec

CLOSE_REASON = 1 << 31

AT_ONCE_BYTES, AT_ONCE_FOR_STRANGERS = 9 << 20, 1 << 16
"""Room that is made for a frame by its length alone: that of a batch with arrays; and less before an owner reads. Four
bytes may say 256 MiB, and to clear so much takes longer than all else that a loop does. So more is made as bytes come,
each time as much as there is."""

MAX_COPIED_BYTES = 1 << 16
"""Shorter batches are copied behind their header, which costs less than a second call of the kernel."""


class LinkLost(ConnectionError):
    """The other end of a link hung up, or is silent."""


class Handshake(msgspec.Struct, frozen=True, array_like=True):
    """The path of a link, and the metadata that show that the other end may open it."""

    path: str
    metadata: dict[str, str]


HANDSHAKE = msgspec.msgpack.Decoder(Handshake)


def frame(batch: bytes) -> bytes:
    return len(batch).to_bytes(4, "big") + batch


def framed(batch: bytes, apart: bool = True) -> tuple[bytes, ...]:
    """A frame in pieces: a long batch is not copied behind its header where they may go `apart`."""
    header = len(batch).to_bytes(4, "big")
    return (header, batch) if apart and len(batch) >= MAX_COPIED_BYTES else (header + batch,)


PING = frame(b"")


class Frames:
    """Takes bytes as they come, gives the frames that are whole. `limit` is the longest that the next one may be, and
    `at_once` the most for which there is room before its bytes come."""

    def __init__(self, limit: int) -> None:
        self.limit, self.at_once = limit, AT_ONCE_BYTES
        self.close_reason: str | None = None
        self._header = b""
        self._spoken = False
        self._body: bytearray | None = None
        """Of a frame that is not all there: each byte is copied to its place."""
        self._filled = self._size = 0

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Batches that are whole now, none of which is a view of `data`. Raises `LinkLost` for a frame that is longer
        than it may be."""
        begun, size = self._header or self._body is not None, len(data) - 4
        if not begun and 0 < size <= self.limit and int.from_bytes(data[:4], "big") == size:
            return iter((bytes(data[4:]),))  # one frame, whole: nearly always
        return self._batches(memoryview(data))

    def _batches(self, coming: memoryview) -> Iterator[bytes]:
        at, came = 0, len(coming)
        if not self._header and self._body is None:
            while (begin := at + 4) < came:  # several that are whole
                size = int.from_bytes(coming[at:begin], "big")
                if size > self.limit or (after := begin + size) > came:
                    break
                at = after
                if size:
                    yield bytes(coming[begin:at])
        while at < came:
            if self._body is None:
                header = coming[at : at + 4 - len(self._header)]
                self._header += bytes(header)
                at += len(header)
                if len(self._header) < 4:
                    return
                size = self._begin()
                if size <= came - at:
                    yield from self._end(bytes(coming[at : at + size]))
                    at += size
                    continue
                self._body, self._filled, self._size = bytearray(min(size, self.at_once)), 0, size
            end = min(self._size, self._filled + came - at)
            if (room := len(self._body)) < end:
                self._body += bytes(min(self._size, max(end, 2 * room)) - room)
            memoryview(self._body)[self._filled : end] = coming[at : at + end - self._filled]
            at, self._filled = at + end - self._filled, end
            if end == self._size:
                whole, self._body = cast(bytes, self._body), None  # who takes a batch takes any buffer
                yield from self._end(whole)

    def _begin(self) -> int:
        """The length of the frame whose header has come."""
        size, self._header = int.from_bytes(self._header, "big"), b""
        self._spoken, size = bool(size & CLOSE_REASON), size & ~CLOSE_REASON
        if size > self.limit:
            raise LinkLost(f"a frame of {size} bytes came; the limit is {self.limit}")
        return size

    def _end(self, body: bytes) -> Iterator[bytes]:
        if self._spoken:
            self.close_reason = body.decode(errors="replace")
        elif body:
            yield body
