"""Files for a proxy's client: it gets each answer unasked, with its number."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pathways_ray.proxy.handover import NUMBER_BYTES, Handover, Handovers, number_of
from pathways_ray.transport.local_sockets import Invitation, LocalSocket, NotLocal, received
from pathways_ray.transport.shared_memory import SharedFile


@pytest.fixture
def server() -> Iterator[Handovers]:
    made = Handovers()
    yield made
    made.close()


def client_of(files: Handover) -> LocalSocket:
    client = LocalSocket(files.invitation)
    client.connection.settimeout(20.0)
    return client


def test_a_file_a_small_value_and_nothing_come_with_their_numbers(server: Handovers) -> None:
    files = server.open()
    client = client_of(files)
    made = SharedFile.create(8)
    made.write(np.arange(8, dtype=np.uint8), 0)
    for number, value in ((2, made), (1, b"1234"), (3, None)):
        files.give(number, value)
    data, file = received(client.connection)
    assert (number_of(data), file is not None and file.bytes(8).tolist()) == (2, list(range(8)))
    for number, value in ((1, b"1234"), (3, b"")):
        data, file = received(client.connection)
        assert (number_of(data), data[NUMBER_BYTES:], file) == (number, value, None)


def test_only_who_was_invited_gets_files_and_one_client_not_those_of_another(server: Handovers) -> None:
    files, others = server.open(), server.open()
    with pytest.raises(NotLocal):
        LocalSocket(Invitation(files.invitation.name, b"guessed" * 4, b"x"))
    client, other = client_of(files), client_of(others)
    with pytest.raises(NotLocal):  # an invitation is for one connection
        client_of(files)
    files.give(1, b"mine")
    others.give(1, b"another's")
    assert received(client.connection)[0].endswith(b"mine")
    assert received(other.connection)[0].endswith(b"another's")


def test_a_client_that_reads_no_answers_is_hung_up_on(server: Handovers) -> None:
    """Nothing is kept for it; what it had not read, it may read yet."""
    files = server.open()
    client = client_of(files)
    for number in range(1, 1 << 12):
        files.give(number, b"x" * (1 << 14))
    read = 0
    while received(client.connection)[0]:
        read += 1
    assert 0 < read < 1 << 10


def test_answers_for_a_client_that_never_came_go_to_nobody_who_comes_later(server: Handovers) -> None:
    files, later = server.open(), server.open()
    files.give(1, b"1234")
    client_of(later)  # by then the server has worked off what it was told
    with pytest.raises(NotLocal):
        client_of(files)


def test_what_a_client_says_is_not_listened_to(server: Handovers) -> None:
    files = server.open()
    client = client_of(files)
    for said in (b"\0", b"\1" * 1000, b"x" * (1 << 16)):
        assert client.send(said, SharedFile.create(8))
    files.give(1, b"1234")
    assert received(client.connection)[0].endswith(b"1234")


def test_the_end_is_seen_by_clients_and_ends_the_thread() -> None:
    before = set(threading.enumerate())
    server = Handovers()
    ends, stays = server.open(), server.open()
    first, second = client_of(ends), client_of(stays)
    ends.close()
    assert received(first.connection) == (b"", None)
    stays.give(1, b"1234")
    assert received(second.connection)[0].endswith(b"1234")
    server.close()
    assert received(second.connection) == (b"", None)
    assert not set(threading.enumerate()) - before
