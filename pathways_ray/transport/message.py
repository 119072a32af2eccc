"""The base of all messages on the wire, and what encodes and strictly decodes them."""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from pathways_ray.errors import WireError

VERSION = 32

Counted = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""An id that others are counted on from: what comes out must fit on the wire as well."""

Uploaded = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
"""The number of a buffer that a client makes: 0 stands for none."""


Measured = Annotated[float, msgspec.Meta(ge=0.0)]
"""Seconds, or a factor: a number that can be compared, which NaN cannot."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag_field="message"):
    """Base of all messages."""


_ENCODER = msgspec.msgpack.Encoder()

encode = _ENCODER.encode


def is_tagged(data: bytes, kind: type[Message]) -> bool:
    """Whether bytes begin as a message of this class does, as it is encoded here. Nothing of it is decoded."""
    return data[:1] >= b"\x90" and data[:1] < b"\xa0" and data.startswith(encode(kind.__struct_config__.tag), 1)


M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes and strictly decodes one family of messages, singly or as a batch."""

    def __init__(self, family: Any) -> None:
        self._one = msgspec.msgpack.Decoder(family)
        self._many = msgspec.msgpack.Decoder(list[family])

    def decode(self, data: bytes) -> M:
        """Raises `WireError` unless `data` is one message of the family."""
        try:
            return self._one.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"message of {len(data)} bytes refused: {error}") from None

    def decode_batch(self, data: bytes) -> list[M]:
        """Raises `WireError` unless `data` is a batch of messages of the family."""
        try:
            return self._many.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"batch of {len(data)} bytes refused: {error}") from None
