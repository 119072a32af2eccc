"""The harness: settings become options, every benchmark has the commands of the documentation, workers fail loudly."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks.harness import Benchmark, Output, Progress, Result, option
from benchmarks.registry import BENCHMARKS, entry_of, load
from benchmarks.workers import Worker, answers, ask_all

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Inner:
    size: int = option(8)


@dataclass(frozen=True)
class Settings:
    rounds: int = option(5, "that count")
    parts: tuple[str, ...] = option(("a", "b"), choices=("a", "b"))
    apart: bool = option(True, flags=["--together"])
    wait: float = option(1.5)
    large: int = option(0)
    inner: Inner = field(default_factory=Inner)
    hidden: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError("there must be a round")


def benchmark(**more: Any) -> Benchmark[Settings]:
    def run(settings: Settings, progress: Progress) -> Result:
        return {"rounds": settings.rounds, "size": settings.inner.size}

    return Benchmark("one", "One.", Settings, Settings(rounds=1, hidden=0), run, lambda result, console: None, **more)


def settings_of(*words: str) -> Settings:
    made = benchmark()
    return made.settings_of(made.parser().parse_args(words))


def test_fields_are_options() -> None:
    assert settings_of() == Settings()
    changed = settings_of("--rounds", "2", "--parts", "b", "--together", "--size", "9")
    assert changed == Settings(2, ("b",), apart=False, inner=Inner(9))


def test_smoke_changes_the_defaults_only() -> None:
    assert settings_of("--smoke") == Settings(rounds=1, hidden=0)
    assert settings_of("--smoke", "--rounds", "4") == Settings(rounds=4, hidden=0)


def test_settings_that_are_refused_end_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark().main(["--rounds", "0"])
    assert "there must be a round" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--size", "0"], ["--wait", "-1"], ["--wait", "nan"], ["--large", "-1"]], ids=" ".join
)
def test_numbers_that_mean_nothing_are_refused_before_anything_is_measured(words: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{words[0]}: {words[1]} is not above 0"):
        settings_of(*words)
    assert settings_of("--large", "0") == Settings(), "as it is by default"


def test_a_duration_without_an_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark().main(["--wait", "inf"])
    assert ended.value.code == 2
    assert "--wait: inf is not finite" in capsys.readouterr().err


def test_the_folder_of_the_json_is_there_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "deep" / "one.json"
    assert benchmark().main(["--json", str(target)]) == 0
    assert json.loads(target.read_text())["rounds"] == 5
    with pytest.raises(SystemExit):
        benchmark(succeeded=lambda result: pytest.fail("it measured")).main(["--json", str(target.parent)])
    assert "is a folder" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_known_before_the_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. It is below a file, or in a folder that takes none. 2. One that could be is not left behind empty."""
    file = tmp_path / "file"
    file.touch()
    made = benchmark(
        succeeded=lambda result: pytest.fail("it measured"), outputs=(Output("--figure", lambda *_: None, "one.png"),)
    )
    for flag, path in (("--json", file / "one.json"), ("--json", "/proc/one.json"), ("--figure", file / "one.png")):
        with pytest.raises(SystemExit) as ended:
            made.main(["--json", str(tmp_path / "good.json"), flag, str(path)])
        assert ended.value.code == 2
        assert f"{flag}: {path} cannot be written: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_a_measurement_that_cannot_be_saved_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk may be full by then; it may be so for the part before as well."""

    def run(settings: Settings, progress: Progress) -> Result:
        assert not progress.save({"rounds": 1})
        return {"rounds": settings.rounds}

    made = replace(benchmark(), run=run, show=lambda result, console: print(f"{result['rounds']} rounds"))
    assert made.main(["--json", "/dev/full"]) == 1
    said = capsys.readouterr()
    assert said.out == "5 rounds\n"
    assert said.err == "/dev/full is not written: No space left on device\n" * 2


def test_a_run_writes_its_json_and_outputs(tmp_path: Path) -> None:
    def draw(result: Result, path: Path) -> None:
        path.write_text(f"{result['rounds']} rounds")

    made = benchmark(outputs=(Output("--figure", draw, "one.png"),), succeeded=lambda result: result["rounds"] > 1)
    words = ["--json", str(tmp_path / "one.json"), "--figure", str(tmp_path / "new" / "figure.png")]
    assert made.main([*words, "--rounds", "2"]) == 0
    written = json.loads((tmp_path / "one.json").read_text())
    assert (written["benchmark"], written["rounds"], written["size"]) == ("one", 2, 8)
    assert written["settings"] == asdict(Settings(rounds=2)) | {"parts": ["a", "b"]}
    assert written["machine"]["cores"] > 0
    assert (tmp_path / "new" / "figure.png").read_text() == "2 rounds"
    assert "smoke" not in written
    assert made.main(["--smoke"]) == 1
    assert made.main(["--smoke", "--rounds", "2", "--json", str(tmp_path / "smoke.json")]) == 0
    assert json.loads((tmp_path / "smoke.json").read_text())["smoke"] is True
    made.outputs[0].write_below({"rounds": 7}, tmp_path)
    assert (tmp_path / "one.png").read_text() == "7 rounds"


