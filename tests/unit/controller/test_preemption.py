"""Who gives way under the policy "preempt", and who comes back, with sessions whose memory is written down here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pathways_ray.controller.events import StreamOpened, Tick
from pathways_ray.controller.memory import Memory, Waiting
from pathways_ray.controller.overview import Overview
from pathways_ray.controller.preemption import (
    AGAIN_S,
    GIVE_WAY_LIMIT_S,
    MEMORY_LIMIT_S,
    PATIENCE_S,
    PRESSED_S,
    SAVED_BYTES_S,
    STAY_S,
    TURN_S,
    WORK_LIMIT_S,
    Preemption,
    Way,
)
from pathways_ray.controller.state import SendClient, Session, Tables
from pathways_ray.controller.tenants import Tenant
from pathways_ray.scheduler.policies import Usage
from pathways_ray.transport import messages as wire
from tests.unit.controller.core_harness import CoreHarness, sent
from tests.unit.controller.harness import Harness


class Room(Memory):
    """Pools of 100 bytes; `bytes` are what each session holds in the pool "p", or in one of `pool_of`."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.bytes: dict[int, int] = {}
        self.pool_of: dict[int, str] = {}

    def capacity(self) -> dict[str, int]:
        return {"p": 100, **dict.fromkeys(self.pool_of.values(), 100)}

    def held(self, sessions: Any) -> dict[str, int]:
        found = {"p": 0}
        for one in sessions:
            pool = self.pool_of.get(one.id, "p")
            found[pool] = found.get(pool, 0) + (0 if one.suspended else self.bytes.get(one.id, 0))
        return found


class Story:
    """Sessions of tenants with these priorities, each of which holds 60 bytes, but for the last one, which waits."""

    def __init__(self, *priorities: int) -> None:
        self.tables = Tables()
        self.memory = Room(self.tables)
        self.calls: dict[int, list[str]] = {}
        self.core = Preemption(self.tables, self.memory, lambda number: len(self.calls.get(number, ())))
        self.core.enable()
        self.now = 100.0
        for number, priority in enumerate(priorities):
            tenant = Tenant(f"t{number}", priority=priority)
            self.tables.sessions[number] = Session(number, tenant, Usage(tenant.name))
            self.memory.bytes[number] = 60

    def waits(self, number: int) -> None:
        self.memory.waiting[number] = {1: Waiting(self.now, self.memory.pool_of.get(number, "p"))}

    def starts(self, number: int) -> None:
        self.memory.waits_no_more(number, 1)

    def after(self, seconds: float) -> dict[int, bool]:
        """What clients are told then: `back` for each session."""
        self.now += seconds
        self.tables.now = self.now
        told: dict[int, bool] = {}
        for command in self.core.tick(self.now):
            assert isinstance(command, SendClient)
            assert isinstance(command.message, wire.GiveWay)
            told[command.session] = command.message.back
        return told

    def ignored(self, seconds: float) -> None:
        """Time passes, second by second, in which clients do nothing of what they are told."""
        until = self.now + seconds
        while self.now < until:
            self.after(min(1.0, until - self.now))

    def suspended(self, number: int, suspended: bool = True) -> None:
        session = self.tables.sessions[number]
        session.suspended = session.gives_way = suspended


def test_a_lower_priority_gives_way_soon_and_comes_back_when_there_is_room() -> None:
    """
    1. Tenant 1, of a higher priority, waits for memory: after a moment session 0 is told to give way, once.
    2. While it does, its launches do not wait for memory themselves. It is suspended, and the other one starts.
    3. When that one has ended, session 0 is told to come back, and is there.
    """
    story = Story(0, 5)
    story.waits(1)
    assert story.after(PATIENCE_S / 2) == {}
    assert story.after(PATIENCE_S) == {0: False}
    assert story.memory.let_through == {0}
    assert story.core.to(0) == 1
    assert story.after(0.5) == {}
    story.suspended(0)
    story.starts(1)
    assert story.after(0.5) == {}
    assert story.memory.let_through == set()
    del story.tables.sessions[1]
    assert story.after(0.5) == {0: True}
    story.suspended(0, False)
    assert story.after(0.5) == {}
    story.after(AGAIN_S + 1)
    assert story.core.to(0) == 0
    assert not story.core.giving


