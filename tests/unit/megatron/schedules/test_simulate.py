"""The simulation: equal to the published formulas for even costs, and to what one reckons by hand for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.schedules import (
    Costs,
    Link,
    Overlap,
    Schedule,
    ScheduleError,
    Span,
    Timeline,
    Transfer,
    build,
    interleaved,
    peak_memory,
    simulate,
)
from tests.unit.megatron.schedules.pipelines import Sizes, sizes
from tests.unit.strategies import repeatable

TIMES = st.integers(1, 5)


@given(p=st.integers(1, 8), m=st.integers(1, 20), f=TIMES, i=TIMES, w=TIMES, name=st.sampled_from(["gpipe", "1f1b"]))
@repeatable(100)
def test_gpipe_and_1f1b_have_a_bubble_of_p_minus_1_over_m(p: int, m: int, f: int, i: int, w: int, name: str) -> None:
    """PTD-P, section 2.2.1; in the other convention (p-1)/(m+p-1)."""
    timeline = simulate(build(name, p, m), Costs.uniform(p, f, i, w))
    assert timeline.makespan == (m + p - 1) * (f + i + w)
    for bubble in (timeline.bubble, *timeline.bubbles):
        assert bubble.of_ideal == pytest.approx((p - 1) / m)
        assert bubble.of_total == pytest.approx((p - 1) / (m + p - 1))


@given(p=st.integers(1, 6), groups=st.integers(1, 4), v=st.integers(1, 4), f=TIMES, i=TIMES, w=TIMES)
@repeatable(100)
def test_v_chunks_divide_the_bubble_by_v(p: int, groups: int, v: int, f: int, i: int, w: int) -> None:
    """PTD-P, section 2.2.2, for m a multiple of p; looped breadth-first has the same bubble."""
    m = p * groups
    for name in ("interleaved", "looped-bfs"):
        timeline = simulate(build(name, p, m, v), Costs.uniform(p * v, f, i, w))
        assert timeline.bubble.of_ideal == pytest.approx((p - 1) / (m * v))


@given(p=st.integers(1, 8), extra=st.integers(0, 12), f=TIMES, w=TIMES, more=st.integers(0, 3))
@repeatable(100)
def test_zb_h1_has_a_third_of_the_bubble(p: int, extra: int, f: int, w: int, more: int) -> None:
    """(p-1)(F + I - W), if no part of the backward is shorter than W; a third of that of 1F1B if all are equal."""
    m, i = 2 * p + extra, w + more
    timeline = simulate(build("zb-h1", p, m), Costs.uniform(p, max(f, w), i, w))
    assert timeline.bubbles[0].idle == (p - 1) * (max(f, w) + i - w)
    even = simulate(build("zb-h1", p, m))
    assert even.bubble.idle * 3 == simulate(build("1f1b", p, m)).bubble.idle


@given(p=st.integers(1, 6), groups=st.integers(2, 4), v=st.integers(1, 4), f=TIMES)
@repeatable(50)
def test_interleaved_zb_divides_that_by_v(p: int, groups: int, v: int, f: int) -> None:
    """The idle time of zb-h1 in times of a chunk, for m a multiple of p."""
    timeline = simulate(build("interleaved-zb", p, p * groups, v), Costs.uniform(p * v, f, f, f))
    assert [bubble.idle for bubble in timeline.bubbles] == [(p - 1) * f] * p


@given(p=st.integers(1, 8), extra=st.integers(0, 12), w=TIMES, more=st.integers(0, 3))
@repeatable(50)
def test_zb_v_is_idle_only_while_it_fills(p: int, extra: int, w: int, more: int) -> None:
    """(p-1)·F of one chunk, if F = I and W takes F/2 to F: half of zb-h1's bubble when all are equal."""
    f = w + min(w, more)
    timeline = simulate(build("zb-v", p, 2 * p - 1 + extra), Costs.uniform(2 * p, f, f, w))
    assert [bubble.idle for bubble in timeline.bubbles] == [(p - 1) * f] * p


