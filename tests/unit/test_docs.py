"""What the documentation names is there: paths, modules, classes and their members, errors, commands, links.

Names are looked up in the syntax trees of the packages. A name may begin at any level of its
module's path, as in `order.IslandOrder` for `pathways_ray.scheduler.order.IslandOrder`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pathways_ray import limits
from pathways_ray.transport import messages
from tests.unit.test_errors import OWN, drawn_tree
from tests.unit.test_language import BANNED

ROOT = Path(__file__).resolve().parents[2]
NAMING = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LINKING = [*NAMING, *sorted((ROOT / "docs" / "adr").glob("*.md"))]
PACKAGES = ("pathways_ray", "megatron_ptdp", "benchmarks", "examples")
FOLDERS = (*PACKAGES, "tests", "docs", "deploy")

OUTPUTS = re.compile(r"checkpoints/|events/|.*\.jsonl?")
"""Paths that exist only after a run."""

OTHERS = {"AllocateBuffer", "PartitionSpec", "Software", "jax", "jnp", "np", "pydoc_data/topics.py", "pytest", "torch"}
"""Names of Python, libraries and other systems."""

VARIABLES = {"error", "f", "host", "weights", "y"}
"""First parts of names in examples that the text itself introduces."""


# --- what the packages define -----------------------------------------------------------------------------------------


@dataclass
class Scope:
    """Names that a module or a class defines."""

    names: set[str] = field(default_factory=set)
    classes: dict[str, Scope] = field(default_factory=dict)
    bases: list[str] = field(default_factory=list)


def targets(node: ast.AST) -> Iterator[str]:
    """Names bound by an assignment, `self.name` included."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            yield one.attr


def scope_of(body: list[ast.stmt]) -> Scope:
    scope = Scope()
    for node in body:
        match node:
            case ast.ClassDef():
                scope.names.add(node.name)
                inner = scope.classes[node.name] = scope_of(node.body)
                inner.bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        inner.names.update(targets(method))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                scope.names.update(alias.asname or alias.name for alias in node.names)
            case ast.If() | ast.Try():
                scope.names |= scope_of(node.body).names
            case _:
                scope.names.update(targets(node))
    return scope


@functools.cache
def modules() -> dict[str, Scope]:
    """Each module of the packages, by its dotted path."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = scope_of(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


@functools.cache
def classes() -> dict[str, list[Scope]]:
    """Classes of the packages by their names."""
    found = defaultdict(list)
    for scope in modules().values():
        for name, inner in scope.classes.items():
            found[name].append(inner)
    return found


@functools.cache
def constants() -> frozenset[str]:
    """Names at the top of modules, and members of their classes."""
    scopes = list(modules().values())
    return frozenset().union(*(scope.names for scope in scopes), *(c.names for s in scopes for c in s.classes.values()))


@functools.cache
def files() -> frozenset[str]:
    """Files and folders (with a slash at the end) of the tree, relative to its root."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    found = {*inside, *(ROOT / folder for folder in FOLDERS), *(path for path in ROOT.iterdir() if path.is_file())}
    return frozenset(str(path.relative_to(ROOT)) + "/" * path.is_dir() for path in found)


def has_member(scope: Scope, names: list[str]) -> bool:
    """Whether a module or a class, or a base of the class, defines the name that `names` lead to."""
    if not names:
        return True
    if names[0] in scope.classes:
        return has_member(scope.classes[names[0]], names[1:])
    if names[0] in scope.names:
        return True  # how a value of it goes on is not known
    return any(has_member(base, names) for name in scope.bases for base in classes().get(name, ()))


# --- what the documentation names -------------------------------------------------------------------------------------


def path_is_there(path: str) -> bool:
    return bool(OUTPUTS.fullmatch(path)) or path in OTHERS or any(f"/{file}".endswith(f"/{path}") for file in files())


def name_is_there(name: str) -> bool:
    """Whether a dotted or capitalised name is one of the packages, or none of this project."""
    first, *more = name.split(".")
    if first in OTHERS | VARIABLES:
        return True
    if first == "pw":
        return not more or has_member(modules()["pathways_ray"], more) or more[0] in public_names()
    if any(has_member(scope, more) for scope in classes().get(first, ())):
        return True
    parts = name.split(".")
    for at in range(len(parts), 0, -1):
        prefix = ".".join(parts[:at])
        scopes = [scope for module, scope in modules().items() if f".{module}".endswith(f".{prefix}")]
        if any(has_member(scope, parts[at:]) for scope in scopes):
            return True
    return not more and any(first in scope.names for scope in modules().values())


