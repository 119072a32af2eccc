"""A client loses its controller, and comes back to the successor."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pathways_ray.client.buffer import DELETED, FAILED, PENDING, READY, BufferRecord
from pathways_ray.client.events import (
    Cancelling,
    CloseData,
    Closing,
    Disconnected,
    MoveHost,
    Renewing,
    Resume,
    Resumed,
    ResumeFailed,
    Wake,
)
from pathways_ray.client.moving import is_quiet
from pathways_ray.client.suspension import Kept, Part, Suspension
from pathways_ray.errors import ControllerLost, Failure, from_failure
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType, Spec
from pathways_ray.transport.messages import (
    VERSION,
    CancelRefused,
    Completed,
    DonationsDecided,
    Free,
    HeldBuffer,
    HostAddress,
    KeptBuffers,
    KnownSlice,
    Launch,
    LaunchFailed,
    Register,
    ResumeSession,
    SessionResumed,
    Unanswered,
)
from tests.unit.client.scripted import GONE, Script
from tests.unit.helpers import VECTOR


class Kind(NamedTuple):
    """The type of an array, with the names that `ArgumentType` has."""

    slice: SliceType = SliceType(1, (2,), ("x",))
    array: ArrayType = VECTOR
    spec: Spec = ()


KNOWN = KnownSlice(PlacedSlice.on(Kind().slice, 0, [Device(0, 0), Device(0, 1)]), "its tag")


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
        return self.core.resume_request("me", [KNOWN], self.now)

    def resume(
        self,
        *lost: int,
        done: tuple[int, ...] = (),
        failed: tuple[tuple[int, Failure], ...] = (),
        running: tuple[int, ...] = (),
    ) -> None:
        host = HostAddress(3, 2, "there:1")
        self.handle(Resumed(SessionResumed("secret", 0, (host,), (), lost, done, failed, running)))


def sent(launch: int, *results: BufferRecord, dropped: tuple[int, ...] = ()) -> Unanswered:
    numbers = tuple(one.id for one in results)
    return Unanswered(launch, (*dropped, *numbers), (KeptBuffers(1, VECTOR, (), numbers),) if results else ())


def test_what_was_sent_waits_for_the_successor_and_what_is_ready_stays() -> None:
    """
    1. One launch has its outcome, one has none, when the controller goes. The successor hears of both.
    2. It knows nothing of the one without: that fails, and may be called again, since the session goes on.
    """
    s = Session()
    a, b = s.call(), s.call()
    s.handle(Completed((1,)))
    s.lose()
    assert s.commands == [Wake(fetches=True), Resume()]
    assert (a.state, b.state) == (READY, PENDING)
    assert s.core.ended is None
    s.handle(Disconnected("the link says so too"))
    assert s.commands == [Wake(fetches=True), Resume()]
    kept = (KeptBuffers(1, VECTOR, (), (a.id,), False),)
    assert s.request() == ResumeSession(VERSION, 7, "tag", "me", (KNOWN,), kept, b.id + 1, unanswered=(sent(2, b),))
    s.resume()
    assert b.failure is not None
    assert isinstance(from_failure(b.failure), ControllerLost)
    assert "The session goes on with its arrays: call again" in b.failure.message


def test_what_was_sent_has_the_outcome_that_the_successor_knows() -> None:
    """
    1. Of four launches one has ended in a value, one failed, one still runs, and of one nobody knows.
    2. The third one has its outcome later, once; a second one changes nothing.
    """
    s = Session()
    a, b, c, d = (s.call() for _ in range(4))
    s.lose()
    assert s.request().unanswered == (sent(1, a), sent(2, b), sent(3, c), sent(4, d))
    s.resume(done=(1,), failed=((2, GONE),), running=(3,))
    assert (a.state, b.failure, c.state) == (READY, GONE, PENDING)
    assert d.failure is not None
    assert d.failure.kind == "ControllerLost"
    s.handle(Completed((3,)))
    assert c.state is READY
    s.handle(LaunchFailed(3, GONE))
    assert c.state is READY


def test_results_without_a_handle_are_not_asked_for_unless_a_launch_waits_for_them() -> None:
    s = Session()
    s.register()
    a, b = s.call(), s.call()
    s.lose()
    s.free(a)
    s.call(b)
    s.free(b)
    assert s.request().unanswered == (sent(1, dropped=(a.id,)), sent(2, b))


def test_a_second_controller_that_dies_is_asked_for_as_well() -> None:
    """A launch still runs when the successor dies too: its successor is asked for it."""
    s = Session()
    a = s.call()
    s.lose()
    s.request()
    s.resume(running=(1,))
    s.lose()
    assert s.request().unanswered == (sent(1, a),)
    s.resume(done=(1,))
    assert a.state is READY


def test_donations_to_a_launch_that_fails_after_the_loss_are_gone() -> None:
    """The successor does not know of them. Those to one that ended in a value are, too."""
    s = Session()
    a, b, c = (s.call() for _ in range(3))
    s.handle(Completed((1, 2, 3)))
    for given in (a, b, c):
        s.call(given, donated=(given,))
    s.lose()
    assert s.request().kept == ()
    s.resume(done=(4,), failed=((5, GONE),), running=(6,))
    s.handle(LaunchFailed(6, GONE))
    assert [one.state for one in (a, b, c)] == [DELETED] * 3
    assert not s.core.donations.by_launch


@pytest.mark.parametrize("known", ["done", "failed", "running", "nothing"])
def test_donations_to_a_launch_that_was_cancelled_too_late_are_gone_after_the_loss(known: str) -> None:
    """Its results have failed already; of what was donated to it, its end decides, or the successor."""
    s = Session()
    a = s.call()
    s.handle(Completed((1,)))
    made = s.call(a, donated=(a,))
    s.handle(Cancelling(made))
    s.handle(CancelRefused(2, Failure("Cancelled", "it has begun")))
    s.lose()
    assert s.request().kept == ()
    assert s.request().unanswered == (sent(2),)
    match known:
        case "done":
            s.resume(done=(2,))
        case "failed":
            s.resume(failed=((2, GONE),))
        case "running":
            s.resume(running=(2,))
            assert not is_quiet(s.core)
            s.handle(LaunchFailed(2, GONE))
        case _:
            s.resume()
    assert (a.state, a.donated) == (DELETED, None)
    assert made.failure is not None
    assert made.failure.kind == "Cancelled"
    assert not s.core.donations.by_launch
    s.take()
    assert is_quiet(s.core)


def test_a_launch_that_was_sent_cannot_be_taken_back_any_more() -> None:
    """It counts as cancelled at once; nothing is sent to a controller that does not know it."""
    s = Session()
    a = s.call()
    s.take()
    s.lose()
    s.handle(Cancelling(a))
    assert a.failure is not None
    assert a.failure.kind == "Cancelled"
    assert s.take() == []
    s.request()
    s.resume(done=(1,))
    assert a.failure.kind == "Cancelled"


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


@pytest.mark.parametrize("again", ["called", "warmed up"])
def test_the_program_of_a_launch_that_waited_for_an_upload_is_there_before_it(again: str) -> None:
    """What asks for the program once the session is back stands behind that launch."""
    s = Session()
    s.register()
    x = s.put(3)
    s.call(x)
    s.take()
    s.lose()
    s.resume()
    if again == "called":
        s.call()
    else:
        s.handle(Renewing(1))
    assert s.take() == []
    s.acknowledge(x, 3)
    register, launch, *rest = [m for m in s.take() if m != Free(())]
    assert register == Register(1, b"f", {})
    assert launch == Launch(1, 1, (x.id,), x.id + 1)
    assert [type(message) for message in rest] == [Launch] * (again == "called")


def test_the_successor_hears_that_a_session_is_suspended_and_nothing_saved_is_lost() -> None:
    """What is saved, its client has; an array that is not is lost with its devices."""
    s = Session()
    a, b = s.call(), s.call()
    s.handle(Completed((1, 2)))
    mesh, part = SliceType(1, (2,), ("x",)), SliceType(2, (1,), ("y",))
    kept = Kept(mesh, "", 0, (Part(part, (1,)),))
    saved = Suspension((kept,), {a.id: (0, HeldBuffer(a.id, 1, VECTOR, ()))}, gives_way=True)
    s.lose()
    request = s.core.resume_request("me", [KNOWN], s.now, saved)
    assert (request.slices, request.suspended, request.gives_way) == ((KNOWN,), True, True)
    assert [group.numbers for group in request.kept] == [(b.id,)]
    s.resume(b.id)
    assert (a.state, b.state) == (READY, FAILED)


@pytest.mark.parametrize("freed", [False, True])
def test_an_upload_to_a_host_that_the_successor_has_never_heard_of_is_ended(freed: bool) -> None:
    """Its machine went with the controller, for good. Nobody else would say so, and what waits behind it would wait."""
    s = Session()
    s.put(3)
    x = s.put(0)
    if freed:
        s.free(x)
    s.lose()
    s.request()
    s.resume()
    found = [command for command in s.commands if isinstance(command, MoveHost)]
    assert found == [MoveHost(HostAddress(3, 2, "there:1")), MoveHost(HostAddress(0, 0, ""))]


def test_an_upload_that_arrives_meanwhile_may_not_be_known_yet() -> None:
    """The successor hears to which processes it went: one that has ended since will never say that it has it."""
    s = Session()
    x, y = s.put(0), s.put(0)
    x.kind = y.kind = Kind()
    s.acknowledge(x)
    s.lose()
    s.acknowledge(y)
    assert y.upload is not None
    y.upload.epochs[0] = 5
    assert [(group.numbers, group.arriving) for group in s.request().kept] == [((x.id,), False), ((y.id,), True)]
    assert [group.epochs for group in s.request().kept] == [{}, {0: 5}]


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
    assert not b.undecided
    assert [group.numbers for group in s.request().kept] == []
    s.resume()
    assert (a.state, b.state) == (DELETED, DELETED)
    s.handle(DonationsDecided((b.id,), ()))
    assert b.state is DELETED


def test_the_successor_is_asked_for_a_launch_that_leaves_while_nobody_listens() -> None:
    """Its thread had the message in hand when the connection broke."""
    s = Session()
    made = s.core.new_buffers(1)
    s.core.launch(1, (), made)
    s.core.pending.clear()
    s.lose()
    s.core.pending[1] = made
    assert s.request().unanswered == (sent(1, dropped=(made[0].id,)),)
    s.resume()
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
