"""Bytes between a client and its arrays: those that are asked for before they are there, or do not come."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from pathways_ray.proxy import host_buffers
from pathways_ray.proxy.arrays import Code, Refused, Status
from pathways_ray.proxy.host_buffers import HostBuffers

LOST = Status(Code.UNAVAILABLE, "HostLost: gone")


@pytest.mark.parametrize("value", [b"1234", LOST], ids=["bytes", "failure"])
def test_what_is_asked_for_before_or_after_it_is_there_is_the_same(value: Any) -> None:
    buffers = HostBuffers()
    served: list[Any] = []
    buffers.expect(1)
    buffers.look_up(1, served.append)
    assert served == []
    buffers.arrived(1, value)
    buffers.look_up(1, served.append)
    assert served == [value, value]
    buffers.drop(1)
    with pytest.raises(Refused, match="no host buffer with handle 1"):
        buffers.look_up(1, served.append)


def test_what_was_dropped_before_it_came_is_not_kept() -> None:
    buffers = HostBuffers()
    buffers.expect(1)
    buffers.drop(1)
    buffers.arrived(1, b"1234")
    with pytest.raises(Refused):
        buffers.bytes_of(1)


def test_there_is_room_for_as_much_as_is_let_go() -> None:
    """1. The buffers are full. 2. A value comes: those who wait for it hear that there is no room. 3. There is again,
    once one was dropped; a failure takes none."""
    buffers = HostBuffers()
    served: list[Any] = []
    with patch.object(host_buffers, "MAX_BYTES", 8):
        buffers.keep(1, b"12345678")
        buffers.expect(2)
        buffers.look_up(2, served.append)
        with pytest.raises(Refused, match="8 are the limit"):
            buffers.arrived(2, b"1")
        assert served[0].code == Code.RESOURCE_EXHAUSTED
        buffers.drop(2)
        buffers.drop(1)
        buffers.keep(3, b"12345678")
        with pytest.raises(Refused, match="no host buffer"):
            buffers.bytes_of(2)


def test_who_waits_hears_that_nothing_more_comes() -> None:
    """1. A value is waited for as the session ends. 2. One that is asked for later comes neither."""
    buffers = HostBuffers()
    served: list[Any] = []
    buffers.expect(1)
    buffers.look_up(1, served.append)
    buffers.close(LOST)
    assert served == [LOST]
    buffers.expect(2)
    with pytest.raises(Refused, match="no host buffer with handle 2"):
        buffers.look_up(2, served.append)
