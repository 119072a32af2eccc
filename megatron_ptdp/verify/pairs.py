"""All-pairs generation: few rows in which every two values of different factors that can meet do meet.

Most bugs in combinations of settings need only two of them to show, and a full product of settings cannot be run.
Greedy, as AETG (Cohen et al., 1997), but deterministic: a row starts with the first pair that no row has yet, and is
completed by a search that takes in each place the value which brings the most new pairs. Rules say which values can
meet; a pair that no row can hold under the rules is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple, TypeAlias

Row: TypeAlias = dict[str, Any]


class Pair(NamedTuple):
    """Two values of two factors, the factors in the order in which they were given."""

    first: tuple[str, Any]
    second: tuple[str, Any]


@dataclass(frozen=True)
class Rule:
    """A condition on every row: `holds`, of the values of the factors `names` in this order."""

    names: tuple[str, ...]
    holds: Callable[..., bool]


def all_pairs(factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule] = ()) -> list[Row]:
    """Rows that hold every pair of values that some row under the rules can hold.

    Args:
        factors: at least two, each with its values; those that come first are preferred where all else is equal
        rules: conditions on every row
    """
    left = dict.fromkeys(
        Pair((a, x), (b, y)) for a, b in combinations(factors, 2) for x, y in product(factors[a], factors[b])
    )
    rows = []
    while left:
        pair = next(iter(left))
        row = _completed(dict(pair), factors, rules, left)
        if row is None:
            del left[pair]  # the rules forbid it
            continue
        rows.append(row)
        for held in pairs_of(row, factors):
            left.pop(held, None)
    return rows


def pairs_of(row: Row, factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """All pairs that a row holds."""
    return [Pair((a, row[a]), (b, row[b])) for a, b in combinations(factors, 2)]


def possible(pair: Pair, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> bool:
    """Whether any row under the rules holds the pair."""
    return _completed(dict(pair), factors, rules, {}) is not None


def _completed(
    row: Row, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule], left: Mapping[Pair, None]
) -> Row | None:
    """The row with a value for each factor, by a depth-first search; None if the rules leave none."""
    if not all(_holds(rule, row) for rule in rules):
        return None
    able = {name: _able(name, row, factors, rules) for name in factors if name not in row}
    if not able:
        return {name: row[name] for name in factors}
    name = min(able, key=lambda name: len(able[name]))  # what has the fewest values first: it fails soonest
    order = list(factors)

    def new(value: Any) -> int:
        """The number of new pairs that the value would bring."""
        pairs = (
            Pair((name, value), (other, row[other]))
            if order.index(name) < order.index(other)
            else Pair((other, row[other]), (name, value))
            for other in row
        )
        return sum(pair in left for pair in pairs)

    for value in sorted(able[name], key=new, reverse=True):  # stable: of equal ones the first
        made = _completed({**row, name: value}, factors, rules, left)
        if made is not None:
            return made
    return None


def _able(name: str, row: Row, factors: Mapping[str, Sequence[Any]], rules: Sequence[Rule]) -> list[Any]:
    about = [rule for rule in rules if name in rule.names]
    return [value for value in factors[name] if all(_holds(rule, {**row, name: value}) for rule in about)]


def _holds(rule: Rule, row: Row) -> bool:
    """Whether the rule holds, as far as the row goes."""
    return any(name not in row for name in rule.names) or rule.holds(*(row[name] for name in rule.names))
