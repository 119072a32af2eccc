"""The tenants benchmark, as far as it needs no process: which parts are measured, and when they are saved."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import Progress
from benchmarks.tenants import benchmark as tenants


class Jax:
    """JAX alone, with as many steps for each length."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def answer(self) -> None:
        pass

    def ask(self, word: str, lengths: tuple[float, ...]) -> list[int]:
        return [10] * len(lengths)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("short", [True, False])
def test_what_is_measured_is_saved_before_the_part_of_short_computations_which_may_have_none(
    short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, fused = tmp_path / "tenants.json", []

    @contextlib.contextmanager
    def start(*arguments: Any) -> Iterator[None]:
        fused.append(arguments[-1])
        if not arguments[-1]:
            assert json.loads(target.read_text())["rows"] == ["on a cluster"]
        yield

    monkeypatch.setattr(tenants, "Worker", Jax)
    monkeypatch.setattr(tenants, "start", start)
    monkeypatch.setattr(tenants, "on_a_cluster", lambda *_: {"rows": ["on a cluster"]})
    monkeypatch.setattr(tenants, "without_fusion", lambda *_: {"rows": ["without fusion"]})
    lengths = (0.001, 0.01) if short else (0.003, 0.01)
    result = tenants.run(tenants.Settings(lengths=lengths, apart=False), Progress(target))
    assert fused == ([True, False] if short else [True])
    assert result["rows"] == ["on a cluster"]
    assert ("unfused" in result) == short
    assert ("left out, as no computation is at most 1.25 ms long" in capsys.readouterr().err) != short
