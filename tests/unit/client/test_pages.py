"""The code of the pages for users runs, as it stands there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import pathways_ray as pw
from pathways_ray.client import context
from pathways_ray.client.api import ClusterSession
from tests.unit.client.local import LocalSession, opened

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["README.md", "docs/arrays.md", "docs/coming_from_jax.md", "docs/guide.md", "docs/libraries.md"]
ELSEWHERE = {
    "docs/launch.md": "excerpts of the code (test_launch_page.py)",
    "docs/schedules.md": "test_schedules_page.py",
    "docs/gpu.md": "needs a GPU (gpu/test_gpu.py)",
    "docs/observe.md": "asks a cluster (integration/test_first_day.py)",
}
"""Pages whose code does not run here, and why."""
DEPLOYMENTS = {
    "docs/jax_programs.md": "starts processes (integration/test_proxy.py)",
    "docs/operations.md": "starts a cluster of two islands (integration/test_placement.py)",
    "docs/security.md": "listens at an address of its own, with certificates (integration/test_tls.py)",
}
"""Pages whose code runs here on nothing but the signatures of what it calls."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRELUDE = re.compile(r"^```\n(import jax, .*?)^```", re.MULTILINE | re.DOTALL)
"""Code that a page says that each of its blocks begins with."""

PRINTED = {
    "README.md": ["56.0"],
    "docs/arrays.md": ["1.4462", "[ 0.  2.  4.  6.  8. 10. 12. 14.]"],
    "docs/guide.md": [
        "restored P('x',) True 3",
        "loss 14.0 [0.",
        "rounds 4 [ 0. 32. 64. 96.]",
        "advantages [ 0.5 -0.5",
        "answers [",
        "served (32, 2)",
        "recovered [ 0.",
        "error <lambda> (",
    ],
    "docs/libraries.md": ["nnx 3.50 True", "linen", "equinox", "grain 496", "chex (8, 4)", "profiler 32"],
    "docs/coming_from_jax.md": [r"slice 1 (x=2) slice 2 (x=2)", "largest 7.0", "made by log in log on slice"],
}
"""What the code of a page prints, among other things."""


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(pw, "init", lambda **_: opened(), raising=False)
    text = (ROOT / page).read_text(encoding="utf-8")
    prelude = "".join(PRELUDE.findall(text))
    blocks = [prelude + block for block in BLOCK.findall(text)]
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), {"__name__": "page"})
        for session in [s for s in context.sessions if isinstance(s, LocalSession)]:
            session.close()
    printed = capsys.readouterr().out
    for text in PRINTED[page]:
        assert text in printed


@pytest.mark.parametrize("page", DEPLOYMENTS)
def test_the_code_of_a_page_about_deployments_calls_what_there_is(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = mock.create_autospec(ClusterSession, instance=True)
    session.proxy.return_value.__enter__.return_value.env = {}
    where = mock.create_autospec(pw.VirtualSlice, instance=True)
    for name, made in (("init", session), ("connect", session), ("virtual_slice", where)):
        monkeypatch.setattr(pw, name, mock.create_autospec(getattr(pw, name), return_value=made))
    monkeypatch.setattr(subprocess, "run", mock.create_autospec(subprocess.run))
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {"pw": pw, "token": "a token"})
    assert pw.init.called  # type: ignore[attr-defined]


def test_the_code_of_every_page_runs_somewhere_or_is_python() -> None:
    with_code = {str(path.relative_to(ROOT)) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    for page in sorted(with_code - set(PAGES) - {"docs/launch.md"}):
        blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
        assert page in ELSEWHERE or page in DEPLOYMENTS or not blocks, f"the code of {page} is in no test"
        for block in blocks:
            compile(block, page, "exec")


def test_a_training_script_changes_in_three_lines() -> None:
    """The one of the page: what it has beside plain JAX."""
    script = BLOCK.findall((ROOT / "docs" / "coming_from_jax.md").read_text(encoding="utf-8"))[0]
    ours = [line for line in script.splitlines() if "pw" in line or "pathways" in line]
    assert ours == [
        "import pathways_ray as pw",
        "pw.init(islands=1, devices_per_host=4)  # new",
        'mesh = pw.virtual_slice((4,), ("data",)).mesh  # was jax.make_mesh((4,), ("data",))',
    ]
