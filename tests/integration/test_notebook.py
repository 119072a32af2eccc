"""The notebook of examples/, cell by cell on the shared cluster, with what a notebook would show of each."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import numpy as np

import pathways_ray as pw
from tests.integration.conftest import ROOT

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def run(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; the value of its last expression, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_notebook_runs_and_shows_what_it_has(session, tmp_path, monkeypatch) -> None:
    """All cells but those that start and end a cluster, which the shared one stands for."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {"session": session}
    shown = []
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs are made, not kept"
            if not {"start", "end"} & set(cell["metadata"].get("tags", ())):
                shown.append(run("".join(cell["source"]), names))
    pages = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    cluster, matrix, result, program = pages
    assert cluster.count("up</td>") == 2
    assert session.token not in cluster
    assert "float32[8,8]" in matrix
    assert len(re.findall("<td style=", matrix)) == 4, "one tile on each of 2 x 2 devices"
    assert "sharding" in result
    assert program.count("<rect") == program.count("</rect>") >= 3
    v = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    np.testing.assert_allclose(names["value"], (v @ v).sum(axis=0))
    assert json.loads((tmp_path / "first_steps.json").read_text())["traceEvents"]
    names.clear()  # its functions hold on to it, and so to the arrays


def test_a_session_that_is_closed_still_has_a_page(session) -> None:
    other = pw.connect(session.url, session.token)
    assert other._repr_html_().startswith("<div>")
    other.close()
    assert repr(other).startswith("pw.Session(")
    assert "closed" in repr(other)
    assert other._repr_html_() == f"<p>{other!r}</p>"
