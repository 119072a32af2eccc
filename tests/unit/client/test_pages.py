"""The code of the pages for users runs, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import pathways_ray as pw
from pathways_ray.client import context
from tests.unit.client.local import LocalSession, opened

ROOT = Path(__file__).resolve().parents[3]
PAGES = ["README.md", "docs/arrays.md", "docs/coming_from_jax.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

PRINTED = {
    "README.md": ["56.0"],
    "docs/arrays.md": ["1.4462", "[ 0.  2.  4.  6.  8. 10. 12. 14.]"],
    "docs/coming_from_jax.md": [r"slice 1 (x=2) slice 2 (x=2)"],
}
"""What the code of a page prints, among other things."""


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(pw, "init", lambda **_: opened(), raising=False)
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {number}", "exec"), {"__name__": "page"})
        for session in [s for s in context.sessions if isinstance(s, LocalSession)]:
            session.close()
    printed = capsys.readouterr().out
    for text in PRINTED[page]:
        assert text in printed


def test_a_training_script_changes_in_three_lines() -> None:
    """The one of the page: what it has beside plain JAX."""
    script = BLOCK.findall((ROOT / "docs" / "coming_from_jax.md").read_text(encoding="utf-8"))[0]
    ours = [line for line in script.splitlines() if "pw" in line or "pathways" in line]
    assert ours == [
        "import pathways_ray as pw",
        "pw.init(islands=1, devices_per_host=4)  # new",
        'mesh = pw.virtual_slice((4,), ("data",)).mesh  # was jax.make_mesh((4,), ("data",))',
    ]
