"""Sessions for the clients of a proxy. The first is opened ahead, so that a cluster without room shows at the start."""

from __future__ import annotations

import threading

from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import SessionClosed
from pathways_ray.proxy.devices import open_session

Opened = tuple[Session, list[VirtualSlice]]


class SpareSession:
    """Opens sessions, the first one at once; the arguments and errors are those of `open_session`."""

    def __init__(self, url: str, token: str, ca: str, devices: int, name: str) -> None:
        self._arguments = url, token, ca, devices, name
        self._lock = threading.Lock()
        self._closed = False
        self._spare: Opened | None = open_session(*self._arguments)
        self.devices = sum(whole.size for whole in self._spare[1])

    def take(self) -> Opened:
        """A session that nobody else has."""
        with self._lock:
            found, self._spare = self._spare, None
            if self._closed:
                raise SessionClosed("the proxy is being stopped")
        if found is not None and not found[0].closed_because:
            return found
        return open_session(*self._arguments)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            found, self._spare = self._spare, None
        if found is not None:
            found[0].close()
