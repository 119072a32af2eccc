"""The client's core: which message leaves when, what each launch comes to, how a session ends. No socket, no thread."""

from __future__ import annotations

import pytest

from pathways_ray.client.buffer import BufferRecord, BufferState, Upload
from pathways_ray.client.ending import FORKED
from pathways_ray.client.events import (
    Cancelling,
    CloseData,
    Closing,
    Disconnected,
    Forked,
    MoveHost,
    Placed,
    ReleaseQueue,
    Uploaded,
    Wake,
)
from pathways_ray.errors import ControllerLost, Failure, from_failure
from pathways_ray.transport.messages import (
    BuffersLost,
    Cancel,
    CancelRefused,
    Completed,
    DonationsDecided,
    EarlyLaunch,
    Free,
    HostAddress,
    Launch,
    LaunchFailed,
    Prepared,
    Put,
    Register,
    SessionEnded,
)
from tests.unit.client.scripted import GONE, Script
from tests.unit.helpers import VECTOR

PENDING, READY, FAILED, DELETED = BufferState
BROKEN = Failure("ExecutionError", "f divided by zero", node="f")


def state(*records: BufferRecord) -> list[BufferState]:
    return [record.state for record in records]


# --- launches ---------------------------------------------------------------------------------------------------------


def test_a_launch_leaves_at_once_as_one_message() -> None:
    script = Script()
    (x,) = script.core.new_buffers(1)
    made = script.core.new_buffers(2)
    assert [record.id for record in made] == [2, 3]
    assert script.core.launch(5, [x, x], made) == Launch(1, 5, (1, 1), 2)
    assert script.core.pending == {1: made}
    assert state(*made) == [PENDING, PENDING]


def test_launches_and_buffers_are_numbered_one_after_the_other() -> None:
    script = Script()
    for _ in range(3):
        script.launch(results=2)
    assert script.take() == [Launch(1, 1, (), 1), Launch(2, 1, (), 3), Launch(3, 1, (), 5)]


def test_a_launch_without_results_names_none() -> None:
    script = Script()
    script.launch(results=0)
    assert script.take() == [Launch(1, 1, (), 0)]
    script.handle(Completed((1,)))
    assert not script.core.pending


def test_completed_launches_are_ready_and_waiters_wake() -> None:
    script = Script()
    (a,), (b,), (c,) = script.launch(), script.launch(), script.launch()
    script.handle(Completed((1, 3), (10, 10)))
    assert state(a, b, c) == [READY, PENDING, READY]
    assert script.commands == [Wake(fetches=False)]
    assert list(script.core.pending) == [2]


def test_a_failed_launch_fails_all_its_results_and_ends_fetches() -> None:
    script = Script()
    a, b = script.launch(results=2)
    (other,) = script.launch()
    script.handle(LaunchFailed(1, BROKEN))
    assert state(a, b, other) == [FAILED, FAILED, PENDING]
    assert (a.failure, b.failure) == (BROKEN, BROKEN)
    assert script.commands == [Wake(fetches=True)]


def test_an_outcome_that_comes_twice_changes_nothing() -> None:
    script = Script()
    (a,) = script.launch()
    script.handle(Completed((1,)))
    script.handle(LaunchFailed(1, BROKEN))
    assert (a.state, a.failure) == (READY, None)
    script.handle(Completed((1, 99)))
    assert a.state is READY


def test_a_launch_that_takes_a_known_failure_fails_without_a_message() -> None:
    script = Script()
    (a,) = script.launch()
    script.handle(LaunchFailed(1, BROKEN))
    script.take()
    b, c = script.launch(a, results=2)
    assert script.take() == []
    assert (b.failure, c.failure) == (BROKEN, BROKEN)
    assert not script.core.pending
    (d,) = script.launch(b)
    assert (d.failure, script.take()) == (BROKEN, [])


