"""Suspending and resuming, as the client does it: its steps, what comes back, and that a failure changes nothing."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from pathways_ray.client.buffer import READY, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import Disconnected, Resumed
from pathways_ray.client.moving import LOOKS, Ask, Drop, Load, Pause, Release, Save, Suspended
from pathways_ray.client.suspending import RETURN_LIMIT_S, resume, suspend
from pathways_ray.client.suspension import Kept, Part, Suspension
from pathways_ray.errors import (
    BufferLost,
    ControllerLost,
    Failure,
    HostLost,
    Unschedulable,
    UsageError,
    WaitTimeout,
)
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.transport.messages import (
    Accepted,
    CreateSlice,
    ExchangeSlices,
    Held,
    HeldBuffer,
    ListHeld,
    ReleaseSlice,
    SessionResumed,
    SliceCreated,
    SlicesExchanged,
    Suspend,
)

MESH, PART, OTHER = SliceType(3, (2,), ("x",)), SliceType(4, (1,), ("y",)), SliceType(5, (1,), ("x",))
SLICES = [Kept(MESH, "mine", 1, (Part(PART, (1,)),)), Kept(OTHER, "", 0, ())]
KIND = ArrayType((4,), "float32")


def with_arrays(count: int) -> tuple[ClientCore, list[BufferRecord], Held]:
    """A session with arrays on a slice, of which the last one's handle has gone."""
    core = ClientCore(1, 100)
    records = core.new_buffers(count)
    for record in records:
        record.state = READY
    return core, records, Held(tuple(HeldBuffer(record.id, MESH.id, KIND, ()) for record in records))


class Replies:
    """Answers steps as controller and hosts would; `refused` are the errors of some, by name, each once."""

    def __init__(self, held: Held, **refused: Exception) -> None:
        self.held, self.refused, self.slices = held, refused, 10

    def __call__(self, step: Any) -> Any:
        what = step.request if isinstance(step, Ask) else step
        if (error := self.refused.pop(type(what).__name__, None)) is not None:
            raise error
        match what:
            case CreateSlice(_, shape, axes):
                self.slices += 1
                mesh = SliceType(self.slices, shape, axes)
                return SliceCreated(PlacedSlice.on(mesh, 0, [Device(9, k) for k in range(mesh.size)]))
            case ExchangeSlices(_, pairs):
                return SlicesExchanged(
                    tuple(
                        SliceCreated(PlacedSlice.on(SliceType(one, (1,), ("x",)), 0, [Device(9, 0)]))
                        for one, _ in pairs
                    )
                )
            case Load():
                step.record.become_ready()
        return {"ListHeld": self.held}.get(type(what).__name__, Accepted())


def carried_out(run: Any, replies: Replies) -> tuple[list[Any], Exception | None]:
    """The steps, and what they raised in the end."""
    steps: list[Any] = []
    try:
        step = next(run)
        while True:
            steps.append(step)
            try:
                reply = replies(step)
            except Exception as error:
                step = run.throw(error)
            else:
                step = run.send(reply)
    except StopIteration:
        return steps, None
    except Exception as error:
        return steps, error


def names(steps: list[Any]) -> list[str]:
    return [type(step.request if isinstance(step, Ask) else step).__name__ for step in steps]


def test_arrays_are_saved_before_the_one_step_that_takes_effect() -> None:
    core, records, held = with_arrays(3)
    del core.buffers[records[2].id]  # its last handle went, and the controller has yet to hear of it
    steps, error = carried_out(suspend(core, SLICES), Replies(held))
    assert error is None
    assert names(steps) == ["Hold", "ListHeld", "Save", "Save", "Finish", "Suspended", "Suspend", "Release"]
    assert [step.number for step in steps if isinstance(step, Save)] == [0, 1]
    assert steps[-3] == Suspended(Suspension(tuple(SLICES), {1: (0, held.buffers[0]), 2: (1, held.buffers[1])}))


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        *itertools.product(["Hold", "ListHeld", "Save", "Finish"], [UsageError, MemoryError]),
        ("Suspend", UsageError),
    ],
)
def test_a_session_that_cannot_be_suspended_goes_on(refused: str, kind: type[Exception]) -> None:
    core, records, held = with_arrays(1)
    steps, error = carried_out(suspend(core, SLICES), Replies(held, **{refused: kind("no room")}))
    assert str(error) == "no room"
    assert names(steps)[-3:] == [refused, "Suspended", "Release"]
    assert steps[-2] == Suspended(None)
    assert (records[0].state, records[0].failure) == (READY, None)


def test_an_array_that_was_lost_before_is_lost_and_the_others_are_saved() -> None:
    core, records, held = with_arrays(2)
    steps, error = carried_out(suspend(core, SLICES), Replies(held, Save=BufferLost("its host is gone")))
    assert isinstance(error, BufferLost), "of an array that should be there"
    records[0].fail(Failure("BufferLost", "its host is gone"))
    steps, error = carried_out(suspend(core, SLICES), Replies(held))
    assert error is None
    assert steps[-3].suspension.arrays == {2: (0, held.buffers[1])}