@pytest.mark.parametrize(("pool", "asked"), [("q", {2: False}), ("p", {})])
def test_one_that_cannot_come_back_keeps_its_own_room_and_no_other(pool: str, asked: dict[int, bool]) -> None:
    """
    1. Session 0 has given way to session 1, which is asked to in its turn, and has calls under way.
    2. Session 3 waits for memory that session 2 holds, of a lower priority: in another pool, or in that of session 0.
    """
    story = Story(1, 2, 0, 1)
    story.memory.pool_of = {2: pool, 3: pool}
    story.memory.bytes |= {1: 0, 2: 0, 3: 0}
    story.waits(1)
    assert story.after(PATIENCE_S) == {0: False}
    story.suspended(0)
    story.memory.bytes[1] = 60
    story.starts(1)
    story.calls[1] = ["a call"]
    story.after(1)
    assert story.after(TURN_S) == {1: False}
    story.memory.bytes[2] = 60
    story.waits(3)
    assert story.after(PATIENCE_S) == asked


def test_equals_take_turns() -> None:
    story = Story(0, 0)
    story.waits(1)
    assert story.after(TURN_S - 1) == {}
    assert story.after(1) == {0: False}
    story.suspended(0)
    story.starts(1)
    story.after(1)
    assert story.after(TURN_S) == {1: False}, "session 0 has waited for its turn"
    story.suspended(1)
    assert story.after(1) == {0: True}
    story.suspended(0, False)
    story.after(1)
    story.after(AGAIN_S + 1)
    assert set(story.core.giving) == {1}
    assert story.after(TURN_S / 2) == {}
    assert story.after(TURN_S) == {0: False}


def test_a_lower_priority_has_its_turn_too_and_the_higher_one_lets_it_stay_a_while() -> None:
    story = Story(0, 5)
    story.waits(1)
    assert story.after(PATIENCE_S) == {0: False}
    story.suspended(0)
    story.starts(1)
    story.after(1)
    assert story.after(TURN_S) == {1: False}
    story.suspended(1)
    assert story.after(1) == {0: True}
    story.suspended(0, False)
    story.after(1)
    story.after(AGAIN_S + 1)
    assert story.after(STAY_S / 2) == {}
    assert story.after(STAY_S) == {0: False}


def test_of_several_the_lowest_gives_way_and_one_that_holds_nothing_there_does_not() -> None:
    story = Story(3, 1, 2, 0, 9)
    story.memory.bytes[3] = 0
    story.waits(4)
    assert story.after(PATIENCE_S) == {1: False}


@pytest.mark.parametrize("priority", [0, 5])
def test_one_that_does_not_answer_is_told_again_and_has_a_minute(priority: int) -> None:
    """Then it stays, or, to one of a higher priority that still waits, it ends."""
    story = Story(0, priority)
    story.waits(1)
    assert story.after(TURN_S) == {0: False}
    assert story.after(AGAIN_S + 1) == {0: False}
    story.ignored(GIVE_WAY_LIMIT_S - AGAIN_S - 2)
    assert (story.core.to(0), story.core.late) == (1, {})
    story.after(2)
    assert list(story.core.late) == ([0] if priority else [])
    for reason in story.core.late.values():
        assert "session, which has a higher priority" in reason
        assert "t1" not in reason, "its tenant's name is not for this one"
    assert story.core.to(0) == 0
    assert story.memory.let_through == set()


def test_one_that_still_works_or_has_much_to_save_gets_more_time() -> None:
    story = Story(0, 5)
    story.memory.bytes[0] = 10 * SAVED_BYTES_S
    story.waits(1)
    assert story.after(PATIENCE_S) == {0: False}
    story.calls[0] = ["a launch that waits for its compiler"]
    story.ignored(GIVE_WAY_LIMIT_S + 11)
    story.calls[0] = []
    story.ignored(GIVE_WAY_LIMIT_S + 9)
    assert story.core.late == {}, "ten seconds are for what it holds"
    story.after(2)
    assert list(story.core.late) == [0]


