"""`help(pw.anything)` has an example, and completion offers public names alone."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

import pathways_ray as pw


@pytest.mark.parametrize("name", pw.__all__)
def test_help_has_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(pw, name)) or ""
    blocks = [textwrap.dedent("\n".join(run)) for run in _indented(text)]
    codes = [block for block in blocks if _is_code(block)]
    assert codes, f"help(pw.{name}) has no example"


def _indented(text: str) -> list[list[str]]:
    """Runs of lines that are indented."""
    runs: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("    "):
            runs[-1].append(line)
        elif line.strip():
            runs.append([])
    return [run for run in runs if run]


def _is_code(block: str) -> bool:
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(tree))


def test_completion_offers_public_names() -> None:
    assert dir(pw) == sorted(pw.__all__)
    assert {"sum", "at", "T", "astype", "block_until_ready", "cancel", "why", "slice"} <= set(dir(pw.Array))
