"""Memory of devices: launches wait for room, or fail at once with the figures where there never will be any."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from pathways_ray.controller.memory import MAX_PROGRAMS_AHEAD, WAIT_LIMIT_S
from pathways_ray.controller.programs import PlannedProgram
from pathways_ray.controller.state import Send, Session
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.messages import (
    BuffersLost,
    Cancel,
    HostUp,
    IslandLaunch,
    LaunchFailed,
    PrioritizedIslandLaunch,
    Put,
    Ready,
    launch_of,
)
from tests.unit.controller.harness import (
    ISLAND_OF_HOST,
    Harness,
    failure_of,
    program_over,
    sketch_with_slices,
    to_client,
    to_island,
)
from tests.unit.helpers import VECTOR

EACH = VECTOR.nbytes  # a vector on slice 1 is replicated over two devices of host 0


def front(vectors: int, pool: str = "", **options: Any) -> Harness:
    """Sessions 1 and 2 with a program over slice 1. Each device has room for so many vectors, or all of them together
    where they share a pool."""
    found = Harness(sessions=(1, 2), **options)
    for host, island in ISLAND_OF_HOST.items():
        up = HostUp(host, 2, f"transfer-{host}", f"data-{host}", 2, 100 + host, "", vectors * EACH, pool)
        found.checked(found.launches.host_up(island, up))
    for session in (1, 2):
        found.register(program_over(1, key=session, session=session), 1)
    return found


def started(commands: list[Send]) -> list[int]:
    return [message.results for message in to_island(commands, 0, IslandLaunch)]


def test_a_refused_launch_counts_as_failed() -> None:
    f = front(2)
    f.put(1)
    f.put(2)
    kinds = {failure_of(f.launch(1, (1,), 10)).kind, failure_of(f.launch(2, (10,), 11)).kind}
    assert kinds == {"OutOfMemory"}
    assert f.launches.tables.recorder.failures == {"OutOfMemory": 2}


def test_a_launch_waits_for_the_buffers_of_others() -> None:
    f = front(3)
    f.put(1, session=1)
    f.put(1, session=2)
    assert started(f.launch(1, (1,), 10, session=1)) == [10]
    assert started(f.launch(1, (1,), 10, session=2)) == []
    f.done(0, 1)
    assert started(f.free(10, session=1)) == [10], "the other session's launch goes"


def test_what_is_uploaded_behind_a_launch_takes_room_from_the_next_one() -> None:
    f = front(6)
    f.put(1)
    assert started(f.launch(1, (1,), 10)) == [10]
    for k in range(1, 5):
        f.put(k, session=2)
    assert started(f.launch(2, (1,), 20)) == []


def test_a_launch_that_can_never_fit_fails_at_once_with_the_figures() -> None:
    """Its own session holds what it lacks, and does not give it up while it waits."""
    f = front(2)
    f.put(1)
    f.put(2)
    failure = failure_of(f.launch(1, (1,), 10))
    assert failure.kind == "OutOfMemory"
    for text in (
        "can never fit",
        f"{EACH} bytes for results",
        f"has {2 * EACH} bytes",
        f"{2 * EACH} bytes of that hold",
    ):
        assert text in failure.message
    f.free(2)
    assert started(f.launch(2, (1,), 10)) == [10]


def test_nobody_waits_for_ever() -> None:
    """Each holds what the other needs."""
    f = front(2)
    f.put(1, session=1)
    f.put(1, session=2)
    f.launch(1, (1,), 10, session=1)
    f.tick(WAIT_LIMIT_S)
    (failed,) = to_client(f.tick(WAIT_LIMIT_S + 1), kind=LaunchFailed)
    assert f"found no room for {WAIT_LIMIT_S:.0f} s" in failed.failure.message


def test_one_whose_launch_was_cancelled_waits_for_nothing() -> None:
    """Its next launch has all of the time, and nobody gives way to it."""
    f = front(2)
    f.put(1, session=1)
    f.put(1, session=2)
    f.launch(1, (1,), 10, session=1)
    memory = f.launches.admission.memory
    assert list(memory.waiting) == [1]
    f.checked(f.launches.cancellation.cancel(f.launches.sessions[1], Cancel(1)))
    assert not memory.waiting
    f.tick(WAIT_LIMIT_S)
    f.launch(1, (1,), 20, session=1)
    assert to_client(f.tick(WAIT_LIMIT_S + 2), kind=LaunchFailed) == []


@pytest.mark.parametrize("before", ["a deferred one", "a cancelled one"])
def test_other_launches_of_its_session_do_not_begin_the_wait_of_a_launch_again(before: str) -> None:
    """It passed one whose program is compiled, or one behind it is cancelled again and again: it fails in its time."""
    f = front(2)
    f.register(program_over(2, key=9, session=1, arguments=0), 2, ready=False)
    f.put(1, session=1)
    f.put(1, session=2)
    if before == "a deferred one":
        f.launch(1, (), 30, program=2)
    f.launch(2, (1,), 10)
    for second in range(1, int(WAIT_LIMIT_S) + 1):
        assert to_client(f.tick(float(second)), kind=LaunchFailed) == []
        if before == "a cancelled one":
            f.launch(2 + second, (1,), 100 * second)
            f.checked(f.launches.cancellation.cancel(f.launches.sessions[1], Cancel(2 + second)))
    (failed,) = to_client(f.tick(WAIT_LIMIT_S + 1), kind=LaunchFailed)
    assert (failed.launch, failed.failure.kind) == (2, "OutOfMemory")
    assert not f.launches.admission.memory.waiting


def test_launches_of_who_gives_way_go_one_by_one_where_there_is_no_room() -> None:
    """Or two sessions that wait for each other would wait for ever. What can never fit fails all the same."""
    f = front(4)
    for number in (1, 2):
        f.put(number, session=number)
        f.put(number + 10, session=number)
    assert started(f.launch(1, (1,), 20, session=1)) == []
    f.launches.admission.memory.let_through.add(1)
    assert started(f.tick(1.0)) == [20]
    assert started(f.launch(2, (1,), 21, session=1)) == []
    assert started(f.done(0, 1)) == [21]
    f.done(0, 2)
    assert failure_of(f.launch(3, (1,), 22, session=1)).kind == "OutOfMemory"


def test_a_session_that_ends_gives_room() -> None:
    f = front(3)
    f.put(1, session=1)
    f.put(1, session=2)
    f.launch(1, (1,), 10, session=1)
    assert started(f.launch(1, (1,), 10, session=2)) == []
    assert started(f.checked(f.launches.close_session(1))) == [10]


def test_nothing_is_remembered_of_a_session_that_has_ended() -> None:
    f = front(2)
    f.put(1, session=1)
    f.put(1, session=2)
    f.launch(1, (1,), 10, session=1)
    memory = f.launches.admission.memory
    memory.let_through.add(1)
    assert (memory.waiting.keys(), memory.peaks.keys()) == ({1}, {1})
    f.checked(f.launches.close_session(1))
    assert (memory.waiting, memory.peaks, memory.let_through) == ({}, {}, set())


def test_temporaries_count_once_for_each_pool() -> None:
    """Devices work on one launch at a time, so only the largest temporaries of the launches under way are there."""
    f = front(5)
    for key in (1, 2):
        f.checked(f.launches.ready(Ready(0, key, 2 * EACH)))
    f.put(1)
    assert started(f.launch(1, (1,), 10)) == [10]
    f.free(10)
    assert started(f.launch(2, (1,), 20)) == [20]
    f.put(1, session=2)
    assert started(f.launch(1, (1,), 30, session=2)) == [], "four vectors and the temporaries of one launch"
    f.done(0, 1)
    assert started(f.free(20)) == [30]
    assert f.launches.admission.memory.waiting == {}


def test_a_launch_without_temporaries_leaves_their_room_to_those_under_way() -> None:
    f = front(5)
    f.checked(f.launches.ready(Ready(0, 1, 2 * EACH)))
    f.put(1)
    f.put(1, session=2)
    assert started(f.launch(1, (1,), 10)) == [10]
    assert started(f.launch(1, (1,), 10, session=2)) == [], "three vectors, and the temporaries of the other launch"


def test_a_launch_whose_temporaries_can_never_fit_fails_at_once() -> None:
    f = front(2)
    f.checked(f.launches.ready(Ready(0, 1, 2 * EACH)))
    f.put(1)
    assert failure_of(f.launch(1, (1,), 10)).kind == "OutOfMemory"


def test_donated_arguments_give_their_memory_to_the_results() -> None:
    f = front(1)
    f.put(1)
    f.register(dataclasses.replace(program_over(1, key=7), donated=(0,)), 2)
    assert started(f.launch(1, (1,), 10, program=2)) == [10]


def test_devices_of_one_machine_share_its_memory() -> None:
    """A vector on two devices takes twice its bytes of a pool that both are in."""
    f = front(4, pool="machine")
    f.put(1)
    assert started(f.launch(1, (1,), 10)) == [10]
    assert failure_of(f.launch(2, (1,), 20)).kind == "OutOfMemory"
    (pool,) = f.launches.admission.memory.status()
    assert pool == {"pool": "machine", "bytes": 4 * EACH, "held": 4 * EACH, "tenants": {"session 1": 4 * EACH}}


@pytest.mark.parametrize(("pool", "room", "where"), [("", 1, "device 0.0"), ("machine", 2, "its devices' memory")])
def test_an_upload_that_empty_devices_could_not_hold_is_refused(pool: str, room: int, where: str) -> None:
    """Each device gets all of it, or its half where it is partitioned. A launch with it fails for the same reason."""
    f = front(room, pool)
    session = f.launches.sessions[1]
    bigger = ArrayType((2 * VECTOR.shape[0] + 2,), "float32")
    (lost,) = to_client(f.checked(f.launches.admission.call(session, Put(1, 1, bigger, ()))))
    assert isinstance(lost, BuffersLost)
    asked = bigger.nbytes * (2 if pool else 1)
    assert lost.failure.kind == "OutOfMemory"
    assert f"can never fit: it takes {asked} bytes on {where}, which has {room * EACH} bytes" in lost.failure.message
    assert failure_of(f.launch(1, (1,), 10)) == lost.failure
    assert f.buffers() == set()
    f.put(2)
    f.put(3)
    assert f.buffers() == {2, 3}, "what merely finds no room now is taken"
    double = ArrayType((4 * VECTOR.shape[0],), "float32")
    assert to_client(f.checked(f.launches.admission.call(session, Put(4, 1, double, (("x",),))))) == []
    assert f.buffers() == {2, 3, 4}, "each device takes one half"


def test_unknown_memory_is_not_counted() -> None:
    f = Harness()
    f.register(program_over(1), 1)
    f.put(1)
    assert started(f.launch(1, (1,), 10)) == [10]
    assert f.launches.admission.memory.status() == []


def test_most_launches_are_not_counted_one_by_one() -> None:
    f = front(1000)
    f.put(1)
    f.launch(1, (1,), 10)
    slack = f.launches.admission.memory.slack
    f.launch(2, (1,), 20)
    assert f.launches.admission.memory.slack == slack - 2 * EACH


def test_what_those_that_go_on_free_is_for_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the middle of their calls: to work these off again from there would never end."""
    admission = front(3).launches.admission
    admission.memory.waiting = {1: {}, 2: {}}
    rounds: list[list[int]] = []

    def resumed(sessions: Iterable[Session]) -> list[Send]:
        rounds.append([session.id for session in sessions])
        return admission.memory_freed() if len(rounds) < 3 else []

    monkeypatch.setattr(admission, "resume", resumed)
    assert admission.memory_freed() == []
    assert rounds == [[1, 2]] * 3