@given(p=st.integers(1, 8), extra=st.integers(0, 12), w=TIMES, more=st.integers(0, 3))
@repeatable(50)
def test_dualpipe_v_has_the_bubble_of_its_formula(p: int, extra: int, w: int, more: int) -> None:
    """(p-1)(pair + B - 3W) on p devices, which DualPipe's README has for 2p, if F = I and a pair takes F + B."""
    f = w + more
    timeline = simulate(build("dualpipe-v", p, 2 * p + extra), Costs.uniform(2 * p, f, f, w))
    assert [bubble.idle for bubble in timeline.bubbles] == [(p - 1) * ((f + f + w) + (f + w) - 3 * w)] * p


def test_a_pair_may_take_less_time_than_its_parts() -> None:
    schedule = build("dualpipe-v", 2, 8)
    pairs = sum(isinstance(entry, Overlap) for row in schedule.rows for entry in row)
    assert pairs == 22
    faster = simulate(schedule, replace(Costs.uniform(4), pair=0.75))
    assert simulate(schedule).bubble.busy - faster.bubble.busy == pairs * 3 * 0.25  # F = 1 and B = 2


def test_peaks_of_memory_are_those_of_the_papers() -> None:
    """In stashes of a whole device: 1F1B p - r, GPipe m, interleaved p(1 + (p-1)/(pv)), V p, DualPipe-V p + 1/2."""
    p, m = 4, 16
    assert simulate(build("1f1b", p, m)).peak_memory == (4, 3, 2, 1)
    assert simulate(build("gpipe", p, m)).peak_memory == (16,) * 4
    assert simulate(build("zb-h1", p, m)).peak_memory == (4,) * 4
    for v in (2, 4):
        assert simulate(build("interleaved", p, m, v)).peak_memory[0] / v == p * (1 + (p - 1) / (p * v))
    assert simulate(build("zb-v", p, m)).peak_memory == (2 * p,) * p
    assert simulate(build("dualpipe-v", p, m)).peak_memory == (2 * p + 1,) * p


