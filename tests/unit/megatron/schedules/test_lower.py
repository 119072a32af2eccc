"""Messages and reductions, derived: all that is sent is received, and lists that run without messages run with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.schedules import Receive, Reduce, Schedule, ScheduleError, Send, Tie, build, lower
from tests.unit.megatron.schedules.pipelines import Pipeline, Sizes, sizes
from tests.unit.strategies import repeatable


def test_the_lists_of_two_devices() -> None:
    assert lower(build("1f1b", 2, 2)).as_text() == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    )


def test_receives_are_posted_ahead_in_the_order_of_need() -> None:
    assert lower(build("1f1b", 2, 2), ahead=1).as_text() == (
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD\n"
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD"
    )


def test_stages_of_one_device_need_no_message() -> None:
    """At the turn of a V the last device hands over to itself."""
    texts = lower(build("zb-v", 2, 3)).texts()
    assert not any("1SEND_F" in text or "2RECV_F" in text for text in texts[1])
    assert "2SEND_F0" in texts[1]
    assert lower(build("gpipe", 1, 2)).as_text() == "0F0 0F1 0B0 0B1 0REDUCE_GRAD"


def test_tied_stages_exchange_when_their_gradient_is_complete() -> None:
    rows = lower(build("interleaved-zb", 2, 2, 2), tied=(0, 3)).rows
    assert [instruction for instruction in rows[0] if isinstance(instruction, Tie)] == [Tie(0, 3, device=1)]
    assert [instruction for instruction in rows[1] if isinstance(instruction, Tie)] == [Tie(3, 0, device=0)]
    assert rows[0].index(Tie(0, 3, 1)) == rows[0].index(Reduce(0)) + 1
    assert rows[1][-1] == Reduce(1)  # the other chunk of the device is complete later


@given(sizes=sizes(most_devices=6, most=12), ahead=st.integers(0, 3))
@repeatable(300)
def test_lowered_lists_run_to_their_end_and_every_gradient_arrives(sizes: Sizes, ahead: int) -> None:
    schedule = sizes.build()
    lowered = lower(schedule, tied=(0, schedule.stages - 1) if schedule.stages > 1 else None)
    done = Pipeline(lowered).run()
    assert {stage: sorted(ks) for stage, ks in done.gradients.items()} == {
        stage: list(range(sizes.microbatches)) for stage in range(schedule.stages)
    }
    assert sorted(done.reduced) == list(range(schedule.stages))
    if sizes.name != "looped-bfs":  # the same sums in the same order: the same bits
        assert all(ks == sorted(ks) for ks in done.gradients.values())
    sends = [name(at) for row in lowered.rows for at in row if isinstance(at, Send)]
    receives = [name(at) for row in lower(schedule, ahead).rows for at in row if isinstance(at, Receive)]
    assert sorted(sends) == sorted(receives)
    assert len(set(sends)) == len(sends)


def name(message: Send | Receive) -> tuple[int, str, int]:
    """The stage that makes the value, its kind, its microbatch."""
    stage, value, k, _ = message
    if isinstance(message, Send):
        return (stage, value, k)
    return (stage - 1 if value == "F" else stage + 1, value, k)


@given(sizes=sizes(most_devices=6, most=12))
@repeatable(200)
def test_one_way_between_two_stages_keeps_its_order(sizes: Sizes) -> None:
    """So that a transport with a queue for each such way needs no names."""
    rows = lower(sizes.build()).rows
    sent: dict[tuple[int, str], list[int]] = {}
    taken: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        for message in row:
            if isinstance(message, Send | Receive):
                stage, value, k = name(message)
                (sent if isinstance(message, Send) else taken).setdefault((stage, value), []).append(k)
    assert sent == taken


def test_what_names_nothing_is_refused() -> None:
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="0 or more steps ahead, not -1"):
        lower(schedule, ahead=-1)
    for tied in ((0, 2), (1, 1), (-1, 1)):
        with pytest.raises(ScheduleError, match=r"two different stages of 0\.\.1, not"):
            lower(schedule, tied=tied)
    with pytest.raises(ScheduleError, match="no F"):
        lower(Schedule.of("empty", 1, (0,), [[]]))
