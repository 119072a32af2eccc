"""A peer's process: what it answers, what its libraries print, what happens when it hangs or ends, and what stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.peers import environments
from benchmarks.peers.process import ROOT, PeerEnded, PeerError, PeerProcess
from benchmarks.peers.systems import SystemInfo, start
from tests.integration.conftest import SCRIPTS

PATH = f"{ROOT}{os.pathsep}{SCRIPTS}"  # of a peer's process, which imports `fake_peer` by its name


@pytest.fixture
def peer() -> Iterator[Callable[[], PeerProcess]]:
    """Starts peers, and closes what a test leaves open."""
    made: list[PeerProcess] = []

    def one() -> PeerProcess:
        made.append(PeerProcess(sys.executable, ["fake_peer"], {"PYTHONPATH": PATH}))
        made[-1].ask("configure", 30, hosts=2, devices=1)
        return made[-1]

    yield one
    for each in made:
        each.close()


def run(process: PeerProcess, mode: str, limit_s: float = 30) -> list[float]:
    return process.ask("run", limit_s, mode=mode, payload="noop", count=7)["value"]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_answers_stay_apart_from_what_libraries_print(peer: Callable[[], PeerProcess]) -> None:
    process = peer()
    assert run(process, "opbyop") == [8.0, 8.0]
    assert "and a child that does" in process.last_output()


def test_a_peer_goes_on_after_an_error(peer: Callable[[], PeerProcess]) -> None:
    process = peer()
    with pytest.raises(PeerError, match="ValueError: as told"):
        run(process, "fail")
    assert run(process, "opbyop") == [8.0, 8.0]


def test_a_peer_that_ends_leaves_its_last_output_and_no_process(peer: Callable[[], PeerProcess]) -> None:
    process = peer()
    child = int(run(process, "child")[0])
    with pytest.raises(PeerEnded, match=r"ended with code 3\n(.*\n)*my last words"):
        run(process, "end")
    assert gone(child)


def test_a_peer_that_hangs_is_ended_in_time_with_all_below_it(peer: Callable[[], PeerProcess]) -> None:
    process = peer()
    child = int(run(process, "child")[0])
    begin = time.monotonic()
    with pytest.raises(PeerEnded, match=r"no answer within 0.3 s"):
        run(process, "hang", 0.3)
    assert time.monotonic() - begin < 15
    assert gone(child)


def test_closing_leaves_no_process(peer: Callable[[], PeerProcess]) -> None:
    process = peer()
    child = int(run(process, "child")[0])
    process.close()
    assert gone(child)


def test_a_peer_whose_packages_are_missing_says_which() -> None:
    """The Monarch peer in this environment, where there is no Monarch."""
    with pytest.raises(PeerEnded, match="No module named 'monarch'"):
        start(SystemInfo("", ("benchmarks.peers.monarch_actors",)), 1, 1)


def test_an_environment_that_cannot_be_built_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "requirements-dask.txt").write_text("no requirement at all\n")
    monkeypatch.setattr(environments, "HERE", tmp_path)
    monkeypatch.setattr(environments, "ROOT", tmp_path / "built")
    assert environments.main(["dask"]) == 0
    assert "reports them as not run" in capsys.readouterr().out
    assert "Invalid requirement" in str(environments.problem("dask"))
    assert not environments.interpreter("dask").exists()


def test_a_benchmark_that_is_told_to_end_twice_leaves_nothing(tmp_path: Path) -> None:
    """1. The benchmark of one peer is under way. 2. It gets SIGTERM two times. 3. No process is left, and no folder."""
    (tmp_path / "folders").mkdir()
    with subprocess.Popen(
        [sys.executable, str(SCRIPTS / "peers_ended_benchmark.py"), PATH],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(tmp_path / "folders")},
    ) as benchmark:
        assert benchmark.stdout is not None
        child = int(benchmark.stdout.readline())
        benchmark.terminate()
        time.sleep(0.2)  # the second comes while the peer is being closed
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + 15
    assert gone(child)
    assert not list((tmp_path / "folders").iterdir())
