"""The layout rules, read from the source: pure cores, thin shells, imports that go downward, nothing unpickled.

A rule that has to change is changed in the tables below, with its reason.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pathways_ray", "megatron_ptdp", "benchmarks", "examples")

# Decisions only: time, events and random numbers come in as arguments, commands go out. A folder stands for all its
# files but `actor.py`.
PURE = {
    "megatron_ptdp/planner",
    "megatron_ptdp/schedules",
    "pathways_ray/client/buffer.py",
    "pathways_ray/client/coalesce.py",
    "pathways_ray/client/core.py",
    "pathways_ray/client/events.py",
    "pathways_ray/controller",
    "pathways_ray/errors.py",
    "pathways_ray/executor/run/barriers.py",
    "pathways_ray/executor/compile/loops.py",
    "pathways_ray/executor/profiling/order_check.py",
    "pathways_ray/executor/run/progress.py",
    "pathways_ray/executor/run/prepared.py",
    "pathways_ray/executor/run/steps.py",
    "pathways_ray/ir",
    "pathways_ray/limits.py",
    "pathways_ray/liveness.py",
    "pathways_ray/resource_manager",
    "pathways_ray/scheduler",
    "pathways_ray/story.py",
    "pathways_ray/transport/capabilities.py",
    "pathways_ray/transport/endpoints.py",
    "pathways_ray/transport/messages.py",
}
IMPURE_IMPORTS = {
    "asyncio",
    "grpc",
    "importlib",
    "jax",
    "logging",
    "os",
    "random",
    "ray",
    "socket",
    "subprocess",
    "threading",
    "time",
}

# Thin shells beside an `actor.py`: parts of it that stand in files of their own, so that each can be read on its own.
SHELLS = {
    "megatron_ptdp/planner/cli.py",
    "megatron_ptdp/planner/measure.py",
    "megatron_ptdp/planner/probes.py",
    "pathways_ray/controller/client_service.py",
    "pathways_ray/controller/metrics_server.py",
    "pathways_ray/scheduler/plugins.py",
}

# What each folder may not know of. Folders that are not named here are held by the other rules alone.
ABOVE = {
    "ir": {"cli", "client", "cluster", "controller", "executor", "resource_manager", "scheduler", "transport"},
    "transport": {"cli", "client", "cluster", "controller", "executor", "resource_manager", "scheduler"},
    "client": {"cli", "controller", "executor", "resource_manager", "scheduler"},
}

# Folders whose files import each other in one direction only, type-only imports included: so each can be read first.
WITHOUT_CIRCLES = ["pathways_ray/client"]

IMPORTS_ACTORS = "pathways_ray/deployment/cluster.py"  # the module behind `pw.init`
IMPORTS_JAX_INTERNALS = "pathways_ray/compat.py"

# Bytes from a client must never become code.
UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
UNSAFE_BUILTINS = {"eval", "exec"}

# What a process must not load: the control plane stays small, a remote client needs no Ray.
NOT_LOADED = [
    ("pathways_ray.controller.actor", "jax"),
    ("pathways_ray.scheduler.actor", "jax"),
    ("pathways_ray.resource_manager.actor", "jax"),
    ("pathways_ray.client", "ray"),
]

Finding = tuple[int, str]  # a line and what it does there
Finder = Callable[[str, ast.Module], Iterator[Finding]]  # from a file's path (below ROOT, with /) and its syntax tree


def source_files(place: str) -> list[str]:
    """The Python files at a path below ROOT; a path that is gone is an error, so that no rule passes on nothing."""
    path = ROOT / place
    found = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert found, f"no Python file at {place}: if it moved, correct its name in the tables above"
    return [file.relative_to(ROOT).as_posix() for file in found]


def package_files(*names: str) -> list[str]:
    """The files of these packages; all of them must exist, except that `pathways_ray` may be alone."""
    there = [name for name in names if name == "pathways_ray" or (ROOT / name).is_dir()]
    return [file for name in there for file in source_files(name)]


def is_pure(file: str) -> bool:
    if file.endswith("/actor.py") or file in SHELLS:
        return False
    return any(within(file, place, "/") for place in PURE)


def imports(file: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every import as (line, full name), wherever it stands; `from a import b` gives a.b, as b may be a module."""
    folder = file.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = [*base, *(node.module or "").split(".")] if node.module else base
            yield from ((node.lineno, ".".join([*module, alias.name])) for alias in node.names)


