"""One timeline: slices of each process, flows from the call to the outcome, clocks, bounds."""

from __future__ import annotations

import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_ray.observe import timeline
from pathways_ray.observe.predictions import PREDICTION, Prediction, Span
from pathways_ray.observe.timeline import (
    Clock,
    Ended,
    Interval,
    Records,
    moved_by,
    newest,
    offset_of,
    share_of,
    trace_file,
)

RECORDS = Records(
    ended=[Ended(640, 2, 5, 10.0, 10.004, 3), Ended(641, 1, 6, 10.001, 10.006, -1)],
    programs={5: "step", 6: "double"},
    tenants={1: "alice", 2: "bob"},
    moved={5: 4096},
    schedulers={0: [Interval(640, 10.0005, 10.003)]},
    ran={0: [Interval(640, 10.001, 10.002)], 5: [Interval(640, 10.001, 10.0025), Interval(641, 10.0025, 10.005)]},
    waits={0: [Interval(640, 10.0006, 10.001)]},
    python={0: [Interval(640, 10.002, 10.003)]},
    client={2: [Interval(3, 9.999, 10.0045)]},
    clocks={"host 5": Clock(0.5, 0.00002)},
)


def slices(found, pid: int) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"], e["dur"]) for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == pid]


def test_a_launch_is_a_slice_of_each_process_with_one_flow_through_all() -> None:
    found = json.loads(json.dumps(trace_file(RECORDS)))
    assert slices(found, timeline.CLIENT) == [("step 640", 0.0, 5500.0)]
    assert slices(found, timeline.CONTROLLER) == [("step 640", 1000.0, 4000.0), ("double 641", 2000.0, 5000.0)]
    assert slices(found, timeline.SCHEDULERS) == [("step 640", 1500.0, 2500.0)]
    assert slices(found, timeline.HOSTS + 5)[1][0] == "double 641"
    flows = [(e["ph"], e["pid"]) for e in found["traceEvents"] if e.get("cat") == "flow" and e["id"] == 640]
    assert flows == [
        ("s", timeline.CLIENT),
        ("t", timeline.CONTROLLER),
        ("t", timeline.SCHEDULERS),
        ("f", timeline.HOSTS),
        ("t", timeline.HOSTS),
        ("t", timeline.HOSTS),
        ("f", timeline.HOSTS + 5),
    ]
    assert ("Python for 640", 3000.0, 1000.0) in slices(found, timeline.HOSTS)
    waits = next(e for e in found["traceEvents"] if e.get("name") == "data for 640")
    assert waits["args"]["bytes of the launch between hosts"] == 4096
    assert found["metadata"]["clocks"]["host 5"] == {"offset_s": 0.5, "within_s": 0.00002}


def test_tenants_have_colours_of_their_own() -> None:
    events = [e for e in trace_file(RECORDS)["traceEvents"] if e["ph"] == "X" and e["cat"]]
    assert len({(e["cat"], e["cname"]) for e in events}) == len({e["cat"] for e in events}) == 2


def test_slices_that_overlap_stand_in_lanes_and_too_many_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MAX_LANES", 3)
    ran = [Interval(k, 0.0, 1.0) for k in range(5)] + [Interval(9, 1.0, 2.0)]
    found = trace_file(Records(ran={0: ran}))
    drawn = [(e["tid"], e["args"]["launch"]) for e in found["traceEvents"] if e["ph"] == "X"]
    assert drawn == [(0, 0), (1, 1), (2, 2), (0, 9)]
    assert found["metadata"]["slices left out"] == 2


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=40))
def test_no_two_slices_of_a_lane_overlap(times: list[tuple[float, float]]) -> None:
    ran = [Interval(k, start, start + length) for k, (start, length) in enumerate(times)]
    by_lane: dict[int, list[tuple[float, float]]] = {}
    lanes = timeline._Lanes()
    for one in sorted(ran, key=lambda one: one.start):
        lane = lanes.take(one.start, one.end)
        assert lane is not None
        by_lane.setdefault(lane, []).append((one.start, one.end))
    for found in by_lane.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(found))


def test_nothing_recorded_is_a_file_too() -> None:
    assert [e["name"] for e in trace_file(Records())["traceEvents"]] == ["process_name", "process_sort_index"]


@given(st.floats(-1000, 1000), st.lists(st.tuples(st.floats(1e-6, 0.1), st.floats(0, 1)), min_size=1, max_size=9))
def test_the_offset_of_a_clock_is_right_within_what_it_says(offset: float, samples) -> None:
    """A clock that is `offset` ahead is asked; each answer takes its time, of which a part goes before it is read."""
    asked = [(float(k), k + way * share + offset, k + way) for k, (way, share) in enumerate(samples)]
    clock = offset_of(asked)
    assert abs(clock.offset_s - offset) <= clock.within_s + 1e-9
    assert moved_by([Interval(1, offset, offset + 1)], Clock(offset))[0].start == 0.0


# --- predicted beside real --------------------------------------------------------------------------------------------

STEP = Prediction(
    "step", 0.003, {0: [Span("0F0", 0.0, 0.001)], 5: [Span("1F0", 0.001, 0.002), Span("1B0", 0.002, 0.003)]}
)


def test_what_was_predicted_stands_beside_each_launch_of_its_program() -> None:
    """Launch 640 of program 'step' began on its devices at 10.001; 641 is of another program."""
    found = trace_file(msgspec.structs.replace(RECORDS, predictions=[STEP]))
    zero = 9.999
    drawn = {
        (e["pid"], e["name"]): (e["ts"] / 1e6 + zero, e["dur"] / 1e6)
        for e in found["traceEvents"]
        if e.get("cat") == "predicted"
    }
    assert set(drawn) == {(timeline.HOSTS, "0F0"), (timeline.HOSTS + 5, "1F0"), (timeline.HOSTS + 5, "1B0")}
    assert drawn[timeline.HOSTS + 5, "1F0"] == (pytest.approx(10.002), pytest.approx(0.001))
    said = {e["args"].get("predicted seconds") for e in found["traceEvents"] if e.get("name") == "step 640"}
    assert said == {0.003}
    assert all("predicted seconds" not in e["args"] for e in found["traceEvents"] if e.get("name") == "double 641")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"program": "step", "seconds": 1, "hosts": {"0": [["a", 2, 1]]}}',
        '{"program": "step", "seconds": 1, "hosts": {"0": [["a", -1, 1]]}}',
        '{"program": "step", "seconds": 0, "hosts": {}}',
        '{"program": "step", "seconds": 1, "hosts": {}, "more": 1}',
        '{"program": "step", "seconds": 1, "hosts": {"0": [' + ",".join(['["a", 0, 1]'] * 20_001) + "]}}",
    ],
)
def test_what_is_no_prediction_is_refused(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        PREDICTION.decode(text)


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_the_newest_records_are_given() -> None:
    records = [(1, 0.0, 5.0), (2, 1.0, 3.0), (3, 2.0, 4.0)]
    assert newest(records, 3.5, 2, 9) == [records[0], records[2]]
    assert newest(records, 0.0, 2, 2) == [records[2], records[0]], "those that end last, in that order"


def test_processes_share_the_room_of_a_file() -> None:
    assert share_of(10) * 10 <= timeline.MAX_SLICES
    assert share_of(10**6) == timeline.MIN_SLICES
