"""The benchmark against peers, as far as it needs no process: what is measured, compared, read and printed."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.harness import QUIET
from benchmarks.peers import benchmark as program
from benchmarks.peers import environments, protocol, rounds
from benchmarks.peers.jax_multicontroller import MultiController
from benchmarks.peers.process import PeerEnded, PeerError
from benchmarks.peers.rounds import Case, Session
from benchmarks.peers.systems import SYSTEMS, Running, variables
from benchmarks.workers import Worker, answers


class FakeProcess:
    """A peer whose every computation takes `us`; `spoiled` modes fail as told."""

    def __init__(self, us: float, devices: int, spoiled: dict[str, Any]) -> None:
        self.us, self.devices, self.spoiled, self.closed = us, devices, spoiled, False

    def ask(self, word: str, limit_s: float, mode: str = "", payload: str = "", count: int = 0, **_: Any) -> Any:
        what = self.spoiled.get(mode)
        if isinstance(what, Exception):
            raise what
        value = what if what is not None else protocol.START + count
        return {"seconds": count * self.us / 1e6, "value": [value] * self.devices}

    def close(self) -> None:
        self.closed = True


def described(modes: tuple[str, ...], all_reduce: str = "the same") -> dict[str, Any]:
    return {"payloads": {"allreduce": all_reduce}, "modes": {"allreduce": list(modes)}}


def session_of(**systems: tuple[FakeProcess, dict[str, Any]]) -> Session:
    made = Session(1, 2, lambda text: None)
    for name, (process, says) in systems.items():
        made.systems[name.replace("_", "-")] = Running(process, says, 2)
    return made


def measured(made: Session, number: int = 3) -> Session:
    made.warm_up(made.cases([], []), 0.01)
    for k in range(number):
        made.round(k)
    return made


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "SETTLE_S", 0.001)


def test_ratios_are_of_rates_and_say_when_payloads_differ() -> None:
    made = session_of(
        pathways=(FakeProcess(50, 2, {}), described(("opbyop", "chained"))),
        jax_multicontroller=(FakeProcess(100, 2, {}), described(("opbyop",))),
        tf1_sessions=(FakeProcess(400, 2, {}), described(("opbyop-wait",), "its own")),
    )
    found = {ratio["name"]: ratio for ratio in program.ratios(measured(made))}
    same = found["pathways opbyop / jax-multicontroller opbyop"]
    assert (same["median"], same["same_payload"]) == (pytest.approx(2.0), True)
    other = found["pathways opbyop / tf1-sessions opbyop-wait"]
    assert (other["median"], other["same_payload"]) == (pytest.approx(8.0), False)
    assert [row["payload_is"] for row in rounds.rows(made)].count("its own") == 1


@pytest.mark.parametrize(
    "spoiled, text",
    [({"fused": 0.0}, r"fused: after 256 computations the value is \[0.0, 0.0\]"), ({"fused": PeerError("no")}, "no")],
)
def test_a_case_that_fails_is_dropped_alone(spoiled: dict[str, Any], text: str) -> None:
    process = FakeProcess(50, 2, spoiled)
    made = measured(session_of(pathways=(process, described(("opbyop", "fused")))))
    assert [str(case) for case in made.samples] == ["pathways opbyop (allreduce)"]
    assert re.fullmatch(text + ".*", made.errors["pathways fused (allreduce)"])
    assert not process.closed


def test_a_system_that_ends_is_started_again_for_its_other_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. `fused` ends the process. 2. A new one is started. 3. `opbyop` is measured on it."""
    first, second = FakeProcess(50, 2, {"fused": PeerEnded("gone")}), FakeProcess(60, 2, {})
    monkeypatch.setattr(rounds, "start", lambda *where: Running(second, described(("fused", "opbyop")), 2))
    made = measured(session_of(pathways=(first, described(("fused", "opbyop")))))
    assert first.closed
    assert made.errors == {"pathways fused (allreduce)": "gone"}
    assert made.samples[Case("pathways", "opbyop", "allreduce")] == pytest.approx([60.0] * 3)


@pytest.mark.parametrize("ended", [True, False])
def test_the_process_of_a_system_ends_with_a_host_that_fails_or_has_ended(ended: bool, tmp_path: Path) -> None:
    """The others may wait for it: the system is started again for its other cases."""
    made = MultiController()
    made._hosts = [Worker(Path, tmp_path)]  # which knows no `restart`
    answers(made._hosts)
    if ended:
        made._hosts[0].kill()
    with pytest.raises(SystemExit):
        made.prepare("opbyop", "noop", 1)
    made.close()


