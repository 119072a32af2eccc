"""The order in which the hosts of an island handle what their scheduler sends and what one of them takes early."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.errors import Failure
from pathways_ray.executor.run.instructions import Next, SchedulerFound
from pathways_ray.executor.run.journal import Journal, is_counted
from pathways_ray.executor.run.leading import NOT_WAITED, WAITED, Follower, Leader
from pathways_ray.transport.capabilities import tenant_mark
from pathways_ray.transport.messages import (
    Abort,
    AllowEarly,
    CatchUp,
    Drop,
    Heartbeat,
    IslandLaunch,
    LaunchEarly,
    Led,
    LogClosed,
    Message,
    Passed,
    Program,
    Recount,
)
from tests.unit.executor.run.test_core import Host, run
from tests.unit.executor.run.test_early import MARK, handed
from tests.unit.helpers import Sketch

TERM = AllowEarly(MARK, 1)
END = AllowEarly("")


def host_of_two(number: int) -> Host:
    """Program 1 is one call `f` on both hosts of an island; buffer 1 is there on each."""
    host, sketch = Host(multi_host=True, host=number), Sketch()
    both = sketch.slice("0.0", "1.0")
    host.program(1, sketch, sketch.call("f", sketch.argument(both), slice=both))
    host.store.put(1, 1, "x")
    if host.core.leader is not None:
        host.core.leader.linked = True
    return host


def in_a_term() -> tuple[Host, Host]:
    """A leader that takes calls, and its follower: both have had launch 5 of program 1."""
    leader, follower = host_of_two(0), host_of_two(1)
    for host in (leader, follower):
        host.handle(run(5, 1), TERM)
        host.enqueued.clear()
        host.watched.clear()
    return leader, follower


def test_a_call_begins_on_all_hosts_under_the_same_number() -> None:
    leader, follower = in_a_term()
    leader.handle(handed(600, 1))
    assert leader.enqueued == ["f(x)"]
    follower.handle(*leader.log)
    assert follower.enqueued == ["f(x)"]
    assert leader.watched == follower.watched == [(-1, ["f(x)"])]
    for host in (leader, follower):
        host.handle(Passed(1, 1), run(6, 1)) if host is follower else host.handle(run(6, 1))
        assert (host.confirmed, host.enqueued) == ([(-1, 6)], ["f(x)"])


def test_a_follower_handles_nothing_before_the_leader_does() -> None:
    """A launch waits for the leader's word, and what the leader takes before it comes first."""
    leader, follower = in_a_term()
    follower.handle(run(6, 1, results=650))
    assert follower.enqueued == []
    leader.handle(handed(600, 1))
    leader.handle(run(6, 600, results=650))
    follower.handle(*leader.log)
    assert follower.core.early.taken.keys() == leader.core.early.taken.keys()
    assert leader.enqueued == ["f(x)", "f(f(x))"]
    assert follower.enqueued == ["f(x)", "f(x)"]


def test_followers_may_go_on_before_the_leader_enqueues() -> None:
    """It may not come back from that before they have."""
    leader, _ = in_a_term()
    leader.handle(run(6, 1), run(7, 1))
    assert leader.log == [Passed(1, 2)]
    leader.handle(END, run(8, 1))
    assert leader.log[1:] == [Passed(1, 3)]


def test_out_of_a_term_nobody_waits_and_nothing_is_written() -> None:
    leader, follower = host_of_two(0), host_of_two(1)
    for host in (leader, follower):
        host.handle(run(5, 1), Drop(1, (500,)))
        assert host.enqueued == ["f(x)"]
    leader.handle(handed(600, 1))
    assert (leader.log, leader.refused) == ([], [600])


def test_a_follower_takes_no_calls() -> None:
    _, follower = in_a_term()
    follower.handle(handed(600, 1))
    assert (follower.refused, follower.allowed) == ([600], [])