def test_one_that_calls_on_has_three_minutes() -> None:
    story = Story(0, 5)
    story.waits(1)
    story.after(PATIENCE_S)
    story.calls[0] = ["a launch"]
    story.ignored(WORK_LIMIT_S)
    assert story.core.late == {}
    story.after(1)
    assert list(story.core.late) == [0]


def test_one_that_holds_much_goes_before_the_launch_that_waits_fails() -> None:
    """Whatever it holds, or says that it will upload: a client that does nothing would keep the other one out."""
    story = Story(0, 5)
    story.memory.bytes[0] = 10_000 * SAVED_BYTES_S
    story.waits(1)
    story.after(PATIENCE_S)
    story.calls[0] = ["a launch"]
    story.ignored(PRESSED_S - PATIENCE_S)
    assert story.core.late == {}
    story.after(1)
    assert list(story.core.late) == [0]


def test_who_gives_way_is_told_to_whom_by_the_operator_alone() -> None:
    front = Harness(sessions=())
    for number, name in ((1, "alice"), (2, "bob"), (3, "alice")):
        front.launches.open_session(number, Tenant(name))
    first, second, third = front.launches.sessions.values()
    front.launches.preemption.ask(first, second, 1.0)
    seen = Overview(front.launches).made(frozenset({1}))["events"][0]
    assert (seen["event"], seen["detail"]) == ("session gives way", "")
    told = "to session 2 of tenant bob, which waits for memory"
    assert Overview(front.launches).made()["events"][0]["detail"] == told
    assert front.launches.story.lifecycle[-1].detail == told
    front.launches.preemption.ask(first, third, 2.0)
    assert (
        Overview(front.launches).made(frozenset({1}))["events"][0]["detail"].startswith("to session 3 of tenant alice")
    )


def test_one_that_is_asked_late_has_its_minute_all_the_same() -> None:
    story = Story(0, 5)
    story.memory.bytes[0] = 10_000 * SAVED_BYTES_S
    story.waits(1)
    story.now += PRESSED_S - 10
    story.after(0)
    story.ignored(GIVE_WAY_LIMIT_S)
    assert story.core.late == {}
    story.after(1)
    assert list(story.core.late) == [0]
    assert PRESSED_S - 10 + GIVE_WAY_LIMIT_S + 1 < MEMORY_LIMIT_S


@pytest.mark.parametrize("why", ["the other has room", "it is suspended", "it leaves an island", "it was asked once"])
def test_one_ends_only_where_that_is_of_use(why: str) -> None:
    story = Story(0, 5)
    story.waits(1)
    story.after(PATIENCE_S)
    if why == "the other has room":
        story.starts(1)
    elif why == "it is suspended":
        story.suspended(0)
    elif why == "it leaves an island":
        story.tables.sessions[0].vacates = True
    if why == "it was asked once":
        story.after(2 * WORK_LIMIT_S)  # the controller stood still
        assert story.core.late == {}
        return
    for _ in range(int(WORK_LIMIT_S)):
        story.after(2)
        assert story.core.late == {}


def test_one_that_could_not_be_resumed_is_asked_again() -> None:
    story = Story(0, 5)
    story.waits(1)
    story.after(PATIENCE_S)
    story.suspended(0)
    story.starts(1)
    story.after(1)
    story.memory.bytes[1] = 10
    assert story.after(1) == {0: True}
    story.suspended(0, False)
    assert story.after(1) == {}
    story.suspended(0)
    assert story.after(1) == {0: True}


@pytest.mark.parametrize("ends", [0, 1])
def test_sessions_that_end_are_forgotten(ends: int) -> None:
    story = Story(0, 5)
    story.waits(1)
    story.after(PATIENCE_S)
    story.suspended(0)
    del story.tables.sessions[ends]
    story.memory.waiting.clear()
    told: Mapping[int, bool] = story.after(1)
    assert told == ({0: True} if ends else {})
    assert not story.memory.let_through


