"""Failures as the text of an error: how they travel in place of arrays."""

from __future__ import annotations

import json

import msgspec

from pathways_ray.errors import Failure

MARK = "pathways-failure:"
OF_A_PEER = "Error while transferring"
"""What the text of an error says that came with the data of a peer: no computation of this host is to blame for it."""
MAX_ERROR_BYTES = 2000
"""The transfer library cuts the text of an error off behind 2,048 bytes."""


def error_text(failure: Failure) -> str:
    """The text that carries a failure to a peer. A long message loses its middle: what went wrong is at its ends."""
    text = MARK + msgspec.json.encode(failure).decode()
    message, kept = failure.message, len(failure.message)
    while len(text.encode()) > MAX_ERROR_BYTES:
        kept = min(kept, MAX_ERROR_BYTES) * 3 // 4
        short = message if kept >= len(message) else f"{message[: kept // 2]} … {message[len(message) - kept // 2 :]}"
        cut = msgspec.structs.replace(
            failure, message=short, node=failure.node[:kept], where=failure.where[-kept:], story=()
        )
        text = MARK + msgspec.json.encode(cut).decode()
    return text


def failure_in(text: str) -> Failure | None:
    """The failure that a peer put into an error array, found in the text of the error it became here."""
    start = text.find(MARK)
    if start < 0:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text[start + len(MARK) :])
        return msgspec.convert(value, Failure)
    except (ValueError, msgspec.ValidationError):
        return None
