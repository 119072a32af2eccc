"""`help(pw.anything)` has an example, and completion offers public names alone."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib import resources

import pytest

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.client.compiled import CompiledFunction
from pathways_ray.client.program import Program
from pathways_ray.client.snapshots import Snapshot
from pathways_ray.client.versioned import Versioned


@pytest.mark.parametrize("name", pw.__all__)
def test_help_has_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(pw, name)) or ""
    blocks = [textwrap.dedent("\n".join(run)) for run in _indented(text)]
    codes = [block for block in blocks if _is_code(block)]
    assert codes, f"help(pw.{name}) has no example"


METHODS = {
    "Array": ["block_until_ready", "is_ready", "add_done_callback", "cancel", "delete", "why"],
    "Session": ["status", "suspend", "resume", "virtual_slice", "proxy"],
    "VirtualSlice": ["move", "explain", "release"],
}
"""What users call of the classes that they see."""
ISLANDS = ["add_island", "drain_island", "undrain_island", "remove_island", "spread_islands"]


def test_help_of_methods_has_an_example() -> None:
    methods = [(getattr(pw, kind), name) for kind, names in METHODS.items() for name in names]
    methods += [(ClusterSession, name) for name in ISLANDS]
    methods += [(Versioned, name) for name in ("push", "latest", "restore")]
    methods += [(Snapshot, "restore")]
    for kind, name in methods:
        blocks = _indented(inspect.getdoc(getattr(kind, name)) or "")
        codes = [block for block in (textwrap.dedent("\n".join(run)) for run in blocks) if _is_code(block)]
        assert codes, f"help of {kind.__name__}.{name} has no example"


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


@pytest.mark.parametrize("package", ["pathways_ray", "megatron_ptdp"])
def test_type_checkers_read_the_types_of_a_package(package: str) -> None:
    assert resources.files(package).joinpath("py.typed").is_file()


def test_type_checkers_find_each_public_name_where_it_is() -> None:
    tree = ast.parse(inspect.getsource(pw))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    found = {alias.asname: node.module for node in imports for alias in node.names}
    assert found == {"errors": "pathways_ray"} | {name: f"pathways_ray.{home}" for name, home in pw._HOMES.items()}


SEEN = (pw.Array, pw.VirtualSlice, pw.Session, pw.TransferBytes, Snapshot, Versioned, CompiledFunction, Program)


@pytest.mark.parametrize("kind", SEEN)
def test_what_users_see_of_a_class_says_what_it_is(kind: type) -> None:
    own = [base for base in kind.__mro__ if base.__module__.startswith("pathways_ray")]
    members = [(name, one) for base in own for name, one in vars(base).items() if not name.startswith("_")]
    functions = [(name, one.fget if isinstance(one, property) else one) for name, one in members]
    assert [name for name, one in functions if inspect.isfunction(one) and not one.__doc__] == []


def test_completion_offers_public_names() -> None:
    assert dir(pw) == sorted(pw.__all__)
    assert {"sum", "at", "T", "astype", "block_until_ready", "cancel", "why", "slice"} <= set(dir(pw.Array))
