"""The search for the shortest computation that keeps up, on systems that are formulas."""

from __future__ import annotations

import pytest

from benchmarks import parity
from benchmarks.aims import verdict_of
from benchmarks.harness import QUIET
from benchmarks.parity import CLOSE, Probe, Settings, search
from benchmarks.peers.systems import Running


def probing(overhead: float, seen: list[int]):
    """A system that takes `overhead` iterations more than JAX for each computation."""

    def probe(iterations: int) -> Probe:
        seen.append(iterations)
        ratio = iterations / (iterations + overhead)
        return Probe(iterations, iterations * 1e-9, {"min": ratio, "median": ratio, "max": ratio})

    return probe


@pytest.mark.parametrize("first", [10, 1_000, 19_000, 400_000])
@pytest.mark.parametrize("overhead", [10, 1_000, 20_000])
def test_the_search_comes_near_wherever_it_begins(first: int, overhead: float) -> None:
    seen: list[int] = []
    found = search(probing(overhead, seen), first, 10, 10_000_000)
    assert found.shortest is not None
    true = 19 * overhead  # a / (a + overhead) = 0.95
    assert true <= found.shortest.iterations <= true * CLOSE + 2
    assert len(seen) == len(set(seen)) < 30
    assert [p.iterations for p in found.probes] == seen


def test_a_system_without_overhead_keeps_up_with_the_least() -> None:
    found = search(probing(0.0, []), 1_000, 10, 10**6)
    assert found.shortest is not None
    assert found.shortest.iterations == 10


def test_one_that_never_keeps_up_has_no_parity() -> None:
    seen: list[int] = []
    found = search(probing(1e9, seen), 1_000, 10, 100_000)
    assert found.shortest is None
    assert max(seen) == 100_000


def test_a_parity_that_is_never_reached_misses_its_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not one that was not measured."""
    monkeypatch.setattr(parity, "start", lambda *where: Running(None, {}, 2))
    monkeypatch.setattr(parity.Pair, "parity", lambda *_: {"parity_ms": None, "probes": []})
    (figure,) = parity.run(Settings(("2x1",), ("pathways",)), QUIET)["figures"]
    assert figure["median"] == float("inf")
    assert verdict_of("parity", figure)["verdict"] == "missed"


def test_hosts_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="'2x' is not HOSTSxDEVICES"):
        Settings(("2x1", "2x"))