def test_an_array_that_the_controller_does_not_know_yet_is_waited_for() -> None:
    """Its `Put` went by the stream, which questions overtake."""
    core, _, held = with_arrays(2)
    run = suspend(core, SLICES)
    next(run)
    run.send(None)
    assert isinstance(run.send(Held(held.buffers[:1])), Pause)
    assert run.send(None) == Ask(ListHeld(1, ()))
    assert isinstance(run.send(held), Save)
    steps, error = carried_out(suspend(core, SLICES), Replies(Held(held.buffers[:1])))
    assert isinstance(error, WaitTimeout)
    assert "arrays [2] are on their way to the controller" in str(error)
    assert names(steps).count("ListHeld") == LOOKS


def test_arrays_that_the_controller_tells_by_and_by_are_asked_for_until_all_are_there() -> None:
    core, _, held = with_arrays(3)
    run = suspend(core, SLICES)
    next(run)
    run.send(None)
    assert run.send(Held(held.buffers[:1], 1)) == Ask(ListHeld(1, (), 1))
    assert run.send(Held((), 2)) == Ask(ListHeld(1, (), 2))
    assert isinstance(run.send(Held(held.buffers[1:])), Save)


def suspended() -> tuple[ClientCore, list[BufferRecord], Suspension]:
    core, records, held = with_arrays(2)
    steps, _ = carried_out(suspend(core, SLICES), Replies(held))
    return core, records, steps[-3].suspension


def test_a_session_comes_back_with_its_slices_and_its_arrays() -> None:
    """An island has no room: the slice comes back elsewhere. One handle has gone by then, one slice was given back."""
    core, records, suspension = suspended()
    del core.buffers[records[0].id]
    replies = Replies(Held(()), CreateSlice=Unschedulable("no island can hold it"))
    steps, error = carried_out(resume(core, suspension, {OTHER.id}, 0.0), replies)
    assert error is None
    expected = (
        ["Suspended"]
        + ["CreateSlice"] * 3
        + ["ExchangeSlices", "Exchanged", "ReleaseSlice", "Load", "Arrive", "Hold", "Suspended", "Drop", "Release"]
    )
    assert names(steps) == expected
    assert [step.request.island for step in steps[1:4]] == [1, -1, -1]
    assert steps[3] == Ask(CreateSlice(1, (1,), ("y",), -1, "", "", 11, (1,)))
    assert steps[4] == Ask(ExchangeSlices(1, ((MESH.id, 11), (PART.id, 12))))
    (load,) = [step for step in steps if isinstance(step, Load)]
    assert (load.number, load.held.slice) == (1, MESH.id)
    assert steps[-3] == Suspended(None)
    assert [record.id for record in (records[1], load.record)] == [3, 2], "the handle names what was uploaded"
    assert core.buffers[3] is records[1]


def test_arrays_are_on_their_way_while_the_next_slice_is_made() -> None:
    core, _, suspension = suspended()
    steps, _ = carried_out(resume(core, suspension, (), 0.0), Replies(Held(())))
    again = ["CreateSlice", "ExchangeSlices", "Exchanged", "ReleaseSlice"]
    assert names(steps)[2:10] == [*again, "Load", "Load", *again[:2]]
    assert [step for step in steps if step == Ask(ReleaseSlice(1, 11))], "the one that was made, with its part"


def test_arrays_on_a_slice_that_was_given_back_come_with_it_and_it_goes_again() -> None:
    core, _, suspension = suspended()
    steps, _ = carried_out(resume(core, suspension, {MESH.id, PART.id, OTHER.id}, 0.0), Replies(Held(())))
    assert names(steps).count("CreateSlice") == 1
    assert steps[-1] == Ask(ReleaseSlice(1, MESH.id))


@pytest.mark.parametrize("refused", ["CreateSlice", "ExchangeSlices", "ReleaseSlice", "Load", "Arrive", "Hold"])
@pytest.mark.parametrize("kind", [HostLost, MemoryError])
def test_a_session_that_cannot_be_resumed_stays_suspended_and_can_be_later(refused: str, kind: type[Exception]) -> None:
    core, records, suspension = suspended()
    replies = Replies(Held(()), **{refused: kind("host 9 is gone, or there is no memory")})
    steps, error = carried_out(resume(core, suspension, (), 0.0), replies)
    assert isinstance(error, kind)
    assert steps[-1] == Ask(Suspend(1))
    assert names(steps)[-3:-1] == ["Drop", "Release"]
    assert not any(step == Suspended(None) for step in steps)
    (tried,) = [step.suspension for step in steps if isinstance(step, Suspended) and step.suspension is not None]
    assert [record.id for record in records] == [1, 2]
    steps, error = carried_out(resume(core, tried, (), 0.0), Replies(Held(())))
    assert (error, steps[0]) == (None, Ask(Suspend(1)))
    assert [record.state for record in records] == [READY, READY]