def test_other_policies_have_nobody_give_way() -> None:
    story = Story(0, 5)
    story.core.enabled = False
    story.waits(1)
    assert story.after(10 * TURN_S) == {}


def test_one_that_its_user_suspends_meanwhile_is_left_alone() -> None:
    """Its room is not kept for it, and it is not told to come back."""
    story = Story(0, 5)
    story.waits(1)
    assert story.after(PATIENCE_S) == {0: False}
    story.tables.sessions[0].suspended = True
    assert story.after(1) == {}
    assert not story.core.giving
    story.starts(1)
    assert story.after(AGAIN_S + 1) == {}


def test_one_that_gives_way_after_its_time_is_over_comes_back_all_the_same() -> None:
    story = Story(0, 5)
    story.waits(1)
    story.after(PATIENCE_S)
    story.memory.waiting.clear()
    story.ignored(GIVE_WAY_LIMIT_S + 1)
    assert not story.core.giving
    story.suspended(0)
    assert story.after(1) == {0: True}
    story.suspended(0, False)
    story.after(1)
    story.after(AGAIN_S + 1)
    assert not story.core.giving


def test_two_that_wait_for_each_other_do_not_wait_for_a_turn() -> None:
    """Each holds what the other needs: one of them gives way, and only one."""
    story = Story(0, 0)
    story.waits(0)
    story.waits(1)
    assert len(story.after(PATIENCE_S)) == 1
    assert story.after(PATIENCE_S) == {}


def test_one_comes_back_where_there_is_room_for_its_launches_too() -> None:
    """It held 40 of 100 bytes, and 80 with its launch; the other one holds 30, and 50 with its own."""
    story = Story(0, 5)
    story.memory.bytes = {0: 40, 1: 30}
    story.memory.peaks = {0: {"p": 80}, 1: {"p": 50}}
    story.waits(1)
    assert story.after(PATIENCE_S) == {0: False}
    story.suspended(0)
    story.starts(1)
    assert story.after(1) == {}
    story.memory.peaks[1] = {"p": 20}
    story.memory.bytes[1] = 20
    assert story.after(1) == {0: True}


def test_one_that_asked_for_more_than_there_is_keeps_others_away_for_no_longer_than_another() -> None:
    """Its launch failed, since it can never fit. What it would have taken is not kept for it when it comes back."""
    story = Story(0, 5)
    story.memory.peaks = {0: {"p": 1000 * SAVED_BYTES_S}}
    story.waits(1)
    assert story.after(PATIENCE_S) == {0: False}
    assert story.core.giving[0].room == {"p": 100}


def test_one_that_does_not_come_back_keeps_no_other_one_away() -> None:
    story = Story(0, 0)
    for number in (0, 1):
        story.suspended(number)
        story.core.giving[number] = Way(9, story.now + number, {"p": 60}, story.now, away=True)
    assert story.after(1) == {0: True}
    assert story.after(GIVE_WAY_LIMIT_S) == {0: True}, "told again; its room is kept"
    assert story.after(1) == {1: True}


@pytest.mark.parametrize("number", [1, 9])
def test_one_that_was_late_at_another_time_than_a_tick_ends_with_the_next(number: int) -> None:
    """Time passes where an island is removed as well. A session that has ended by itself meanwhile is none."""
    core = CoreHarness()
    core.core.launches.preemption.enable()
    core.open_session(Tenant("t"))
    core.handle(StreamOpened(1))
    core.core.launches.preemption.late[number] = "it has not given way"
    core.handle(Tick())
    assert list(core.core.launches.sessions) == ([] if number == 1 else [1])
    assert core.core.launches.preemption.late == {}


def test_who_ends_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreHarness()
    for number in (1, 2):
        core.open_session(Tenant(f"t{number}"))
        core.handle(StreamOpened(number))
    preemption = core.core.launches.preemption
    monkeypatch.setattr(preemption, "tick", lambda now: preemption.late.update({1: "it has not given way"}) or [])
    commands = core.handle(Tick())
    assert [one for one in sent(commands) if isinstance(one, wire.SessionEnded)] == [
        wire.SessionEnded("it has not given way")
    ]
    assert list(core.core.launches.sessions) == [2]