def within(name: str, prefix: str, separator: str = ".") -> bool:
    return name == prefix or name.startswith(prefix + separator)


def impure_imports(file: str, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(file, tree):
        if name.split(".")[0] in IMPURE_IMPORTS:
            yield line, f"imports {name}"


def imports_of_shells(file: str, tree: ast.Module) -> Iterator[Finding]:
    """Imports of modules of this project that are not pure themselves, so that purity holds all the way down."""
    for line, name in imports(file, tree):
        path = module_file(name)
        if within(name, "pathways_ray") and not is_pure(path):
            yield line, f"imports {path}"


def module_file(name: str) -> str:
    """The file that holds `name`: the longest part of it that is a module."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end])
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if (ROOT / file).is_file():
                return file
    return name.replace(".", "/")


def unsafe_uses(file: str, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(file, tree):
        if UNSAFE_MODULES.intersection(name.split(".")):
            yield line, f"imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_MODULES:
            yield node.lineno, f"uses .{node.attr}"
        elif isinstance(node, ast.Name) and node.id in UNSAFE_BUILTINS:
            yield node.lineno, f"uses {node.id}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.lineno, "allows pickle"


def jax_internals(file: str, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(file, tree):
        if within(name, "jax._src"):
            yield line, f"imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            yield node.lineno, "uses jax._src"


def upward_imports(file: str, tree: ast.Module) -> Iterator[Finding]:
    folder = file.split("/")[1]
    for line, name in imports(file, tree):
        for above in ABOVE.get(folder, ()):
            if within(name, f"pathways_ray.{above}"):
                yield line, f"imports {name}"


def actor_imports(file: str, tree: ast.Module) -> Iterator[Finding]:
    for line, name in imports(file, tree):
        if within(name, "pathways_ray") and "actor" in name.split("."):
            yield line, f"imports {name}"


def import_circles(files: list[str]) -> list[str]:
    """Circles among these files, as `a.py -> b.py -> a.py`; imports for types only, and inside functions, count."""
    there = set(files)
    graph: dict[str, list[str]] = {}
    for file in files:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"), file)
        graph[file] = sorted({module_file(name) for _, name in imports(file, tree)} & there - {file})
    return circles_of(graph)


def circles_of(graph: dict[str, list[str]]) -> list[str]:
    """At least one circle of a graph that has any: a depth-first search names each way back to a node above."""
    found: list[str] = []
    done: set[str] = set()

    def visit(node: str, above: list[str]) -> None:
        if node in above:
            found.append(" -> ".join([*above[above.index(node) :], node]))
        elif node not in done:
            for following in graph[node]:
                visit(following, [*above, node])
            done.add(node)

    for node in sorted(graph):
        visit(node, [])
    return found


def breaches(files: list[str], find: Finder) -> list[str]:
    trees = ((file, ast.parse((ROOT / file).read_text(encoding="utf-8"), file)) for file in files)
    return [f"{file}:{line} {what}" for file, tree in trees for line, what in find(file, tree)]


def test_pure_modules_import_nothing_that_acts() -> None:
    pure = [file for place in sorted(PURE) for file in source_files(place) if is_pure(file)]
    assert breaches(pure, impure_imports) == []


def test_pure_modules_import_only_pure_modules_of_the_project() -> None:
    pure = [file for place in sorted(PURE) for file in source_files(place) if is_pure(file)]
    assert breaches(pure, imports_of_shells) == []


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert breaches(source_files("pathways_ray"), unsafe_uses) == []


def test_jax_internals_are_used_in_one_place() -> None:
    files = [file for file in package_files(*PACKAGES, "tests") if file != IMPORTS_JAX_INTERNALS]
    assert breaches(files, jax_internals) == []


@pytest.mark.parametrize("folder", ABOVE)
def test_imports_go_downward(folder: str) -> None:
    assert breaches(source_files(f"pathways_ray/{folder}"), upward_imports) == []


@pytest.mark.parametrize("folder", WITHOUT_CIRCLES)
def test_files_of_a_folder_import_each_other_without_circles(folder: str) -> None:
    assert import_circles(source_files(folder)) == []


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": ["b", "c"], "b": ["c"], "c": []}, []),
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["b -> c -> b"]),
        ({"a": ["a2"], "a2": ["a"], "b": ["a", "b2"], "b2": ["b"]}, ["a -> a2 -> a", "b -> b2 -> b"]),
    ],
)
def test_a_circle_is_named_by_its_files(graph: dict[str, list[str]], circles: list[str]) -> None:
    assert circles_of(graph) == circles


def test_only_the_cluster_imports_actors() -> None:
    assert source_files(IMPORTS_ACTORS)
    files = [file for file in package_files(*PACKAGES) if file != IMPORTS_ACTORS]
    assert breaches(files, actor_imports) == []


@pytest.mark.parametrize(("module", "unwanted"), NOT_LOADED)
def test_processes_load_no_more_than_they_need(module: str, unwanted: str) -> None:
    program = f"import sys, {module}; sys.exit({unwanted!r} in sys.modules and 'loaded {unwanted}')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("find", "file", "source"),
    [
        (impure_imports, "pathways_ray/ir/a.py", "def f():\n    import os.path"),
        (impure_imports, "pathways_ray/ir/a.py", "from jax import numpy"),
        (imports_of_shells, "pathways_ray/ir/a.py", "from pathways_ray.transport.streams import Stream"),
        (imports_of_shells, "pathways_ray/scheduler/a.py", "from . import actor"),
        (imports_of_shells, "pathways_ray/scheduler/a.py", "import pathways_ray"),
        (unsafe_uses, "pathways_ray/a.py", "from ray import cloudpickle"),
        (unsafe_uses, "pathways_ray/a.py", "ray.cloudpickle.loads(b'')"),
        (unsafe_uses, "pathways_ray/a.py", "eval('1')"),
        (unsafe_uses, "pathways_ray/a.py", "numpy.load(f, allow_pickle=True)"),
        (jax_internals, "examples/a.py", "from jax import _src"),
        (jax_internals, "examples/a.py", "import jax._src.core as core"),
        (jax_internals, "examples/a.py", "jax._src.core.Tracer"),
        (upward_imports, "pathways_ray/ir/passes/a.py", "from ...scheduler.order import Order"),
        (upward_imports, "pathways_ray/client/a.py", "import pathways_ray.controller.ownership"),
        (actor_imports, "pathways_ray/cli/a.py", "from pathways_ray.executor import actor"),
        (actor_imports, "benchmarks/a.py", "from pathways_ray.executor.actor import HostExecutor"),
    ],
)
def test_each_rule_sees_a_breach(find: Finder, file: str, source: str) -> None:
    assert list(find(file, ast.parse(source)))


@pytest.mark.parametrize(
    ("find", "file", "source"),
    [
        (impure_imports, "pathways_ray/ir/a.py", "import dataclasses, msgspec, numpy"),
        (imports_of_shells, "pathways_ray/scheduler/a.py", "from pathways_ray.errors import PathwaysError"),
        (unsafe_uses, "pathways_ray/a.py", "model.eval(); numpy.load(f, allow_pickle=False)"),
        (jax_internals, "examples/a.py", "import jax.experimental.transfer"),
        (upward_imports, "pathways_ray/client/a.py", "from pathways_ray.ir import graph"),
        (actor_imports, "pathways_ray/controller/actor.py", "from ray.actor import ActorHandle"),
    ],
)
def test_no_rule_sees_a_breach_where_there_is_none(find: Finder, file: str, source: str) -> None:
    assert list(find(file, ast.parse(source))) == []
