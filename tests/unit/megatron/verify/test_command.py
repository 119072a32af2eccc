"""The command: bad input is refused at once, and the exit status says whether all came out as it must."""

from __future__ import annotations

import pytest
import ray
from click.testing import CliRunner

from megatron_ptdp.train import cli
from megatron_ptdp.verify import command


@pytest.mark.parametrize("passed", [True, False])
def test_exit_status_is_1_when_anything_failed(passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(command, "verify", lambda *arguments: asked.append(arguments[:4]) or passed)
    result = CliRunner().invoke(cli.commands, ["verify", "--grid", "full", "--only", "p=2,t=2", "--only", "d=2"])
    assert result.exit_code == (0 if passed else 1)
    assert asked == [("full", "float64", ("p=2,t=2", "d=2"), False)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--only", "p=3"), "ConfigError: --only p=3 matches none of the"),
        (("--only", "pipeline=2"), "ConfigError: there is no setting of a check 'pipeline'"),
        (("--mistakes", "--dtype", "float32"), "ConfigError: mistakes are planted in float64"),
        (("--json", "/no/such/folder/out.json"), "ConfigError: --json /no/such/folder/out.json cannot be written"),
    ],
)
def test_bad_input_is_refused_before_a_cluster_starts(arguments: tuple[str, ...], text: str) -> None:
    result = CliRunner().invoke(cli.commands, ["verify", *arguments])
    assert result.exit_code == 2, result.output
    assert f"pathways-train: {text}" in result.stderr
    assert not ray.is_initialized()
