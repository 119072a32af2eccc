"""Gathering a trace: processes of this machine and of another one with another clock, and one that does not answer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from pathways_ray.deployment import tracing
from pathways_ray.errors import PathwaysError
from pathways_ray.observe.timeline import Clock, Interval
from pathways_ray.os_process import clock


class Actor:
    """An actor whose calls are answered at once; `records` None: it is dead. Its clock is `ahead` of this one's."""

    def __init__(self, records: Any, boot: str = "", ahead: float = 0.0) -> None:
        self.records, self.boot, self.ahead, self.asked = records, boot, ahead, 0.0

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": lambda _, *arguments: (self, name, arguments)})()

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.records is None:
            raise ray.exceptions.RayActorError
        if name == "clock":
            return self.boot or clock()[0], time.monotonic() + self.ahead
        (self.asked,) = arguments
        return self.records


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.deployment.tracing.ray.get", lambda call, timeout: call[0].answer(*call[1:]))


ENDED = ([(640, 2, 5, 10.0, 10.004, 3)], {5: "step"}, {2: "bob"}, {5: 4096})


def test_records_of_all_processes_are_by_the_clock_of_this_one(tmp_path: Path) -> None:
    host = Actor(([(640, 510.001, 510.002)], [(640, 510.0005, 510.001)]), boot="another", ahead=500.0)
    actors = {"controller": Actor(ENDED), "scheduler 0": Actor([(640, 10.0005, 10.003)]), "host 3": host}
    found = tracing.trace(actors, 9.0, {2: [Interval(3, 9.999, 10.005)]})
    assert found.clocks["controller"] == found.clocks["scheduler 0"] == Clock()
    assert found.clocks["host 3"].offset_s == pytest.approx(500.0, abs=0.05)
    assert host.asked == pytest.approx(509.0, abs=0.05)
    assert found.schedulers == {0: [Interval(640, 10.0005, 10.003)]}
    (ran,), (waited,) = found.ran[3], found.waits[3]
    assert (ran.start, waited.end) == (pytest.approx(10.001, abs=0.05), pytest.approx(10.001, abs=0.05))
    tracing.write(found, tmp_path / "t.json")
    names = [e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert names == ["step 640"] * 4 + ["data for 640"]


def test_a_process_that_does_not_answer_is_left_out() -> None:
    found = tracing.trace({"controller": Actor(ENDED), "host 3": Actor(None)}, 0.0)
    assert set(found.clocks) == {"controller"}
    assert found.ran == {}


def test_without_the_controller_there_is_no_trace() -> None:
    with pytest.raises(PathwaysError, match="the controller does not answer"):
        tracing.trace({"controller": Actor(None)}, 0.0)