def test_of_two_failed_arguments_the_first_counts() -> None:
    script = Script()
    a, b = script.core.new_buffers(2)
    a.fail(GONE)
    b.fail(BROKEN)
    (c,) = script.launch(b, a)
    assert c.failure == BROKEN


def test_a_deleted_result_stays_deleted_when_its_launch_ends() -> None:
    script = Script()
    (a,), (b,) = script.launch(), script.launch()
    a.state = b.state = DELETED
    script.handle(Completed((1,)))
    script.handle(LaunchFailed(2, BROKEN))
    assert state(a, b) == [DELETED, DELETED]


def test_a_session_is_full_at_its_limit_and_has_room_an_eighth_below_it() -> None:
    script = Script(max_launches=16)
    for _ in range(15):
        script.launch()
    assert not script.core.is_full
    script.launch()
    assert script.core.is_full
    script.handle(Completed((1, 2)))
    assert not script.core.is_full
    assert not script.core.has_room
    script.handle(Completed((3,)))
    assert script.core.has_room


# --- programs ---------------------------------------------------------------------------------------------------------


def test_a_function_is_sent_once_in_a_session() -> None:
    script = Script()
    script.register("f", {"d1": b"one", "d2": b"two"})
    script.register("g", {"d2": b"two", "d3": b"three"})
    script.register("h", {"d1": b"one"})
    assert script.take() == [
        Register(1, b"f", {"d1": b"one", "d2": b"two"}),
        Register(2, b"g", {"d3": b"three"}),
        Register(3, b"h", {}),
    ]


def test_a_program_that_waits_behind_an_upload_has_its_functions_in_its_own_message() -> None:
    """1. A launch waits for an upload, and a program behind it. 2. A second program uses the same function. 3. Both
    leave in order: the second one's function comes with the first."""
    script = Script()
    x = script.put()
    script.launch(x, program=9)
    script.register("f", {"d1": b"one"})
    script.register("g", {"d1": b"one"})
    assert script.take() == [Put(1, 1, VECTOR, ())]
    script.acknowledge(x)
    assert script.take()[1:] == [Register(1, b"f", {"d1": b"one"}), Register(2, b"g", {})]


def test_a_prepared_program_is_of_no_concern_unless_it_was_composed() -> None:
    script = Script()
    script.register()
    script.handle(Prepared(1))
    script.handle(Prepared(12345))
    assert script.commands == []


# --- uploads and the queue --------------------------------------------------------------------------------------------


def test_the_controller_learns_of_a_buffer_while_its_upload_is_under_way() -> None:
    script = Script()
    x = script.put(0, 1)
    assert script.take() == [Put(1, 1, VECTOR, ())]
    assert x.state is PENDING


def test_an_upload_is_ready_once_every_host_has_acknowledged_it() -> None:
    script = Script()
    x = script.put(0, 1)
    script.acknowledge(x, 1)
    assert (x.state, script.commands) == (PENDING, [])
    script.acknowledge(x, 0)
    assert x.state is READY
    assert x.upload is not None
    assert x.upload.done
    assert script.commands == [Wake(fetches=False)]


def test_a_launch_waits_for_the_uploads_of_its_arguments() -> None:
    script = Script()
    x, y = script.put(), script.put()
    script.take()
    (z,) = script.launch(x, y)
    assert script.take() == []
    script.acknowledge(y)
    assert script.take() == []
    script.acknowledge(x)
    assert script.take() == [Launch(1, 1, (1, 2), 3)]
    assert z.state is PENDING


def test_a_launch_with_arrived_uploads_leaves_at_once() -> None:
    script = Script()
    x = script.put()
    script.acknowledge(x)
    script.take()
    script.launch(x)
    assert script.take() == [Launch(1, 1, (1,), 2)]