class Full(Replies):
    """No island can hold the slices that were taken back."""

    def __call__(self, step: Any) -> Any:
        if isinstance(step, Ask) and isinstance(step.request, CreateSlice):
            raise Unschedulable("no island can hold a slice of shape (2,)")
        return super().__call__(step)


def test_a_session_that_gave_way_waits_a_while_for_an_island_and_is_its_users_then() -> None:
    """
    1. No island can hold its slices. The controller calls it again and again, and its user's calls wait.
    2. A lost host is no such refusal, however late: there was an island, and a further refusal is a first one again.
    3. After a while its user hears why, and the controller that it need not call it any more.
    4. There is an island: the user resumes it.
    """
    core, records, suspension = suspended()
    left = dataclasses.replace(suspension, gives_way=True)
    for now in (5.0, 10.0, 4.9 + RETURN_LIMIT_S):
        steps, error = carried_out(resume(core, left, (), now), Full(Held(())))
        assert isinstance(error, Unschedulable)
        left = dataclasses.replace(left, tried=True, refused_since=5.0)
        assert steps[-2:] == [Suspended(left), Ask(Suspend(1, True))]
    replies = Replies(Held(()), Load=HostLost("host 9 is gone"))
    steps, error = carried_out(resume(core, left, (), 5.0 + RETURN_LIMIT_S), replies)
    assert isinstance(error, HostLost)
    left = dataclasses.replace(left, refused_since=math.inf)
    assert steps[-3:] == [Release(), Suspended(left), Ask(Suspend(1, True))]
    for now in (40.0, 39.9 + RETURN_LIMIT_S):
        steps, error = carried_out(resume(core, left, (), now), Full(Held(())))
        left = dataclasses.replace(left, refused_since=40.0)
        assert steps[-2:] == [Suspended(left), Ask(Suspend(1, True))]
    steps, error = carried_out(resume(core, left, (), 1e6, math.inf), Full(Held(())))
    assert steps[-2:] == [Suspended(left), Ask(Suspend(1, True))], "who cannot resume waits on"
    steps, error = carried_out(resume(core, left, (), 40.0 + RETURN_LIMIT_S), Full(Held(())))
    left = steps[-2].suspension
    assert (left.gives_way, left.tried, left.stuck) == (False, True, str(error))
    assert steps[-1] == Ask(Suspend(1, False))
    assert left.arrays is suspension.arrays
    steps, error = carried_out(resume(core, left, (), 50.0), Full(Held(())))
    assert isinstance(error, Unschedulable)
    assert names(steps)[-2:] == ["Release", "Suspend"]
    steps, error = carried_out(resume(core, left, (), 60.0), Replies(Held(())))
    assert error is None
    assert [record.state for record in records] == [READY, READY]


def test_a_handle_that_goes_while_its_array_comes_back_is_freed() -> None:
    core, records, suspension = suspended()
    run = resume(core, suspension, (), 0.0)
    replies, step = Replies(Held(())), next(run)
    while not isinstance(step, Drop):
        if isinstance(step, Load) and step.number == 1:
            records[0].dropped = True
            core.free(records[0])
        step = run.send(replies(step))
    assert [record.id for record in step.buffers] == [1, 2, 3], "the copies under their old numbers, and its own"


@pytest.mark.parametrize("lost", [ControllerLost("it is gone"), MemoryError()])
def test_a_session_whose_controller_dies_as_it_is_suspended_is_suspended(lost: Exception) -> None:
    """Its arrays may be freed by then, and the client has them all. So it is where the answer is lost in the client."""
    core, _, held = with_arrays(1)
    steps, error = carried_out(suspend(core, SLICES), Replies(held, Suspend=lost))
    assert error is None
    assert names(steps)[-4:] == ["Suspended", "Suspend", "Suspended", "Release"]
    left = steps[-2].suspension
    assert (left.tried, left.arrays) == (True, {1: (0, held.buffers[0])})


@pytest.mark.parametrize("lost_in", ["CreateSlice", "ReleaseSlice", "Arrive", "Hold"])
def test_a_session_whose_controller_dies_as_it_comes_back_stays_suspended(lost_in: str) -> None:
    """The successor is there before the next question, which it would answer. It has none of the slices."""
    core, records, suspension = suspended()
    core.resume_tag = "tag"

    class Dying(Replies):
        def __call__(self, step: Any) -> Any:
            if type(step.request if isinstance(step, Ask) else step).__name__ == lost_in and not core.losses:
                core.handle(Disconnected("the controller is gone"), 0.0)
                core.handle(Resumed(SessionResumed("", 0, (), (), ())), 0.0)
            return super().__call__(step)

    steps, error = carried_out(resume(core, suspension, (), 0.0), Dying(Held(())))
    assert isinstance(error, ControllerLost)
    assert "it is suspended as it was" in str(error)
    assert steps[-1] == Ask(Suspend(1))
    assert not any(step == Suspended(None) for step in steps)
    steps, error = carried_out(resume(core, suspension, (), 0.0), Replies(Held(())))
    assert error is None
    assert [record.state for record in records] == [READY, READY]
