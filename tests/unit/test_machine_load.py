"""The load of the machine, as the kernel counts it."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pathways_ray import machine_load


class Kernel:
    """What it says in `/proc/loadavg` and `/proc/stat`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: str = "0 0 0 3/900 1234\n") -> None:
        self.load, self.times = load, ""
        monkeypatch.setattr("builtins.open", self._open)
        monkeypatch.setattr(machine_load, "_cores", lambda: 2)
        monkeypatch.setattr(machine_load, "_stolen", machine_load.StolenTime())
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def _open(self, path: str, **_: Any) -> io.StringIO:
        return io.StringIO({"/proc/loadavg": self.load, "/proc/stat": self.times}[path])

    def passes(self, seconds: float, times: str) -> float:
        """The slowness behind some time, with these counts of ticks since the machine began."""
        self.now += seconds
        self.times = f"cpu  {times} 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
        return machine_load.slowness()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.50 0.40 0.30 3/900 1234\n", 1.0), ("9.0 9.0 9.0 301/900 1234\n", 15.05), ("", 1.0), ("a b c d e", 1.0)],
)
def test_slowness_follows_the_threads_that_want_to_run(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: float
) -> None:
    """On two cores. What cannot be read says nothing."""
    Kernel(monkeypatch, text)
    assert machine_load.slowness() == pytest.approx(expected)


def test_a_machine_whose_cores_are_given_to_others_is_slow_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    assert kernel.passes(1, "1000 0 0 5000 0 0 0 900") == 1.0  # of before nobody asks
    assert kernel.passes(1, "1100 0 50 5050 0 0 0 900") == 1.0
    assert kernel.passes(0.5, "1100 0 50 5050 0 0 0 990") == 1.0  # too early to say
    assert kernel.passes(0.5, "1120 0 50 5050 0 0 0 1080") == pytest.approx(10)  # 180 of 200 ticks
    assert kernel.passes(0.5, "1220 0 50 5050 0 0 0 1080") == pytest.approx(10)
    assert kernel.passes(17, "1210 0 50 5050 0 0 0 4490") == 20.0  # 3,400 of 3,500
    assert kernel.passes(1, "1310 0 50 5150 0 0 0 4490") == 1.0


def test_who_wants_to_run_on_cores_that_are_stolen_is_slower_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, "0 0 0 40/900 1234\n")
    assert kernel.passes(1, "0 0 0 0 0 0 0 0") == 2.0
    assert kernel.passes(1, "100 0 0 0 0 0 0 100") == 4.0


@pytest.mark.parametrize("times", ["", "1 2 3", "a b c d e f g h", "5 0 0 5 0 0 0 5"])
def test_counts_that_are_missing_or_go_back_say_nothing(monkeypatch: pytest.MonkeyPatch, times: str) -> None:
    kernel = Kernel(monkeypatch)
    kernel.passes(1, "100 0 0 100 0 0 0 100")
    assert kernel.passes(1, times) == 1.0


def test_the_first_count_is_held_against_none_whenever_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    assert kernel.passes(1, "") == 1.0
    assert kernel.passes(1, "100 0 0 100 0 0 0 1600") == 1.0
    assert kernel.passes(1, "200 0 0 100 0 0 0 1700") == 2.0
    assert kernel.passes(1, "") == 1.0
    assert kernel.passes(0.5, "") == 1.0


def test_a_machine_without_such_a_count_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    Kernel(monkeypatch)  # what this machine's hypervisor has taken since is not asked for
    monkeypatch.setattr("builtins.open", missing)
    assert machine_load.slowness() == 1.0