def test_later_calls_wait_behind_a_launch_that_waits() -> None:
    """
    1. A launch waits for an upload.
    2. A launch without uploads, a registration, a put and a free come behind it: none overtakes it.
    3. The upload arrives: all leave in the order of the calls.
    """
    script = Script()
    x = script.put()
    script.take()
    script.launch(x, program=9)
    (y,) = script.launch(program=9)
    script.register("g")
    script.put()
    script.free(y)
    assert script.take() == []
    script.acknowledge(x)
    assert script.take() == [
        Launch(1, 9, (1,), 2),
        Launch(2, 9, (), 3),
        Register(1, b"g", {}),
        Put(4, 1, VECTOR, ()),
        Free((3,)),
    ]
    assert not script.core.queue


def test_the_queue_moves_up_to_the_next_unfinished_upload() -> None:
    script = Script()
    x, y = script.put(), script.put()
    script.take()
    script.launch(x)
    script.launch(y)
    script.launch(x)
    script.acknowledge(x)
    assert [m.launch for m in script.take() if isinstance(m, Launch)] == [1]
    script.acknowledge(y)
    assert [m.launch for m in script.take() if isinstance(m, Launch)] == [2, 3]


def test_a_failed_upload_fails_the_launches_that_wait_for_it_and_no_others() -> None:
    """
    1. Launches wait for two uploads, and one for a result of the first of them.
    2. One upload fails on one of its two hosts; the other host still acknowledges its part.
    3. What takes that array fails with its failure, without a message; the rest leaves.
    """
    script = Script()
    x, y = script.put(0, 1), script.put()
    script.take()
    (a,) = script.launch(x)
    (b,) = script.launch(y)
    (c,) = script.launch(a)
    script.acknowledge(y)
    script.acknowledge(x, 1, GONE)
    script.acknowledge(x, 0)
    assert script.take() == [Launch(2, 1, (2,), 4)]
    assert state(x, a, b, c) == [FAILED, FAILED, PENDING, FAILED]
    assert (a.failure, c.failure) == (GONE, GONE)
    assert list(script.core.pending) == [2]


def test_a_launch_fails_in_the_queue_although_the_handle_of_its_argument_is_gone() -> None:
    """
    1. A launch waits for an upload; a second one takes its result, and the user drops the handle of that.
    2. The upload fails. The second launch must not leave: the controller never learns of its argument.
    """
    script = Script()
    x = script.put()
    script.take()
    (a,) = script.launch(x)
    (b,) = script.launch(a)
    script.free(a)
    script.acknowledge(x, 0, GONE)
    assert script.take() == [Free((a.id,))]
    assert b.failure == GONE


def test_a_launch_that_failed_in_the_queue_has_failed_before_the_queue_is_empty() -> None:
    """A call that finds the queue empty leaves by itself: it must find the failure of what it takes."""
    script = Script()
    x = script.put()
    script.take()
    (a,) = script.launch(x)
    assert x.upload is not None
    x.upload.failure, x.upload.done = GONE, True
    head = script.core.head(script.now)
    assert head == (Wake(fetches=True),)
    assert script.core.queue, "removed only after its commands were executed"
    assert a.failure == GONE
    script.core.remove_head()
    assert script.core.head(script.now) is None


def test_a_message_stays_at_the_head_until_it_is_removed() -> None:
    """A free in the middle of sending, from a destructor, must not overtake the launch that takes the buffer."""
    script = Script()
    x = script.put()
    script.take()
    script.launch(x)
    assert x.upload is not None
    x.upload.done = True
    assert script.core.head(script.now) == (Launch(1, 1, (1,), 2),)
    assert script.core.free(x) is None
    script.core.remove_head()
    assert script.core.head(script.now) == (Free((1,)),)


def test_the_first_failure_of_an_upload_counts() -> None:
    script = Script()
    x = script.put(0, 1)
    script.acknowledge(x, 0, GONE)
    script.acknowledge(x, 1, BROKEN)
    assert x.failure == GONE


def test_an_array_deleted_during_its_upload_stays_deleted() -> None:
    script = Script()
    x, y = script.put(), script.put()
    x.state = y.state = DELETED
    script.acknowledge(x)
    script.acknowledge(y, 0, GONE)
    assert state(x, y) == [DELETED, DELETED]


