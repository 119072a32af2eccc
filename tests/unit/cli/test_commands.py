"""The commands from the outside, without a cluster: options, exit status, what goes where."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import pathways_ray
from pathways_ray.cli import bench, commands, demo, demo_programs, output, proxy, status
from pathways_ray.cli.demo_programs import Check, Outcome, Program
from pathways_ray.errors import AuthenticationError, ControllerLost, PathwaysError, Unschedulable, UsageError

MEASURED = {"benchmark": "dispatch", "rows": []}


@dataclass(frozen=True)
class Dispatch:
    """Settings of the stand-in for `benchmarks.dispatch`."""

    repetitions: int
    computations: int | None = None
    reuse_session: bool | None = None


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments, prog_name="pathways")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-ins for `benchmarks.*`; collects the settings of what is measured."""
    asked: list[dict[str, Any]] = []

    def benchmark(name: str, smoke: Any) -> SimpleNamespace:
        def measured(settings: Any) -> dict[str, Any]:
            asked.append({key: value for key, value in vars(settings).items() if value is not None})
            return MEASURED

        def show(result: Any, console: Any) -> None:
            console.print("the numbers")

        made = SimpleNamespace(name=name, settings=type(smoke), smoke=smoke, measured=measured, show=show)
        return SimpleNamespace(BENCHMARK=made)

    modules = {
        "benchmarks.dispatch": benchmark("dispatch", Dispatch(1, 256)),
        "benchmarks.tenants.benchmark": benchmark("tenants", SimpleNamespace(rounds=1)),
        "benchmarks.figures": SimpleNamespace(
            dispatch=lambda result, path: path.write_bytes(b"PNG"),
            tenants=lambda result, folder: (folder / "tenants.png").write_bytes(b"PNG"),
        ),
        "benchmarks.measure": SimpleNamespace(machine=lambda: {"cores": 2}),
    }
    for module in (bench, demo):
        monkeypatch.setattr(module, "load", modules.__getitem__)
    return asked


# --- the group --------------------------------------------------------------------------------------------------------


def test_the_command_line_loads_nothing_heavy() -> None:
    program = (
        "import sys, pathways_ray.cli; "
        "print([m for m in ('jax', 'ray', 'grpc', 'numpy.linalg', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() in ("[]", "['numpy.linalg']")


def test_version() -> None:
    assert pathways_ray.__version__ in invoke("--version").output


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["demo", "bench", "status", "--version"]),
        (["demo"], ["--output", "--json", "--smoke"]),
        (["bench"], ["dispatch", "tenants"]),
        (["bench", "dispatch"], ["--json", "--figure", "--repetitions", "--smoke"]),
        (["bench", "tenants"], ["--json", "--figures", "--rounds", "--smoke"]),
        (["status"], ["--url", "--token", "--json", "PATHWAYS_URL", "PATHWAYS_TOKEN"]),
    ],
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(arguments: list[str], names: list[str], flag: str) -> None:
    found = invoke(*arguments, flag)
    assert found.exit_code == 0
    assert [name for name in names if name not in found.output] == []


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (UsageError("say\nmore"), 2),
        (AuthenticationError("say\nmore"), 2),
        (ControllerLost("say\nmore"), 1),
        (Unschedulable("say\nmore"), 1),
    ],
)
def test_an_error_is_one_line(error: PathwaysError, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setitem(commands.commands, "fail", click.Command("fail", callback=fail))
    found = invoke("fail")
    assert (found.exit_code, found.stdout, found.stderr) == (exit_code, "", "pathways: say more\n")


@pytest.mark.parametrize("ports", ["20000", "20000:20099", "a-b", "-5", "20099-20000", "1-70000"])
def test_client_ports_that_are_none(ports: str) -> None:
    """Said before Ray is looked for."""
    found = invoke("up", "--client-ports", ports)
    assert found.exit_code == 2
    assert "ports" in found.stderr
    assert "no Ray cluster" not in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [("trace", "--seconds"), ("spans", "--every"), ("top", "--every"), ("island", "drain", "0", "--deadline")],
)
def test_what_is_no_number_is_in_no_range(arguments: tuple[str, ...]) -> None:
    found = invoke(*arguments, "nan")
    assert found.exit_code == 2
    assert "is not a number" in found.stderr