class CompilesFirst(FakeProcess):
    """A peer whose first run of each mode takes a second more."""

    def __init__(self, us: float, devices: int) -> None:
        super().__init__(us, devices, {})
        self.ran: set[str] = set()

    def ask(self, word: str, limit_s: float, mode: str = "", payload: str = "", count: int = 0, **_: Any) -> Any:
        answer = super().ask(word, limit_s, mode, payload, count)
        extra = 0.0 if mode in self.ran else 1.0
        self.ran.add(mode)
        return {**answer, "seconds": answer["seconds"] + extra}


def test_a_system_that_was_started_again_is_warm_before_its_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. `fused` ends the process in the second round. 2. A new one compiles. 3. No sample has that."""
    first, second = CompilesFirst(50, 2), CompilesFirst(50, 2)
    monkeypatch.setattr(rounds, "start", lambda *where: Running(second, described(("opbyop", "fused")), 2))
    made = measured(session_of(pathways=(first, described(("opbyop", "fused")))), 1)
    first.spoiled["fused"] = PeerEnded("gone")
    for number in range(1, 3):
        made.round(number)
    assert first.closed
    assert made.samples == {Case("pathways", "opbyop", "allreduce"): pytest.approx([50.0] * 3)}


def test_a_missing_environment_and_a_start_that_fails_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*where: Any) -> Any:
        raise PeerError("no such module")

    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(rounds, "start", fail)
    made = Session(1, 4, lambda text: None)
    made.start("tf1-sessions", SYSTEMS["tf1-sessions"])
    made.start("pathways", SYSTEMS["pathways"])
    measured(made)
    assert "run 'make peers'" in made.errors["tf1-sessions"]
    assert made.errors["pathways"] == "did not start: no such module"


def test_an_environment_that_did_not_build_tells_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    (tmp_path / "dask.error").write_text("No matching distribution found for distributed==0.0\n")
    assert "No matching distribution" in str(environments.problem("dask"))


def test_every_system_has_an_environment_and_exact_versions() -> None:
    assert {info.environment for info in SYSTEMS.values()} - {""} <= set(environments.NAMES)
    for name in environments.NAMES:
        lines = environments.requirements(name).read_text().splitlines()
        wanted = [line.split(";")[0] for line in lines if line and not line.startswith("#")]
        assert all("==" in line for line in wanted), name


@pytest.mark.parametrize("devices, threads", [(1, None), (2, "8"), (4, "8"), (8, "16")])
def test_every_system_has_as_many_threads_as_hosts_of_this_runtime(devices: int, threads: str | None) -> None:
    assert variables(devices)["NPROC"] == threads


@pytest.mark.parametrize("us, count", [(1e-9, 8192), (100, 4992), (1000, 512), (50_000, 256)])
def test_counts_are_whole_chains_within_bounds(us: float, count: int) -> None:
    assert rounds.count_for(us / 1e6, 0.5) == count


def test_topologies_are_read() -> None:
    assert program.topologies_of("1,2,4x2") == ((1, 4), (2, 1), (4, 2))
    with pytest.raises(argparse.ArgumentTypeError, match="'2by1' is not HOSTSxDEVICES"):
        program.topologies_of("2by1")


@pytest.mark.parametrize(
    "words, text", [("--only spark", "no such system: spark"), ("--payloads noop,add", "no such payload: add")]
)
def test_an_unknown_system_or_payload_is_refused(words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.BENCHMARK.main(words.split())
    assert text in capsys.readouterr().err


def test_a_mode_that_no_system_has_is_an_error_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made = session_of(pathways=(FakeProcess(50, 2, {}), described(("opbyop", "fused"))))
    monkeypatch.setattr(rounds, "session", lambda *_: contextlib.nullcontext(made))
    result = program.run(program.Settings(((1, 2),), rounds=1, modes=("opbyop", "fusde"), target_s=0.0), QUIET)
    assert result["topologies"][0]["errors"] == {"mode fusde": "no system that runs has it"}
    assert [row["mode"] for row in result["rows"]] == ["opbyop"]


def test_a_result_is_json_and_prints_its_losses(capsys: pytest.CaptureFixture[str]) -> None:
    made = measured(session_of(pathways=(FakeProcess(50, 2, {}), described(("opbyop",)))))
    made.fail("tf1-sessions", "its environment is not there")
    others = {"tf1-sessions": "it crashed"}
    result = {
        "measured": "",
        "machine": {"cpu": "", "cores": 2, "memory_gib": 1, "system": "", "python": "", "packages": {}, "load": [0.0]},
        "rows": rounds.rows(made),
        "ratios": program.ratios(made),
        "topologies": [
            {"hosts": hosts, "devices_per_host": 2, "busy_cores_between_rounds": None, "errors": errors}
            for hosts, errors in ((1, made.errors), (2, others))
        ],
    }
    program.show(json.loads(json.dumps(result)), Console())
    shown = capsys.readouterr().out
    assert "1x2, tf1-sessions: its environment is not there" in shown
    assert "2x2, tf1-sessions: it crashed" in shown