def test_what_is_written_before_the_end_says_that_it_is_incomplete(tmp_path: Path) -> None:
    seen: list[Result] = []

    def run(settings: Settings, progress: Progress) -> Result:
        progress.save({"rounds": 1})
        seen.append(json.loads((tmp_path / "one.json").read_text()))
        if settings.rounds == 2:
            raise RuntimeError("the second topology died")
        return {"rounds": settings.rounds}

    made = replace(benchmark(), run=run)
    assert made.main(["--json", str(tmp_path / "one.json")]) == 0
    assert json.loads((tmp_path / "one.json").read_text())["complete"] is True
    with pytest.raises(RuntimeError, match="the second topology died"):
        made.main(["--json", str(tmp_path / "one.json"), "--rounds", "2"])
    assert [one["complete"] for one in seen] == [False, False]
    assert json.loads((tmp_path / "one.json").read_text()) == seen[1]


# --- all benchmarks ---------------------------------------------------------------------------------------------------


def documented() -> list[list[str]]:
    """The words of every command of a benchmark in the documentation."""
    text = "\n".join((ROOT / name).read_text() for name in ("README.md", "benchmarks/README.md", "docs/planner.md"))
    commands = re.findall(r"python -m benchmarks[. ](?:run )?(\w+)((?: +[^#`\n|]+)?)", text)
    found = [[name, *shlex.split(words.split("   ")[0])] for name, words in commands]
    return [words for words in found if words[0] in BENCHMARKS]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs_at_its_smallest_size_by_its_name(name: str) -> None:
    made = load(BENCHMARKS[name])
    assert made.name == name
    assert made.settings_of(made.parser().parse_args(["--smoke"])) is made.smoke
    module = ROOT / "benchmarks" / name
    assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_documented_commands_have_their_options(words: list[str]) -> None:
    made = load(BENCHMARKS[words[0]])
    assert isinstance(made.settings_of(made.parser().parse_args(words[1:])), type(made.smoke))


def test_all_benchmarks_have_a_documented_command() -> None:
    assert {words[0] for words in documented()} == set(BENCHMARKS)


def test_the_list_has_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(BENCHMARKS)


@pytest.mark.parametrize("words", ["--smoke run memory", "--output x list", "--smoke report"])
def test_options_of_all_benchmarks_are_refused_for_one(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(words.split())
    assert "are of all benchmarks" in capsys.readouterr().err


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Runs of all benchmarks end at once in `tmp_path`: those that are added to this list by writing a result."""
    right: list[str] = []

    def run(words: list[str]) -> int:
        name, target = words[4], Path(words[6])
        if name in right:
            target.write_text(json.dumps({"benchmark": name}))
        return 0 if name in right else 1

    monkeypatch.setattr(command, "run_one", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "old.json").write_text('{"benchmark": "old"}')
    return right


@pytest.mark.parametrize("words", ["--smoke --only memory", "--only memory", "--smoke --only memory --output there"])
def test_the_smallest_sizes_do_not_take_the_place_of_results(words: str, ended: list[str]) -> None:
    ended.append("memory")
    assert command.main(words.split()) == 0
    folder = "there" if "there" in words else "results/smoke" if "smoke" in words else "results"
    assert [str(path) for path in Path().rglob("memory.json")] == [f"{folder}/memory.json"]


@pytest.mark.parametrize("name", ["parity", "metg", "peers", "training"])
def test_a_run_of_which_no_system_started_has_failed(name: str) -> None:
    made = load(BENCHMARKS[name])
    assert not made.succeeded({"rows": [], "bytes": [], "errors": {"jax": "did not start"}})
    assert made.succeeded({"rows": [{}], "bytes": [], "errors": {"jax": "did not start"}})


def test_an_older_result_is_none_of_a_run_that_wrote_none(ended: list[str], tmp_path: Path) -> None:
    (tmp_path / "results" / "memory.json").write_text(json.dumps({"benchmark": "memory", "total": 7}))
    assert command.run_all(["memory"], True, tmp_path / "results") == 1
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["old.json", "report.html"]


def test_a_folder_without_a_result_gets_no_page_of_others(ended: list[str], tmp_path: Path) -> None:
    assert command.run_all(["memory"], True, tmp_path / "new") == 1
    assert list((tmp_path / "new").iterdir()) == []


def test_figures_that_cannot_be_drawn_stop_no_other_benchmark(
    ended: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1. The result of `dispatch` has no rows to draw. 2. `memory` runs all the same. 3. The page has both."""
    ended += ["dispatch", "memory"]
    assert command.run_all(["dispatch", "memory"], True, tmp_path / "new") == 0
    assert "dispatch: no dispatch.png: KeyError" in capsys.readouterr().err
    page = (tmp_path / "new" / "report.html").read_text()
    assert "dispatch.json" in page
    assert "memory.json" in page


BENCHMARK = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("ended")))
try:
    print("begun", flush=True)
    time.sleep(20)