@functools.cache
def public_names() -> set[str]:
    tree = ast.parse((ROOT / "pathways_ray" / "__init__.py").read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def module_is_there(name: str) -> bool:
    return name in modules() or name.split(".")[0] not in PACKAGES


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


PATH = re.compile(r"(?:[\w.\-]+/)+|(?:[\w\-]+/)*[\w.\-]+\.(?:py|toml|md|yaml|lock|json|jsonl)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+(?=\(|$)")
CLASS = re.compile(r"[A-Z][a-z]\w*(?=\(|$)")
CONSTANT = re.compile(r"(?!PATHWAYS_|RAY_|OVERLAP_)[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+")
"""Variables of the environment and what schedules print are no names of the code."""

MODULE = re.compile(r"python -m ([\w.]+)")
TARGET = re.compile(r"make ([a-z][a-z\-]*)")


def fault(quoted: str) -> str:
    """What is wrong with something in backticks; empty if nothing is, or if it is no name or path."""
    if PATH.fullmatch(quoted):
        return "" if path_is_there(quoted) else "no such path"
    if found := DOTTED.match(quoted) or CLASS.match(quoted):
        return "" if name_is_there(found[0]) else "no such name"
    if CONSTANT.fullmatch(quoted):
        return "" if quoted in constants() else "no such constant"
    if found := MODULE.match(quoted):
        return "" if module_is_there(found[1]) else "no such module"
    if found := TARGET.match(quoted):
        return "" if found[1] in make_targets() else "no such target of make"
    return ""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines outside blocks of code, with their numbers."""
    inside = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def unresolved(path: Path) -> list[str]:
    """Names and paths in backticks that are not in the tree."""
    quotes = ((number, quoted) for number, line in prose(path) for quoted in re.findall(r"(?<!`)`([^`]+)`(?!`)", line))
    return [f"{place(path, number)}: `{quoted}`: {wrong}" for number, quoted in quotes if (wrong := fault(quoted))]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"


def test_names_in_backticks_are_in_the_tree() -> None:
    found = [fault for path in NAMING for fault in unresolved(path)]
    assert not found, "\n".join(["", *found])


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Anchors that a page's headings get."""
    headings = [line.lstrip("#").strip() for _, line in prose(path) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    found = []
    for number, line in prose(path):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"\w+:", target):
                continue
            to, _, anchor = target.partition("#")
            page = path.parent / to if to else path
            if not page.exists():
                found.append(f"{place(path, number)}: no such file: {target}")
            elif anchor and page.suffix == ".md" and anchor not in anchors(page):
                found.append(f"{place(path, number)}: no such heading: {target}")
    return found


def test_links_lead_somewhere() -> None:
    found = [fault for path in LINKING for fault in broken_links(path)]
    assert not found, "\n".join(["", *found])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_the_page_of_errors_has_each_error_with_its_cause_and_cure() -> None:
    """The tree is that of the code; each error but the two that only stand for others has a row."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    drawn = re.search(r"^```\n(PathwaysError\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert drawn is not None
    assert drawn_tree("".join(f"    {line}\n" for line in drawn[1].splitlines())) == drawn_tree()
    rows = re.findall(r"^\| `(\w+)` \| (\S[^|]*) \| (\S[^|]*) \|$", page, re.MULTILINE)
    wanted = {kind.__name__ for kind in OWN} - {"PathwaysError", "ResourceError"}
    assert {name for name, _, _ in rows} == wanted
    assert len(rows) == len(wanted)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_the_page_of_messages_names_each() -> None:
    page = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", page))
    missing = {kind.__name__ for kind in messages.Message.__subclasses__()} - named
    assert not missing


# --- limits -----------------------------------------------------------------------------------------------------------

UNITS = {"": 1, " MiB": 1 << 20, " GiB": 1 << 30, " s": 1}


def test_the_page_of_the_design_states_the_limits_of_the_code() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    stated = re.findall(r"\(`(\w+)`\) \| ([\d,]+)( MiB| GiB| s|) \|", page)
    assert len(stated) > 10
    for name, number, unit in stated:
        assert getattr(limits, name) == int(number.replace(",", "")) * UNITS[unit], name


NAMED_IN = re.compile(r"((?:`[A-Z][A-Z_]+`(?:, | and )?)+) in `([\w/]+\.py)`")
"""Constants, and the file that the text says they are in."""


def constants_elsewhere(path: Path) -> list[str]:
    """Constants that a page says to be in a file that does not define them."""
    found = []
    for number, line in prose(path):
        for names, file in NAMED_IN.findall(line):
            texts = [(ROOT / one).read_text(encoding="utf-8") for one in files() if f"/{one}".endswith(f"/{file}")]
            for name in re.findall(r"\w+", names):
                if not any(re.search(rf"^{name}\b.* = ", text, re.MULTILINE) for text in texts):
                    found.append(f"{place(path, number)}: {name} is not in {file}")
    return found


def test_constants_are_in_the_files_that_the_pages_name() -> None:
    assert [fault for path in NAMING for fault in constants_elsewhere(path)] == []


# --- parts ------------------------------------------------------------------------------------------------------------


def test_the_page_of_the_design_names_each_part_of_the_controller() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("| file below `controller/` | part |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+\.py)`", table)
    there = {path.name for path in (ROOT / "pathways_ray" / "controller").glob("*.py")} - {"__init__.py"}
    assert sorted(named) == sorted(there)


# --- words ------------------------------------------------------------------------------------------------------------


def words_of(page: str) -> list[str]:
    """The words in the first columns of a page's tables, without the names in parentheses behind them."""
    cells = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE)
    words = [re.sub(r" \(.*\)", "", word).strip("` ") for cell in cells for word in cell.split(", ")]
    return [word for word in words if word != "word"]


