"""All-pairs generation: every pair that can be is in some row, none that cannot, and the rows are few."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megatron_ptdp.verify import cases
from megatron_ptdp.verify.pairs import Pair, Rule, all_pairs, pairs_of, possible

THREE = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1, 2)}


def held(rows: list[dict[str, Any]], factors: Any) -> set[Pair]:
    return {pair for row in rows for pair in pairs_of(row, factors)}


def every_row(factors: dict[str, tuple[Any, ...]], rules: list[Rule]) -> list[dict[str, Any]]:
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    return [row for row in rows if all(rule.holds(*(row[name] for name in rule.names)) for rule in rules)]


def test_ten_rows_hold_the_27_pairs_of_three_factors_of_three_values() -> None:
    rows = all_pairs(THREE)
    assert len(held(rows, THREE)) == 27
    assert len(rows) <= 10  # 27 are the product, 9 the fewest that there can be


def test_rules_hold_in_every_row_and_only_what_they_forbid_is_missing() -> None:
    rules = [Rule(("a", "b"), lambda a, b: a != b), Rule(("a", "b", "c"), lambda a, b, c: a + b + c < 4)]
    rows = all_pairs(THREE, rules)
    assert all(row in every_row(THREE, rules) for row in rows)
    assert held(rows, THREE) == held(every_row(THREE, rules), THREE)


@st.composite
def questions(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[Rule]]:
    names = "abcde"[: draw(st.integers(2, 5))]
    factors = {name: tuple(range(draw(st.integers(1, 4)))) for name in names}
    rules = []
    for pair in draw(st.lists(st.sampled_from(list(combinations(names, 2))), max_size=3)):
        total = draw(st.integers(0, 5))
        rules.append(Rule(pair, lambda x, y, total=total: x + y != total))
    return factors, rules


@given(questions())
def test_every_pair_that_some_row_can_hold_is_held(question: tuple[dict[str, tuple[int, ...]], list[Rule]]) -> None:
    factors, rules = question
    rows = all_pairs(factors, rules)
    allowed = every_row(factors, rules)
    assert all(row in allowed for row in rows)
    assert held(rows, factors) == held(allowed, factors)
    assert all(possible(pair, factors, rules) for pair in held(rows, factors))


def test_the_full_grid_leaves_out_only_what_no_case_can_have() -> None:
    rows = [cases.settings(case) for case in cases.full()]
    everything = {
        Pair((a, x), (b, y))
        for a, b in combinations(cases.FACTORS, 2)
        for x, y in product(cases.FACTORS[a], cases.FACTORS[b])
    }
    missing = everything - held(rows, cases.FACTORS)
    assert not [pair for pair in missing if possible(pair, cases.FACTORS, cases.RULES)]
    assert Pair(("t", 1), ("sp", True)) in missing
    assert Pair(("model", "t5-moe"), ("zero", 3)) not in missing
    assert len(rows) < 70 < 1_000_000  # what a product of all settings would be
