"""Small arrays are dropped behind the launches of their batch, as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.controller.late_drops import MAX_LATE, SMALL_BYTES, with_drops_joined
from pathways_ray.ir.types import ArrayType
from pathways_ray.transport.messages import Drop, DropSession, Free, IslandLaunch, LateDrop, Message, Put, encode
from tests.unit.controller.harness import Harness

NUMBERS = st.lists(st.integers(1, 30), min_size=1, max_size=3).map(tuple)
SESSIONS = st.integers(1, 3)
LAUNCHES = st.builds(IslandLaunch, st.integers(1, 99), SESSIONS, st.just(1), st.just(()), st.integers(-5, 40))
DROPS = st.builds(Drop, SESSIONS, NUMBERS)
LATE = st.builds(LateDrop, SESSIONS, NUMBERS)
OTHERS = st.builds(DropSession, SESSIONS)


def launch(number: int, session: int = 1) -> IslandLaunch:
    """It takes what the one before has made, and makes the array of the same number."""
    return IslandLaunch(number, session, 1, (number - 1,), number)


def held(messages: list[Message]) -> list[set[tuple[int, int]]]:
    """What a host holds behind each message but drops, if each launch makes one array."""
    arrays: set[tuple[int, int]] = set()
    found = []
    for message in messages:
        match message:
            case Drop(session, buffers):
                arrays.difference_update((session, buffer) for buffer in buffers)
                continue
            case IslandLaunch():
                arrays.add((message.session, message.results))
            case DropSession(session):
                arrays = {one for one in arrays if one[0] != session}
        found.append(set(arrays))
    return [*found, arrays]


@given(st.lists(st.one_of(LAUNCHES, DROPS, LATE, OTHERS), max_size=200))
def test_hosts_hold_the_same_in_the_end_and_no_less_before(messages: list[Message]) -> None:
    joined = with_drops_joined(messages)
    kept = [message for message in messages if not isinstance(message, Drop)]
    assert [message for message in joined if not isinstance(message, Drop)] == kept
    before, after = held(messages), held(joined)
    assert after[-1] == before[-1]
    assert all(earlier <= later for earlier, later in zip(before, after, strict=True))


def test_a_stream_of_calls_that_drop_what_they_take_has_one_drop() -> None:
    messages: list[Message] = []
    for number in range(1, 20):
        messages += [launch(number, 1), launch(number, 2), LateDrop(1, (number - 1,)), LateDrop(2, (number - 1,))]
    *launches, one, two = with_drops_joined(messages)
    assert launches == [message for message in messages if isinstance(message, IslandLaunch)]
    assert [one, two] == [Drop(1, tuple(range(19))), Drop(2, tuple(range(19)))]


@pytest.mark.parametrize("other", [DropSession(1), Drop(1, (3,)), launch(7), launch(6)], ids=repr)
def test_nothing_else_is_passed_nor_a_launch_that_is_given_the_number_again(other: Message) -> None:
    messages = [launch(7), LateDrop(1, (6,)), LateDrop(1, (7,)), other, launch(8)]
    assert with_drops_joined(messages) == [launch(7), Drop(1, (6, 7)), other, launch(8)]


def test_a_limited_number_of_arrays_waits() -> None:
    messages: list[Message] = [LateDrop(1, tuple(range(MAX_LATE))), LateDrop(1, (MAX_LATE,)), launch(MAX_LATE + 1)]
    assert with_drops_joined(messages) == [Drop(1, tuple(range(MAX_LATE))), messages[-1], Drop(1, (MAX_LATE,))]
    several = [LateDrop(1, (1,)), LateDrop(1, tuple(range(2, 2 * MAX_LATE))), launch(2 * MAX_LATE)]
    assert with_drops_joined(several) == [Drop(1, tuple(range(1, 2 * MAX_LATE))), several[-1]]


def test_a_late_drop_is_a_drop_on_the_wire() -> None:
    assert encode(LateDrop(1, (3,))) == encode(Drop(1, (3,)))


@pytest.mark.parametrize(("elements", "kind"), [(SMALL_BYTES // 8, LateDrop), (SMALL_BYTES // 8 + 1, Drop)])
def test_what_clients_free_is_dropped_late_where_it_is_small(elements: int, kind: type[Drop]) -> None:
    """It lies on two devices, each of which has all of it."""
    h = Harness()
    number = 1
    for kinds in ((LateDrop,), (kind,), (LateDrop, kind)):
        freed = tuple(range(number, number := number + len(kinds)))
        for buffer, each in zip(freed, kinds, strict=True):
            size = ArrayType((8 if each is LateDrop else elements,), "float32")
            h.take(Put(buffer, 1, size, (), {}))
            h.stored(0, buffer, kind=size)
        (command,) = h.take(Free(freed))
        assert isinstance(command.message, Drop)
        assert (type(command.message), command.message.buffers) == (kinds[-1], freed)