def test_an_upload_that_ended_before_the_record_names_it_is_known() -> None:
    """Hosts may acknowledge an upload before the call that began it has returned."""
    script = Script()
    (record,) = script.core.new_buffers(1)
    upload = Upload({0})
    script.handle(Uploaded(record, upload, 0))
    record.upload = upload
    script.handle(Placed((Put(record.id, 1, VECTOR, ()),)))
    script.launch(record)
    assert script.take() == [Put(1, 1, VECTOR, ()), Launch(1, 1, (1,), 2)]
    assert record.state is READY


# --- freeing ----------------------------------------------------------------------------------------------------------


def test_a_free_may_wait_for_the_next_message() -> None:
    script = Script()
    (a,) = script.launch()
    assert script.core.free(a) == Free((1,))
    assert not script.core.buffers


def test_a_buffer_is_freed_behind_its_upload() -> None:
    script = Script()
    x = script.put()
    script.take()
    script.free(x)
    assert script.take() == []
    script.acknowledge(x)
    assert script.take() == [Free((1,))]


def test_calls_pass_a_free_that_waits_for_its_upload() -> None:
    """1. An array is dropped amid its upload, of which its host takes long. 2. Other calls, and other frees, leave at
    once. 3. Its free leaves behind its upload, and behind the launches that take it."""
    script = Script()
    x, y = script.put(), script.put(1)
    script.take()
    script.free(x)
    (a,) = script.launch()
    script.free(a)
    assert script.take() == [Launch(1, 1, (), 3), Free((3,))]
    script.launch(y)
    script.free(y)
    script.acknowledge(x)
    assert script.take() == []
    script.acknowledge(y, 1)
    assert script.take() == [Launch(2, 1, (2,), 4), Free((1,)), Free((2,))]
    assert not script.core.freed


def test_with_a_quota_puts_do_not_pass_a_free_that_waits_for_its_upload() -> None:
    script = Script()
    script.core.frees_in_turn = True
    x = script.put()
    script.take()
    script.free(x)
    further = script.put(1)
    assert script.take() == []
    script.acknowledge(x)
    free, put = script.take()
    assert free == Free((1,))
    assert isinstance(put, Put)
    assert put.buffer == further.id


@pytest.mark.parametrize("noted", [False, True])
def test_an_upload_that_ends_amid_its_free_is_freed_once(noted: bool) -> None:
    """Another thread takes the host's answer just before the free is noted, or just after."""
    script = Script()
    x = script.put()
    script.take()

    class Noting(dict[int, BufferRecord]):
        def __setitem__(self, number: int, record: BufferRecord) -> None:
            if noted:
                super().__setitem__(number, record)
            script.acknowledge(x)
            if not noted:
                super().__setitem__(number, record)

    script.core.freed = Noting()
    script.free(x)
    assert script.take() == [Free((1,))]
    assert not script.core.freed


def test_a_buffer_whose_upload_failed_is_freed_on_the_hosts_that_have_it() -> None:
    script = Script()
    x = script.put(0, 1)
    script.take()
    script.free(x)
    script.acknowledge(x, 0, GONE)
    assert script.take() == [Free((1,))]


@pytest.mark.parametrize("how", ["deleted", "dropped", "donated and dropped"])
def test_what_was_called_with_a_deleted_array_fails_with_the_cause(how: str) -> None:
    """1. Calls wait behind an upload. 2. The user deletes the result of one of them, or lets go of it; another one was
    called with it before. 3. The upload fails."""
    script = Script()
    upload = script.put()
    (a,) = script.launch(upload)
    (b,) = script.launch(a)
    (c,) = script.launch(b, donated=[b] if how == "donated and dropped" else ())
    if how == "deleted":
        b.state = DELETED
    b.dropped = True
    if b.donated is None:
        script.free(b)
    script.acknowledge(upload, failure=GONE)
    assert a.failure == GONE
    assert c.state is FAILED
    assert (c.failure.kind, c.failure.host) == (GONE.kind, GONE.host)  # type: ignore[union-attr]
    assert [message for message in script.take() if isinstance(message, Launch)] == []
    assert not script.core.pending


