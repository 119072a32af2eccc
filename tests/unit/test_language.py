"""The language of docstrings, comments and messages.

A docstring begins with a noun or a verb: a relative clause has its reader wait for the subject. Some phrases are no
English, or say in Python what they do not mean ("is none").
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pathways_ray", "megatron_ptdp", "benchmarks", "examples")

OPENING = re.compile(
    r"(?:What|Whatever|Who|Whoever|Whom|Whose|Where|Wherever|When|Whenever|Which|Why|How|That which|Those who"
    r"|So many|So much|From)\b"
)
"""Words that no docstring begins with."""

BANNED = re.compile(
    r"\b(?:is|are|was|were|be) none\b|\banew\b|\bmanieth\b|\bmany-th\b|\b(?:tell|tells|told|telling) of\b|\bwho asks?\b"
    r"|\bwhoever\b|\bWhoever\b"
)
"""Phrases that no docstring, comment or message has. Lower case only: `is None` is Python."""


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string, docstrings and the parts of f-strings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def faults(path: Path) -> list[str]:
    """Faults of one file, each with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for line, text in docstrings(tree):
        if opening := OPENING.match(text):
            found.append(f"{line}: the docstring begins with {opening[0]!r}")
    for line, text in (*strings(tree), *comments(path)):
        found += [f"{line}: {phrase[0]!r}" for phrase in BANNED.finditer(re.sub(r"\s+", " ", text))]
    return found


def test_docstrings_comments_and_messages_are_plain_english() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert files
    wrong = [f"{path.relative_to(ROOT)}:{fault}" for path in files for fault in faults(path)]
    assert not wrong, "\n".join(["", *wrong])


def test_faults_are_found(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        '"""Who asks for a value."""\n'
        "def f():\n"
        '    """What is returned."""\n'
        "    # starts anew when it is None\n"
        '    raise ValueError(f"port {1} is none")\n'
        "def g():\n"
        '    """Sum of what came; whether it is None is known."""\n',
        encoding="utf-8",
    )
    assert sorted(faults(file)) == [
        "1: the docstring begins with 'Who'",
        "3: the docstring begins with 'What'",
        "4: 'anew'",
        "5: 'is none'",
    ]
