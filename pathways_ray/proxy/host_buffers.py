"""Bytes on their way between a client and its arrays, by the client's names for them.

They come and go by calls of their own, beside the stream of requests: what comes may be early or late, and what goes
may be asked for before it is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pathways_ray.proxy.arrays import Code, Refused, Status

MAX_BYTES = 64 << 30
"""Of one client at a time: what it has put, or said to come, and the proxy not sent on, and what it has not fetched."""

Serve = Callable[[Any], None]
"""Takes the bytes of a host buffer, or the `Status` with which they failed."""


class HostBuffers:
    """The host buffers of one client. Safe to use from several threads."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._expected: dict[int, list[Serve]] = {}
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def keep(self, handle: int, data: Any) -> None:
        """Raises `Refused` when there are too many."""
        with self._lock:
            self._keep(handle, data)

    def reserve(self, size: int) -> None:
        """Makes room for bytes that were announced, until `release`. Raises `Refused` where they are too many."""
        with self._lock:
            self._check(size)
            self._bytes += size

    def release(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def _check(self, size: int) -> None:
        if self._bytes + size > MAX_BYTES:
            text = f"host buffers of {self._bytes} bytes and {size} more; {MAX_BYTES} are the limit"
            raise Refused(Code.RESOURCE_EXHAUSTED, text)

    def _keep(self, handle: int, data: Any) -> None:
        self._check(len(data))
        self._drop(handle)
        self._bytes += len(data)
        self._kept[handle] = data

    def bytes_of(self, handle: int) -> Any:
        """Raises `Refused` for a name without bytes."""
        with self._lock:
            found = self._kept.get(handle)
        if found is None or isinstance(found, Status):
            raise Refused(Code.NOT_FOUND, f"there is no host buffer with handle {handle}")
        return found

    def drop(self, handle: int) -> None:
        """Lets go of bytes, also of those that are expected."""
        with self._lock:
            self._expected.pop(handle, None)
            self._drop(handle)

    def _drop(self, handle: int) -> None:
        found = self._kept.pop(handle, b"")
        if not isinstance(found, Status):
            self._bytes -= len(found)

    # --- on their way to the client -----------------------------------------------------------------------------------

    def expect(self, handle: int) -> None:
        """Notes that bytes of an array are on their way."""
        with self._lock:
            if not self._closed:
                self._expected[handle] = []

    def arrived(self, handle: int, data: Any) -> None:
        """Takes the bytes that were expected, or a `Status`; what was dropped meanwhile is not kept.

        Raises:
            Refused: there are too many, which those who wait for them hear as well.
        """
        refused: Refused | None = None
        with self._lock:
            waiting = self._expected.pop(handle, None)
            if waiting is None:
                return
            try:
                if isinstance(data, Status):
                    self._kept[handle] = data
                else:
                    self._keep(handle, data)
            except Refused as error:
                refused, data = error, error.status
                self._kept[handle] = data
        for serve in waiting:
            serve(data)
        if refused is not None:
            raise refused

    def look_up(self, handle: int, serve: Serve) -> None:
        """Serves bytes, now or when they have arrived.

        Raises:
            Refused: nobody knows of them.
        """
        with self._lock:
            waiting = self._expected.get(handle)
            found = self._kept.get(handle)
            if waiting is not None:
                waiting.append(serve)
                return
        if found is None:
            raise Refused(Code.NOT_FOUND, f"there is no host buffer with handle {handle}")
        serve(found)

    def close(self, why: Status) -> None:
        """Has those hear that nothing more comes who wait for bytes: they would wait without end."""
        with self._lock:
            expected, self._expected, self._closed = self._expected, {}, True
        for waiting in expected.values():
            for serve in waiting:
                serve(why)