def test_a_dropped_result_still_has_an_outcome() -> None:
    script = Script()
    (a,) = script.launch()
    script.free(a)
    script.handle(LaunchFailed(1, BROKEN))
    assert not script.core.pending


# --- losses and hosts -------------------------------------------------------------------------------------------------


def test_lost_buffers_fail_also_when_they_were_ready() -> None:
    script = Script()
    (a,), (b,), (c,), (d,) = (script.launch() for _ in range(4))
    script.handle(Completed((1, 2)))
    script.free(b)
    d.state = DELETED
    script.commands.clear()
    script.handle(BuffersLost((a.id, b.id, c.id, d.id, 999), GONE))
    assert state(a, b, c, d) == [FAILED, READY, FAILED, DELETED]
    assert a.failure == GONE
    assert script.commands == [Wake(fetches=True)]


def test_a_buffer_that_failed_keeps_its_first_cause() -> None:
    script = Script()
    (a,) = script.launch()
    script.handle(LaunchFailed(1, BROKEN))
    script.handle(BuffersLost((a.id,), GONE))
    assert a.failure == BROKEN


def test_data_streams_follow_the_address_of_a_host() -> None:
    script = Script()
    for address in (HostAddress(3, 2, ""), HostAddress(3, 4, "127.0.0.1:9")):
        script.handle(address)
        assert script.commands.pop() == MoveHost(address)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_lost_controller_fails_what_is_pending_and_says_what_led_there() -> None:
    script = Script()
    script.handle(HostAddress(3, 2, ""))
    (a,), (b,) = script.launch(), script.launch()
    script.handle(Completed((1,)))
    script.commands.clear()
    script.now += 2.5
    script.handle(Disconnected("the controller is gone (connection reset)"))
    ended = script.core.ended
    assert ended is not None
    assert (ended.kind, ended.message) == (
        "ControllerLost",
        "the session ended: the controller is gone (connection reset)",
    )
    assert script.core.closed_because == "the controller is gone (connection reset)"
    assert (a.state, b.failure) == (READY, ended)
    assert script.commands == [Wake(fetches=True), CloseData(ended)]
    notes = from_failure(ended).__notes__
    assert isinstance(from_failure(ended), ControllerLost)
    assert notes == [
        "client of session 7: 2.500 s before: host moved session 7 host 3: down",
        "client of session 7: 0.000 s before: controller lost session 7: launches without an outcome: 1, 2.500 s "
        "after the last outcome (because the controller is gone (connection reset))",
    ]


def test_a_session_without_an_outcome_says_so_when_it_is_lost() -> None:
    script = Script()
    script.handle(Disconnected("gone"))
    assert script.core.ended is not None
    assert "launches without an outcome: 0, no outcome so far" in script.core.ended.story[-1]


def test_the_controller_ends_a_session_with_its_reason() -> None:
    script = Script()
    (a,) = script.launch()
    script.handle(SessionEnded("tenant 'dave' is not in the table any more"))
    assert a.failure == Failure("SessionClosed", "the session ended: tenant 'dave' is not in the table any more")
    script.handle(Disconnected("the controller closed the stream"))
    assert script.core.closed_because == "tenant 'dave' is not in the table any more", "the first reason counts"


def test_closing_fails_what_is_pending_before_hosts_hang_up() -> None:
    """
    1. The user closes the session: what is under way fails with that.
    2. The controller hangs up before it answers, or not: the reason stays the user's.
    """
    script = Script()
    (a,) = script.launch()
    script.handle(Closing())
    assert a.failure == Failure("SessionClosed", "the session ended: it was shut down")
    assert (script.core.closing, script.core.ended) == (True, None)
    (late,) = script.launch()
    script.handle(Disconnected("the controller is gone (EOF)"))
    assert script.core.closed_because == "it was shut down"
    assert late.failure == script.core.ended == a.failure


