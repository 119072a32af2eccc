"""Schedules that update while microbatches are under way: the versions that they use, and those that they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ptdp.schedules import (
    Rules,
    Schedule,
    ScheduleError,
    Updates,
    build,
    check,
    kept_versions,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    rules_of,
    versions,
)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 8), (4, 2), (3, 12)])
def test_pipedream_sees_on_each_stage_the_weights_of_its_papers_rule(p: int, m: int) -> None:
    made = pipedream(p, m)
    check(made)
    assert versions(made) == {(s, k): max(0, k - (p - 1 - s)) for s in range(p) for k in range(m)}
    # The newest, and one for each microbatch in flight but the one that is at its backward.
    assert kept_versions(made) == tuple(min(p - s, m) for s in range(p))


@pytest.mark.parametrize(("p", "m", "every"), [(2, 8, None), (4, 16, 4), (4, 16, 8), (3, 12, 6), (1, 4, 2)])
def test_two_versions_are_all_that_2bw_keeps(p: int, m: int, every: int | None) -> None:
    made = pipedream_2bw(p, m, every=every)
    n = every or p
    assert versions(made) == {(s, k): max(0, k // n - 1) for s in range(p) for k in range(m)}
    assert max(kept_versions(made)) == 2


def test_2bw_refuses_updates_of_fewer_microbatches_than_stages() -> None:
    with pytest.raises(ScheduleError, match="0F4 of pipedream-2bw needs version 1 of its weights, and there are 0 upd"):
        pipedream_2bw(4, 8, every=2)
    with pytest.raises(ScheduleError, match="multiples of those of an update, but 6 is not a multiple of 4"):
        pipedream_2bw(4, 6)


def test_a_schedule_without_updates_has_one_version() -> None:
    with pytest.raises(ScheduleError, match="1f1b updates once"):
        versions(build("1f1b", 2, 4))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_they_are_built_by_name_and_state_their_rules(name: str) -> None:
    rules = rules_of(name)
    assert rules.stale
    seen = Rules.observed(name, build(name, 4, 8))
    assert replace(seen, chunks=1, whole_rounds=rules.whole_rounds) == rules
    assert not any(rules_of(other).stale for other in ("1f1b", "gpipe", "zb-v"))
    with pytest.raises(ScheduleError, match="has 1 chunks on each device, not 2"):
        build(name, 4, 8, chunks=2)
    with pytest.raises(ScheduleError, match="needs at least 1 of its microbatches"):
        build(name, 4, 0)


@pytest.mark.parametrize("made", [pipedream(2, 4), pipedream_2bw(2, 4), one_f_one_b(2, 4)])
def test_their_text_says_when_they_update(made: Schedule) -> None:
    line = made.as_text().splitlines()[0]
    assert ("an update every" in line) is (made.updates is not None)
    assert replace(made, updates=Updates(3)).as_text() != made.as_text()
