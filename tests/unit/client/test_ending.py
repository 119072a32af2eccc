"""A client loses its controller, and comes back to the successor."""

from __future__ import annotations

from typing import NamedTuple

from pathways_ray.client.buffer import DELETED, FAILED, READY, BufferRecord
from pathways_ray.client.events import CloseData, Closing, Disconnected, MoveHost, Resume, Resumed, ResumeFailed, Wake
from pathways_ray.client.suspension import Kept, Part, Suspension
from pathways_ray.errors import ControllerLost, from_failure
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from pathways_ray.transport.messages import (
    VERSION,
    Completed,
    DonationsDecided,
    Free,
    HeldBuffer,
    HostAddress,
    KeptBuffers,
    Launch,
    LaunchFailed,
    Register,
    ResumeSession,
    SessionResumed,
)
from tests.unit.client.scripted import GONE, Script
from tests.unit.helpers import VECTOR


class Kind(NamedTuple):
    """The type of an array, with the names that `ArgumentType` has."""

    slice: SliceType = SliceType(1, (2,), ("x",))
    array: ArrayType = VECTOR
    spec: Spec = ()


class Session(Script):
    """A session that can be resumed. Its launches give one array of `Kind`."""

    def __init__(self) -> None:
        super().__init__()
        self.core.resume_tag = "tag"

    def call(self, *arguments: BufferRecord, **more: int | tuple[BufferRecord, ...]) -> BufferRecord:
        (made,) = self.launch(*arguments, **more)  # type: ignore[arg-type]
        made.kind = Kind()
        return made

    def lose(self) -> None:
        self.commands.clear()
        self.handle(Disconnected("the controller is gone (reset)"))

    def request(self) -> ResumeSession:
        return self.core.resume_request("me", {1: "its tag"}, self.now)

    def resume(self, *lost: int) -> None:
        host = HostAddress(3, 2, "there:1")
        self.handle(Resumed(SessionResumed("secret", 0, (host,), (), lost)))


def test_what_was_sent_fails_and_what_is_ready_stays() -> None:
    """
    1. One launch has its outcome, one has none, when the controller goes. The one without fails, and may be called
       again: the session goes on.
    2. The successor hears of the array that is there, and of no other one.
    """
    s = Session()
    a, b = s.call(), s.call()
    s.handle(Completed((1,)))
    s.lose()
    assert s.commands == [Wake(fetches=True), Resume()]
    assert (a.state, b.state) == (READY, FAILED)
    assert b.failure is not None
    assert isinstance(from_failure(b.failure), ControllerLost)
    assert "The session goes on with its arrays: call again" in b.failure.message
    assert s.core.ended is None
    s.handle(Disconnected("the link says so too"))
    assert s.commands == [Wake(fetches=True), Resume()]
    assert s.request() == ResumeSession(
        VERSION, 7, "tag", "me", (1,), (KeptBuffers(1, VECTOR, (), (a.id,), False),), b.id + 1, ("its tag",)
    )


def test_what_is_called_meanwhile_leaves_afterwards_with_the_programs_that_it_needs() -> None:
    """Functions are sent again, once; a program that nothing calls is not registered."""
    s = Session()
    first, second = s.register("f", {"f": b"code"}), s.register("g", {"f": b"code"})
    assert [m.functions for m in s.take() if isinstance(m, Register)] == [{"f": b"code"}, {}]
    a = s.call()
    s.handle(Completed((1,)))
    s.take()
    s.lose()
    b = s.call(a)
    assert s.launch(b, program=second)
    s.free(a)
    assert s.take() == []
    assert [group.numbers for group in s.request().kept] == [(a.id,)]
    s.resume()
    register, launch, again, *rest = [m for m in s.take() if m != Free(())]
    assert isinstance(register, Register)
    assert (register.program, register.functions) == (first, {"f": b"code"})
    assert launch == Launch(2, first, (a.id,), b.id)
    assert isinstance(again, Register)
    assert (again.program, again.functions) == (second, {})
    assert rest == [Launch(3, second, (b.id,), b.id + 1), Free((a.id,))]
    assert s.commands[2:4] == [MoveHost(HostAddress(3, 2, "there:1")), Wake(fetches=True)]


def test_a_launch_whose_upload_was_under_way_is_sent_to_the_successor() -> None:
    """It had not left, so nobody has begun it. The upload goes on: hosts are there all the time."""
    s = Session()
    s.register()
    x = s.put(3)
    x.kind = Kind()
    y = s.call(x)
    s.take()
    s.lose()
    assert [(group.numbers, group.arriving) for group in s.request().kept] == [((x.id,), True)]
    s.resume()
    s.acknowledge(x, 3)
    assert [m for m in s.take() if isinstance(m, Launch)] == [Launch(1, 1, (x.id,), y.id)]
    s.handle(Completed((1,)))
    assert y.state is READY


