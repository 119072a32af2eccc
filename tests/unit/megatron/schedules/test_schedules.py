"""The schedules: equal to the field's generators, whole for any sizes, refused where their rule is broken."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given

from megatron_ptdp.schedules import (
    Action,
    Overlap,
    Schedule,
    ScheduleError,
    build,
    check,
    in_flight,
    interleaved,
    loop,
    parse,
    register,
    registry,
    schedule_names,
    vee,
)
from tests.unit.megatron.schedules.pipelines import Sizes, sizes
from tests.unit.strategies import repeatable

ORACLE = Path(__file__).parents[3] / "data" / "oracle"
NAMES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
    "interleavedzb": "interleaved-zb",
    "zbv": "zb-v",
    "dualpipev": "dualpipe-v",
}
DIGESTS = json.loads((ORACLE / "digests.json").read_text())


def of_file(name: str) -> Sizes:
    """`zbv_p2_v2_m8` is 8 microbatches on 2 devices with 2 chunks each."""
    found = re.fullmatch(r"(\w+?)_p(\d+)(?:_v(\d+))?_m(\d+)", name)
    assert found, name
    return Sizes(NAMES[found[1]], int(found[2]), int(found[4]), int(found[3] or 1))


@pytest.mark.parametrize("file", sorted(path.stem for path in ORACLE.glob("*_p*.json")))
def test_orders_are_those_of_torch_action_by_action(file: str) -> None:
    assert of_file(file).build().texts() == json.loads((ORACLE / f"{file}.json").read_text())


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_orders_of_more_sizes_have_the_digest_of_torchs(name: str) -> None:
    text = "\n".join(" ".join(row) for row in of_file(name).build().texts())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]


def test_the_interleaved_order_is_that_of_megatrons_documentation() -> None:
    """Two devices, groups of 3, 5 microbatches, 2 chunks: the last group has what is left."""
    row = interleaved(2, 5, 2, group=3).rows[0]
    forwards = [part for entry in row for part in entry.parts if part.kind == "F"]
    assert [action.microbatch for action in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [action.stage // 2 for action in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    signed = [(part.stage // 2 + 1) * (1 if part.kind == "F" else -1) for entry in row for part in entry.parts]
    assert signed == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]


@pytest.mark.parametrize("devices, group", [(1, 1), (2, 2), (2, 4), (4, 4), (4, 5), (8, 9), (8, 11)])
@pytest.mark.parametrize("microbatches", [8, 32])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_groups_of_any_allowed_size_run(devices: int, group: int, microbatches: int, chunks: int) -> None:
    """The sizes of Megatron-Core's own test. Those that its rule forbids are refused."""
    if group > microbatches or 0 < microbatches % group < devices:
        with pytest.raises(ScheduleError, match=r"interleaved needs"):
            interleaved(devices, microbatches, chunks, group)
    else:
        check(interleaved(devices, microbatches, chunks, group))


@given(sizes=sizes())
@repeatable(1000)
def test_any_sizes_give_a_whole_schedule(sizes: Sizes) -> None:
    """Every action once, on the device of its stage, forwards before backwards; no deadlock; memory as promised."""
    schedule = sizes.build()
    p, m = sizes.devices, sizes.microbatches
    assert (schedule.devices, schedule.microbatches, schedule.chunks) == sizes[1:]
    place: dict[Action, tuple[int, int]] = {}
    for device, row in enumerate(schedule.rows):
        for at, entry in enumerate(row):
            for part in entry.parts:
                assert part not in place
                assert schedule.placement[part.stage] == device
                place[part] = (device, at)
    for stage in range(schedule.stages):
        for k in range(m):
            forward, full = place.pop(Action(stage, "F", k)), place.pop(Action(stage, "B", k), None)
            if full is None:
                first, second = place.pop(Action(stage, "I", k)), place.pop(Action(stage, "W", k))
                assert forward < first < second
            else:
                assert forward < full
    assert not place
    check(schedule, limit=most_in_flight(sizes))
    assert max(in_flight(schedule)) == most_in_flight(sizes)
    if sizes.name == "1f1b":
        assert in_flight(schedule) == tuple(min(p - r, m) for r in range(p))


def most_in_flight(sizes: Sizes) -> int:
    """Stashes on the device that holds the most, for each schedule as docs/schedules.md has it."""
    name, p, m, v = sizes
    group = m // max(1, m // p)
    return {
        "gpipe": m,
        "looped-bfs": m * v,
        "1f1b": min(p, m),
        "zb-h1": min(p, m),
        "interleaved": min(2 * (p - 1) + (v - 1) * group + 1, m * v),
        "interleaved-zb": min((v - 1) * group + p, m * v),
        "zb-v": min(2 * p, 2 * m),
        "dualpipe-v": 2 * p + 1,
    }[name]