def test_a_launch_after_the_end_fails_with_it() -> None:
    script = Script()
    script.handle(Disconnected("gone"))
    (a,) = script.launch()
    assert a.failure == script.core.ended
    assert (script.take(), dict(script.core.pending)) == ([], {})


def test_nothing_is_freed_after_the_end() -> None:
    script = Script()
    (a,) = script.launch()
    script.take()
    script.handle(Disconnected("gone"))
    script.free(a)
    assert script.take() == []


def test_the_end_fails_launches_that_wait_for_an_upload() -> None:
    script = Script()
    x = script.put()
    (a,) = script.launch(x)
    script.take()
    script.handle(Disconnected("gone"))
    assert a.failure == script.core.ended
    script.acknowledge(x, 0, GONE)
    assert script.take() == []
    assert a.failure == script.core.ended, "the first outcome counts"


def test_a_fork_has_no_session_and_its_handles_free_nothing() -> None:
    script = Script()
    (a,) = script.launch()
    script.take()
    assert script.core.handle(Forked(), 0.0) == ()
    assert script.core.closed_because == FORKED
    assert script.core.ended == Failure("SessionClosed", f"the session ended: {FORKED}")
    script.free(a)
    assert script.take() == []
    assert a.state is PENDING, "it is the parent's"


def test_an_unknown_event_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match="object"):
        Script().handle(object())


# --- the story --------------------------------------------------------------------------------------------------------


def test_the_story_names_failed_launches_and_uploads_with_their_cause() -> None:
    script = Script()
    x = script.put(4)
    script.launch(x)
    script.launch()
    script.acknowledge(x, 4, GONE)
    script.handle(LaunchFailed(2, BROKEN))
    assert [(e.event, e.detail, e.cause, e.launch, e.host) for e in script.core.story.entries()] == [
        ("upload failed", "host 1 is gone", "", 0, 4),
        ("launch failed", "host 1 is gone", "HostLost", 1, -1),
        ("launch failed", "f divided by zero", "ExecutionError", 2, -1),
    ]
    assert {entry.session for entry in script.core.story.entries()} == {7}


def test_what_enters_the_queue_is_not_sent_before_it_is_released() -> None:
    script = Script()
    (record,) = script.core.new_buffers(1)
    record.upload = Upload({0})
    assert list(script.core.handle(Placed((Put(1, 1, VECTOR, ()),)), 0.0)) == [ReleaseQueue()]
    assert script.core.launch(1, [record], script.core.new_buffers(1)) is None
    assert len(script.core.queue) == 2


# --- donated arrays ---------------------------------------------------------------------------------------------------


def donation(script: Script) -> tuple[BufferRecord, BufferRecord]:
    """A ready array, and the result of a launch that it was donated to."""
    (x,) = script.launch()
    script.handle(Completed((1,)))
    (y,) = script.launch(x, donated=[x])
    script.take()
    return x, y


def test_a_donated_array_counts_as_deleted_and_is_gone_with_success() -> None:
    script = Script()
    x, y = donation(script)
    assert state(x, y) == [DELETED, PENDING]
    script.handle(Completed((2,)))
    assert state(x, y) == [DELETED, READY]
    assert not script.core.donations.by_launch
    assert x.id not in script.core.buffers
    assert script.take() == [], "the controller frees it"


def test_a_donated_array_lives_on_when_its_launch_fails_before_it_took_it() -> None:
    script = Script()
    x, y = donation(script)
    script.handle(LaunchFailed(2, BROKEN))
    assert state(x, y) == [READY, FAILED]
    assert y.failure is not None
    assert "had not taken the memory" in y.failure.message
    (z,) = script.launch(x)
    assert script.take() == [Launch(3, 1, (1,), z.id)]


