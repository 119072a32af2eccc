"""The check refuses what cannot run, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ptdp.schedules import Action, Lowered, Schedule, ScheduleError, build, check, in_flight, lower
from tests.unit.megatron.schedules.pipelines import Pipeline, Sizes, Stuck, sizes
from tests.unit.strategies import repeatable


def made(*rows: str, placement: tuple[int, ...] = (0, 1), microbatches: int = 2) -> Schedule:
    return Schedule.of("made", microbatches, placement, [row.split() for row in rows])


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1"),
            r"no B or I of microbatch 1 on stage 0 \(on device 0\); 1 of 4 are missing",
        ),
        (("0F0 0F1 0I0 0B1", "1F0 1B0 1F1 1B1"), r"no W of microbatch 0 on stage 0 \(on device 0\); 1 of 4"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0"), r"no F of microbatch 1 on stage 1 \(on device 1\)"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"), r"1B1 on device 1 does not come after 1F1"),
        (("0F0 0F1 0W0 0I0 0B1", "1F0 1B0 1F1 1B1"), r"0W0 on device 0 does not come after 0I0"),
        (("0F0 0F1 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), r"0F1 is there twice: microbatch 1 .* on stage 0"),
        (("0F0 0F1 0B0 0I0 0B1", "1F0 1B0 1F1 1B1"), r"0I0 is a second backward"),
        (("0F0 0F1 0B0 0W0 0B1", "1F0 1B0 1F1 1B1"), r"0W0 is there twice"),
        (("0F0 0F1 1F0 0B0 0B1", "1B0 1F1 1B1"), r"1F0 is on device 0, but stage 1 is on device 1"),
        (("0F0 0F1 0F2 0B0 0B1", "1F0 1B0 1F1 1B1"), r"0F2 on device 0: there are 2 stages and 2 microbatches"),
        (
            ("0F0 (0B0;0F1)OVERLAP_F_B 0B1", "1F0 1B0 1F1 1B1"),
            r"\(0B0;0F1\)OVERLAP_F_B on device 0 is not a forward and",
        ),
        (("0F0 0F1 0B0 0B1",), r"stage 1 is on device 1, but there are lists for 1 devices"),
    ],
)
def test_what_is_missing_twice_or_out_of_place_is_named(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(made(*rows))


def test_actions_of_no_known_kind_are_refused() -> None:
    odd = Action(0, "X", 0)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="0X0 on device 0 has kind 'X'; the kinds are F B I W"):
        check(Schedule.of("made", 1, (0,), [[Action(0, "F", 0), odd]]))


def test_a_pair_is_of_two_microbatches() -> None:
    with pytest.raises(ScheduleError, match="0B0 on device 0 does not come after 0F0"):
        check(made("(0F0;0B0)OVERLAP_F_B", placement=(0,), microbatches=1))


def test_a_deadlock_is_told_as_a_circle() -> None:
    """Device 0 wants the gradient of microbatch 0 before it runs 1; device 1 wants both forwards first."""
    check(made("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(
        ScheduleError,
        match=r"deadlock: device 0 is at 0B0 and needs 1B0 of device 1, which comes after 1F1 there; "
        r"device 1 is at 1F1 and needs 0F1 of device 0, which comes after 0B0 there$",
    ):
        check(made("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))


def test_a_deadlock_inside_a_device_is_told_too() -> None:
    with pytest.raises(ScheduleError, match="device 0 is at 1F0 and needs 0F0 of device 0, which comes after 1F0"):
        check(made("1F0 0F0 1B0 0B0", placement=(0, 0), microbatches=1))


def test_those_who_only_wait_are_not_in_the_circle() -> None:
    """Devices 1 and 2 wait for each other; 0 waits for them, and is looked at first."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"]
    with pytest.raises(ScheduleError, match=r"^deadlock: device 1 is at 1B0 and needs 2B0") as caught:
        check(made(*rows, placement=(0, 1, 2)))
    assert "device 0" not in str(caught.value)


def test_too_many_microbatches_in_flight_are_refused_with_the_numbers() -> None:
    assert in_flight(build("gpipe", 2, 6)) == (6, 6)
    build("gpipe", 2, 6, limit=6)
    with pytest.raises(ScheduleError, match="device 0 holds 6 microbatches at its peak, but 5 is the limit"):
        build("gpipe", 2, 6, limit=5)
    build("1f1b", 4, 6, limit=4)


@given(sizes=sizes(most_devices=4, most=8), data=st.data())
@repeatable(300)
def test_a_dropped_action_is_refused(sizes: Sizes, data: st.DataObject) -> None:
    schedule = sizes.build()
    rows = schedule.texts()
    device = data.draw(st.integers(0, schedule.devices - 1))
    del rows[device][data.draw(st.integers(0, len(rows[device]) - 1))]
    with pytest.raises(ScheduleError, match=r"^no |does not come after"):
        check(Schedule.of("broken", schedule.microbatches, schedule.placement, rows))


@given(sizes=sizes(most_devices=4, most=8), data=st.data())
@repeatable(500)
def test_two_swapped_actions_are_refused_if_and_only_if_they_cannot_run(sizes: Sizes, data: st.DataObject) -> None:
    """Against an interpreter that just tries: it knows nothing of needs but what it finds in its inbox."""
    schedule = sizes.build()
    rows = [list(row) for row in schedule.rows]
    row = rows[data.draw(st.integers(0, schedule.devices - 1))]
    assume(len(row) > 1)
    first = data.draw(st.integers(0, len(row) - 2))
    second = data.draw(st.integers(first + 1, min(first + 6, len(row) - 1)))
    row[first], row[second] = row[second], row[first]
    swapped = Schedule.of("swapped", schedule.microbatches, schedule.placement, rows)
    try:
        check(swapped)
    except ScheduleError as error:
        if "deadlock" in str(error):
            with pytest.raises(Stuck):
                Pipeline(without_messages(swapped)).run()
    else:
        Pipeline(lower(swapped)).run()


def without_messages(schedule: Schedule) -> Lowered:
    """The bare actions. The interpreter lets a stage take its neighbour's output directly."""
    return Lowered(schedule, schedule.rows)