def test_the_successor_hears_that_a_session_is_suspended_and_nothing_saved_is_lost() -> None:
    """What is saved, its client has; an array that is not is lost with its devices."""
    s = Session()
    a, b = s.call(), s.call()
    s.handle(Completed((1, 2)))
    mesh, part = SliceType(1, (2,), ("x",)), SliceType(2, (1,), ("y",))
    kept = Kept(mesh, "", 0, (Part(part, (1,)),))
    saved = Suspension((kept,), {a.id: (0, HeldBuffer(a.id, 1, VECTOR, ()))}, gives_way=True)
    s.lose()
    request = s.core.resume_request("me", {}, s.now, saved)
    assert (request.slices, request.suspended, request.gives_way) == ((), (mesh, part), True)
    assert [group.numbers for group in request.kept] == [(b.id,)]
    s.resume(b.id)
    assert (a.state, b.state) == (READY, FAILED)


def test_an_upload_to_a_host_that_the_successor_has_never_heard_of_is_ended() -> None:
    """Its machine went with the controller, for good. Nobody else would say so, and what waits behind it would wait."""
    s = Session()
    s.put(3)
    s.put(0)
    s.lose()
    s.request()
    s.resume()
    found = [command for command in s.commands if isinstance(command, MoveHost)]
    assert found == [MoveHost(HostAddress(3, 2, "there:1")), MoveHost(HostAddress(0, 0, ""))]


def test_an_upload_that_arrives_meanwhile_may_not_be_known_yet() -> None:
    s = Session()
    x, y = s.put(0), s.put(0)
    x.kind = y.kind = Kind()
    s.acknowledge(x)
    s.lose()
    s.acknowledge(y)
    assert [(group.numbers, group.arriving) for group in s.request().kept] == [((x.id,), False), ((y.id,), True)]


def test_arrays_that_are_not_there_any_more_are_lost() -> None:
    s = Session()
    a, b = s.call(), s.call()
    s.handle(Completed((1, 2)))
    s.lose()
    s.request()
    s.resume(b.id)
    assert a.state is READY
    assert b.failure is not None
    assert b.failure.kind == "BufferLost"


def test_a_launch_that_waited_fails_with_the_loss_of_an_argument_without_a_handle() -> None:
    """Its argument was dropped behind it. The successor does not know the array, so the launch must not be sent."""
    s = Session()
    s.register()
    a = s.call()
    s.handle(Completed((1,)))
    s.take()
    s.lose()
    b = s.call(a)
    s.free(a)
    assert [group.numbers for group in s.request().kept] == [(a.id,)]
    s.resume(a.id)
    assert not [m for m in s.take() if isinstance(m, Launch)]
    assert b.failure is not None
    assert b.failure.kind == "BufferLost"


def test_what_a_lost_launch_may_have_taken_is_gone() -> None:
    """A donated array, and one of which it was not known yet whether a failed launch had taken it."""
    s = Session()
    a, b = s.call(), s.call()
    s.handle(Completed((1, 2)))
    s.call(a, donated=(a,))
    s.call(b, donated=(b,))
    s.handle(LaunchFailed(4, GONE, (), (b.id,)))
    s.lose()
    assert (a.state, b.state) == (DELETED, DELETED)
    assert not b.undecided
    assert [group.numbers for group in s.request().kept] == []
    s.resume()
    s.handle(DonationsDecided((b.id,), ()))
    assert b.state is DELETED


def test_a_launch_that_leaves_while_nobody_listens_fails_before_the_successor_is_asked() -> None:
    """Its thread had the message in hand when the connection broke."""
    s = Session()
    made = s.core.new_buffers(1)
    s.core.launch(1, (), made)
    s.core.pending.clear()
    s.lose()
    s.core.pending[1] = made
    s.request()
    assert made[0].failure is not None
    assert made[0].failure.kind == "ControllerLost"


def test_a_program_of_a_first_call_meanwhile_is_registered_once() -> None:
    """Twice, hosts would drop it and compile it again."""
    s = Session()
    s.lose()
    s.call(program=s.register())
    s.resume()
    assert [message for message in s.take() if isinstance(message, Register)] == [Register(1, b"f", {})]


def test_a_session_that_finds_no_successor_ends() -> None:
    s = Session()
    a = s.call()
    s.handle(Completed((1,)))
    s.lose()
    b = s.call(a)
    s.handle(ResumeFailed("the controller is gone (reset); nothing answers"))
    assert s.core.ended is not None
    assert s.core.ended.kind == "ControllerLost"
    assert b.failure == s.core.ended
    assert s.core.closed_because == "the controller is gone (reset); nothing answers"
    assert s.commands[-1] == CloseData(s.core.ended)


def test_a_session_that_is_closed_meanwhile_ends_as_one_that_was_shut_down() -> None:
    s = Session()
    s.lose()
    s.handle(Closing())
    s.handle(Disconnected("it was shut down"))
    assert s.core.ended is not None
    assert s.core.ended.kind == "SessionClosed"
