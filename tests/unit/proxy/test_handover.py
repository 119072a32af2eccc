"""Files for a proxy's client: each question gets its own, whichever is first."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest

from pathways_ray.proxy.handover import MAX_KEPT, Handover, Handovers, number_of, question
from pathways_ray.transport.local_sockets import Invitation, LocalSocket, NotLocal, received
from pathways_ray.transport.shared_memory import SharedFile

HERE: Any = "a connection"


class Client:
    """A client's files, and what was sent to it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, int, SharedFile | None]] = []
        self.ended: list[Handover] = []
        self.takes = True
        self.files = Handover(self.send, self.ended.append)

    def send(self, to: Any, data: bytes, file: SharedFile | None) -> bool:
        if self.takes:
            self.sent.append((to, number_of(data), file))
        return self.takes


def test_a_file_and_its_question_find_each_other() -> None:
    client, files = Client(), [SharedFile.create(8) for _ in range(3)]
    client.files.give(1, files[1])
    client.files.ask(HERE, 2)
    client.files.ask(HERE, 1)
    client.files.give(2, files[2])
    client.files.give(3, None)
    client.files.ask(HERE, 3)
    assert client.sent == [(HERE, 1, files[1]), (HERE, 2, files[2]), (HERE, 3, None)]


def test_a_small_value_is_the_answer_itself() -> None:
    sent: list[bytes] = []

    def send(to: socket.socket, data: bytes, file: SharedFile | None) -> bool:
        sent.append(data)
        return file is None

    files = Handover(send, lambda _: None)
    files.give(1, b"1234")
    files.ask(HERE, 1)
    assert (sent, number_of(sent[0])) == ([question(1) + b"1234"], 1)


def test_what_is_not_asked_for_is_kept_up_to_a_limit_and_no_question_waits_for_what_is_gone() -> None:
    client = Client()
    for number in range(1, MAX_KEPT + 3):
        client.files.give(number, SharedFile.create(8))
    for number in (2, 3, MAX_KEPT + 3):
        client.files.ask(HERE, number)
    assert [(number, file is not None) for _, number, file in client.sent] == [(2, False), (3, True)]
    client.files.give(MAX_KEPT + 3, None)
    assert client.sent[-1] == (HERE, MAX_KEPT + 3, None)


@pytest.mark.parametrize("asks_first", [True, False])
def test_who_cannot_be_sent_an_answer_sees_the_end_and_does_not_wait_for_it(asks_first: bool) -> None:
    client = Client()
    client.takes = False
    steps = [lambda: client.files.ask(HERE, 1), lambda: client.files.give(1, SharedFile.create(8))]
    for step in steps if asks_first else steps[::-1]:
        assert not client.ended
        step()
    assert client.ended == [client.files]


def test_a_socket_hands_files_to_whom_it_has_invited_and_hangs_up_at_the_end() -> None:
    server = Handovers()
    files = server.open()
    with pytest.raises(NotLocal):
        LocalSocket(Invitation(files.invitation.name, b"guessed" * 4, b"x"))
    client = LocalSocket(files.invitation)
    client.connection.settimeout(20.0)
    assert client.send(question(1))
    made = SharedFile.create(8)
    made.write(np.arange(8, dtype=np.uint8), 0)
    files.give(1, made)
    data, file = received(client.connection)
    assert (number_of(data), file is not None and file.bytes(8).tolist()) == (1, list(range(8)))
    files.close()
    assert received(client.connection) == (b"", None)
    threads = threading.active_count()
    server.close()
    assert threading.active_count() < threads
