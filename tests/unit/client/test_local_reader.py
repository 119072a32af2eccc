"""Threads that wait for small values: one of them reads for all, and what ends a wait otherwise wakes it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pathways_ray.client.local_reader import LocalReader

LIMIT_S = 20.0
NEVER_S = 3600.0


class Ends:
    """A reader of one socket, whose other end is the test's."""

    def __init__(self) -> None:
        self.reader = LocalReader()
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.came: list[bytes] = []
        self.reader.add(self.here, self.came.append)

    def lead(self, count: int) -> threading.Thread:
        """A thread that leads until so many batches have come, or it is woken."""

        def run() -> None:
            with self.reader.leading:
                self.reader.lead(lambda: len(self.came) >= count, NEVER_S)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.here.close()
    made.there.close()


def ended(thread: threading.Thread) -> bool:
    thread.join(LIMIT_S)
    return not thread.is_alive()


def test_the_leader_reads_until_it_has_what_it_waits_for(ends: Ends) -> None:
    leader = ends.lead(2)
    ends.there.send(b"a")
    ends.there.send(b"b")
    assert ended(leader)
    assert ends.came == [b"a", b"b"]


def test_what_ends_a_wait_otherwise_wakes_the_leader(ends: Ends) -> None:
    leader = ends.lead(1)
    while ends.reader._leader == 0:
        pass
    ends.reader.wake()
    assert ended(leader)
    ends.reader.wake()  # nobody leads: the next leader does not wait for it
    ends.there.send(b"a")
    assert ended(ends.lead(1))


def test_what_was_read_when_ctrl_c_came_is_taken_by_the_next_leader(ends: Ends) -> None:
    def interrupted(_: bytes) -> None:
        raise KeyboardInterrupt

    take = ends.reader._sockets[ends.here.fileno()][1]
    ends.reader._sockets[ends.here.fileno()] = ends.here, interrupted
    ends.there.send(b"a")
    with ends.reader.leading, pytest.raises(KeyboardInterrupt):
        ends.reader.lead(lambda: False, NEVER_S)
    ends.reader._received[0] = ends.here, take, b"a"
    assert ended(ends.lead(1))
    assert ends.came == [b"a"]


def test_a_socket_that_was_closed_under_the_leader_does_not_keep_it_busy(ends: Ends) -> None:
    ends.here.close()
    leader = ends.lead(1)
    while ends.reader._sockets:
        pass
    while ends.reader._leader == 0:
        pass
    ends.reader.wake()
    assert ended(leader)


def test_a_host_that_hangs_up_is_read_no_more(ends: Ends) -> None:
    leader = ends.lead(1)
    ends.there.close()
    while ends.reader._sockets:
        pass
    other, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other, there:
        ends.reader.add(other, ends.came.append)
        there.send(b"a")
        assert ended(leader)
