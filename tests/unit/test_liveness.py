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


def test_a_look_that_comes_late_counts_as_two_periods() -> None:
    """A watcher that itself runs only every third second has heard nothing for 30 s, and counts 20 of them."""
    watched: Liveness[str] = Liveness(20.0, period_s=1.0)
    watched.hear("a", 0.0)
    for second in range(3, 31, 3):
        assert watched.silent(float(second)) == []
    assert watched.silent(31.0) == ["a"]


def test_on_a_slow_machine_silence_counts_for_less() -> None:
    """1. Ten times as slow, as its watcher sees: 70 s are 7. 2. As the peer says: the same. 3. One second more of each
    is the machine's again, which is quick."""
    for own, said in ((10.0, 1.0), (1.0, 10.0), (10.0, 10.0)):
        watched: Liveness[str] = Liveness(8.0, period_s=1.0)
        watched.hear("a", 0.0, said)
        for second in range(1, 71):
            assert watched.silent(float(second), own) == []
        watched.hear("b", 70.0)
        watched.slowness.clear()
        assert watched.silent(71.0) == []
        assert watched.silent(72.0) == ["a"], "b has its full time"


def test_a_peer_that_was_slow_is_judged_as_it_says_now() -> None:
    watched: Liveness[str] = Liveness(8.0, period_s=1.0)
    watched.hear("a", 0.0, 10.0)
    watched.hear("a", 0.0)
    assert watched.slowness == {"a": 10.0}, "not every message says it"
    watched.hear("a", 0.0, 1.0)
    assert [now for now in range(1, 12) if watched.silent(float(now))] == [9, 10, 11]


def test_one_bad_moment_before_a_peer_vanishes_hardly_counts() -> None:
    """Slow again and again, it is believed."""
    watched: Liveness[str] = Liveness(8.0, period_s=1.0)
    for said in (1.0, 1.0, 2.0):
        watched.hear("a", 0.0, said)
    assert watched.slowness == {"a": 1.25}
    for _ in range(20):
        watched.hear("a", 0.0, 2.0)
    assert watched.slowness["a"] > 1.99
