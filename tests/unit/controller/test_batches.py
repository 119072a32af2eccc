"""Uploads that come together, and what hosts say of them: each has the effect that it would have alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import Quota, Tenant
from pathways_ray.ir.types import ArrayType
from pathways_ray.limits import MIN_BUFFER_BYTES
from pathways_ray.transport.messages import (
    BuffersLost,
    Drop,
    Free,
    HeldSlices,
    Holds,
    HostDown,
    IslandLaunch,
    Launch,
    LaunchFailed,
    Message,
    Put,
    Stored,
)
from tests.unit.controller.core_harness import CoreHarness, sent
from tests.unit.controller.test_turns import launches, say, with_sessions
from tests.unit.helpers import VECTOR

BIG = ArrayType((1024,), "float32")


def put(buffer: int, kind: ArrayType = VECTOR, epochs: dict[int, int] | None = None) -> Put:
    return Put(buffer, 2, kind, (), {2: 1} if epochs is None else epochs)


def stored(buffer: int, kind: ArrayType = VECTOR, session: int = 1) -> Stored:
    return Stored(2, session, buffer, 2, kind, ())


def of_kind(kind: type[Message], commands: list[Any]) -> list[Any]:
    return [message for message in sent(commands) if isinstance(message, kind)]


def buffers(core: CoreHarness) -> set[int]:
    return set(core.core.launches.sessions[1].buffers)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (put(3), "its number cannot be used again"),
        (put(5, epochs={2: 0}), "buffer 5 went to host 2 just before that was lost"),
        (put(5, epochs={3: 1}), "buffer 5 went to where slice 2 was"),
        (put(5, BIG), "can never fit"),
        (put(5, ArrayType((4,), "float33")), ""),
        (Put(5, 2, VECTOR, (("nowhere",),), {2: 1}), ""),
        (Put(5, 99, VECTOR, (), {2: 1}), ""),
    ],
)
def test_some_of_several_uploads_are_refused_and_the_others_are_entered(refused: Put, why: str) -> None:
    """
    1. Buffers 3 and 4 were dropped on their way, so their numbers are spent. A batch has five uploads, of which two
       that are alike cannot be.
    2. Its client hears of these alone, where it would not see for itself, and their hosts drop them.
    3. Once the others have come, launches take them; what comes of the refused ones is dropped.
    """
    core = with_sessions(1)
    core.core.launches.hosts[2].memory = BIG.nbytes - 1
    say(core, 1, put(3), put(4), Free((3, 4)))
    also = msgspec.structs.replace(refused, buffer=refused.buffer + 1)
    commands = say(core, 1, put(10), put(11), refused, also, put(12))
    assert buffers(core) == {1, 10, 11, 12}
    lost, expected = of_kind(BuffersLost, commands), [(refused.buffer,), (also.buffer,)] if why else []
    assert [one.buffers for one in lost] == expected
    assert not why or why in lost[0].failure.message
    assert of_kind(Drop, [one for one in commands if isinstance(one, SendIsland) and one.island == 1]) == [
        Drop(1, numbers) for numbers in expected
    ]
    commands = core.from_island(1, *map(stored, (10, 11, refused.buffer, also.buffer, 12)))
    assert [message.buffers for message in of_kind(Drop, commands)] == expected
    made = say(core, 1, *(Launch(number, 1, (number,), 100 + number) for number in (10, 11, 12)))
    assert launches(made) == [(1, 110), (1, 111), (1, 112)]


def test_the_limits_of_a_session_are_reached_amid_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tells of its limit of buffers. Where bytes are limited, uploads of one kind are counted as well."""
    core = with_sessions(1)
    with monkeypatch.context() as patched:
        patched.setattr("pathways_ray.controller.quotas.MAX_SESSION_BUFFERS", 3)
        (lost,) = of_kind(BuffersLost, say(core, 1, *map(put, (2, 3, 4))))
    assert (buffers(core), lost.buffers) == ({1, 2, 3}, (4,))
    assert f"asks for 1 more for {VECTOR} to put" in lost.failure.message
    core.core.launches.sessions[1].tenant = Tenant("alice", quota=Quota(device_bytes=5 * MIN_BUFFER_BYTES))
    (lost,) = of_kind(BuffersLost, say(core, 1, *map(put, (5, 6, 7))))
    assert (buffers(core), lost.buffers) == ({1, 2, 3, 5, 6}, (7,))
    assert f"more for {VECTOR} to put" in lost.failure.message


def test_uploads_of_a_batch_wait_behind_a_launch_that_waits() -> None:
    core = with_sessions(1)
    admission = core.core.launches.admission
    most, admission.max_in_flight = admission.max_in_flight, 0
    assert launches(say(core, 1, put(2), Launch(1, 1, (1,), 10), put(3), put(4))) == []
    assert buffers(core) == {1, 2}
    assert admission.backlogs[1].uploads() == {3, 4}
    admission.max_in_flight = most
    assert launches(core.from_island(1, stored(2), stored(3))) == [(1, 10)]
    assert buffers(core) == {1, 2, 3, 4, 10}
    assert set(core.core.launches.sessions[1].arriving) == {4}


def test_what_hosts_report_together_counts_for_each_upload() -> None:
    """
    1. Three launches wait for an upload each. One was freed on its way, and one is yet to be named.
    2. A batch reports them, one as something else than what was said, and one of a session that has ended.
    3. The launches with the others go in the order of their calls, that one fails, and what was freed is dropped.
    """
    core = with_sessions(2)
    core.core.launches.close_session(2)
    waiting = [Launch(number, 1, (number,), 100 + number) for number in (10, 11, 12)]
    assert of_kind(IslandLaunch, say(core, 1, put(9), *map(put, (10, 11, 12)), Free((9,)), *waiting)) == []
    commands = core.from_island(
        1, stored(12), stored(9), stored(11, BIG), stored(10, session=2), stored(13), stored(10)
    )
    assert launches(commands) == [(1, 110), (1, 112)]
    assert [message.launch for message in of_kind(LaunchFailed, commands)] == [11]
    assert [message.buffers for message in of_kind(Drop, commands)] == [(9,), (11,)]
    assert launches(say(core, 1, put(13), Launch(13, 1, (13,), 113))) == [(1, 113)], "its report came before"


def test_a_report_beside_other_words_of_hosts_has_its_place_among_them() -> None:
    """A launch that waits for it goes before the host is lost, and fails with that."""
    core = with_sessions(1)
    assert launches(say(core, 1, put(2), Launch(1, 1, (2,), 10))) == []
    commands = core.from_island(1, stored(2), stored(7), HostDown(2, 1, "killed"))
    assert [type(one) for one in sent(commands) if isinstance(one, IslandLaunch | LaunchFailed)] == [
        IslandLaunch,
        LaunchFailed,
    ]


def test_another_controller_notes_all_that_comes_for_a_session_that_may_come_back() -> None:
    core = CoreHarness(hosts=True)
    core.core.take_over(HeldSlices())
    assert core.core.takeover is not None
    core.core.takeover.held[2] = Holds({}, ())
    core.from_island(1, stored(4, session=77), stored(5, session=77))
    assert [one.buffer for one in core.core.takeover.arrived[2, 77]] == [4, 5]
