"""The server's end of one HTTP/2 connection that carries gRPC calls. Pure: bytes in, events and bytes out.

gRPC's own server for Python hands each message from thread to thread, twice in each direction, and a client of the
proxy sends two for each small computation. Here one read of the socket gives all messages that are in it.

What a peer sends is taken at the pace at which it is read, so its windows are as wide as they can be. What goes out
keeps to the windows that the peer gives, stream by stream, and waits here for more.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import hpack

from pathways_ray.proxy import http2_frames as f


class Called(NamedTuple):
    """A call has begun. Metadata whose name ends in `-bin` are as they were before base64."""

    stream: int
    path: str
    metadata: Mapping[str, bytes]


class Message(NamedTuple):
    """A message of a call has come."""

    stream: int
    data: bytes


class Finished(NamedTuple):
    """The peer sends nothing more of a call."""

    stream: int


class Gone(NamedTuple):
    """The peer has given a call up; nothing can be sent of it."""

    stream: int


Event = Called | Message | Finished | Gone


class _Stream:
    """A call: how much of it the peer takes, and what waits for it to take more."""

    __slots__ = ("began", "came", "ends", "limit", "open", "room", "uncredited", "unsent")

    def __init__(self, room: int, limit: int) -> None:
        self.room = room
        self.limit = limit
        self.open = True  # the peer may send
        self.began = False  # the headers of the answer are out
        self.came = bytearray()
        self.uncredited = 0
        self.unsent: deque[memoryview] = deque()
        self.ends: tuple[int, str] | None = None


class Http2:
    """The state of one connection.

    Args:
        limits: the bytes that a message of each path may have; calls of other paths are refused.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        self._decoder = hpack.Decoder(f.MAX_HEADER_BYTES)
        self._rest = b""
        self._greeted = False
        self._block: tuple[int, int, bytearray] | None = None
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._room = self._window = f.DEFAULT_WINDOW
        self._max_frame = f.MAX_FRAME
        self._uncredited = 0
        self._events: list[Event] = []
        settings = {f.SET_STREAMS: f.MAX_STREAMS, f.SET_WINDOW: f.MAX_WINDOW, f.SET_HEADERS: f.MAX_HEADER_BYTES}
        body = b"".join(struct.pack(">HI", key, value) for key, value in settings.items())
        grant = (f.MAX_WINDOW - f.DEFAULT_WINDOW).to_bytes(4, "big")
        self._out: list[bytes | memoryview] = [f.frame(f.SETTINGS, 0, 0, body), f.frame(f.WINDOW, 0, 0, grant)]

    # --- in -----------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """The events of what the peer has sent.

        Raises:
            ProtocolError: it is not HTTP/2; `goodbye` is the last that can be sent.
        """
        if self._rest:
            data = self._rest + data
        at = 0
        if not self._greeted:
            if not f.PREFACE.startswith(data[: len(f.PREFACE)]):
                raise f.ProtocolError("the connection does not begin as HTTP/2 does")
            if len(data) < len(f.PREFACE):
                self._rest = data
                return []
            self._greeted, at = True, len(f.PREFACE)
        size = len(data)
        while size - at >= 9:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if length > f.MAX_FRAME:
                raise f.ProtocolError(f"a frame of {length} bytes; {f.MAX_FRAME} are the limit", 6)
            start = at + 9
            if start + length > size:
                break
            stream = int.from_bytes(data[at + 5 : start], "big") & f.MAX_WINDOW
            self._take(data[at + 3], data[at + 4], stream, data[start : start + length])
            at = start + length
        self._rest = data[at:]
        events, self._events = self._events, []
        return events

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != f.CONTINUATION or number != self._block[0]):
            raise f.ProtocolError("the headers of a call were interrupted")
        if kind == f.DATA:
            self._data(number, flags, payload)
        elif kind == f.HEADERS:
            body = f.unpadded(flags, payload)
            self._headers(number, flags, body[5:] if flags & f.WITH_PRIORITY else body)
        elif kind == f.CONTINUATION:
            self._continued(flags, payload)
        elif kind == f.WINDOW:
            self._granted(number, payload)
        elif kind == f.SETTINGS:
            self._set(flags, payload)
        elif kind == f.PING:
            if len(payload) != 8:
                raise f.ProtocolError("a ping has eight bytes", 6)
            if not flags & f.ACK:
                self._out.append(f.frame(f.PING, f.ACK, 0, payload))
        elif kind == f.RESET:
            if self._streams.pop(number, None) is not None:
                self._events.append(Gone(number))
        elif kind == f.PUSH:
            raise f.ProtocolError("a client cannot push")

    def _data(self, number: int, flags: int, payload: bytes) -> None:
        self._uncredited += len(payload)
        if self._uncredited >= f.CREDIT_FROM:
            self._out.append(f.frame(f.WINDOW, 0, 0, self._uncredited.to_bytes(4, "big")))
            self._uncredited = 0
        stream = self._streams.get(number)
        if stream is None or not stream.open:
            if not number or number > self._last:
                raise f.ProtocolError(f"data of stream {number}, which was not opened")
            return  # it was finished here meanwhile
        stream.uncredited += len(payload)
        if stream.uncredited >= f.CREDIT_FROM:
            self._out.append(f.frame(f.WINDOW, 0, number, stream.uncredited.to_bytes(4, "big")))
            stream.uncredited = 0
        if flags & f.PADDED:
            payload = f.unpadded(flags, payload)
        if not stream.came and len(payload) >= 5 and int.from_bytes(payload[1:5], "big") == len(payload) - 5:
            if payload[0] or len(payload) > stream.limit + 5:
                self._refuse(number, payload)
                return
            self._events.append(Message(number, payload[5:]))
        elif payload:
            stream.came += payload
            if not self._messages(number, stream):
                return
        if flags & f.END_STREAM:
            self._finished(number, stream)

    def _messages(self, number: int, stream: _Stream) -> bool:
        """Takes whole messages out of what has come; False when the call was refused."""
        came = stream.came
        while len(came) >= 5:
            size = int.from_bytes(came[1:5], "big")
            if came[0] or size > stream.limit:
                self._refuse(number, came)
                return False
            if len(came) < size + 5:
                break
            self._events.append(Message(number, bytes(memoryview(came)[5 : size + 5])))
            del came[: size + 5]
        return True

    def _refuse(self, number: int, begin: bytes | bytearray) -> None:
        if begin[0]:
            self.finish(number, f.UNIMPLEMENTED, "messages are taken uncompressed")
        else:
            size = int.from_bytes(begin[1:5], "big")
            self.finish(number, f.EXHAUSTED, f"a message of {size} bytes is longer than one of this call may be")
        self._events.append(Gone(number))

    def _finished(self, number: int, stream: _Stream) -> None:
        stream.open = False
        self._events.append(Finished(number))

    def _headers(self, number: int, flags: int, block: bytes) -> None:
        if flags & f.END_HEADERS:
            self._called(number, flags, block)
        else:
            self._block = number, flags, bytearray(block)

    def _continued(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise f.ProtocolError("headers are continued that did not begin")
        number, first, block = self._block
        block += payload
        if len(block) > f.MAX_HEADER_BYTES:
            raise f.ProtocolError(f"headers of more than {f.MAX_HEADER_BYTES} bytes", 11)
        if flags & f.END_HEADERS:
            self._block = None
            self._called(number, first, bytes(block))

    def _called(self, number: int, flags: int, block: bytes) -> None:
        try:
            headers = self._decoder.decode(block, raw=True)
        except Exception as error:  # whatever bytes those are
            raise f.ProtocolError(f"headers cannot be read: {error}", f.COMPRESSION_ERROR) from None
        stream = self._streams.get(number)
        if stream is not None or (number <= self._last and number % 2):  # trailers
            if stream is not None and flags & f.END_STREAM:
                self._finished(number, stream)
            return
        if not number % 2:
            raise f.ProtocolError(f"a client cannot open stream {number}")
        self._last = number
        if len(self._streams) >= f.MAX_STREAMS:
            self._out.append(f.frame(f.RESET, 0, number, f.REFUSED.to_bytes(4, "big")))
            return
        found = {bytes(key).decode("latin-1"): bytes(value) for key, value in headers}
        path = found.get(":path", b"").decode("latin-1")
        stream = self._streams[number] = _Stream(self._window, self._limits.get(path, 0))
        if path not in self._limits:
            self.finish(number, f.UNIMPLEMENTED, f"there is no method {path}")
            return
        metadata = {k: f.decoded(v) if k.endswith("-bin") else v for k, v in found.items() if not k.startswith(":")}
        self._events.append(Called(number, path, metadata))
        if flags & f.END_STREAM:
            self._finished(number, stream)

    def _granted(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise f.ProtocolError("the update of a window has four bytes", 6)
        more = int.from_bytes(payload, "big") & f.MAX_WINDOW
        if not number:
            self._room += more
            if self._room > f.MAX_WINDOW:
                raise f.ProtocolError("the window of the connection is too wide", f.FLOW_ERROR)
            for other, stream in list(self._streams.items()):
                if stream.unsent:
                    self._pump(other, stream)
        elif number in self._streams:
            stream = self._streams[number]
            stream.room += more
            if stream.unsent:
                self._pump(number, stream)

    def _set(self, flags: int, payload: bytes) -> None:
        if flags & f.ACK:
            return
        if len(payload) % 6:
            raise f.ProtocolError("settings have six bytes each", 6)
        # Ahead of what the new windows let go: the peer counts with the old ones until it has this.
        self._out.append(f.frame(f.SETTINGS, f.ACK, 0, b""))
        for key, value in struct.iter_unpack(">HI", payload):
            if key == f.SET_WINDOW:
                if value > f.MAX_WINDOW:
                    raise f.ProtocolError("the window of streams is too wide", f.FLOW_ERROR)
                change, self._window = value - self._window, value
                for number, stream in list(self._streams.items()):
                    stream.room += change
                    if stream.unsent:
                        self._pump(number, stream)
            elif key == f.SET_FRAME:
                if not f.MAX_FRAME <= value < 1 << 24:
                    raise f.ProtocolError(f"frames of {value} bytes")
                self._max_frame = value

    # --- out ----------------------------------------------------------------------------------------------------------

    def send(self, number: int, *parts: bytes | memoryview) -> None:
        """Sends a message that consists of parts. Of a call that is over nothing goes out."""
        stream = self._streams.get(number)
        if stream is None or stream.ends is not None:
            return
        self._begin(number, stream)
        size = sum(map(len, parts))
        whole = size + 5
        if not stream.unsent and whole <= stream.room and whole <= self._room and whole <= f.MAX_FRAME:
            stream.room -= whole
            self._room -= whole
            head = (
                whole.to_bytes(3, "big") + b"\x00\x00" + number.to_bytes(4, "big") + b"\x00" + size.to_bytes(4, "big")
            )
            self._out.append(head + b"".join(parts))
            return
        stream.unsent.append(memoryview(b"\x00" + size.to_bytes(4, "big")))
        stream.unsent.extend(memoryview(part) for part in parts if len(part))
        self._pump(number, stream)

    def send_all(self, number: int, messages: Sequence[bytes]) -> None:
        """Sends messages, as one frame where that is possible: it costs the peer what one message costs."""
        stream = self._streams.get(number)
        if stream is None or stream.ends is not None:
            return
        whole = sum(map(len, messages)) + 5 * len(messages)
        if stream.unsent or whole > min(stream.room, self._room, f.MAX_FRAME):
            for message in messages:
                self.send(number, message)
            return
        self._begin(number, stream)
        stream.room -= whole
        self._room -= whole
        parts = [whole.to_bytes(3, "big"), b"\x00\x00", number.to_bytes(4, "big")]
        for message in messages:
            parts += (b"\x00", len(message).to_bytes(4, "big"), message)
        self._out.append(b"".join(parts))

    def finish(self, number: int, code: int = 0, text: str = "") -> None:
        """Ends a call with a status, behind its messages."""
        stream = self._streams.get(number)
        if stream is None or stream.ends is not None:
            return
        stream.ends = code, text
        if not stream.unsent:
            self._end(number, stream)

    def _begin(self, number: int, stream: _Stream) -> None:
        if not stream.began:
            stream.began = True
            self._out.append(f.frame(f.HEADERS, f.END_HEADERS, number, f.BEGIN))

    def _end(self, number: int, stream: _Stream) -> None:
        assert stream.ends is not None
        block = f.trailers(*stream.ends)
        if not stream.began:
            block = f.BEGIN + block
        self._out.append(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, number, block))
        if stream.open:
            self._out.append(f.frame(f.RESET, 0, number, f.NO_ERROR.to_bytes(4, "big")))
        del self._streams[number]

    def _pump(self, number: int, stream: _Stream) -> None:
        """Sends what waits, as far as the windows go."""
        unsent = stream.unsent
        while unsent:
            room = min(stream.room, self._room, self._max_frame)
            if room <= 0:
                return
            pieces, size = [], 0
            while unsent and size < room:
                piece = unsent.popleft()
                if len(piece) > room - size:
                    unsent.appendleft(piece[room - size :])
                    piece = piece[: room - size]
                pieces.append(piece)
                size += len(piece)
            stream.room -= size
            self._room -= size
            self._out.append(size.to_bytes(3, "big") + b"\x00\x00" + number.to_bytes(4, "big"))
            self._out.extend(pieces)
        if stream.ends is not None:
            self._end(number, stream)

    def ping(self) -> None:
        """Asks whether the peer is there; its answer is no event."""
        self._out.append(f.frame(f.PING, 0, 0, bytes(8)))

    def goodbye(self, error: f.ProtocolError) -> None:
        """Says why nothing more is read."""
        body = self._last.to_bytes(4, "big") + error.code.to_bytes(4, "big") + str(error).encode()[:256]
        self._out.append(f.frame(f.GOAWAY, 0, 0, body))

    def taken(self) -> list[bytes | memoryview]:
        """The bytes to be written now; they are no longer kept here."""
        out, self._out = self._out, []
        return out
