"""The grids: all cases can be built, the small one has every value, and --only picks or refuses."""

from __future__ import annotations

import pytest

from megatron_ptdp import schedules
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import Compute, build
from megatron_ptdp.parallel import Options
from megatron_ptdp.parallel.layer_split import cut
from megatron_ptdp.parallel.layout import islands_of
from megatron_ptdp.verify import cases, checks
from megatron_ptdp.verify.cases import FACTORS, RULES, SMALL, Case
from megatron_ptdp.verify.models import CONFIGS
from megatron_ptdp.verify.planted import PLANTED_BUGS

EVERY = [*SMALL, *cases.full(), *checks.TRAININGS, checks.PLANTED, *(case for pair in checks.BITS for case in pair)]


@pytest.mark.parametrize("case", EVERY, ids=Case.label)
def test_a_case_fits_the_model_the_schedule_and_the_devices(case: Case) -> None:
    assert all(rule.holds(*(getattr(case, name) for name in rule.names)) for rule in RULES)
    sizes = case.sizes
    assert sizes.batch == cases.BATCH
    model = build(CONFIGS[case.model], Compute(case.t, case.sp, case.recompute), weighted=True)
    assert model.layers == cases.LAYERS
    assert len(cut(model.layers, sizes.stages, counts=case.counts)) == sizes.stages
    assert (len(set(case.counts)) > 1) == (case.cut == "uneven")
    schedules.build(case.schedule, case.p, case.m, case.v)
    Options(zero=case.zero, keep=case.keep).check(sizes)
    for row in islands_of(sizes, range(cases.ISLANDS), case.place):
        for island in row:
            assert row.count(island) * sizes.members * sizes.tensor <= cases.DEVICES


@pytest.mark.parametrize("name", FACTORS)
def test_the_small_grid_has_every_value_of_every_factor(name: str) -> None:
    assert {getattr(case, name) for case in SMALL} == set(FACTORS[name])


def test_no_case_is_there_twice_and_labels_tell_them_apart() -> None:
    for grid in (SMALL, cases.full()):
        assert len(set(grid)) == len({case.label() for case in grid}) == len(grid)


def test_only_picks_checks_that_have_all_settings_of_one_of_them() -> None:
    picked = checks.chosen("small", "float64", False, ["check=gradients,p=2,t=2", "zero=3"])
    gradients = [check.case for check in picked if check.kind == "gradients"]
    assert gradients == [case for case in SMALL if (case.p, case.t) == (2, 2) or case.zero == 3]
    assert [check.planted_bug for check in checks.chosen("small", "float64", True, ["mistake=stale-tied"])] == [
        "stale-tied"
    ]
    assert checks.chosen("small", "float64", False, ["sp=on"])


@pytest.mark.parametrize(
    "only, text",
    [
        ("p=3", r"--only p=3 matches none of the \d+ checks"),
        ("p=2,t=7", "matches none"),
        ("pipline=2", "there is no setting of a check 'pipline'"),
        ("zer=2", "did you mean 'zero'"),
        ("p", "settings like p=2,t=2, not 'p'"),
    ],
)
def test_only_that_matches_nothing_is_refused(only: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        checks.chosen("small", "float64", False, [only])


def test_a_grid_can_be_run_in_parts_that_make_it_whole() -> None:
    count = len(checks.chosen("full", "float64", False, []))
    parts = [cases.part(text, count) for text in (":10", "10:30", "30:")]
    assert [number for one in parts for number in range(count)[one]] == list(range(count))


@pytest.mark.parametrize(
    "text, message",
    [("5", "two numbers, as in 10:20, not '5'"), ("a:b", "not 'a:b'"), ("7:7", "none of the 9"), ("9:", "none of the")],
)
def test_a_part_without_checks_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.part(text, 9)


def test_every_bug_is_planted_after_the_case_passes_without_it() -> None:
    listed = checks.with_planted_bugs()
    assert [check.kind for check in listed[:2]] == ["gradients", "training"]
    assert {check.case for check in listed} == {checks.PLANTED}
    assert [check.planted_bug for check in listed[2:]] == list(PLANTED_BUGS)
    assert len(PLANTED_BUGS) >= 10
    with pytest.raises(ConfigError, match="mistakes are planted in float64"):
        checks.chosen("small", "float32", True, [])


def test_float32_has_no_training_as_no_bound_is_stated() -> None:
    assert "training" not in {check.kind for check in checks.listed("full", "float32")}
    assert "training" in {check.kind for check in checks.listed("small", "float64")}