def test_an_upload_counts_once_a_launch_has_taken_it() -> None:
    """Its part on another host may not be there: one that is sent has been reported by all."""
    leader, _ = in_a_term()
    assert leader.store.add(1, 2, "y")
    leader.handle(handed(600, 2))
    assert leader.refused == [600]
    leader.handle(run(6, 2), handed(700, 2))
    assert leader.refused == [600]
    assert leader.enqueued == ["f(y)", "f(y)"]


@pytest.mark.parametrize("results", [600, -3])
def test_what_follows_a_value_on_another_host_is_left_to_the_scheduler(results: int) -> None:
    leader, _ = in_a_term()
    leader.handle(handed(results, 1, tenant="" if results < 0 else MARK))
    assert (leader.enqueued, leader.refused) == ((["f(x)"] if results > 0 else []), [])


def test_calls_of_programs_whose_hosts_wait_for_each_other_are_left_to_the_scheduler() -> None:
    leader, sketch = in_a_term()[0], Sketch()
    first, second = sketch.slice("0.0"), sketch.slice("1.0")
    here = sketch.call("f", sketch.argument(first), slice=first)
    leader.program(2, sketch, sketch.call("g", here, slice=second), here)
    leader.handle(run(6, 1, program=2), handed(700, 1, program=2))
    assert leader.refused == [700]


def test_a_follower_ends_that_cannot_begin_what_the_leader_has_begun() -> None:
    _, follower = in_a_term()
    follower.handle(Led(1, 0, 1, IslandLaunch(-1, 1, 77, (1,), 600)))
    assert "program 77" in follower.ends


def test_a_leader_says_so_while_launches_are_waited_for() -> None:
    """Early ones count: their clients wait, or would not have handed them over."""
    leader = host_of_two(0)
    leader.handle(run(5, 1), TERM)
    for k in range(WAITED):
        leader.handle(handed(600 + k, 1))
    assert [one.leads for one in leader.messages if isinstance(one, Heartbeat)] == [True]
    leader.handle(*(run(1000 + k, 1) for k in range(2 * WAITED)))
    assert [one.leads for one in leader.messages if isinstance(one, Heartbeat)] == [True, False]


def test_launches_that_never_begin_early_are_no_reason_to_lead() -> None:
    """Each of a training's steps takes the memory of the one before, and somebody waits for its loss."""
    leader = host_of_two(0)
    for k in range(2 * WAITED):
        leader.store.when_present(1, 2000 + k, lambda later: None)
        leader.handle(run(20 + k, 1, results=2000 + k))
    assert leader.core.leads
    sketch = Sketch()
    both = sketch.slice("0.0", "1.0")
    leader.program(2, sketch, sketch.call("step", sketch.argument(both), slice=both, donated=(0,)))
    for k in range(2 * WAITED):
        leader.store.put(1, 3, "state")
        leader.store.when_present(1, 3000 + k, lambda later: None)
        leader.handle(run(60 + k, 3, results=3000 + k, program=2))
    assert not leader.core.leads


def test_a_leader_without_links_says_nothing() -> None:
    leader = Leader(Journal())
    for _ in range(WAITED):
        assert not leader.completed(True)
    leader.linked = True
    assert leader.leads
    assert [leader.completed(False) for _ in range(WAITED - NOT_WAITED)][-1]


def test_a_session_is_said_to_a_successor_of_which_a_host_has_begun_something_and_holds_nothing() -> None:
    """Else nobody would tell it that the session has ended."""
    sketch = Sketch()
    here = sketch.slice("0.0")
    follower = host_of_two(1)
    follower.program(2, sketch, sketch.call("f", sketch.argument(here), slice=here))
    led = Led(1, 0, 0, IslandLaunch(-1, 2, 2, (1,), 600))
    follower.handle(TERM, led, LogClosed(), SchedulerFound(), CatchUp(0, (), 1))
    assert follower.holds is not None
    assert follower.holds.buffers[2] == ()


