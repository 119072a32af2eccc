"""The rules of the schedules: they say which sizes can be built, and what all action lists of a schedule are like."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.schedules import Rules, ScheduleError, build, rules_of, schedule_names, states_rules
from tests.unit.megatron.schedules.pipelines import BUILT_IN
from tests.unit.strategies import repeatable


@given(
    name=st.sampled_from(BUILT_IN), devices=st.integers(1, 6), microbatches=st.integers(1, 14), chunks=st.integers(1, 3)
)
@repeatable(400)
def test_rules_refuse_what_cannot_be_built_and_nothing_else(
    name: str, devices: int, microbatches: int, chunks: int
) -> None:
    fault = rules_of(name).fault(devices, microbatches, chunks)
    if fault is None:
        assert build(name, devices, microbatches, chunks).placement == rules_of(name).placement(devices, chunks)
        return
    with pytest.raises(ScheduleError) as caught:
        build(name, devices, microbatches, chunks)
    assert str(caught.value) == fault


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (4, 8), (3, 12)])
def test_declared_traits_are_those_of_the_action_lists(name: str, devices: int, microbatches: int) -> None:
    rules = rules_of(name)
    seen = Rules.observed(name, build(name, devices, microbatches))
    traits = {trait: getattr(rules, trait) for trait in ("splits_backward", "v_placement", "fuses_last_stage")}
    assert replace(seen, **traits) == seen


def test_every_schedule_of_the_package_states_its_rules() -> None:
    assert all(states_rules(name) for name in BUILT_IN)
    assert [rules_of(name).name for name in BUILT_IN] == [name for name in schedule_names() if name in BUILT_IN]


@pytest.mark.parametrize(
    ("name", "sizes", "says"),
    [
        ("interleaved", (4, 8, 1), "interleaved needs chunks of 2 or more, not 1"),
        ("interleaved", (4, 6, 2), r"interleaved needs microbatches \(6\) in multiples of pipeline 4"),
        ("zb-h1", (4, 3, 1), "zb-h1 needs 4 microbatches or more, not 3"),
        ("zb-v", (4, 3, 2), "zb-v needs 4 microbatches or more, not 3"),
    ],
)
def test_sizes_that_can_be_built_and_not_planned(name: str, sizes: tuple[int, int, int], says: str) -> None:
    build(name, *sizes)
    assert re.fullmatch(says, rules_of(name).plan_fault(*sizes) or "")


def test_an_unknown_schedule_has_no_rules() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule '2f2b'; there are gpipe"):
        rules_of("2f2b")