def test_others_go_on_though_a_call_of_a_session_ends_in_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. Session 1 fills the memory, and session 2 waits for some. 2. A call of session 1 trips over a defect, and its
    client is ended for it. 3. Session 2 has its turn."""
    f = front(4, max_in_flight=1)
    for buffer, session in ((1, 1), (1, 2), (2, 1)):
        f.put(buffer, session=session)
    f.launch(1, (1,), 11)
    assert started(f.launch(1, (1,), 90, session=2)) == []
    f.launch(2, (1,), 12)
    f.launch(3, (1,), 13)

    def trips(*_: object) -> list[Send]:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(f.launches.admission, "_step", trips)
        with pytest.raises(RuntimeError, match="a defect"):
            f.launches.cancellation.cancel(f.launches.sessions[1], Cancel(3))
    assert started(f.checked(f.launches.close_session(1))) == [90]


def test_a_session_goes_on_once_its_only_launch_is_cancelled() -> None:
    """1. A launch whose program was compiled meanwhile waits for memory. 2. It is cancelled. 3. There is room."""
    f = front(4)
    slow = f.register(program_over(1, key=9, session=1), 2, ready=False)
    f.put(1)
    for buffer in (1, 2, 3):
        f.put(buffer, session=2)
    f.launch(1, (1,), 10, program=2)
    for host in slow.hosts:
        f.ready(slow, host)
    f.checked(f.launches.cancellation.cancel(f.launches.sessions[1], Cancel(1)))
    f.free(2, session=2)
    assert started(f.launch(2, (1,), 20)) == [20]


def calling(slice: int, times: int, key: int) -> PlannedProgram:
    """A program with so many results on a slice."""
    sketch = sketch_with_slices(f"calling-{slice}")
    return sketch.planned(*(sketch.call(f"f{k}", slice=slice) for k in range(times)), key=key)


def test_nothing_passes_what_gives_memory_back_while_its_session_waits_for_some() -> None:
    """1. A launch waits for another session's memory; behind it are one more, and arrays that are dropped. 2. A launch
    of a higher priority comes: it stays behind these. 3. There is room for all of them in this order."""
    f = front(6)
    f.register(calling(1, 2, key=9), 2)
    for buffer in (1, 2, 3):
        f.put(buffer)
        f.put(buffer, session=2)
    assert started(f.launch(1, (1,), 10) + f.launch(2, (2,), 11) + f.free(2, 3)) == []
    f.checked(f.launches.admission.call(f.launches.sessions[1], launch_of(3, 2, (), 20, 10)))
    found = f.free(1, 2, 3, session=2)
    assert to_client(found) == []
    assert started(found) == [10, 11]
    assert [m.launch.results for m in to_island(found, 0, PrioritizedIslandLaunch)] == [20]


def test_a_launch_passes_none_that_it_would_leave_no_room() -> None:
    """1. A launch is deferred, for its compiler, and what it takes is dropped behind it. 2. Another one of the session,
    elsewhere in the same memory, waits for it. 3. With what was dropped there is room for both."""
    f = front(8, pool="machine")
    slow = f.register(program_over(1, key=8), 3, ready=False)
    f.register(calling(3, 4, key=9), 2)
    for buffer in (1, 2, 3):
        f.put(buffer)
    f.launch(1, (1,), 10, program=3)
    f.free(1, 2)
    assert f.launch(2, (), 20, program=2) == []
    found = [command for host in slow.hosts for command in f.ready(slow, host)]
    assert to_client(found, kind=LaunchFailed) == []
    assert started(found) == [10]
    assert [m.results for m in to_island(found, 2, IslandLaunch)] == [20]


def test_a_launch_of_a_higher_priority_passes_no_frees_that_it_needs() -> None:
    """1. One launch may be under way. Another waits, and behind it arrays that are dropped. 2. A launch of a higher
    priority comes, for which there is room once they are: it stays behind these."""
    f = front(6, max_in_flight=1)
    f.register(calling(1, 3, key=9), 2)
    for buffer in (1, 2, 3):
        f.put(buffer)
    assert started(f.launch(1, (1,), 10) + f.launch(2, (2,), 11) + f.free(2, 3)) == [10]
    f.checked(f.launches.admission.call(f.launches.sessions[1], launch_of(3, 2, (), 20, 10)))
    assert started(f.done(0, 1)) == [11]
    found = f.done(0, 2)
    assert to_client(found, kind=LaunchFailed) == []
    assert [m.launch.results for m in to_island(found, 0, PrioritizedIslandLaunch)] == [20]


def test_a_launch_passes_none_in_its_memory_where_these_are_of_too_many_programs() -> None:
    """To look at each would take the time of others, with each call of a tenant."""
    f = front(1000, pool="machine")
    session = f.launches.sessions[1]
    *ahead, program = (program_over(1, key=key) for key in range(10, MAX_PROGRAMS_AHEAD + 12))
    leaves_room = f.launches.admission.memory.leaves_room
    assert leaves_room(session, program, ahead[1:])
    assert not leaves_room(session, program, ahead)


def test_a_launch_passes_one_that_it_leaves_room() -> None:
    f = front(8, pool="machine")
    f.register(program_over(1, key=8), 3, ready=False)
    f.register(calling(3, 2, key=9), 2)
    for buffer in (1, 2):
        f.put(buffer)
    f.launch(1, (1,), 10, program=3)
    assert [m.results for m in to_island(f.launch(2, (), 20, program=2), 2, IslandLaunch)] == [20]


def test_an_upload_that_cannot_be_keeps_no_memory_from_others() -> None:
    """Others would wait, and the figures of the failure could not be written: the controller ended."""
    f = front(3)
    huge = Put(9, 1, ArrayType((1 << 62,) * 64, "float32"), ())
    assert f.checked(f.launches.admission.call(f.launches.sessions[1], huge)) == []
    f.put(1, session=2)
    assert started(f.launch(1, (1,), 10, session=2)) == [10]
    f.tick(WAIT_LIMIT_S + 1.0)


def test_launches_that_are_not_added_up_leave_room_for_the_temporaries_of_others() -> None:
    """One of 3 vectors is under way, where each device has 8: of what makes one vector, two more go."""
    f = front(8)
    f.put(1, session=1)
    f.put(1, session=2)
    f.checked(f.launches.ready(Ready(0, 1, 3 * EACH)))
    assert started(f.launch(1, (1,), 10, session=1)) == [10]
    assert [started(f.launch(k, (1,), 10 + k, session=2)) for k in (1, 2, 3)] == [[11], [12], []]


def test_a_launch_that_goes_without_a_look_at_the_pools_waits_no_more() -> None:
    """
    1. One of 4 vectors of temporaries is under way, and a launch of each session waits.
    2. It ends. The launch of its session goes, and the room that this finds is enough for the other one.
    """
    f = front(7)
    f.register(program_over(1, key=3), 2)
    f.put(1, session=1)
    f.put(1, session=2)
    f.checked(f.launches.ready(Ready(0, 1, 4 * EACH)))
    assert started(f.launch(1, (1,), 10, session=1)) == [10]
    assert started(f.launch(2, (1,), 11, session=1, program=2)) == []
    assert started(f.launch(1, (1,), 10, session=2)) == []
    assert sorted(started(f.done(0, 1))) == [10, 11]
    assert f.launches.admission.memory.waiting == {}
