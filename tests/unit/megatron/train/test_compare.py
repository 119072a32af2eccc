"""Two runs compared by their metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.train.cli import commands
from megatron_ptdp.train.compare import difference


def run(directory: Path, losses: dict[int, float]) -> Path:
    directory.mkdir()
    lines = [json.dumps({"step": step, "loss": loss, "norm": 2 * loss, "mfu": 0.1}) for step, loss in losses.items()]
    (directory / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return directory


def test_the_largest_difference_is_found_among_the_steps_that_both_have(tmp_path: Path) -> None:
    one = run(tmp_path / "one", {1: 4.0, 2: 3.0, 3: 2.0, 4: 9.0})
    other = run(tmp_path / "other", {2: 3.25, 3: 2.5, 5: 1.0})
    found = difference(one, other / "metrics.jsonl")
    assert (found.steps, found.first, found.last, found.at) == (2, 2, 3, 3)
    assert (found.loss, found.relative, found.norm, found.ends) == (0.5, 0.2, 0.2, (2.0, 2.5))


def test_the_command_fails_beyond_the_bound_and_not_at_it(tmp_path: Path) -> None:
    paths = [str(run(tmp_path / "one", {1: 4.0})), str(run(tmp_path / "other", {1: 4.5}))]
    within = CliRunner().invoke(commands, ["compare", *paths, "--bound", "0.5"])
    assert within.exit_code == 0
    assert "largest difference of losses 5.00e-01 (step 1)" in within.output
    assert CliRunner().invoke(commands, ["compare", *paths, "--bound", "0.49"]).exit_code == 1
    nan = run(tmp_path / "nan", {1: float("nan")})
    assert CliRunner().invoke(commands, ["compare", paths[0], str(nan)]).exit_code == 1
    curves = (
        run(tmp_path / "three", {1: 4.0, 2: 4.0, 3: 4.0}),
        run(tmp_path / "later", {1: 4.0, 2: float("nan"), 3: 4.0}),
    )
    assert CliRunner().invoke(commands, ["compare", *map(str, curves)]).exit_code == 1


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    one, other = run(tmp_path / "one", {1: 4.0, 2: 3.0}), run(tmp_path / "other", {1: 4.0})
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert difference(one, other).steps == 1


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = run(tmp_path / "one", {1: 4.0})
    with pytest.raises(ConfigError, match=r"none/?.* cannot be read: No such file"):
        difference(one, tmp_path / "none")
    with pytest.raises(ConfigError, match="no step in common: they have 1 and 1 steps"):
        difference(one, run(tmp_path / "other", {2: 4.0}))
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(ConfigError, match="no metrics of a training"):
        difference(one, tmp_path / "text")
    (tmp_path / "words").write_text('{"step": 1, "loss": "low", "norm": 1.0}\n')
    with pytest.raises(ConfigError, match="no metrics of a training: ValueError"):
        difference(one, tmp_path / "words")
