"""`pathways-train` on the real runtime, through its command line: a tiny GPT on the default corpus.

All runs have one curve: whatever stops a training, what it is resumed with, and however it is cut, each step has the
loss that it has in the run without interruptions. To the bit where the sizes are the same.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import pathways_ray as pw
from megatron_ptdp.schedules import Costs, one_f_one_b, simulate
from megatron_ptdp.train import cli

STEPS = 20
LIMIT_S = 300.0
pytestmark = pytest.mark.timeout(280)  # the first test trains, which may take a busy machine more than is usual
SETTINGS = (
    "model=gpt-tiny",
    "pipeline=2",
    "microbatches=4",
    "microbatch=2",
    "learning_rate=3e-3",
    "warmup_steps=2",
    f"steps={STEPS}",
    "checkpoint_every=5",
    "log_every=1",
    "peak_flops=1e10",
    "eval_every=8",
    "held_out=0.001",
    "eval_batches=2",
)


class Trainer:
    """Starts `pathways-train` in processes of their own."""

    def __init__(self, python: Any, tokens: Path) -> None:
        self.python, self.tokens = python, tokens

    def start(self, directory: Path, *settings: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        words = self._words(directory, settings)
        process: subprocess.Popen[str] = self.python.command(
            "-m", "megatron_ptdp.train.cli", *words, *options, RAY_ADDRESS=""
        )
        return process

    def refused(self, directory: Path, *settings: str) -> str:
        """What is said on stderr of settings that cannot be, in this process, where the command must start nothing."""
        found = CliRunner().invoke(cli.commands, self._words(directory, settings), prog_name=cli.NAME)
        assert found.exit_code == 2, found.output
        return found.stderr

    def _words(self, directory: Path, settings: tuple[str, ...]) -> list[str]:
        given = (*SETTINGS, f"path={self.tokens}", f"directory={directory}", *settings)
        return ["run", *itertools.chain.from_iterable(("--set", setting) for setting in given)]

    def run(self, directory: Path, *settings: str, options: tuple[str, ...] = (), status: int = 0) -> str:
        """Runs to the end; what it said on stderr."""
        process = self.start(directory, *settings, options=options)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, f"exit status {process.returncode}\n{out}\n{err}"
        return err


def curve(directory: Path) -> list[tuple[int, float, float]]:
    """(step, loss, norm) of every step."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["norm"]) for line in lines]


