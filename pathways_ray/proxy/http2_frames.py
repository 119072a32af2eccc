"""Frames of HTTP/2 and the headers that gRPC puts into them, as bytes. Pure."""

from __future__ import annotations

import base64
import binascii

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

MAX_FRAME = 1 << 14
"""Bytes of a frame that the peer may send: HTTP/2's default."""

MAX_STREAMS = 256
"""Calls of one connection at a time; the peer keeps further ones."""

MAX_HEADER_BYTES = 1 << 16
"""Bytes of the headers of one call."""

MAX_TEXT_BYTES = 2048
"""Bytes of the text of a status, before it is escaped: gRPC takes 8 KiB of trailers."""

MAX_WINDOW = (1 << 31) - 1
DEFAULT_WINDOW = (1 << 16) - 1
CREDIT_FROM = 1 << 29
"""Bytes that were received and not yet credited, from which on they are: a long way before the window is empty."""

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
SET_STREAMS, SET_WINDOW, SET_FRAME, SET_HEADERS = 3, 4, 5, 6

NO_ERROR, PROTOCOL_ERROR, FLOW_ERROR, REFUSED, COMPRESSION_ERROR = 0, 1, 3, 7, 9

UNIMPLEMENTED, EXHAUSTED = 12, 8
"""Codes of gRPC that are given here."""


class ProtocolError(Exception):
    """The peer broke the rules of HTTP/2: the connection cannot go on."""

    def __init__(self, text: str, code: int = PROTOCOL_ERROR) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that the peer's table is not to remember."""
    return b"\x00" + _text(name) + _text(value)


def _text(data: bytes) -> bytes:
    size = len(data)
    if size < 0x7F:
        return bytes((size,)) + data
    found, left = bytearray((0x7F,)), size - 0x7F
    while left >= 0x80:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    found.append(left)
    return bytes(found) + data


_STATUS_200 = b"\x88"
BEGIN = _STATUS_200 + _literal(b"content-type", b"application/grpc")


def trailers(code: int, text: str) -> bytes:
    found = _literal(b"grpc-status", str(code).encode())
    if text:
        data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
        escaped = b"".join(bytes((b,)) if 0x20 <= b < 0x7F and b != 0x25 else b"%%%02X" % b for b in data)
        found += _literal(b"grpc-message", escaped)
    return found


def unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError("padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]


def decoded(value: bytes) -> bytes:
    """The bytes of binary metadata; b"" where it is something else."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except (ValueError, binascii.Error):
        return b""
