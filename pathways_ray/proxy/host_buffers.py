"""Bytes on their way between a client and its arrays, by the client's names for them.

They come and go by calls of their own, beside the stream of requests: what comes may be early or late, and what goes is
asked for when the client has heard that it is there.
"""

from __future__ import annotations

import threading
from typing import Any

from pathways_ray.proxy.arrays import Code, Refused

MAX_BYTES = 64 << 30
"""Of one client at a time: what the client has put and the proxy not yet sent on, and what it has not yet fetched."""


class HostBuffers:
    """The host buffers of one client. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, handle: int, data: Any) -> None:
        """Raises `Refused` when there are too many."""
        with self._lock:
            if self._bytes + len(data) > MAX_BYTES:
                text = f"host buffers of {self._bytes} bytes and {len(data)} more; {MAX_BYTES} are the limit"
                raise Refused(Code.RESOURCE_EXHAUSTED, text)
            self._bytes += len(data) - len(self._kept.get(handle, b""))
            self._kept[handle] = data

    def bytes_of(self, handle: int) -> Any:
        """Raises `Refused` for a name without bytes."""
        with self._lock:
            found = self._kept.get(handle)
        if found is None:
            raise Refused(Code.NOT_FOUND, f"there is no host buffer with handle {handle}")
        return found

    def drop(self, handle: int) -> None:
        with self._lock:
            self._bytes -= len(self._kept.pop(handle, b""))
