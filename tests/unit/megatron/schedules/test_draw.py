"""What is shown of a timeline: a trace for Perfetto, and a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_ptdp.schedules import Costs, Link, build, chrome_trace, simulate
from megatron_ptdp.schedules.draw import COLOURS, draw, shade
from tests.unit.megatron.schedules.pipelines import BUILT_IN


def test_a_trace_has_a_track_for_each_device_and_link() -> None:
    costs = replace(Costs.uniform(4, message=1.0), link=Link(0.5, 1.0))
    timeline = simulate(build("dualpipe-v", 2, 4), costs)
    events = json.loads(chrome_trace(timeline, microseconds=1000))["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        (0, 0): "device 0",
        (0, 1): "device 1",
        (1, 0): "device 0 to 1",
        (1, 1): "device 0 to 1, 2",
        (1, 2): "device 1 to 0",
        (1, 3): "device 1 to 0, 2",
    }
    spans, messages = ([event for event in events if event["ph"] == "X" and event["pid"] == pid] for pid in (0, 1))
    assert len(spans) == len(timeline.started)
    assert len(messages) == len(timeline.transfers)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(timeline.makespan * 1000)
    pair = next(event for event in spans if event["name"].endswith("OVERLAP_F_B"))
    assert pair["cat"] == "forward+backward"
    assert pair["args"]["forward"]["kind"] == "forward"
    first = next(event for event in messages if event["name"] == "0SEND_F0")
    assert (first["ts"], first["dur"], first["args"]["link held until"]) == (1000, 1500, 2000)
    for track in names:
        row = sorted(
            (event["ts"], event["dur"]) for event in (*spans, *messages) if (event["pid"], event["tid"]) == track
        )
        assert row
        assert all(start + length <= later for (start, length), (later, _) in pairwise(row))


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
