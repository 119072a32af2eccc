"""Gathering a trace: processes of this machine and of another one with another clock, and one that does not answer."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from pathways_ray.deployment import detached, tracing
from pathways_ray.errors import PathwaysError, UsageError
from pathways_ray.observe.timeline import Clock, Interval
from pathways_ray.os_process import clock
from pathways_ray.transport.clocks import answer


class Actor:
    """An actor whose calls are answered at once; `records` None: it is dead. Its clock is `ahead` of this one's."""

    def __init__(self, records: Any, boot: str = "", ahead: float = 0.0) -> None:
        self.records, self.boot, self.ahead, self.asked = records, boot, ahead, 0.0
        self.comes: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        def remote(_: Any, *arguments: Any) -> Any:
            if name == "compare_clock":
                self.comes.append(threading.Thread(target=answer, args=arguments, kwargs={"ahead_s": self.ahead}))
                self.comes[-1].start()
            return self, name, arguments

        return type("Method", (), {"remote": remote})()

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.records is None:
            raise ray.exceptions.RayActorError
        if name == "clock":
            return self.boot or clock()[0], time.monotonic() + self.ahead
        if name == "profile":
            return self.records
        self.asked, most = arguments
        return self.records[-most:] if isinstance(self.records, list) else self.records


@pytest.fixture(autouse=True)
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.deployment.tracing.ray.get", lambda call, timeout: call[0].answer(*call[1:]))
    monkeypatch.setattr("pathways_ray.deployment.tracing.ray.util.get_node_ip_address", lambda: "127.0.0.1")


ENDED = ([(640, 2, 5, 10.0, 10.004, 3)], {5: "step"}, {2: "bob"}, {5: 4096})


def test_records_of_all_processes_are_by_the_clock_of_this_one(tmp_path: Path) -> None:
    noted = [(640, 510.001, 510.002)], [(640, 510.0005, 510.001)], [(640, 510.002, 510.003)]
    host = Actor(noted, boot="another", ahead=500.0)
    actors = {"controller": Actor(ENDED), "scheduler 0": Actor([(640, 10.0005, 10.003)]), "host 3": host}
    found = tracing.trace(actors, 9.0, {2: [Interval(3, 9.999, 10.005)]})
    assert found.clocks["controller"] == found.clocks["scheduler 0"] == Clock()
    assert found.clocks["host 3"].offset_s == pytest.approx(500.0, abs=0.05)
    assert host.asked == pytest.approx(509.0, abs=0.05)
    assert found.schedulers == {0: [Interval(640, 10.0005, 10.003)]}
    (ran,), (waited,), (called,) = found.ran[3], found.waits[3], found.python[3]
    assert called.end == pytest.approx(10.003, abs=0.05)
    assert (ran.start, waited.end) == (pytest.approx(10.001, abs=0.05), pytest.approx(10.001, abs=0.05))
    tracing.write(found, tmp_path / "t.json")
    names = [e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert names == ["step 640"] * 4 + ["data for 640", "Python for 640"]


def test_a_machine_is_compared_once_and_directly() -> None:
    hosts = {f"host {n}": Actor(([], [], []), boot="another", ahead=500.0) for n in range(3)}
    found = tracing.clocks_of({"controller": Actor(ENDED), **hosts})
    assert sum(len(host.comes) for host in hosts.values()) == 1
    (clock,) = {found[name] for name in hosts}
    assert abs(clock.offset_s - 500.0) <= clock.within_s, "the bound is one"


def test_a_machine_that_cannot_come_here_is_asked_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.deployment.tracing.ray.util.get_node_ip_address", lambda: "192.0.2.1")
    host = Actor(([], [], []), boot="another", ahead=500.0)
    found = tracing.clocks_of({"host 3": host})["host 3"]
    assert not host.comes
    assert abs(found.offset_s - 500.0) <= found.within_s


def test_of_a_trace_that_is_too_long_the_last_part_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host 3 has more than its share: what ended before its first record is left out everywhere."""
    monkeypatch.setattr("pathways_ray.deployment.tracing.share_of", lambda processes: 2)
    controller = Actor(([(1, 2, 5, 10.0, 10.5, 3)], {5: "step"}, {2: "bob"}, {}))
    host = Actor(([(8, 10.0, 11.0), (9, 11.0, 12.0)], [], []))
    found = tracing.trace({"controller": controller, "host 3": host}, 9.0)
    assert [one.sequence for one in found.ran[3]] == [8, 9]
    assert found.ended == []
    assert found.left_out_s == pytest.approx(2.0)


def test_profiles_of_all_hosts_are_one_session(tmp_path: Path) -> None:
    actors = {"controller": Actor(ENDED), "host 0": Actor(b"zero"), "host 1": Actor("too large"), "host 2": Actor(None)}
    session, lacking = tracing.profile(actors, 0.0, tmp_path)
    assert session.parent == tmp_path / "plugins" / "profile"
    assert {file.name: file.read_bytes() for file in session.iterdir()} == {"host-0.xplane.pb": b"zero"}
    assert lacking == {"host 1": "too large", "host 2": "it did not answer"}


def test_a_prediction_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(UsageError, match=r"p\.json is no prediction"):
        tracing.read_prediction(tmp_path / "p.json")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        tracing.read_prediction(tmp_path / "q.json")


def test_a_process_that_does_not_answer_is_left_out() -> None:
    found = tracing.trace({"controller": Actor(ENDED), "host 3": Actor(None)}, 0.0)
    assert set(found.clocks) == {"controller"}
    assert found.ran == {}


def test_all_that_do_not_answer_together_take_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr("pathways_ray.deployment.tracing.ANSWER_LIMIT_S", 0.0)

    def get(call: Any, timeout: float) -> Any:
        limits.append(timeout)
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr("pathways_ray.deployment.tracing.ray.get", get)
    with pytest.raises(PathwaysError, match="the controller does not answer"):
        tracing.trace({"controller": Actor(ENDED), **{f"host {n}": Actor(None) for n in range(9)}}, 0.0)
    assert limits == [0.0] * 10


def test_without_the_controller_there_is_no_trace() -> None:
    with pytest.raises(PathwaysError, match="the controller does not answer"):
        tracing.trace({"controller": Actor(None)}, 0.0)


def test_a_process_that_ends_while_it_is_looked_for_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_actor(name: str, _: str) -> str:
        if name == "see-host-1":
            raise ValueError("no such actor")
        return name

    monkeypatch.setattr(detached, "actors", lambda name: [f"see-{one}" for one in ("controller", "host-1")])
    monkeypatch.setattr(ray, "get_actor", get_actor)
    assert tracing.processes("see") == {"controller": "see-controller"}