def wait_until(reached: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Waits for something that a running training brings about."""
    deadline = time.monotonic() + LIMIT_S
    while not reached():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.02)


def steps_done(directory: Path) -> int:
    metrics = directory / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.fixture(scope="module")
def trainer(python: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """With the default corpus."""
    tokens = tmp_path_factory.mktemp("corpus") / "corpus.tokens"
    prepare = python.command("-m", "megatron_ptdp.train.cli", "prepare", "--output", str(tokens))
    out = python.finish(prepare)
    assert "vocabulary 256, uint8, tokenizer bytes" in out
    return Trainer(python, tokens)


@pytest.fixture(scope="module")
def whole(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run without interruptions, of which step 12 was drawn."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    trainer.run(directory, options=("--trace-step", "12"))
    return directory


@pytest.mark.slow
def test_loss_falls_and_the_run_leaves_its_records(whole: Path) -> None:
    losses = [loss for _, loss, _ in curve(whole)]
    assert len(losses) == STEPS
    assert sum(losses[-3:]) / 3 < losses[0] - 0.8
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["15", "20"]
    assert list((whole / "events").iterdir())
    about = json.loads((whole / "run.json").read_text())
    assert about["measured_at"] == 12
    assert {kind: len(times) for kind, times in about["stage_seconds"].items()} == {"F": 2, "B": 2}
    assert min(*about["stage_seconds"]["F"], *about["stage_seconds"]["B"]) > 0
    seconds = about["stage_seconds"]
    simulated = simulate(one_f_one_b(2, 4), Costs(seconds["F"], (0.0, 0.0), (0.0, 0.0), seconds["B"]))
    assert about["bubble_of_ideal"] == pytest.approx(simulated.bubble.of_ideal)
    assert about["bubble_of_ideal"] >= 1 / 4  # (p - 1) / m, or more if the stages differ
    assert about["bubble_measured"] > 0
    assert (about["devices"], about["peak_source"]) == (2, "as configured")
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["mfu"] == pytest.approx(line["hardware_flops_utilization"])  # nothing is computed again
    assert line["tokens_per_second"] == pytest.approx(8 * 128 / line["seconds"])


@pytest.mark.slow
def test_what_is_held_out_is_evaluated_every_so_many_steps_and_at_the_end(whole: Path) -> None:
    lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(found) == [8, 16, 20]
    losses = {step: loss for step, loss, _ in curve(whole)}
    assert found[8] > found[16] > found[20]
    assert all(abs(found[step] - losses[step]) < 0.5 for step in found)  # text like that of the training


@pytest.mark.slow
def test_a_step_is_drawn_next_to_its_prediction(whole: Path) -> None:
    assert (whole / "step-12.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((whole / "step-12.trace.json").read_text())["traceEvents"]
    ran = {event["name"] for event in events if event["pid"] == 0 and event["ph"] == "X"}
    predicted = {event["name"] for event in events if event["pid"] == 10 and event["ph"] == "X"}
    actions = {f"{stage}{kind}{microbatch}" for stage in range(2) for kind in "FB" for microbatch in range(4)}
    assert ran >= actions
    assert predicted >= actions
    assert "stage0_update" in ran


@pytest.mark.long
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(trainer: Trainer, whole: Path, tmp_path: Path) -> None:
    """Hosts load the batches from there on."""
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    shutil.rmtree(directory / "checkpoints" / "20")
    trainer.run(directory, "loader=hosts")
    assert curve(directory) == curve(whole)
    trainer.python.assert_none_left()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(trainer: Trainer, whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    process = trainer.start(directory)
    wait_until(lambda: steps_done(directory) >= 6, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all processes of the run
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    done = steps_done(directory)
    assert 6 <= done < STEPS
    assert f"{done} of {STEPS} steps done" in out
    assert (directory / "checkpoints" / str(done)).is_dir()
    trainer.run(directory)
    assert curve(directory) == curve(whole)
    trainer.python.assert_none_left()


def test_what_is_damaged_or_of_another_model_is_refused_before_anything_starts(
    trainer: Trainer, whole: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.tokens"
    cut.write_bytes(trainer.tokens.read_bytes()[:-100])
    err = trainer.refused(tmp_path / "a", f"path={cut}")
    assert "pathways-train: TokenFileError: token file" in err
    assert "is truncated" in err
    assert "TokenFileError: " in trainer.refused(tmp_path / "a", "vocabulary=300")

    directory = tmp_path / "b"
    shutil.copytree(whole, directory)
    err = trainer.refused(directory, "layers=6")
    assert "is of another model: layers is 4 there and 6 here" in err
    for step in ("15", "20"):
        data = max((directory / "checkpoints" / step / "state").rglob("*"), key=lambda path: path.stat().st_size)
        os.truncate(data, data.stat().st_size // 2)
    err = trainer.run(directory, status=2)  # a process that really ends so
    assert "CheckpointError: no checkpoint in" in err
    assert "can be used: checkpoint 20 in" in err


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_second_signal_ends_a_run_at_once_and_leaves_nothing(trainer: Trainer, tmp_path: Path) -> None:
    process = trainer.start(tmp_path / "run", "steps=100000")
    wait_until(lambda: steps_done(tmp_path / "run") >= 1, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30.0)
    assert process.returncode in (130, 143)
    trainer.python.assert_none_left(within_s=60.0)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(trainer: Trainer, whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    data = max((directory / "checkpoints" / "20" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    os.truncate(data, data.stat().st_size // 2)
    err = trainer.run(directory)
    assert "warning: checkpoint 20 in" in err
    assert "going on from step 15" in err
    assert curve(directory) == curve(whole)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "sizes", [("pipeline=1", "tensor=2"), ("pipeline=1", "data=2", "microbatches=2", "zero=1"), ("schedule=gpipe",)]
)
def test_a_checkpoint_is_loaded_under_other_sizes(
    trainer: Trainer, whole: Path, tmp_path: Path, sizes: tuple[str, ...]
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(whole, directory)
    shutil.rmtree(directory / "checkpoints" / "20")
    trainer.run(directory, *sizes)
    for (step, loss, norm), (same, expected, other) in zip(curve(directory), curve(whole), strict=True):
        assert step == same
        assert loss == pytest.approx(expected, rel=1e-5)
        assert norm == pytest.approx(other, rel=1e-3)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings",
    [
        ("model=t5-tiny",),
        ("experts=4", "pipeline=1", "tensor=2"),
        ("dtype=bfloat16", "peak_flops=0"),
        ("dtype=float64",),
        ("schedule=dualpipe-v", "sequence=32"),
        ("hosts_per_island=2", "pipeline=1", "tensor=2", "sequence=32"),
        ("data=2", "data_islands=2", "microbatches=2"),
        ("stage_layers=[1,3]", "recompute=full"),
        ("schedule=pipedream", "clip=0", "tied=false"),
        ("schedule=terapipe", "token_slices=4", "tied=false", "hidden=64"),
        ("expert_slices=2", "experts=4", "pipeline=1", "tensor=2", "sequence=32", "microbatches=2"),
    ],
    ids=lambda settings: settings[0],
)
def test_the_configurations_of_the_page_train(trainer: Trainer, tmp_path: Path, settings: tuple[str, ...]) -> None:
    trainer.run(tmp_path / "run", "steps=6", "checkpoint_every=6", "warmup_steps=0", *settings)
    losses = [loss for _, loss, _ in curve(tmp_path / "run")]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1
    assert (tmp_path / "run" / "checkpoints" / "6").is_dir()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    some = any(setting.startswith("experts=") for setting in settings)
    assert (about["parameters"] > about["parameters_for_a_token"]) == some


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_on_a_cluster_that_is_there_leaves_it(trainer: Trainer, session: Any, tmp_path: Path) -> None:
    there = (f"url={session.url}", f"token={session.token}")
    trainer.run(tmp_path / "run", "steps=3", "tensor=2", *there)
    assert len(curve(tmp_path / "run")) == 3
    assert session.token not in (tmp_path / "run" / "run.json").read_text()
    err = trainer.run(tmp_path / "other", "pipeline=4", "tensor=4", *there, status=2)
    assert "are 16 devices, but there are 8" in err
    assert [len(island["hosts"]) for island in pw.islands()] == [1, 1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_loss_that_is_not_finite_stops_with_step_stage_and_tensor(trainer: Trainer, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    trainer.run(directory, "steps=3", "checkpoint_every=3")
    before = curve(directory)
    err = trainer.run(directory, "optimizer=sgd", "learning_rate=1e38", "clip=0", "beta1=0", status=2)
    assert "CheckpointError" in err  # of another optimizer
    other = tmp_path / "other"
    err = trainer.run(
        other, "optimizer=sgd", "learning_rate=1e38", "clip=0", "beta1=0", "decay=constant", "warmup_steps=0",
        "checkpoint_every=1", status=1,
    )  # fmt: skip
    assert "pathways-train: NotFinite: step 2 is not finite: loss" in err
    assert "first: stage 1: " in err
    assert "the checkpoint of step 1 is kept" in err
    assert [path.name for path in (other / "checkpoints").iterdir()] == ["1"]
    assert len(curve(other)) == 1
    assert len(before) == 3


@pytest.mark.slow
def test_a_killed_host_costs_the_steps_since_the_last_snapshot(trainer: Trainer, whole: Path, tmp_path: Path) -> None:
    """Without a checkpoint, and without a restart: the curve has the bits of a run that was not disturbed, whose
    batches the client read; here hosts read them, and one that comes back does so again."""
    directory = tmp_path / "run"
    process = trainer.start(directory, "snapshot_every=3", "checkpoint_every=0", "loader=hosts")
    wait_until(lambda: steps_done(directory) >= 7, process)
    _hosts(process)[1].kill()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, f"{out}\n{err}"
    assert curve(directory) == curve(whole)
    (recovery,) = map(json.loads, (directory / "recoveries.jsonl").read_text().splitlines())
    assert (recovery["source"], recovery["data"], recovery["devices"]) == ("snapshot", 1, 2)
    assert 6 <= recovery["reached"] < STEPS
    assert recovery["reached"] - recovery["step"] <= 3 + 2, "no more than the steps between snapshots, and in flight"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_host_is_an_error_or_a_restart_with_the_same_bits(
    trainer: Trainer, whole: Path, tmp_path: Path
) -> None:
    for restarts, status in ((0, 1), (1, 0)):
        directory = tmp_path / f"run{restarts}"
        process = trainer.start(directory, options=("--max-restarts", str(restarts)))
        first = directory / "checkpoints" / "5"
        wait_until(lambda run=directory, first=first: steps_done(run) >= 7 and first.is_dir(), process)  # type: ignore[misc]
        _hosts(process)[1].kill()
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, f"{out}\n{err}"
        if restarts:
            assert re.search(r"restart 1 of 1 from step (5|10|15)\b", err), err
            assert curve(directory) == curve(whole)
        else:
            assert "pathways-train: HostLost: " in err or "pathways-train: BufferLost: " in err
            assert "--max-restarts N" in err
            assert curve(directory) == curve(whole)[: steps_done(directory)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_lost_island_leaves_fewer_replicas_and_another_one_brings_them_back(python: Any, tmp_path: Path) -> None:
    """Two replicas on two islands, of which one is killed and removed; ten steps later, another one is added."""
    target, settings = tmp_path / "recovery.json", ("--steps", "300", "--losses", "1")
    words = ("benchmarks.recovery", "--json", str(target), "--kinds", "island", *settings)
    python.finish(python.command("-m", *words, RAY_ADDRESS=""), timeout=800)
    calm, disturbed = json.loads(target.read_text())["runs"]
    assert [(one["what"], one["data"]) for one in disturbed["events"]] == [("island lost", 1), ("island added", 2)]
    lost, added = disturbed["events"]
    assert lost["source"] == "snapshot"
    assert 0 <= lost["steps_again"] <= 10 + 2
    assert (added["source"], added["steps_again"]) == ("devices", 0)
    assert [line[1] for line in disturbed["curve"]] == list(range(1, 301))
    assert {line[3] for line in disturbed["curve"]} == {1, 2}
    for (_, _, loss, _), (_, _, expected, _) in zip(disturbed["curve"], calm["curve"], strict=True):
        assert loss == pytest.approx(expected, abs=1e-4)


def _hosts(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The hosts of a running training, in the order in which they were started."""
    below = {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
    live = (one for one in psutil.process_iter(["cmdline"]) if one.pid in below)  # a worker of Ray ends when it will
    return sorted(
        (one for one in live if "HostExecutor" in "".join(one.info["cmdline"] or ())), key=lambda one: one.pid
    )
