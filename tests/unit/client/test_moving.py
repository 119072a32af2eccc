"""A move as the client makes it: its steps in order, what is copied, and that a failure leaves all as it was."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pathways_ray.client.buffer import READY, BufferRecord, Upload
from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import MoveSlices, Registered, ReleaseQueue, Renewing, Uploaded
from pathways_ray.client.moving import COPIES, Ask, Copy, Drop, Exchanged, Hold, Release, is_quiet, move
from pathways_ray.client.suspension import Part
from pathways_ray.client.wanted import Wanted
from pathways_ray.errors import Failure, Unschedulable, UsageError
from pathways_ray.ir.graph import Argument, Graph, Ref, Result, Transfer
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, Layout, SliceType
from pathways_ray.transport.messages import (
    CreateSlice,
    ExchangeSlices,
    Free,
    Held,
    HeldBuffer,
    Launch,
    Register,
    ReleaseSlice,
    SliceCreated,
    SlicesExchanged,
    Vacate,
    encode,
)

OLD, NEW = SliceType(3, (2,), ("x",)), SliceType(8, (2,), ("x",))
PART, NEW_PART = SliceType(4, (1,), ("y",)), SliceType(9, (1,), ("y",))
KIND = ArrayType((4,), "float32")


def created(mesh: SliceType, island: int = 1) -> SliceCreated:
    return SliceCreated(PlacedSlice.on(mesh, island, [Device(5, k) for k in range(mesh.size)]), "tag")


def with_buffers(count: int) -> tuple[ClientCore, list[BufferRecord]]:
    core = ClientCore(1, 100)
    records = core.new_buffers(count)
    for record in records:
        record.state = READY
    return core, records


def held(records: list[BufferRecord], slice_id: int = 3) -> Held:
    return Held(tuple(HeldBuffer(record.id, slice_id, KIND, ()) for record in records))


def carried_out(core: ClientCore, records: list[BufferRecord], **refusals: Exception) -> tuple[list[Any], Any]:
    """The steps of a move, each answered as the controller would, and what it raised in the end."""
    replies = {
        "CreateSlice": created(NEW),
        "ListHeld": held(records),
        "ExchangeSlices": SlicesExchanged((created(OLD),)),
    }
    steps: list[Any] = []
    run = move(core, OLD, "mine", (), -1)
    try:
        step = next(run)
        while True:
            steps.append(step)
            name = type(step.request).__name__ if isinstance(step, Ask) else type(step).__name__
            for record in step.results if isinstance(step, Copy) else ():
                record.state = READY
            step = run.throw(refusals[name]) if name in refusals else run.send(replies.get(name))
    except StopIteration:
        return steps, None
    except Exception as error:
        return steps, error


def names(steps: list[Any]) -> list[str]:
    return [type(step.request).__name__ if isinstance(step, Ask) else type(step).__name__ for step in steps]


def test_a_move_copies_exchanges_and_frees_and_handles_name_the_copies() -> None:
    core, records = with_buffers(2)
    one, other = records
    gone = core.new_buffers(1)[0]
    del core.buffers[gone.id]  # its last handle went, and the controller has yet to hear of it
    steps, error = carried_out(core, [one, other, gone])
    assert error is None
    expected = [
        "CreateSlice",
        "Hold",
        "ListHeld",
        "Copy",
        "ExchangeSlices",
        "Exchanged",
        "Drop",
        "Release",
        "ReleaseSlice",
    ]
    assert names(steps) == expected
    assert steps[0] == Ask(CreateSlice(1, (2,), ("x",), -1, "", "mine", 0, (), 3))
    copy = steps[3]
    graph = msgspec.msgpack.decode(copy.program.graph, type=Graph)
    assert graph.nodes == (
        Argument(0, KIND, Layout(3, ())),
        Argument(1, KIND, Layout(3, ())),
        Transfer(Ref(0), KIND, Layout(8, ())),
        Transfer(Ref(1), KIND, Layout(8, ())),
        Result((Ref(2), Ref(3))),
    )
    assert steps[4] == Ask(ExchangeSlices(1, ((3, 8),)))
    assert [record.id for record in (one, other)] == [4, 5], "the handles name the copies"
    assert [record.id for record in steps[6].buffers] == [1, 2]
    assert core.buffers[4] is one
    assert steps[-1] == Ask(ReleaseSlice(1, 8))


def test_many_arrays_go_in_several_launches_and_none_where_there_is_nothing() -> None:
    core, records = with_buffers(COPIES + 1)
    steps, _ = carried_out(core, records)
    assert [len(step.arguments) for step in steps if isinstance(step, Copy)] == [COPIES, 1]
    assert not any(isinstance(step, Copy) for step in carried_out(*with_buffers(0))[0])


@pytest.mark.parametrize("refused", ["ListHeld", "ExchangeSlices"])
@pytest.mark.parametrize("kind", [UsageError, MemoryError])
def test_a_step_that_fails_leaves_the_slice_where_it_was(refused: str, kind: type[Exception]) -> None:
    core, records = with_buffers(1)
    steps, error = carried_out(core, records, **{refused: kind("not now")})
    assert str(error) == "not now"
    assert names(steps)[-3:] == ["Drop", "Release", "ReleaseSlice"]
    assert records[0].id == 1
    assert not any(isinstance(step, Exchanged) for step in steps)


def test_a_slice_moves_to_devices_such_as_were_asked_for() -> None:
    core, _ = with_buffers(0)
    wanted = Wanted("tpu", (2,), 1 << 30, "v4")
    step = next(move(core, SliceType(3, (2,), ("x",)), "mine", [], 1, wanted))
    assert step == Ask(CreateSlice(1, (2,), ("x",), 1, "tpu", "mine", 0, (), 3, (2,), 1 << 30, "v4"))


def test_an_island_that_is_too_small_is_refused_before_anything_is_held() -> None:
    steps, error = carried_out(*with_buffers(1), CreateSlice=Unschedulable("no island can hold it"))
    assert isinstance(error, Unschedulable)
    assert names(steps) == ["CreateSlice"]


def test_a_copy_that_fails_ends_the_move() -> None:
    core, records = with_buffers(1)
    run = move(core, OLD, "", (), 2)
    run.send(None)
    assert isinstance(run.send(created(NEW)), Hold)
    run.send(None)
    copy = run.send(held(records))
    assert isinstance(copy, Copy)
    copy.results[0].fail(Failure("HostLost", "host 5 is gone"))
    assert run.send(None) == Drop([copy.results[0]])
    assert isinstance(run.send(None), Release)


def test_an_array_whose_last_handle_goes_as_it_is_copied_is_left_out() -> None:
    """Its launch fails without it, with all that were to be copied by it: these are copied again."""
    core, (gone, stays) = with_buffers(2)
    run = move(core, OLD, "", (), 2)
    run.send(None)
    run.send(created(NEW))
    run.send(None)
    copy = run.send(held([gone, stays]))
    assert isinstance(copy, Copy)
    core.free(gone)
    for record in copy.results:
        record.fail(Failure("BufferDeleted", "buffer 1 of this session does not exist"))
    assert run.send(None) == Drop(copy.results)
    again = run.send(None)
    assert isinstance(again, Copy)
    assert again.arguments == [stays]
    again.results[0].state = READY
    assert run.send(None) == Ask(ExchangeSlices(1, ((3, 8),)))
    assert isinstance(run.send(SlicesExchanged((created(OLD),))), Exchanged)
    assert (stays.id, core.buffers[5]) == (5, stays)


def test_parts_move_with_their_slice() -> None:
    core, records = with_buffers(1)
    run = move(core, OLD, "", (Part(PART, (1,)),), -1)
    run.send(None)
    assert run.send(created(NEW)) == Ask(CreateSlice(1, (1,), ("y",), -1, "", "", 8, (1,)))
    assert isinstance(run.send(created(NEW_PART)), Hold)
    run.send(None)
    run.send(held(records, 4))
    assert run.send(None) == Ask(ExchangeSlices(1, ((3, 8), (4, 9))))


def test_programs_on_a_moved_slice_are_registered_again_by_their_next_call() -> None:
    core, records = with_buffers(1)
    for number, mesh in ((1, OLD), (2, PART)):
        graph = Graph("f", (mesh,), (), (Argument(0, KIND, Layout(mesh.id, ())), Result((Ref(0),))))
        core.handle(Registered(number, graph, encode(graph), {"f": b"code"}), 0.0)
        assert core.head(0.0)
        core.remove_head()
    carried_out(core, records)
    assert core.renewals.stale == {1}
    assert core.launch(1, records, core.new_buffers(1)) is None
    assert core.launch(1, records, core.new_buffers(1)) is None
    found = core.head(0.0)
    assert found is not None
    register, _ = found
    assert isinstance(register, Register)
    assert (register.program, register.functions) == (1, {})
    core.remove_head()
    (again,) = core.head(0.0) or ()
    assert type(again) is Launch, "once is enough"
    core.remove_head()
    assert core.handle(Renewing(1), 0.0) == ()
    core.renewals.moved({4})
    assert core.handle(Renewing(2), 0.0) == (ReleaseQueue(),)


def test_a_session_is_quiet_when_nothing_of_it_is_under_way() -> None:
    core, records = with_buffers(1)
    assert is_quiet(core)
    records[0].undecided = True
    assert not is_quiet(core)
    records[0].undecided = False
    (sent,) = core.new_buffers(1)
    sent.upload = Upload({0})
    core.free(sent)
    assert not is_quiet(core), "its host has yet to take it, and to drop it"
    core.handle(Uploaded(sent, sent.upload, 0, None), 0.0)
    assert core.head(0.0) == (Free((sent.id,)),)
    core.remove_head()
    assert is_quiet(core)
    core.launch(1, records, core.new_buffers(1))
    assert not is_quiet(core)


def test_slices_that_have_to_move_are_the_drivers_work() -> None:
    assert ClientCore(1, 100).handle(Vacate((3, 4)), 0.0) == (MoveSlices((3, 4)),)