def test_memory_counts_the_bytes_of_each_stage_and_what_w_still_needs() -> None:
    schedule = Schedule.of("made", 2, (0,), [["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]])
    assert peak_memory(schedule, (10.0,), (10.0,)) == (20.0,)
    assert peak_memory(schedule, (10.0,), (4.0,)) == (20.0,)
    assert peak_memory(schedule, (10.0,), (11.0,)) == (22.0,)  # keeps the incoming gradient as well
    assert simulate(schedule, replace(Costs.uniform(1), stash=(10.0,), kept=(11.0,))).peak_memory == (22.0,)
    costs = replace(Costs.uniform(4), stash=(10.0, 1.0, 1.0, 30.0))
    assert simulate(build("zb-v", 2, 1), costs).peak_memory == (40.0, 2.0)


def test_stages_may_differ() -> None:
    """1F1B, the last stage the slowest: it starts after the others' forwards and never waits; then their backwards."""
    costs = Costs(forward=(1, 2, 4), input_grad=(1, 1, 3), weight_grad=(1, 1, 3))
    timeline = simulate(build("1f1b", 3, 6), costs)
    assert timeline.makespan == (1 + 2) + 6 * 10 + (2 + 2)
    assert timeline.bubbles[2].idle == 7
    assert timeline.bubble.busy == 6 * (3 + 4 + 10)
    full = replace(costs, backward=(9, 9, 1))  # a B of its own is not I and W
    assert simulate(build("1f1b", 3, 1), full).makespan == 1 + 2 + 4 + 1 + 9 + 9


def transfers(timeline: Timeline) -> list[tuple[str, float, float, float]]:
    return [(str(at), at.start, at.end, at.arrival) for at in timeline.transfers]


def test_messages_take_latency_and_bandwidth() -> None:
    """Two microbatches of 6 bytes over a link of 2 bytes a second and 1 s; forward and backward links are two."""
    costs = replace(Costs.uniform(2, message=6.0), link=Link(1.0, 2.0))
    timeline = simulate(build("gpipe", 2, 2), costs)
    assert transfers(timeline) == [
        ("0SEND_F0", 1, 4, 5),
        ("0SEND_F1", 4, 7, 8),  # made at 2, waits for the link
        ("1SEND_B0", 11, 14, 15),
        ("1SEND_B1", 14, 17, 18),  # made at 13
    ]
    assert timeline.makespan == 20
    assert [str(event) for event in timeline.critical_path] == [
        *("0F0", "0SEND_F0", "0SEND_F1", "1F1", "1B0", "1SEND_B0", "1SEND_B1", "0B1")
    ]


def test_without_overlap_a_device_computes_nothing_while_it_sends() -> None:
    costs = replace(Costs.uniform(2, message=3.0), link=Link(0.0, 1.0), overlap=False)
    timeline = simulate(build("gpipe", 2, 2), costs)
    assert [(str(span), span.start) for span in timeline.rows[0]] == [("0F0", 0), ("0F1", 4), ("0B0", 14), ("0B1", 19)]
    assert [(str(span), span.start) for span in timeline.rows[1]] == [("1F0", 4), ("1F1", 8), ("1B0", 9), ("1B1", 14)]


def test_without_overlap_a_device_waits_for_the_slower_of_two_messages() -> None:
    """A pair sends both ways at once: forward over a fast link, backward over a slow one."""
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"], ["2F0", "2B0", "2F1", "2B1"]]
    schedule = Schedule.of("made", 2, (0, 1, 2), rows)
    slow, fast = Link(0.0, 0.1), Link(0.0, 10.0)
    costs = replace(Costs.uniform(3, message=1.0), link=fast, links={(1, 0): slow}, overlap=False)
    timeline = simulate(schedule, costs)
    pair, after = timeline.rows[1][1:]
    assert after.start >= pair.end + 10
    blocked = [at for at in timeline.transfers if at.source == 1 and at.start == pair.end]
    assert sorted(at.end - at.start for at in blocked) == pytest.approx([0.1, 10])


def test_links_of_one_name_are_one_link() -> None:
    """Both pairs of neighbours send at once over the same wire between islands: the later one waits."""
    schedule = Schedule.of("made", 1, (0, 2, 1, 3), [["0F0", "0B0"], ["2F0", "2B0"], ["1F0", "1B0"], ["3F0", "3B0"]])
    wire = Link(0.0, 1.0, name="wire")
    costs = replace(Costs.uniform(4, message=5.0), link=wire)
    assert simulate(schedule, costs).makespan == 12 + 6 * 5
    busy = build("looped-bfs", 2, 2, 2)
    costs = Costs.uniform(4, message=5.0)
    own = simulate(busy, replace(costs, link=Link(0.0, 1.0)))
    shared = simulate(busy, replace(costs, link=wire))
    one_way = simulate(busy, replace(costs, links={(0, 1): wire}))
    assert shared.makespan > own.makespan > one_way.makespan


@st.composite
def runs(draw: st.DrawFn) -> tuple[Sizes, Costs]:
    """Any schedule on any costs, in whole numbers so that sums are exact."""
    case = draw(sizes(most_devices=5, most=8))
    stages = case.devices * case.chunks

    def each(size: int, least: int = 0) -> tuple[float, ...]:
        return tuple(map(float, draw(st.lists(st.integers(least, 6), min_size=size, max_size=size))))

    link = Link(float(draw(st.integers(0, 3))), 0.5, draw(st.sampled_from(["", "wire"])))
    costs = Costs(each(stages), each(stages), each(stages), message=each(stages - 1), link=link)
    return case, replace(costs, overlap=draw(st.booleans()))


@given(run=runs())
@repeatable(400)
def test_a_timeline_keeps_every_rule(run: tuple[Sizes, Costs]) -> None:
    """One thing at a time on a device and on a link; nothing before what it needs; the longest chain has no gap."""
    case, costs = run
    schedule = case.build()
    timeline = simulate(schedule, costs)
    assert tuple(tuple(span.entry for span in row) for row in timeline.rows) == schedule.rows
    ends = {part: span.end for row in timeline.rows for span in row for part in span.entry.parts}
    sent: dict[tuple[int, str, int], Any] = {(at.stage, at.value, at.microbatch): at for at in timeline.transfers}
    for row in timeline.rows:
        assert all(before.end <= after.start for before, after in pairwise(row))
        for span in row:
            for stage, value, k, there in needs(schedule, span):
                transfer = sent.get((stage, value, k))
                assert (transfer is None) == (there == span.device)
                made = next(
                    ends[a]
                    for a in ends
                    if a[0] == stage and a[2] == k and (a[1] == "F") == (value == "F") and a[1] != "W"
                )
                assert span.start >= (transfer.arrival if transfer else made)
                if transfer:
                    assert transfer.start >= made
    links: dict[object, list[Transfer]] = {}
    for at in timeline.transfers:
        links.setdefault(costs.link.name or (at.source, at.target), []).append(at)
    assert all(before.end <= after.start for link in links.values() for before, after in pairwise(link))
    check_path(timeline)
    check_order(timeline)


def needs(schedule: Schedule, span: Span) -> Iterator[tuple[int, str, int, int]]:
    """The outputs that it takes: of which stage, activation or gradient, microbatch, and on which device that is."""
    for stage, kind, k in span.entry.parts:
        other = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and 0 <= other < schedule.stages:
            yield other, "F" if kind == "F" else "B", k, schedule.placement[other]


def check_path(timeline: Timeline) -> None:
    path = timeline.critical_path
    assert path[0].start == 0
    assert path[-1].end == timeline.makespan
    for before, after in pairwise(path):
        assert after.start in (before.end, before.arrival if isinstance(before, Transfer) else before.end)


def check_order(timeline: Timeline) -> None:
    """What one controller may enqueue: each action after those that it needs."""
    made: set[tuple[int, str, int]] = set()
    for span in timeline.started:
        assert all((stage, value, k) in made for stage, value, k, _ in needs(timeline.schedule, span))
        made |= {(stage, "F" if kind == "F" else "B", k) for stage, kind, k in span.entry.parts}


def test_the_same_run_twice_is_the_same() -> None:
    costs = replace(Costs.uniform(8, message=1.0), link=Link(0.3, 7.0, "wire"))
    first, second = (simulate(build("interleaved", 4, 8, 2), costs) for _ in range(2))
    assert (first.started, first.transfers) == (second.started, second.transfers)


@pytest.mark.parametrize(
    "costs, message",
    [
        (Costs.uniform(3), r"the costs have 3 values for 'forward', but 2 are needed"),
        (replace(Costs.uniform(2), message=(1.0, 1.0)), r"the costs have 2 values for 'message', but 1 are needed"),
        (replace(Costs.uniform(2), weight_grad=(1.0, -1.0)), r"value 1 for 'weight_grad' is -1.0: it must be finite"),
        (replace(Costs.uniform(2), stash=(float("nan"), 1.0)), r"value 0 for 'stash' is nan"),
        (replace(Costs.uniform(2), link=Link(bytes_per_second=0)), r"a link takes 0 s or more and carries more than 0"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(build("1f1b", 2, 2), costs)


def test_a_deadlock_is_refused() -> None:
    with pytest.raises(ScheduleError, match="deadlock: device 0 is at 0B0 and needs 1B0 of device 1"):
        simulate(Schedule.of("made", 2, (0, 1), [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]))


def test_a_large_pipeline_is_simulated_in_seconds() -> None:
    """The 1T model's 64 devices and 512 microbatches, with 2 chunks: 131,072 actions and as many messages."""
    schedule = interleaved(64, 512, 2)
    costs = replace(Costs.uniform(128, message=1.0), link=Link(0.01, 100.0))
    start = time.process_time()
    timeline = simulate(schedule, costs)
    assert time.process_time() - start < 6  # 1.2 s on one core of a server of 2023; room for slower machines
    assert len(timeline.started) == 131_072
    assert 0.0615 < timeline.bubble.of_ideal < 0.065  # 63/1024 and the latency of filling
