"""`y.why()` in the client: the state of the array, the queue of this process, and else the controller's word."""

from __future__ import annotations

from pathways_ray.client.buffer import FAILED, READY, Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import Disconnected
from pathways_ray.client.why import why
from pathways_ray.errors import Failure
from pathways_ray.observe.why import Link, Why


def asking(*answers: str):
    """A controller that gives these answers, and the questions that it got."""
    questions: list[tuple[str, int]] = []

    def ask(subject: str, number: int) -> Why:
        questions.append((subject, number))
        return Why(subject, tuple(map(Link, answers)))

    return questions, ask


def test_an_array_with_an_outcome_needs_no_controller() -> None:
    core = ClientCore(7, 100)
    (record,) = core.new_buffers(1)
    questions, ask = asking()
    record.state = READY
    assert str(why(core, record, ask)) == "array 1 of session 7 is ready"
    record.failure, record.state = Failure("HostLost", "host 2 died", story=("scheduler 0: host lost",)), FAILED
    assert str(why(core, record, ask)).splitlines() == [
        "array 1 of session 7 has failed: HostLost: host 2 died",
        "   scheduler 0: host lost",
    ]
    assert questions == []


def test_the_controller_explains_a_launch_that_has_left() -> None:
    core = ClientCore(7, 100)
    (record,) = core.new_buffers(1)
    core.launch(1, [], [record])
    questions, ask = asking("launch 640 waits")
    assert [link.text for link in why(core, record, ask).links] == [
        "array 1 of session 7 is a result of launch 7.1",
        "launch 640 waits",
    ]
    assert questions == [("launch", 1)]


def test_a_launch_behind_an_upload_has_not_left() -> None:
    """The one that takes the upload, and the one that was called after it."""
    core = ClientCore(7, 100)
    sent, first, second = core.new_buffers(3)
    sent.upload = Upload({2})
    core.launch(1, [sent], [first])
    core.launch(1, [], [second])
    questions, ask = asking("host 2 has 40 of 64 bytes")
    assert [link.text for link in why(core, first, ask).links] == [
        "array 2 of session 7 is a result of launch 7.1, which has not left this process",
        "array 1 is on its way to host 2",
        "host 2 has 40 of 64 bytes",
    ]
    assert questions == [("upload", 1)]
    links = why(core, second, ask).links
    assert links[0].text.endswith("launch 7.2, which has not left this process: 1 calls before it wait")
    assert links[1].text == "array 1 is on its way to host 2"
    assert why(core, sent, ask).links[0].text == "array 1 is on its way to host 2"


def test_an_ended_session_says_why() -> None:
    core = ClientCore(7, 100)
    (record,) = core.new_buffers(1)
    core.handle(Disconnected("its stream broke"), 0.0)
    assert "the session ended: " in str(why(core, record, asking()[1]))


def test_what_is_ready_says_what_keeps_it_from_being_read() -> None:
    core = ClientCore(7, 100)
    (record,) = core.new_buffers(1)
    record.state = READY
    assert [link.text for link in why(core, record, asking()[1], "the session is suspended").links] == [
        "array 1 of session 7 is ready",
        "the session is suspended",
    ]