def test_a_follower_has_caught_up_before_it_hears_what_its_scheduler_says_next() -> None:
    """
    1. What it lacks has two programs, each with a launch, and waits for the end of the leader's log.
    2. Behind that the scheduler ends these launches: an end that came before one of them would count in its place.
    """
    follower, sketch = Host(multi_host=True, host=1), Sketch()
    there = sketch.slice("0.0")
    follower.plan = sketch.planned(sketch.call("f", sketch.argument(there), slice=there)).plans[0]
    programs = [Program(number, b"", {}) for number in (1, 2)]
    launches = [IslandLaunch(number, 1, number, (1,), 0) for number in (1, 2)]
    ended = Abort(((1, 1), (2, 2)), Failure("HostLost", "its island's scheduler ended"))
    lacked = CatchUp(0, (programs[0], launches[0], programs[1], launches[1]), 1)
    follower.handle(SchedulerFound(), lacked, ended)
    assert follower.watched == []
    follower.handle(LogClosed())
    assert [sequence for sequence, _ in follower.watched] == [1, 2]
    assert list(follower.core.journal.last) == [programs[0], launches[0], programs[1], launches[1], ended]


# --- any order of arrival ---------------------------------------------------------------------------------------------


class Island:
    """A leader and a follower with what they have handled, as far as it has a place in their order."""

    def __init__(self) -> None:
        self.journals = Journal(), Journal()
        self.leader, self.follower = Leader(self.journals[0]), Follower(self.journals[1])
        self.leader.linked = True
        self.done: tuple[list[Any], list[Any]] = [], []
        self.log: deque[Message] = deque()
        self.led = 0

    def _note(self, place: int, event: Any) -> None:
        if isinstance(event, Led):
            self.done[place].append(event.launch.sequence)
        elif isinstance(event, IslandLaunch):
            self.journals[place].count += 1
            self.done[place].append(event.sequence)

    def lead(self, *batch: Any) -> None:
        """The leader handles a batch of its scheduler."""
        self.log.extend(one.entry for one in self.leader.announce(batch))  # type: ignore[union-attr]
        for message in batch:
            self._note(0, message)

    def take_early(self) -> None:
        self.led += 1
        launch = IslandLaunch(-self.led, 1, 1, (), 0)
        self.log.append(self.leader.led(launch).entry)  # type: ignore[union-attr]
        self._note(0, Led(0, 0, 0, launch))

    def follow(self, event: Any) -> None:
        if self.follower.lets_pass(event):
            self._note(1, event)
            return
        found = self.follower.take(event)
        while found is not None:
            if isinstance(found, CatchUp):
                self.catch_up(found)
            else:
                self._note(1, found)
            found = self.follower.take(Next())

    def catch_up(self, message: CatchUp) -> None:
        count = message.first
        for one in message.messages:
            count += is_counted(one)
            if count > self.journals[1].count:
                self._note(1, one)
                while (led := self.follower.next_late()) is not None:
                    self._note(1, led)


MESSAGES = st.lists(st.sampled_from(["launch", "drop", "term", "end", "early", "early"]), max_size=30)


def messages(drawn: list[str]) -> list[Any]:
    """Messages of a scheduler, with "early" where the leader takes a call, which it does in terms alone."""
    made: list[Any] = []
    term = terms = sequence = 0
    for one in drawn:
        if one == "term" and not term:
            term = terms = terms + 1
            made.append(AllowEarly("m", term))
        elif one == "end" and term:
            term = 0
            made.append(AllowEarly(""))
        elif one == "launch":
            sequence += 1
            made.append(IslandLaunch(sequence, 1, 1, (), 0))
        elif one == "drop":
            made.append(Drop(1, (1,)))
        elif one == "early" and term:
            made.append(one)
    return made


def lead_all(island: Island, story: list[Any], split: st.DataObject) -> None:
    """The leader handles messages in batches as they come, and takes calls between."""
    batch: list[Any] = []
    for one in story:
        if one == "early":
            island.lead(*batch)
            batch.clear()
            island.take_early()
        else:
            batch.append(one)
            if split.draw(st.booleans()):
                island.lead(*batch)
                batch.clear()
    island.lead(*batch)


