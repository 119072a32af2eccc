"""Launches that carry some of their arguments, as the controller sees them."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.controller.state import Send
from pathways_ray.controller.tenants import Quota, Tenant
from pathways_ray.errors import Failure
from pathways_ray.limits import MAX_INLINE, MAX_INLINE_BYTES, MIN_BUFFER_BYTES
from pathways_ray.transport.messages import (
    TO_CONTROLLER,
    EarlyLaunch,
    InlineLaunch,
    IslandLaunch,
    Launch,
    PrioritizedIslandLaunch,
    PrioritizedLaunch,
    encode,
)
from tests.unit.controller.harness import Harness, completed, failure_of, program_over, to_island
from tests.unit.helpers import VECTOR

VALUE = bytes(range(VECTOR.nbytes))


def front_with(*slices: int, arguments: int = 2, **options: Any) -> Harness:
    """A session with a program on these slices; its arguments lie on the first."""
    front = Harness(**options)
    front.register(program_over(*slices, arguments=arguments), 1)
    return front


def call(front: Harness, message: Launch) -> list[Send]:
    return front.checked(front.launches.admission.call(front.launches.sessions[1], message))


def test_a_launch_goes_with_what_it_carries_and_makes_no_buffer_of_it() -> None:
    front = front_with(1)
    front.put(1)
    (sent,) = to_island(call(front, InlineLaunch(7, 1, (1, 0), 2, ((1, VALUE),))), 0)
    assert isinstance(sent, IslandLaunch)
    assert (sent.arguments, sent.inline) == ((1, 0), ((1, VALUE),))
    assert front.done(0, 1) == completed(7)
    assert front.buffers() == {1, 2}


def test_it_may_have_a_priority() -> None:
    front = front_with(1, arguments=1)
    (sent,) = to_island(call(front, PrioritizedLaunch(7, 1, (0,), 2, 5, ((0, VALUE),))), 0)
    assert isinstance(sent, PrioritizedIslandLaunch)
    assert sent.launch.inline == ((0, VALUE),)


def test_the_first_gang_of_a_launch_has_it_where_gangs_go_one_by_one() -> None:
    front = front_with(1, 2, arguments=1, parallel=False)
    commands = call(front, InlineLaunch(7, 1, (0,), 2, ((0, VALUE),)))
    assert [message.inline for island in (0, 1) for message in to_island(commands, island)] == [((0, VALUE),)] * 2


@pytest.mark.parametrize(
    ("arguments", "inline", "text"),
    [
        pytest.param((0, 0), ((0, VALUE),), "and does not name arguments [0, 1]", id="one too few"),
        pytest.param(
            (1, 0), ((0, VALUE), (1, VALUE)), "carries arguments [0, 1], and does not name", id="one too many"
        ),
        pytest.param((1, 0), ((0, VALUE),), "carries arguments [0], and does not name", id="of another place"),
        pytest.param((1, 0), ((1, VALUE), (1, VALUE)), "carries arguments [1, 1]", id="twice"),
        pytest.param((0, 0), ((1, VALUE), (0, VALUE)), "carries arguments [1, 0]", id="out of order"),
        pytest.param((1, 0), ((5, VALUE),), "carries arguments [5]", id="of no place"),
        pytest.param((1, 0), ((1, VALUE[:-1]),), "carries 63 bytes as argument 1, which is uint64[8]: 64", id="short"),
        pytest.param((1, 0), ((1, VALUE * 2),), "carries 128 bytes as argument 1", id="of a wider dtype"),
        pytest.param((1, 0), ((1, b""),), "carries 0 bytes as argument 1", id="empty"),
        pytest.param((0,), ((0, VALUE),), "takes 2 buffers, the launch gives 1", id="of too few arguments"),
        pytest.param((1, 0), (), "buffer 0 of this session does not exist", id="that does not come"),
        pytest.param((1, 0), ((1, bytes(MAX_INLINE_BYTES + 1)),), f"{MAX_INLINE_BYTES} are the limit", id="too big"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, inline: Any, text: str) -> None:
    front = front_with(1)
    front.put(1)
    failure = failure_of(call(front, InlineLaunch(7, 1, arguments, 2, inline)))
    assert text in failure.message
    assert front.launches.in_flight == {}
    assert front.launches.sessions[1].charged_bytes == MIN_BUFFER_BYTES


def test_the_limit_is_for_all_that_a_launch_carries_and_holds_before_it_has_to_wait() -> None:
    front = Harness()
    front.register(program_over(1, arguments=2), 1, ready=False)
    half = bytes(MAX_INLINE_BYTES // 2 + 1)
    assert failure_of(call(front, InlineLaunch(7, 1, (0, 0), 2, ((0, half), (1, half))))).kind == "TooLarge"
    assert call(front, InlineLaunch(8, 1, (0, 0), 3, ((0, VALUE), (1, VALUE)))) == []
    assert front.launches.backlog(1) == 1


def test_a_message_carries_no_more_values_than_the_limit() -> None:
    many = tuple((k, b"") for k in range(MAX_INLINE + 1))
    with pytest.raises(Exception, match="refused"):
        TO_CONTROLLER.decode(encode(InlineLaunch(1, 1, (0,) * len(many), 1, many)))


def test_what_is_donated_has_to_be_a_buffer() -> None:
    front = front_with(1, arguments=1)
    front.launches.sessions[1].programs[1].donated = (0,)
    failure = failure_of(call(front, InlineLaunch(7, 1, (0,), 2, ((0, VALUE),))))
    assert "buffers alone are donated" in failure.message


def test_an_early_launch_may_leave_out_what_its_host_has() -> None:
    front = front_with(1)
    front.put(1)
    (sent,) = to_island(call(front, EarlyLaunch(7, 1, (1, 0), 2)), 0)
    assert isinstance(sent, IslandLaunch)
    assert (sent.arguments, sent.inline) == ((1, 0), ())
    assert (
        "does not name arguments [0, 1]" in failure_of(call(front, EarlyLaunch(8, 1, (0, 0), 3, ((1, VALUE),)))).message
    )
    assert "buffer 5 of this session" in failure_of(call(front, EarlyLaunch(9, 1, (5, 0), 4))).message


def test_what_is_donated_is_not_left_out() -> None:
    front = front_with(1, arguments=1)
    front.launches.sessions[1].programs[1].donated = (0,)
    assert "buffers alone are donated" in failure_of(call(front, EarlyLaunch(7, 1, (0,), 2))).message


def test_no_buffer_has_the_number_of_what_is_carried() -> None:
    front = front_with(1, arguments=1)
    assert "number 0" in failure_of(call(front, InlineLaunch(7, 1, (0,), 0, ((0, VALUE),)))).message


def test_it_counts_against_the_quota_until_the_launch_is_over() -> None:
    front = front_with(1, arguments=1)
    session = front.launches.sessions[1]
    session.tenant = Tenant("", quota=Quota(device_bytes=3 * MIN_BUFFER_BYTES))
    for number, ends in ((1, front.done), (2, front.failed)):
        call(front, InlineLaunch(number, 1, (0,), 10 + number, ((0, VALUE),)))
        assert session.charged_bytes == 2 * MIN_BUFFER_BYTES
        refused = failure_of(call(front, InlineLaunch(20 + number, 1, (0,), 90, ((0, VALUE),))))
        assert refused.kind == "QuotaExceeded"
        assert f"asks for {2 * MIN_BUFFER_BYTES} more" in refused.message
        ends(0, number)
        front.free(10 + number)
        assert session.charged_bytes == 0


def test_launches_that_wait_have_nothing_to_do_with_what_others_carry() -> None:
    """One whose host is away lets one on another island go, though both name the argument 0."""
    front = Harness()
    front.register(program_over(1, arguments=1), 1)
    front.register(program_over(2, key=2, arguments=1), 2)
    front.down(0)
    assert to_island(call(front, InlineLaunch(1, 1, (0,), 11, ((0, VALUE),))), 0) == []
    assert to_island(call(front, InlineLaunch(2, 2, (0,), 12, ((0, VALUE),))), 1, IslandLaunch) != []


def test_a_failure_of_such_a_launch_is_its_own() -> None:
    front = front_with(1, arguments=1)
    call(front, InlineLaunch(7, 1, (0,), 2, ((0, VALUE),)))
    assert failure_of(front.failed(0, 1, Failure("ExecutionError", "boom"))).message == "boom"
