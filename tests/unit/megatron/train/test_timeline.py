"""A recorded step becomes a timeline: actions told apart by name and order, next to the prediction from their times."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ptdp.schedules import Costs, Schedule, build, simulate
from megatron_ptdp.train.run import Bubbles
from megatron_ptdp.train.timeline import measured, predicted, stage_times, trace_text, write
from pathways_ray.executor.profiling.profiler import Computed

NAMES = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


def slices(schedule: Schedule) -> list[Any]:
    """Each pipeline device on a host of its own: host 10 has device 0."""
    return [
        SimpleNamespace(placed=SimpleNamespace(devices=[SimpleNamespace(host=10 + device, index=0)]))
        for device in range(schedule.devices)
    ]


def recorded(schedule: Schedule, costs: Costs, joined: bool) -> dict[int, list[Computed]]:
    """What hosts would say of a step that takes these times, from second 100 on."""
    seen: dict[int, list[Computed]] = {10 + device: [] for device in range(schedule.devices)}
    for device, row in enumerate(simulate(schedule, costs).rows):
        for span in row:
            for stage, kind, _ in span.entry.parts:
                if joined and kind == "F" and stage == schedule.stages - 1:
                    continue
                seen[10 + device].append(
                    Computed(f"stage{stage}_{NAMES[kind]}", (0,), 100 + span.start, 100 + span.end)
                )
        end = seen[10 + device][-1].end
        seen[10 + device].append(Computed(f"stage{device}_update", (0,), end, end + 1))
    seen[10].append(Computed("copy_state", (0,), 90, 91))
    return seen


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_what_ran_as_predicted_is_shown_so(name: str) -> None:
    schedule = build(name, 2, 4)
    costs = Costs.uniform(schedule.stages, 0.5, 0.75, 0.25)
    ran = measured(schedule, slices(schedule), recorded(schedule, costs, joined=False))
    expected = simulate(schedule, costs)
    for row, other in zip(ran.timeline.rows, expected.rows, strict=True):
        assert [span.entry for span in row] == [span.entry for span in other]
        assert [span.start for span in row] == pytest.approx([span.start for span in other])
    assert predicted(schedule, ran.timeline).makespan == pytest.approx(expected.makespan)
    assert ran.timeline.bubble.of_ideal == pytest.approx(expected.bubble.of_ideal)
    assert {one.name for one in ran.others} == {f"stage{device}_update" for device in range(2)}


def test_a_last_stage_that_joins_forward_and_backward_has_backwards_only() -> None:
    schedule = build("1f1b", 2, 4)
    costs = Costs((1.0, 0.0), (1.0, 1.0), (1.0, 1.0), (2.0, 3.0))
    ran = measured(schedule, slices(schedule), recorded(schedule, costs, joined=True))
    assert [str(span) for span in ran.timeline.rows[1]] == ["1B0", "1B1", "1B2", "1B3"]
    assert predicted(schedule, ran.timeline).makespan == pytest.approx(simulate(schedule, costs).makespan)


def test_what_slices_of_experts_compute_on_the_same_host_is_of_no_stage() -> None:
    schedule = build("1f1b", 1, 2)
    seen = {10: [Computed(name, (0,), 0.0, 1.0) for name in ("begin", "experts0", "stage1_norm", "stage2_update")]}
    ran = measured(schedule, slices(schedule), seen)
    assert (ran.timeline.started, ran.others) == ((), ())


def test_the_files_show_both(tmp_path: Path) -> None:
    schedule = build("1f1b", 2, 4)
    costs = Costs.uniform(2)
    ran = measured(schedule, slices(schedule), recorded(schedule, costs, joined=False))
    drawn = write(tmp_path, 7, ran, predicted(schedule, ran.timeline))
    assert drawn.picture.name == "step-7.png"
    assert drawn.picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(drawn.trace.read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes >= {"measured, 1f1b: devices", "predicted, 1f1b: devices"}
    assert sum(event["name"] == "0F0" for event in events) == 2
    assert sum(event["name"] == "stage1_update" for event in events) == 1


def test_actions_that_were_over_before_they_were_seen_are_counted_and_left_out_of_the_means() -> None:
    schedule = build("1f1b", 2, 4)
    seen = recorded(schedule, Costs.uniform(2, 1.0, 1.0, 1.0), joined=False)
    first, *rest = seen[10]
    seen[10] = [first._replace(end=first.start), *rest]
    ran = measured(schedule, slices(schedule), seen)
    assert ran.unseen == 1
    assert stage_times(schedule, ran.timeline) == {"F": (1, 1), "I": (0, 0), "W": (0, 0), "B": (2, 2)}
    assert predicted(schedule, ran.timeline).bubble.of_ideal == pytest.approx(1 / 4)


def test_a_bubble_is_told_from_the_times_of_unequal_stages() -> None:
    schedule = build("1f1b", 2, 4)
    costs = Costs((3.0, 1.0), (0.0, 0.0), (0.0, 0.0), (6.0, 2.0))
    ran = measured(schedule, slices(schedule), recorded(schedule, costs, joined=False))
    told = Bubbles.of(9, ran, predicted(schedule, ran.timeline))
    assert told.stage_seconds == {"F": (3, 1), "B": (6, 2)}
    assert told.bubble_of_ideal == pytest.approx(simulate(schedule, costs).bubble.of_ideal)
    assert told.bubble_of_ideal > 0.4 > simulate(schedule).bubble.of_ideal
    assert (told.measured_at, told.actions_unseen) == (9, 0)


def test_nothing_recorded_is_an_empty_timeline() -> None:
    schedule = build("1f1b", 2, 4)
    ran = measured(schedule, slices(schedule), {})
    assert ran.timeline.makespan == 0
    assert json.loads(trace_text(ran, predicted(schedule, ran.timeline)))["traceEvents"]
