"""The report: one row for each check, words and figures; JSON that other programs read."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from megatron_ptdp.verify import checks, report
from megatron_ptdp.verify.cases import SMALL
from megatron_ptdp.verify.checks import Check, Outcome
from megatron_ptdp.verify.compare import Difference

GOOD = Outcome(Check("gradients", SMALL[0]), Difference("final/scale", 2e-15, 1e-12, 30), True, 1.5)
BAD = Outcome(Check("gradients", SMALL[1]), Difference("layers/1/out", float("inf"), 1e-12, 30), False, 2.5)
BROKEN = Outcome(Check("gradients", SMALL[2]), None, False, 0.5, "BadSizes: too many [devices]")
MISTAKE = Check("mistake", checks.PLANTED, planted_bug="stale-tied")
FOUND = Outcome(MISTAKE, Difference("embedding/tokens", 0.6, 1e-12, 30), True, 3.0)
MISSED = Outcome(MISTAKE, Difference("embedding/tokens", 1e-15, 1e-12, 30), False, 3.0)
SAME = Outcome(Check("bits", checks.BITS[0][0], checks.BITS[0][1]), Difference("", 0.0, 0.0, 30), True, 4.0)


def printed(*outcomes: Outcome) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(report.table(outcomes, "float64"))
    return out.getvalue()


def test_a_row_says_the_worst_tensor_its_error_and_the_verdict() -> None:
    text = printed(GOOD, BAD, BROKEN, FOUND, MISSED, SAME)
    good, bad, broken, found, missed, same = text.splitlines()[4:-1]
    assert [word in good for word in (SMALL[0].label(), "final/scale", "2.0e-15", "1.0e-12", "pass")] == [True] * 5
    assert "inf" in bad
    assert "FAIL" in bad
    assert "BadSizes: too many [devices]" in broken
    assert "FAIL" in broken
    assert "NOT FOUND" not in found
    assert "found" in found
    assert "NOT FOUND" in missed
    assert "twice" in same
    assert "none differs" in same


def test_the_summary_counts_and_gives_the_worst_share_of_a_bound() -> None:
    assert report.summary([GOOD, SAME], 6.0) == (
        "2 checks in 6 s: all as they must be; the worst error is 0.002 of its bound"
    )
    assert report.summary([GOOD, MISSED, BROKEN], 6.0).startswith("2 checks and 1 mistakes in 6 s: 2 failed")
    assert report.furthest([FOUND, SAME]) is None


def test_json_has_every_setting_and_figure(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    report.written(path, [GOOD, BAD, BROKEN, FOUND, SAME], 5, "float64", 12.3)
    whole = json.loads(path.read_text(), parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert (whole["passed"], whole["dtype"], whole["seconds"]) == (False, "float64", 12.3)
    good, bad, broken, found, same = whole["checks"]
    assert (good["worst"], good["error"], good["bound"], good["t"], good["sp"]) == (
        "final/scale",
        2e-15,
        1e-12,
        2,
        True,
    )
    assert bad["error"] == "inf"
    assert broken["failure"] == "BadSizes: too many [devices]"
    assert (found["mistake"], found["passed"]) == ("stale-tied", True)
    assert same["other"]["schedule"] == "1f1b"


def test_json_of_a_run_that_did_not_end_has_not_passed(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    report.written(path, [GOOD, SAME], 3, "float64", 1.0)
    assert json.loads(path.read_text())["passed"] is False
    report.written(path, [GOOD, SAME], 2, "float64", 1.0)
    assert json.loads(path.read_text())["passed"] is True
