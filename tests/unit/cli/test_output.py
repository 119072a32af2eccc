"""What commands print of texts that come from elsewhere, and the ends of their options."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pathways_ray.cli import commands, output


def test_an_error_steers_no_terminal() -> None:
    """Those of a cluster name what clients have named."""
    assert output.CommandFailed("still has slice\n'a\x1b[2J'").message == "still has slice 'a?[2J'"


@pytest.mark.parametrize(
    "arguments",
    [
        *(("drill", "--kill", "host:0", "--every"), ("spans", "--every"), ("top", "--every"), ("up", "--wait")),
    ],
)
def test_a_time_has_an_end(arguments: tuple[str, ...]) -> None:
    found = CliRunner().invoke(commands, [*arguments, "inf"])
    assert found.exit_code == 2
    assert "is not in the range" in found.stderr


def test_texts_that_come_from_elsewhere_have_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    output.console_beside(None, markup=False).print("a:b:c")
    assert capsys.readouterr().out == "a:b:c\n"
