"""Names of the runtime's streams, and what shows that a caller may open one."""

from __future__ import annotations

import hmac

CALL = "/pathways.Front/Call"
CLIENT_STREAM = "/pathways.Front/Stream"
ISLAND_STREAM = "/pathways.Link/Island"
HOST_STREAM = "/pathways.Link/Host"
DATA_STREAM = "/pathways.Data/Stream"


def authorised(metadata: dict[str, str], secret: str) -> bool:
    """Whether the metadata carry the secret; compared in constant time."""
    return hmac.compare_digest(metadata.get("authorization", "").encode(), secret.encode())


def session_of(metadata: dict[str, str]) -> int:
    """The session that the metadata name; 0, which no session has, when they name none."""
    text = metadata.get("session", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0


def bind_address(bind: str) -> str:
    """The address to serve on: `bind`, or the one by which Ray reaches this machine when it is left open."""
    if bind:
        return bind
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