except KeyboardInterrupt:
    time.sleep(0.5)
    print("ended")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_benchmark_ends_with_the_command_that_runs_all_and_has_time_for_it(number: signal.Signals) -> None:
    """SIGTERM goes to the command alone, SIGINT to both, as from a terminal."""
    words = [sys.executable, "-c", BENCHMARK]
    script = f"from benchmarks.__main__ import run_one; run_one({words!r})"
    every = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with every, every.stdout as output:  # type: ignore[union-attr]
        try:
            assert output.readline() == "begun\n"
            (os.kill if number == signal.SIGTERM else os.killpg)(every.pid, number)
            every.wait(60)
            assert output.readline() == "ended\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(every.pid, signal.SIGKILL)


def test_results_find_their_benchmark() -> None:
    assert entry_of("profile") is BENCHMARKS["hotpath"], "the name that its results have"
    assert entry_of("something else") is None


# --- workers ----------------------------------------------------------------------------------------------------------


class Counter:
    """The object of a worker; leaves a file when it is closed."""

    def __init__(self, start: int, closed: str) -> None:
        if start < 0:
            raise ValueError(f"cannot start at {start}")
        self.value, self.closed = start, closed

    def add(self, number: int) -> int:
        if number < 0:
            raise ValueError("cannot count down")
        self.value += number
        return self.value

    def end(self) -> None:
        raise SystemExit

    def close(self) -> None:
        Path(self.closed).touch()


def test_workers_answer_in_order_and_close_their_object(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    workers = [Worker(Counter, start, closed=str(file)) for start, file in zip((0, 10), files, strict=True)]
    answers(workers)
    assert ask_all(workers, "add", 1) == [1, 11]
    with pytest.raises(RuntimeError, match="cannot count down"):
        workers[0].ask("add", -1)
    assert workers[0].ask("add", number=1) == 2, "it goes on after a failure"
    for worker in workers:
        worker.close()
    assert all(file.exists() for file in files)


class Slow:
    """The object of a worker; the first one's `fail` fails, the other's has its value later."""

    def __init__(self, number: int, gate: str) -> None:
        self.number, self.gate = number, Path(gate)

    def fail(self) -> str:
        if not self.number:
            raise ValueError("it fails")
        while not self.gate.exists():
            time.sleep(0.001)
        return "late"

    def go_on(self) -> str:
        self.gate.touch()
        return f"next of {self.number}"


@pytest.mark.parametrize("limit_s", [None, 60.0])
def test_what_a_worker_says_after_another_has_failed_is_no_answer_to_the_next_call(
    tmp_path: Path, limit_s: float | None
) -> None:
    workers = [Worker(Slow, number, str(tmp_path / "gate")) for number in range(2)]
    answers(workers)
    with pytest.raises(RuntimeError, match="it fails"):
        ask_all(workers, "fail", limit_s=limit_s)
    assert ask_all(workers, "go_on", limit_s=limit_s) == ["next of 0", "next of 1"]
    for worker in workers:
        worker.close()


def test_workers_that_fail_or_end_say_so(tmp_path: Path) -> None:
    worker = Worker(Counter, -1, str(tmp_path / "closed"))
    with pytest.raises(RuntimeError, match="ValueError: cannot start at -1"):
        worker.answer()
    worker.close()
    worker = Worker(Counter, 0, str(tmp_path / "closed"))
    worker.answer()
    with pytest.raises(RuntimeError, match="ended before it answered"):
        ask_all([worker], "end", limit_s=60)
    worker.close()
