"""Names of the runtime's streams, and the address to serve them at."""

from __future__ import annotations

CALL = "/pathways.Front/Call"
CLIENT_STREAM = "/pathways.Front/Stream"
ISLAND_STREAM = "/pathways.Link/Island"
HOST_STREAM = "/pathways.Link/Host"
DATA_STREAM = "/pathways.Data/Stream"
LOG_STREAM = "/pathways.Link/Log"


def bind_address(bind: str) -> str:
    """The address to serve on: `bind`, or the one by which Ray reaches this machine when it is left open."""
    if bind:
        return bind
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
