"""The order in which the controller enqueues the actions of a step."""

from __future__ import annotations

from itertools import chain

import pytest

from megatron_ptdp.parallel.action_order import completing, enqueued, fused_last_stage
from megatron_ptdp.schedules import Action, Schedule, build, rules_of, schedule_names
from megatron_ptdp.schedules.actions import Kind


@pytest.mark.parametrize("name", schedule_names())
def test_every_device_gets_its_row_and_nothing_comes_before_what_it_needs(name: str) -> None:
    schedule = build(name, 3, 6, rules_of(name).chunks or 2)
    actions = enqueued(schedule)
    for device, row in enumerate(schedule.rows):
        own = [action for action in actions if schedule.placement[action.stage] == device]
        assert own == list(chain.from_iterable(entry.parts for entry in row))
    place = {action: number for number, action in enumerate(actions)}
    last = schedule.stages - 1
    backwards: tuple[Kind, ...] = ("B", "I")
    for stage, kind, k in actions:
        here = place[Action(stage, kind, k)]
        if kind == "F" and stage:
            assert place[Action(stage - 1, "F", k)] < here
        elif kind in "BI":
            assert place[Action(stage, "F", k)] < here
            if stage < last:
                assert min(place.get(Action(stage + 1, other, k), here) for other in backwards) < here
        elif kind == "W":
            assert place[Action(stage, "I", k)] < here


def test_the_last_stage_of_1f1b_runs_forward_and_backward_as_one_and_that_of_gpipe_does_not() -> None:
    assert fused_last_stage(build("1f1b", 4, 6)) == frozenset(range(6))
    assert fused_last_stage(build("interleaved", 2, 4, 2)) == frozenset(range(4))
    assert fused_last_stage(build("gpipe", 4, 6)) == frozenset()
    assert fused_last_stage(build("gpipe", 4, 1)) == {0}
    assert fused_last_stage(build("zb-h1", 4, 6)) == frozenset()  # its backward is cut in two


def test_with_recomputation_the_last_stage_leaves_to_its_backwards_each_forward_that_nothing_waits_for() -> None:
    assert fused_last_stage(build("gpipe", 4, 6), True) == frozenset(range(6))
    for schedule in (build("1f1b", 4, 6), build("interleaved", 2, 4, 2)):
        assert fused_last_stage(schedule, True) == fused_last_stage(schedule)
    assert fused_last_stage(build("zb-h1", 4, 6), True) == frozenset()
    assert fused_last_stage(build("dualpipe-v", 2, 4, 2), True) == {1, 2, 3}  # that of 0 is cut in two
    assert fused_last_stage(build("looped-bfs", 2, 4, 2), True) == {3}  # whose backward comes first


def test_the_gradients_of_a_stage_are_complete_after_its_last_backward() -> None:
    mine = Schedule.of("mine", 2, (0, 1), [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1I0", "1F1", "1I1", "1W1", "1W0"]])
    assert completing(enqueued(mine)) == {Action(0, "B", 0), Action(1, "W", 0)}