def test_a_donated_array_that_was_taken_says_so() -> None:
    script = Script()
    x, y = donation(script)
    script.handle(LaunchFailed(2, BROKEN, consumed=(x.id,)))
    assert state(x, y) == [DELETED, FAILED]
    assert x.why_deleted == "it was donated to f, which failed after it had taken the memory: f divided by zero"
    assert x.id not in script.core.buffers


@pytest.mark.parametrize("taken", [False, True])
def test_an_undecided_array_is_decided_later(taken: bool) -> None:
    script = Script()
    x, _ = donation(script)
    script.handle(LaunchFailed(2, GONE, undecided=(x.id,)))
    assert x.undecided
    assert state(x) == [DELETED]
    script.handle(DonationsDecided((x.id,), (x.id,) * taken))
    assert not x.undecided
    assert state(x) == [DELETED if taken else READY]
    script.handle(DonationsDecided((x.id, 99), ()))
    assert state(x) == [DELETED if taken else READY], "said once"


def test_a_donated_array_without_a_handle_is_freed_when_it_comes_back() -> None:
    script = Script()
    x, _ = donation(script)
    x.dropped = True
    script.handle(LaunchFailed(2, BROKEN))
    assert script.take() == [Free((x.id,))]


def test_what_happens_to_a_donated_array_meanwhile_is_known_when_it_comes_back() -> None:
    """It is computed, is lost, or its own launch fails, while the launch that it was donated to waits."""
    for news, expected in (
        (Completed((1,)), READY),
        (LaunchFailed(1, BROKEN), FAILED),
        (BuffersLost((1,), GONE), FAILED),
    ):
        script = Script()
        (x,) = script.launch()
        script.launch(x, donated=[x])
        script.handle(news)
        assert state(x) == [DELETED]
        script.handle(LaunchFailed(2, BROKEN))
        assert state(x) == [expected]


def test_an_array_is_not_donated_to_a_launch_that_fails_at_once() -> None:
    script = Script()
    _, bad = script.launch(results=2)
    script.handle(LaunchFailed(1, BROKEN))
    (y,) = script.launch(results=1)
    script.launch(y, bad, donated=[y])
    assert state(y) == [PENDING]


def test_an_array_is_not_donated_twice() -> None:
    """1. Two threads have looked at an array before either has donated it. 2. The second launch fails at once, and says
    why. 3. The first one may still fail before it took the memory, and the array lives on."""
    script = Script()
    x, y = donation(script)
    (z,) = script.launch(x, donated=[x])
    assert z.failure is not None
    assert (z.failure.kind, x.why_deleted in z.failure.message) == ("BufferDeleted", True)
    assert script.take() == []
    script.handle(LaunchFailed(2, BROKEN))
    assert state(x, y) == [READY, FAILED]


def test_the_end_of_a_session_brings_nothing_back_to_life_that_was_lost_with_it() -> None:
    script = Script()
    x, y = donation(script)
    script.handle(Disconnected("gone"))
    assert state(y) == [FAILED]
    assert not script.core.donations.by_launch
    assert x.donated is None


# --- cancelling -------------------------------------------------------------------------------------------------------


def test_a_launch_in_the_queue_is_cancelled_here() -> None:
    """1. It waits for an upload, another one for it. 2. It is cancelled: it never leaves, and the other fails too."""
    script = Script()
    x = script.put()
    (y,) = script.launch(x)
    (z,) = script.launch(y)
    script.take()
    script.handle(Cancelling(y))
    assert state(y, z) == [FAILED, PENDING]
    script.acknowledge(x)
    assert state(y, z) == [FAILED, FAILED]
    assert z.failure is not None
    assert z.failure.kind == "Cancelled"
    assert script.take() == []


def test_the_controller_is_asked_to_cancel_a_launch_that_has_left() -> None:
    script = Script()
    x, y = script.launch(results=2)
    script.take()
    script.handle(Cancelling(y))
    assert script.take() == [Cancel(1)]
    script.handle(LaunchFailed(1, Failure("Cancelled", "before it began")))
    assert state(x, y) == [FAILED, FAILED]
    assert not y.late


