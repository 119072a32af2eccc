"""What is shown of a timeline: a trace for Perfetto, and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ptdp.schedules import Costs, Link, build, chrome_trace, simulate
from megatron_ptdp.schedules.draw import COLOURS, draw, shade
from tests.unit.megatron.pipelines import BUILT_IN


def test_a_trace_has_a_track_for_each_device_and_link() -> None:
    costs = replace(Costs.uniform(4, message=1.0), link=Link(0.5, 1.0))
    timeline = simulate(build("dualpipe-v", 2, 4), costs)
    events = json.loads(chrome_trace(timeline, microseconds=1000))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        (0, 0): "device 0",
        (0, 1): "device 1",
        (1, 0): "device 0 to 1",
        (1, 1): "device 1 to 0",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.started)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.makespan * 1000)
    pair = next(event for event in spans if event["name"].endswith("OVERLAP_F_B"))
    assert pair["cat"] == "forward+backward"
    assert pair["args"]["forward"]["kind"] == "forward"
    begins, ends = ([event for event in events if event["ph"] == phase] for phase in "be")
    assert len(begins) == len(ends) == len(timeline.transfers)
    assert {event["id"] for event in begins} == {event["id"] for event in ends}


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_schedule_can_be_drawn(name: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw(simulate(build(name, 4, 8)), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_later_chunks_are_lighter_and_never_white() -> None:
    for kind in COLOURS:
        shades = [sum(shade(kind, chunk, 4)) for chunk in range(4)]
        assert shades == sorted(set(shades))
        assert shades[-1] < 2.7