def test_the_glossary_has_each_word_once() -> None:
    """Those of the decision about words among them."""
    glossary = words_of("glossary.md")
    assert len(glossary) == len(set(glossary))
    decided = words_of("adr/0019-words.md")
    assert decided
    assert not set(decided) - set(glossary)


def test_pages_are_plain_english() -> None:
    """As docstrings and messages are."""
    lines = [(path, number, line) for path in NAMING for number, line in prose(path)]
    found = [f"{place(path, number)}: {one[0]!r}" for path, number, line in lines for one in BANNED.finditer(line)]
    assert not found, "\n".join(["", *found])


# --- this test itself -------------------------------------------------------------------------------------------------


def test_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`errors.Failure.kind` `errors.Failure.no_such_field` `errors.NoSuchError` `pw.init()` `pw.no_such_name(1)`\n"
        "`HostLost` `NoSuchClass` `pathways_ray/errors.py` `no/such/file.py` `docs/` `no_such_folder/`\n"
        "`make test` `make nothing` `python -m benchmarks --smoke` `python -m benchmarks.nothing`\n"
        "`ISLAND_WINDOW` `NO_SUCH_LIMIT` `PATHWAYS_URL`; `MAX_NODES`, `ISLAND_WINDOW` in `liveness.py`\n"
        "[one](page.md#a-heading) [two](page.md#another) [three](none.md) [four](https://example.com)\n"
        "# A heading\n```\n`NoSuchClass` in code\n```\n",
        encoding="utf-8",
    )
    assert unresolved(page) == [
        "page.md:1: `errors.Failure.no_such_field`: no such name",
        "page.md:1: `errors.NoSuchError`: no such name",
        "page.md:1: `pw.no_such_name(1)`: no such name",
        "page.md:2: `NoSuchClass`: no such name",
        "page.md:2: `no/such/file.py`: no such path",
        "page.md:2: `no_such_folder/`: no such path",
        "page.md:3: `make nothing`: no such target of make",
        "page.md:3: `python -m benchmarks.nothing`: no such module",
        "page.md:4: `NO_SUCH_LIMIT`: no such constant",
    ]
    assert constants_elsewhere(page) == [
        "page.md:4: MAX_NODES is not in liveness.py",
        "page.md:4: ISLAND_WINDOW is not in liveness.py",
    ]
    assert broken_links(page) == [
        "page.md:5: no such heading: page.md#another",
        "page.md:5: no such file: none.md",
    ]