@given(sizes=sizes(most=12))
@repeatable(100)
def test_text_and_schedule_are_the_same(sizes: Sizes) -> None:
    schedule = sizes.build()
    again = Schedule.of(schedule.name, schedule.microbatches, schedule.placement, schedule.texts())
    assert again == schedule
    assert hash(again) == hash(schedule)


def test_a_schedule_reads_well() -> None:
    schedule = build("1f1b", 2, 2)
    assert schedule.as_text() == ("1f1b: 2 microbatches, stages on devices 0 1\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert repr(schedule) == "<Schedule 1f1b: 2 devices, 2 stages, 2 microbatches, 8 actions>"
    assert parse("(0F3;3B1)OVERLAP_F_B") == Overlap(Action(0, "F", 3), Action(3, "B", 1))
    assert (loop(3, 2), vee(3)) == ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    assert [build("zb-v", 2, 3).chunk(stage) for stage in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("text", ["", "3", "F3", "3X1", "3F-1", "(0F3;3B1)", "(0F3)OVERLAP_F_B", "3F1 "])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=f"{re.escape(repr(text))} is no action: write 3F7"):
        parse(text)


@pytest.mark.parametrize(
    "name, p, m, v, message",
    [
        ("interleaved", 2, 5, 2, r"5 microbatches // 2 devices = 2 of them, but 5 is not a multiple of 2; 4 and 6 are"),
        ("interleaved-zb", 4, 9, 2, r"9 microbatches // 4 devices = 2 of them, but 9 is not a multiple of 2; 8 and 10"),
        (
            "dualpipe-v",
            4,
            7,
            2,
            r"as many microbatches as stages, but there are 7 microbatches and 2 × 4 .* = 8 stages",
        ),
        ("dualpipe-v", 4, 8, 3, r"dualpipe-v has 2 chunks on each device, not 3"),
        ("zb-v", 4, 8, 1, r"zb-v has 2 chunks on each device, not 1"),
        ("1f1b", 4, 8, 2, r"1f1b has 1 chunks on each device, not 2"),
        ("gpipe", 0, 8, None, r"gpipe needs at least 1 of its devices, but there are 0"),
        ("looped-bfs", 2, 0, None, r"looped-bfs needs at least 1 of its microbatches, but there are 0"),
        ("interleaved", 2, 2, -1, r"interleaved needs at least 1 of its chunks, but there are -1"),
        ("2f2b", 2, 2, None, r"there is no schedule '2f2b'; there are gpipe, 1f1b, "),
    ],
)
def test_sizes_that_break_the_rule_are_refused_with_the_numbers(
    name: str, p: int, m: int, v: int | None, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(name, p, m, v)


@pytest.mark.parametrize(
    "group, message",
    [
        (3, r"devices <= group <= microbatches, but 4 <= 3 <= 10 is false"),
        (11, r"devices <= group <= microbatches, but 4 <= 11 <= 10 is false"),
        (4, r"microbatches % group to be 0 or at least the number of devices, but 10 % 4 = 2 and there are 4 devices"),
    ],
)
def test_groups_that_break_megatrons_rule_are_refused(group: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        interleaved(4, 10, 2, group)


def test_a_schedule_of_ones_own_takes_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forwards of two microbatches, then their backwards, then the next two: bounded memory, many bubbles."""
    monkeypatch.setattr(registry, "_GENERATORS", {**registry._GENERATORS})
    before = schedule_names()

    @register("waves of two")
    def waves(devices: int, microbatches: int, chunks: int = 1) -> Schedule:
        rows = []
        for stage in range(devices):
            row: list[Action | Overlap] = []
            for first in range(0, microbatches, 2):
                wave = range(first, min(first + 2, microbatches))
                row += [Action(stage, "F", k) for k in wave] + [Action(stage, "B", k) for k in wave]
            rows.append(row)
        return Schedule.of("waves of two", microbatches, loop(devices), rows)

    schedule = build("waves of two", devices=3, microbatches=5, limit=2)
    assert " ".join(schedule.texts()[2]) == "2F0 2F1 2B0 2B1 2F2 2F3 2B2 2B3 2F4 2B4"
    assert schedule_names() == (*before, "waves of two")
    with pytest.raises(ScheduleError, match="there is a schedule named '1f1b' already"):
        register("1f1b")(waves)