@pytest.mark.parametrize("command", ["dashboard", "top"])
def test_a_wrong_token_is_refused_before_anything_is_served(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any, **__: Any) -> None:
        raise AuthenticationError("the token is missing or wrong")

    monkeypatch.setattr(status, "ask", ask)
    found = invoke(command, "--url", "grpc://h:1", "--token", "t")
    assert (found.exit_code, found.stdout, found.stderr) == (2, "", "pathways: the token is missing or wrong\n")


def test_a_slice_that_is_named_without_its_session() -> None:
    """As handles name themselves, and `pathways status` does in its first column."""
    done = invoke("why", "slice", "12")
    assert done.exit_code == 2
    assert "'slice 12' is no subject" in done.output
    assert "'slice 7.12' is slice 12 of session 7" in done.output


def test_a_missing_package_is_named() -> None:
    with pytest.raises(output.CommandFailed, match=r"needs no_such_package, .* pip install '\.\[train,bench\]'"):
        output.load("no_such_package.module")


@pytest.mark.parametrize("arguments", [("bench", "dispatch", "--json"), ("demo", "--json"), ("demo", "--output")])
def test_a_place_that_cannot_be_written_is_refused_first(
    arguments: tuple[str, ...], benchmarks: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    found = invoke(*arguments, str(tmp_path / "file" / "below" / "result.json"))
    assert found.exit_code == 2
    assert "Not a directory" in found.stderr
    assert benchmarks == []


@pytest.mark.parametrize(
    "arguments", [("bench", "dispatch", "--json"), ("bench", "dispatch", "--figure"), ("demo", "--json")]
)
def test_a_file_that_cannot_be_written_is_refused_first(
    arguments: tuple[str, ...], benchmarks: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result"
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (file, os.W_OK))  # root may write all
    found = invoke(*arguments, str(file))
    assert found.exit_code == 2
    assert "cannot be written to" in found.stderr
    assert benchmarks == []


@pytest.mark.parametrize("option", ["--json", "--figure"])
def test_a_disk_that_is_full_ends_a_command_with_a_line(option: str, benchmarks: list[dict[str, Any]]) -> None:
    benchmark = invoke("bench", "dispatch", option, "/dev/full")
    assert (benchmark.exit_code, len(benchmarks)) == (1, 1)
    assert benchmark.stderr == "pathways: /dev/full cannot be written: No space left on device\n"


# --- bench dispatch ---------------------------------------------------------------------------------------------------


def test_bench_writes_what_was_asked_for(benchmarks: list[dict[str, Any]], tmp_path: Path) -> None:
    result, figure = tmp_path / "new" / "result.json", tmp_path / "figure.png"
    found = invoke("bench", "dispatch", "--repetitions", "4", "--json", str(result), "--figure", str(figure))
    assert found.exit_code == 0, found.output
    assert benchmarks == [{"repetitions": 4}]
    assert json.loads(result.read_text()) == MEASURED
    assert figure.read_bytes() == b"PNG"
    assert "the numbers" in found.stdout


def test_bench_smoke_is_the_benchmarks_own(benchmarks: list[dict[str, Any]]) -> None:
    assert invoke("bench", "dispatch", "--smoke").exit_code == 0
    assert benchmarks == [{"repetitions": 1, "computations": 256}]


def test_bench_tenants_writes_what_was_asked_for(benchmarks: list[dict[str, Any]], tmp_path: Path) -> None:
    result, folder = tmp_path / "result.json", tmp_path / "new"
    found = invoke("bench", "tenants", "--rounds", "4", "--json", str(result), "--figures", str(folder))
    assert found.exit_code == 0, found.output
    assert invoke("bench", "tenants", "--smoke").exit_code == 0
    assert benchmarks == [{"rounds": 4}, {"rounds": 1}]
    assert json.loads(result.read_text()) == MEASURED
    assert (folder / "tenants.png").read_bytes() == b"PNG"


def test_json_on_stdout_is_alone_there(benchmarks: list[dict[str, Any]]) -> None:
    found = invoke("bench", "dispatch", "--smoke", "--json", "-")
    assert json.loads(found.stdout) == MEASURED
    assert "the numbers" in found.stderr


def test_bench_needs_a_round(benchmarks: list[dict[str, Any]]) -> None:
    assert invoke("bench", "dispatch", "--repetitions", "0").exit_code == 2


# --- demo -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for `pw.init`; `open` says whether its cluster runs."""

    class Cluster(SimpleNamespace):
        def __enter__(self) -> Any:
            self.open = True
            return self

        def __exit__(self, *_: object) -> None:
            self.open = False

    cluster = Cluster(open=False, asked={})

    def init(**shape: Any) -> Cluster:
        cluster.asked = shape
        return cluster

    monkeypatch.setattr(pathways_ray, "init", init, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return cluster


def offer(monkeypatch: pytest.MonkeyPatch, *checks: Check, error: Exception | None = None) -> None:
    """The demo's programs: one that prints, and gives these checks or raises."""

    def run(session: Any, steps: int, progress: demo_programs.Progress) -> Outcome:
        assert session.open
        print("the graph [of the program]")
        progress(steps, steps)
        if error:
            raise error
        return Outcome(list(checks), {"steps": steps})

    monkeypatch.setattr(demo, "PROGRAMS", (Program("one", "about one", run),))


RIGHT = Check("sum [of v]", "3", "3", True)
WRONG = Check("product", "2", "4", False)


def test_demo_runs_on_a_cluster_of_its_own(
    benchmarks: list[dict[str, Any]], session: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, RIGHT)
    found = invoke("demo", "--output", str(tmp_path / "results"))
    assert found.exit_code == 0, found.output
    assert session.asked == {"islands": 2, "hosts_per_island": 1, "devices_per_host": 4, "platform": "cpu"}
    assert not session.open
    assert benchmarks == [{"repetitions": 3, "computations": 1024, "reuse_session": True}]
    assert "the graph [of the program]" in found.stdout
    assert "200 of 200 steps" in found.stdout
    assert "sum [of v]" in found.stdout
    assert (tmp_path / "results" / "dispatch.png").read_bytes() == b"PNG"
    result = json.loads((tmp_path / "results" / "demo.json").read_text())
    assert result["ok"] is True
    assert result["dispatch"] == MEASURED
    (program,) = result["programs"]
    assert program["checks"] == [{"what": "sum [of v]", "expected": "3", "came": "3", "ok": True}]
    assert program["steps"] == 200


def test_demo_fails_with_a_wrong_result(
    benchmarks: list[dict[str, Any]], session: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, RIGHT, WRONG)
    found = invoke("demo", "--smoke", "--output", str(tmp_path), "--json", "-")
    assert found.exit_code == 1
    assert found.stderr.endswith("pathways: wrong result: one: product: expected 2, came 4\n")
    assert not session.open
    assert json.loads(found.stdout)["ok"] is False
    assert not (tmp_path / "demo.json").exists()


def test_demo_stops_the_cluster_when_a_program_fails(
    benchmarks: list[dict[str, Any]], session: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, error=ControllerLost("the controller is gone"))
    found = invoke("demo", "--output", str(tmp_path))
    assert (found.exit_code, found.stderr) == (1, "pathways: the controller is gone\n")
    assert not session.open
    assert benchmarks == []


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one, which the tests may be run from, nothing is drawn
    drawn_to = io.StringIO()
    console = Console(file=drawn_to, force_terminal=True, width=100)
    with demo.Shown(console).step("train", "a model") as progress:
        progress(1, 4)
        progress(4, 4)
    drawn = drawn_to.getvalue()
    assert " train " in drawn
    assert drawn.endswith("train: a model\n")


# --- what the demo expects --------------------------------------------------------------------------------------------


def no_progress(done: int, total: int) -> None:
    assert 0 < done <= total


def give(monkeypatch: pytest.MonkeyPatch, **example: Any) -> None:
    monkeypatch.setattr(demo_programs, "load", lambda module: SimpleNamespace(**example))


@pytest.mark.parametrize(("z", "ok"), [([2.0, 4.0], True), ([2.0, 4.5], False)])
def test_figure2(z: list[float], ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, main=lambda session: (np.array([3.0, 5.0]), np.array(z)))
    (check,) = demo_programs.figure2(None, 200, no_progress).checks
    assert check.ok is ok
    assert check.came == f"[3.0, 5.0], {z}"


@pytest.mark.parametrize(("error", "ok"), [(0.0, True), (1e-7, False)])
def test_ping_pong(error: float, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start = np.linspace(0.1, 0.45, 8, dtype=np.float32)
    main = lambda session: start + np.float32(error)  # noqa: E731
    give(monkeypatch, ROUND_TRIPS=100, START=start, plain_jax=lambda v: v, main=main)

    (check,) = demo_programs.ping_pong(None, 200, no_progress).checks
    assert check.ok is ok


@pytest.mark.parametrize(
    ("final", "same", "drift", "verdicts"),
    [
        (2.0, True, 1e-6, [True, True, True]),
        (2.95, True, 1e-6, [True, True, False]),
        (2.0, False, 1e-6, [False, True, True]),
        (2.0, True, 2e-5, [True, False, True]),
    ],
)
def test_language_model(
    final: float, same: bool, drift: float, verdicts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(steps: int, report: Any, off: float = 0.0) -> SimpleNamespace:
        report(steps, None)
        losses = np.concatenate([np.linspace(5.5, final, 180), np.full(20, final)])
        return SimpleNamespace(losses=losses[:steps] + off)

    give(
        monkeypatch,
        STEPS=200,
        train_pathways=train,
        train_reference=train,
        train_unsplit=lambda steps, report: train(steps, report, drift),
        same_bits=lambda one, other: same,
    )
    outcome = demo_programs.language_model(None, 200, no_progress)
    assert [check.ok for check in outcome.checks] == verdicts
    assert len(outcome.details["losses"]) == 200
    assert outcome.checks[2].expected == "below 2.9"
    short = demo_programs.language_model(None, 3, no_progress)
    assert len(short.checks) == 2  # too few steps to ask how low the loss is


@pytest.mark.parametrize(("islands", "status_code"), [([], 1), ([{"up": True}], 0)])
def test_a_diagnosis_is_json_and_an_exit_status(
    islands: list[Any], status_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [{"host": 0, **host} for host in islands]
    found = {"status": {"islands": [{"island": 0, "state": "up", "hosts": hosts}]}, "islands": {"0": {}}}
    monkeypatch.setattr(status, "look", lambda url, token, ca: found)
    result = invoke("status", "--diagnose", "--url", "grpc://head:7", "--token", "t0ken")
    assert result.exit_code == status_code
    said = json.loads(result.stdout)
    assert said["healthy"] is (status_code == 0)
    assert [finding["kind"] for finding in said["findings"]] == ([] if islands else ["no-hosts"])


def test_a_controller_that_does_not_answer_is_unhealthy() -> None:
    result = invoke("status", "--diagnose", "--url", "grpc://127.0.0.1:1", "--token", "t0ken")
    assert result.exit_code == 1
    assert [finding["kind"] for finding in json.loads(result.stdout)["findings"]] == ["controller-silent"]


@pytest.mark.parametrize(
    "options", [("--url", "foo"), ("--url", "grpcs://127.0.0.1:1", "--ca", "/nonexistent"), ("--url", "grpc://h:99999")]
)
def test_a_diagnosis_of_an_address_that_is_none_is_no_diagnosis(options: tuple[str, ...]) -> None:
    result = invoke("status", "--diagnose", *options, "--token", "t0ken")
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1


def test_variables_of_a_proxy_are_quoted_for_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"JAX_PLATFORMS": "pathways", "JAX_BACKEND_TARGET": "unix:/tmp/a folder/$HOME;x"}
    before = {number: signal.getsignal(number) for number in proxy.ENDS}
    monkeypatch.setattr(proxy, "_serving", lambda *_: contextlib.nullcontext((variables, None)))
    try:
        result = invoke("proxy", "--until-eof")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    script = f'{result.stdout}printf %s "$JAX_BACKEND_TARGET"'
    assert (
        subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
        == variables["JAX_BACKEND_TARGET"]
    )
    assert "export JAX_PLATFORMS=pathways" in result.stdout


def test_status_uses_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    found: dict[str, Any] = {"islands": [], "slices": [], "sessions": []}

    def ask(url: str, token: str, ca: str) -> dict[str, Any]:
        asked.append((url, token, ca))
        return found

    monkeypatch.setattr(status, "ask", ask)
    monkeypatch.setenv("PATHWAYS_URL", "grpcs://head:7")
    monkeypatch.setenv("PATHWAYS_CA", "ca.pem")
    monkeypatch.setenv("PATHWAYS_TOKEN", "t0ken")
    result = invoke("status", "--json")
    assert json.loads(result.stdout) == {"url": "grpcs://head:7", **found}
    assert asked == [("grpcs://head:7", "t0ken", "ca.pem")]
