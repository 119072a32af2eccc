"""Frames of a link: its batches as bytes.

A frame is its length in four bytes, then a batch. An empty frame is a ping. The highest bit of the length marks a close
reason: why the other end hangs up. The first frame of the end that dials is a `Handshake`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

CLOSE_REASON = 1 << 31

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
    if apart and len(batch) >= MAX_COPIED_BYTES:
        return len(batch).to_bytes(4, "big"), batch
    return (frame(batch),)


PING = frame(b"")


class Frames:
    """Takes bytes as they come, gives the frames that are whole. `limit` is the longest that the next one may be."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.close_reason: str | None = None
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Batches that are whole now. Raises `LinkLost` for a frame that is longer than it may be."""
        rest = self._rest
        if not rest and len(data) > 4 and int.from_bytes(data[:4], "big") == len(data) - 4 <= self.limit:
            yield data[4:]  # one frame, whole: nearly always
            return
        rest += data
        while len(rest) >= 4:
            size = int.from_bytes(rest[:4], "big")
            spoken, size = bool(size & CLOSE_REASON), size & ~CLOSE_REASON
            if size > self.limit:
                raise LinkLost(f"a frame of {size} bytes came; the limit is {self.limit}")
            if len(rest) - 4 < size:
                return
            with memoryview(rest) as view:
                body = bytes(view[4 : 4 + size])
            del rest[: 4 + size]  # which moves a pointer, not the rest
            if spoken:
                self.close_reason = body.decode(errors="replace")
            elif body:
                yield body
