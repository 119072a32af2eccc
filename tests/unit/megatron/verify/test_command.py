"""The command's end: its exit status says whether all came out as it must."""

from __future__ import annotations

import pytest
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
