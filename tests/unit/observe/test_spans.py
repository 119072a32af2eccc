"""Launches as spans: one trace for each, below its root what the processes noted, the same however often it is made."""

from __future__ import annotations

import msgspec

from pathways_ray.observe.spans import ROOT, is_sampled, span_id, spans, trace_id
from tests.unit.observe.test_timeline import RECORDS


def test_a_launch_is_a_root_with_its_islands_and_hosts_below() -> None:
    first, *rest = spans(RECORDS)
    assert (first.name, first.start, first.end, first.id, first.failed) == ("step", 10.0, 10.004, ROOT, False)
    assert first.attributes == {
        "pathways.launch": 640,
        "pathways.session": 2,
        "pathways.program": "step",
        "pathways.tenant": "bob",
    }
    mine = {one.name: one for one in rest if one.launch == (2, 640)}
    assert set(mine) == {"island 0", "devices of host 0", "devices of host 5", "data for host 0", "Python on host 0"}
    assert mine["devices of host 5"].end == 10.0025
    assert len({one.id for one in mine.values()} | {ROOT}) == 6


def test_a_launch_that_failed_says_so() -> None:
    failed = [one for one in spans(RECORDS) if one.failed]
    assert [(one.launch, one.name) for one in failed] == [((1, 641), "double")]


def test_a_part_of_the_launches_is_the_same_part_for_all() -> None:
    taken = {number for number in range(10_000) if is_sampled(number, 0.1)}
    assert 900 < len(taken) < 1100
    assert taken < {number for number in range(10_000) if is_sampled(number, 0.2)}
    assert not any(is_sampled(number, 0.0) for number in range(100))
    assert all(is_sampled(number, 1.0) for number in range(100))
    found = msgspec.structs.replace(RECORDS, ended=[one for one in RECORDS.ended if is_sampled(one.sequence, 0.5)])
    assert list(spans(RECORDS, 0.5)) == list(spans(found))


def test_numbers_tell_launches_of_different_lives_apart() -> None:
    keys = [("a", (1, 640)), ("a", (2, 640)), ("b", (1, 640))]
    assert len({trace_id(*key) for key in keys}) == 3
    assert len({span_id(*key, number) for key in keys for number in range(3)}) == 9
    assert 0 < trace_id("a", (1, 640)) < 1 << 128
    assert 0 < span_id("a", (1, 640), 1) < 1 << 64
