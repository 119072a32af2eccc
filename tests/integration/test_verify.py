"""`pathways-train verify` on the real runtime: parity holds, planted bugs are found, and a proof that fails says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ptdp.verify import cases
from megatron_ptdp.verify.planted import PLANTED_BUGS


@pytest.mark.long
def test_a_case_has_parity_and_two_bugs_in_it_are_found(python: Any) -> None:
    good, stale, norms, harmless, large = json.loads(python.run("verify_few").splitlines()[-1])
    assert good["passed"], good
    assert good["error"] <= 1e-12
    assert good["tensors"] > 40
    assert (stale["passed"], stale["worst"]) == (True, "embedding/tokens")
    assert stale["error"] > 1e-3
    assert norms["passed"]
    assert "norm" in norms["worst"]
    assert norms["error"] > 1e-3
    assert not harmless["passed"]  # a bug that the comparison does not see is a failure of the proof
    assert harmless["error"] <= 1e-12
    assert not large["passed"]
    assert large["failure"].startswith("BadSizes: pipeline 4 × tensor 4 × data 1 are 16 devices, but there are 8")


def verified(python: Any, path: Path, *arguments: str) -> dict[str, Any]:
    """What the command wrote, which must end well."""
    process = python.command("-m", "megatron_ptdp.train.cli", "verify", "--json", str(path), *arguments)
    out = python.finish(process, timeout=800)
    print(out)
    made: dict[str, Any] = json.loads(path.read_text())
    assert made["passed"]
    assert "all as they must be" in out
    return made


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_small_grid_holds_in_float64(python: Any, tmp_path: Path) -> None:
    made = verified(python, tmp_path / "out.json")
    gradients = [check for check in made["checks"] if check["check"] == "gradients"]
    assert len(gradients) == len(cases.SMALL)
    assert max(check["error"] for check in gradients) <= 1e-12
    assert {check["check"] for check in made["checks"]} == {"gradients", "bits", "training"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_small_grid_holds_in_float32_within_its_bound(python: Any, tmp_path: Path) -> None:
    made = verified(python, tmp_path / "out.json", "--dtype", "float32")
    errors = [check["error"] for check in made["checks"] if check["check"] == "gradients"]
    assert min(errors) > 1e-9  # it was computed in float32


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_planted_bug_is_found(python: Any, tmp_path: Path) -> None:
    made = verified(python, tmp_path / "out.json", "--mistakes")
    planted = [check for check in made["checks"] if check["check"] == "mistake"]
    assert [check["mistake"] for check in planted] == list(PLANTED_BUGS)
    assert all(check["error"] > 1e6 * check["bound"] for check in planted)
