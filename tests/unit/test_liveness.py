"""The one rule by which processes take each other for dead."""

from __future__ import annotations

from pathways_ray.liveness import Liveness


def test_a_peer_is_lost_after_the_limit_and_not_before() -> None:
    watched: Liveness[str] = Liveness(8.0)
    watched.hear("a", 0.0)
    for second in range(1, 9):
        assert watched.silent(float(second)) == []
    assert watched.silent(8.5) == ["a"]


def test_a_sign_of_life_gives_the_full_time_again() -> None:
    watched: Liveness[str] = Liveness(8.0)
    watched.hear("a", 0.0)
    watched.hear("b", 0.0)
    for second in range(1, 8):
        watched.silent(float(second))
    watched.hear("a", 7.0)
    assert watched.silent(8.1) == ["b"]
    assert watched.silent(11.0) == ["b"]
    assert watched.silent(14.9) == ["b"]
    assert set(watched.silent(15.1)) == {"a", "b"}


def test_a_watcher_that_paused_judges_nobody_until_a_full_limit_has_passed() -> None:
    """1. Both peers are silent while the watcher itself is stopped for 60 s.
    2. At its first look it blames neither; 8 s of its own running time later it blames both."""
    watched: Liveness[int] = Liveness(8.0)
    watched.hear(1, 0.0)
    watched.hear(2, 0.0)
    assert watched.silent(1.0) == []
    assert watched.silent(61.0) == []
    assert watched.silent(64.0) == []
    assert watched.silent(68.0) == []
    assert watched.silent(69.1) == [1, 2]


def test_a_forgotten_peer_is_not_watched() -> None:
    watched: Liveness[int] = Liveness(1.0)
    watched.hear(1, 0.0)
    watched.forget(1)
    watched.forget(2)
    assert watched.silent(0.4) == watched.silent(0.8) == watched.silent(1.2) == []