def test_a_launch_that_has_begun_fails_here_at_once_and_its_outcome_changes_nothing() -> None:
    script = Script()
    (x,) = script.launch()
    late = Failure("Cancelled", "while it ran")
    script.handle(Cancelling(x))
    script.handle(CancelRefused(1, late))
    assert x.late
    assert x.failure == late
    script.handle(LaunchFailed(1, late))
    script.handle(CancelRefused(1, late))
    assert state(x) == [FAILED]


def test_a_launch_that_cannot_be_taken_back_leaves_nothing_of_what_has_come_already() -> None:
    """Its host had it early, and its value was there before the controller had the hosts drop it: nobody has it now."""
    script = Script()
    script.core.early.prepared(1, 1, 0)
    script.core.early.allowed(0, True)
    (x,) = script.core.new_buffers(1)
    assert isinstance(script.core.launch(1, (), [x]), EarlyLaunch)
    script.handle(Cancelling(x))
    script.core.early.came(x)
    assert state(x) == [READY]
    script.handle(CancelRefused(1, Failure("Cancelled", "while it ran")))
    assert state(x) == [FAILED]
    assert x.failure is not None


def test_there_is_nothing_to_cancel_in_what_is_there() -> None:
    script = Script()
    (x,) = script.launch()
    script.handle(Completed((1,)))
    script.take()
    script.handle(Cancelling(x))
    assert script.take() == []


@pytest.mark.parametrize("cancelled", [0, 1])
@pytest.mark.parametrize("early", [False, True])
def test_there_is_nothing_to_cancel_in_what_was_read_before_its_outcome_came(early: bool, cancelled: int) -> None:
    """1. A host says the value. 2. The array, or another of its launch, is cancelled: the controller is asked nothing.
    3. The outcome comes."""
    script = Script()
    script.core.early.prepared(1, 1, 0)
    script.core.early.allowed(0, early)
    both = x, _ = script.core.new_buffers(2)
    assert isinstance(script.core.launch(1, (), both), EarlyLaunch) == early
    script.core.early.came(x)
    script.handle(Cancelling(both[cancelled]))
    assert script.take() == []
    assert (x.failure, x.late) == (None, False)
    script.handle(Completed((1,)))
    assert state(*both) == [READY, READY]


def test_what_left_as_one_with_a_cancelled_launch_lives_on() -> None:
    """
    1. `state = step(state); loss = evaluate(state)`: rounds leave as one launch, numbered as the last one, the loss.
    2. The loss is cancelled: nobody cancelled the state, which would end with it. The loss fails here, and only that.
    """
    script = Script(max_launches=100)
    step, evaluate = script.register("step"), script.register("evaluate")
    (trained,) = script.core.new_buffers(1)
    for _ in range(24):  # measured, registered, prepared, and used
        script.take()
        before = set(script.core.pending)
        for _ in range(4):
            previous = trained
            (trained,) = script.launch(previous, program=step)
            script.free(previous)
            (loss,) = script.launch(trained, program=evaluate)
            script.free(loss)
        script.sent.pop()  # the last loss is kept
        sent = script.core.coalescer.coalesce(script.take())
        for message in sent:
            if isinstance(message, Register):
                script.handle(Prepared(message.program))
        launches = [message.launch for message in sent if isinstance(message, Launch)]
        if len(launches) == 1:
            break
        script.handle(Completed(tuple(set(script.core.pending) - before), (10,) * 8))
    (leader,) = launches
    script.handle(Cancelling(loss))
    assert script.take() == [], "the controller would end the whole of it"
    assert state(loss, trained) == [FAILED, PENDING]
    assert loss.late
    script.handle(Completed((leader,), (80,)))
    assert state(loss, trained) == [FAILED, READY]
    assert not script.core.pending