def follow_all(island: Island, coming: list[Any], order: st.DataObject) -> None:
    """The follower hears its scheduler and the leader's log, either first."""
    left = deque(coming)
    while left or island.log:
        scheduler_first = not island.log or (bool(left) and order.draw(st.booleans()))
        source: deque[Any] = left if scheduler_first else island.log
        island.follow(source.popleft())


@given(MESSAGES, st.data())
def test_a_follower_does_all_in_the_order_of_the_leader(drawn: list[str], data: st.DataObject) -> None:
    island, story = Island(), messages(drawn)
    lead_all(island, story, data)
    follow_all(island, [one for one in story if one != "early"], data)
    assert island.done[1] == island.done[0]


@given(MESSAGES, st.data())
def test_hosts_whose_scheduler_died_come_to_the_same_order(drawn: list[str], data: st.DataObject) -> None:
    """
    1. The scheduler dies; the leader has heard the beginning of what it said, the follower another beginning of it.
    2. Each finds a successor, or that and another one behind it, since it dies as well. The last one has them catch up
       with each other once both have said what they have heard.
    3. It begins a term.
    """
    island, story = Island(), messages(drawn)
    said = [one for one in story if one != "early"]
    heard = data.draw(st.integers(0, len(story)))
    mine, theirs = story[:heard], said[: data.draw(st.integers(0, len(said)))]
    lead_all(island, mine, data)
    for _ in range(data.draw(st.integers(1, 2))):
        island.log.extend(one.entry for one in island.leader.close())  # type: ignore[union-attr]
    found = [SchedulerFound()] * data.draw(st.integers(1, 2))
    lacks = [one for one in said if isinstance(one, IslandLaunch)]
    count = max(sum(isinstance(one, IslandLaunch) for one in part) for part in (mine, theirs))
    catch_up = CatchUp(0, tuple(lacks[:count]), island.journals[0].closed)
    for one in catch_up.messages[island.journals[0].count :]:
        island._note(0, one)
    after = [AllowEarly("m", 1), "early", IslandLaunch(1000, 1, 1, (), 0), "early"]
    lead_all(island, after, data)
    follow_all(island, [*theirs, *found, catch_up, *(one for one in after if one != "early")], data)
    assert island.done[1] == island.done[0]
    assert island.journals[1].closed == island.journals[0].closed


def test_a_scheduler_that_dies_before_the_links_stand_closes_nothing() -> None:
    leader, follower = Leader(Journal()), Host(multi_host=True, host=1)
    assert leader.close() == []
    follower.handle(SchedulerFound(), CatchUp(0, ()))
    assert follower.holds is not None


def test_the_successor_of_a_controller_hears_of_nothing_that_was_taken_early() -> None:
    leader, follower = in_a_term()
    leader.handle(handed(600, 1))
    leader.handle(Recount())
    follower.handle(Recount(), *leader.log)
    for host in (leader, follower):
        assert host.confirmed == [(-1, 0)]
        assert host.core.early.taken == {}


def test_a_log_is_closed_once_for_each_scheduler() -> None:
    leader, _ = in_a_term()
    leader.handle(SchedulerFound())
    assert leader.log == [LogClosed()]
    assert leader.holds is not None
    assert leader.holds.heard is not None
    assert leader.holds.heard.closed == 1
    leader.handle(handed(600, 1))
    assert leader.refused == [600]


def test_bytes_that_a_call_carries_go_to_all_hosts() -> None:
    leader, follower = in_a_term()
    message = LaunchEarly(1, (0,), 600, ((0, b"abcdefgh"),))
    leader.handle(type(handed(1))(1, tenant_mark(""), message))
    follower.handle(*leader.log)
    assert follower.enqueued == leader.enqueued
