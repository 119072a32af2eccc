"""Calls of clients on the loop of a host's data server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pathways_ray.executor.data.early_calls import MAX_UNREAD, EarlyCalls
from pathways_ray.transport.capabilities import Grant
from pathways_ray.transport.messages import EarlyAllowed, EarlyRefused, LaunchEarly


class Unread:
    """What waits for a client that reads nothing."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.send = self.messages.append

    def has_room(self, most: int) -> bool:
        return len(self.messages) <= most


def stream(session: int, tenant: str = "t") -> Any:
    return SimpleNamespace(session=session, grant=Grant(session, None, tenant), outbox=Unread())


def test_a_client_that_hands_over_without_end_and_reads_nothing_fills_no_memory() -> None:
    streams: Any = stream(1), stream(1), stream(2)
    first, second, other = streams
    calls = EarlyCalls(streams, lambda handed: False)
    calls.allow("t")
    for results in range(1, 2 * MAX_UNREAD):
        calls.take(first, LaunchEarly(1, (), results))
    for one in (first, second):
        assert one.outbox.messages[:2] == [EarlyAllowed(True), EarlyRefused(1)]
        assert len(one.outbox.messages) == MAX_UNREAD + 1
    assert other.outbox.messages == [EarlyAllowed(True)]
