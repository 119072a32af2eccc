"""The layout rules, read from the source: pure cores, thin shells, imports that go downward, nothing unpickled.

A rule that has to change is changed in the tables below, with its reason.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import pathways_ray

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pathways_ray", "megatron_ptdp", "benchmarks", "examples")

# Decisions only: time, events and random numbers come in as arguments, commands go out. A folder stands for all its
# files but `actor.py`.
PURE = {
    "megatron_ptdp/config",
    "megatron_ptdp/planner",
    "megatron_ptdp/schedules",
    "pathways_ray/client/buffer.py",
    "pathways_ray/client/cancelling.py",
    "pathways_ray/client/coalesce.py",
    "pathways_ray/client/core.py",
    "pathways_ray/client/donations.py",
    "pathways_ray/client/early.py",
    "pathways_ray/client/ending.py",
    "pathways_ray/client/events.py",
    "pathways_ray/client/frees.py",
    "pathways_ray/client/launch_loops.py",
    "pathways_ray/client/moving.py",
    "pathways_ray/client/renewals.py",
    "pathways_ray/client/siblings.py",
    "pathways_ray/client/suspending.py",
    "pathways_ray/client/suspension.py",
    "pathways_ray/client/versions.py",
    "pathways_ray/client/wanted.py",
    "pathways_ray/controller",
    "pathways_ray/deployment/following.py",
    "pathways_ray/deployment/topology.py",
    "pathways_ray/errors.py",
    "pathways_ray/executor/data/failure_texts.py",
    "pathways_ray/executor/profiling/order_check.py",
    "pathways_ray/executor/run",
    "pathways_ray/ir",
    "pathways_ray/limits.py",
    "pathways_ray/liveness.py",
    "pathways_ray/observe",
    "pathways_ray/proxy/array_requests.py",
    "pathways_ray/proxy/arrays.py",
    "pathways_ray/proxy/core.py",
    "pathways_ray/proxy/events.py",
    "pathways_ray/proxy/http2.py",
    "pathways_ray/proxy/http2_frames.py",
    "pathways_ray/proxy/parking.py",
    "pathways_ray/proxy/statuses.py",
    "pathways_ray/resource_manager",
    "pathways_ray/scheduler",
    "pathways_ray/story.py",
    "pathways_ray/transport/batcher.py",
    "pathways_ray/transport/capabilities.py",
    "pathways_ray/transport/client_messages.py",
    "pathways_ray/transport/data_messages.py",
    "pathways_ray/transport/early_messages.py",
    "pathways_ray/transport/endpoints.py",
    "pathways_ray/transport/frames.py",
    "pathways_ray/transport/holding_messages.py",
    "pathways_ray/transport/island_messages.py",
    "pathways_ray/transport/joining.py",
    "pathways_ray/transport/launch_messages.py",
    "pathways_ray/transport/message.py",
    "pathways_ray/transport/messages.py",
    "pathways_ray/transport/operator_messages.py",
    "pathways_ray/transport/preemption_messages.py",
    "pathways_ray/transport/resume_messages.py",
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
    "megatron_ptdp/planner/calibration/command.py",
    "megatron_ptdp/planner/calibration/measure.py",
    "megatron_ptdp/planner/calibration/probes.py",
    "pathways_ray/controller/client_service.py",
    "pathways_ray/controller/log_reading.py",
    "pathways_ray/controller/metrics_server.py",
    "pathways_ray/controller/planner.py",
    "pathways_ray/controller/succession.py",
    "pathways_ray/controller/tenants_file.py",
    "pathways_ray/executor/run/arrivals.py",
    "pathways_ray/executor/run/dispatcher.py",
    "pathways_ray/executor/run/inbox.py",
    "pathways_ray/executor/run/reports.py",
    "pathways_ray/scheduler/plugins.py",
}

# The floors of each package, from the ground up. A folder, or a module beside folders, imports from lower floors only.
FLOORS = {
    "pathways_ray": [
        {"module_functions"},
        {"compat", "errors", "forks", "jax_arrays", "jax_cache", "jax_hooks", "jax_refs", "jax_transfers"}
        | {"limits", "liveness", "machine_load", "story", "waits"},
        {"error_page", "ir", "names", "observe", "os_process", "process_log", "worker"},
        {"jax_types", "joint_exports", "transport"},
        {"formulas"},
        {"resource_manager", "scheduler"},
        {"client", "controller", "executor"},
        {"dashboard", "deployment"},
        {"proxy"},
        {"cli", "simulation"},
    ],
    "megatron_ptdp": [
        {"errors"},
        {"command_line", "config", "data", "schedules"},
        {"models"},
        {"parallel"},
        {"planner", "verify"},
        {"train"},
    ],
}
IMPORTS_ACTORS = {"pathways_ray/deployment/cluster.py", "pathways_ray/deployment/islands.py"}
# The last one runs the tests of JAX itself.
IMPORTS_JAX_INTERNALS = {
    "pathways_ray/compat.py",
    "pathways_ray/jax_arrays.py",
    "pathways_ray/jax_cache.py",
    "pathways_ray/jax_hooks.py",
    "pathways_ray/jax_refs.py",
    "pathways_ray/jax_transfers.py",
    "pathways_ray/joint_exports.py",
    "tests/jax_suite/worker.py",
}

# Packages without an import circle.
WITHOUT_CIRCLES = ["megatron_ptdp", "pathways_ray"]

# What users of the runtime may import of it: the names of `pathways_ray.__all__`, and these modules.
USERS = ["megatron_ptdp"]
PUBLIC_MODULES = ["pathways_ray.errors"]

TIMED_GETS = {"pathways_ray/waits.py", "pathways_ray/proxy/readers.py"}
"""Files that wait for queues with a timeout: the one that knows how, and one whose queue is written in Python."""

# The size of what is read at a time. The lines of a function count without its docstring, which is as long as it takes.
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Bytes from a client must never become code, but those of a trusted tenant's host functions, in a process of theirs.
READS_CODE = {"pathways_ray/client/host_functions.py", "pathways_ray/executor/calls/main.py"}  # written, read
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


class Source:
    """A file at a path below ROOT, with /; or this text as if it stood there. Parsed by the rules that need more than
    its imports, which are found once."""

    def __init__(self, file: str, text: str | None = None) -> None:
        self.file = file
        self._given = text

    @functools.cached_property
    def text(self) -> str:
        return (ROOT / self.file).read_text(encoding="utf-8") if self._given is None else self._given

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.file)

    def nodes(self, pattern: str) -> Iterator[ast.AST]:
        """All nodes of the file where its text has what is looked for; without it, the file need not be parsed."""
        return ast.walk(self.tree) if re.search(pattern, self.text) else iter(())

    @property
    def imports(self) -> tuple[tuple[int, str], ...]:
        return tuple(imports(self.file, self.tree)) if self._given is not None else imports_of(self.file)


@functools.cache
def imports_of(file: str) -> tuple[tuple[int, str], ...]:
    """The imports of a file: ten rules ask for them."""
    return tuple(imports(file, Source(file).tree))


Finder = Callable[[Source], Iterator[Finding]]


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


def impure_imports(source: Source) -> Iterator[Finding]:
    for line, name in source.imports:
        if name.split(".")[0] in IMPURE_IMPORTS:
            yield line, f"imports {name}"


def imports_of_shells(source: Source) -> Iterator[Finding]:
    """Imports of modules of this project that are not pure themselves, so that purity holds all the way down."""
    for line, name in source.imports:
        path = module_file(name)
        if within(name, "pathways_ray") and not is_pure(path):
            yield line, f"imports {path}"


@functools.cache
def module_file(name: str) -> str:
    """The file that holds `name`: the longest part of it that is a module."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end])
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if (ROOT / file).is_file():
                return file
    return name.replace(".", "/")


def unsafe_uses(source: Source) -> Iterator[Finding]:
    for line, name in source.imports:
        if UNSAFE_MODULES.intersection(name.split(".")):
            yield line, f"imports {name}"
    for node in source.nodes(rf"\b({'|'.join([*UNSAFE_MODULES, *UNSAFE_BUILTINS, 'allow_pickle'])})\b"):
        if isinstance(node, ast.Attribute) and node.attr in UNSAFE_MODULES:
            yield node.lineno, f"uses .{node.attr}"
        elif isinstance(node, ast.Name) and node.id in UNSAFE_BUILTINS:
            yield node.lineno, f"uses {node.id}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.lineno, "allows pickle"


def jax_internals(source: Source) -> Iterator[Finding]:
    for line, name in source.imports:
        if within(name, "jax._src"):
            yield line, f"imports {name}"
    for node in source.nodes("_src"):
        if isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node.value) == "jax":
            yield node.lineno, "uses jax._src"


def upward_imports(source: Source) -> Iterator[Finding]:
    package, room = source.file.split("/")[0], room_of(source.file)
    below = set[str]().union(*FLOORS[package][: floor_of(package, room)])
    for line, name in source.imports:
        if within(name, package) and room_of(module_file(name)) not in {room, "__init__", *below}:
            yield line, f"imports {name}"


def room_of(file: str) -> str:
    """The folder below its package that a file lies in, or the file's own name where it lies beside the folders."""
    return file.split("/")[1].removesuffix(".py")


def floor_of(package: str, room: str) -> int:
    """The number of floors below the one that a folder is on."""
    return next(k for k, rooms in enumerate(FLOORS[package]) if room in rooms)


def actor_imports(source: Source) -> Iterator[Finding]:
    for line, name in source.imports:
        if within(name, "pathways_ray") and "actor" in name.split("."):
            yield line, f"imports {name}"


def private_uses(source: Source) -> Iterator[Finding]:
    """Uses of the runtime beside its public names."""
    public = {f"pathways_ray.{name}" for name in pathways_ray.__all__}
    for line, name in source.imports:
        if not within(name, "pathways_ray") or name == "pathways_ray" or name in public:
            continue
        if not any(within(name, module) for module in PUBLIC_MODULES):
            yield line, f"imports {name}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"pathways_ray.{node.attr}"
            if node.value.id in ("pw", "pathways_ray") and name not in public:
                yield node.lineno, f"uses {name}"


def timed_gets(source: Source) -> Iterator[Finding]:
    """Calls of `get` with a timeout, which may wait for ever where it is a queue's; `ray.get` does not."""
    for node in source.nodes(r"\btimeout\b|\bget\(\s*True\b"):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="ray"), attr="get")):
                pass
            case ast.Call(func=ast.Attribute(attr="get"), args=args, keywords=named):
                if any(one.arg == "timeout" for one in named) or _may_block(args):
                    yield node.lineno, "get with a timeout: use `waits.get_within`"


def _may_block(given: list[ast.expr]) -> bool:
    """Whether the arguments are True and a timeout."""
    return len(given) == 2 and isinstance(given[0], ast.Constant) and given[0].value is True


def long_functions(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            documented = node.body[0] if docstring is not None else None
            length = lines_of(node) - (lines_of(documented) if documented is not None else 0)
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines"


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def import_graph(package: str) -> dict[str, set[str]]:
    """For each file of a package the files of the package that it imports, imports for types and in functions too. The
    `__init__.py` that Python runs before a module counts only where a name is imported from it."""
    files = source_files(package)
    graph = {}
    for file in files:
        graph[file] = {module_file(name) for _, name in imports_of(file)}.intersection(files) - {file}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """The circles of a graph as "a -> b -> a", one for each edge that leads back in a depth-first search."""
    found: list[str] = []
    finished: set[str] = set()

    def visit(path: list[str]) -> None:
        for other in sorted(graph[path[-1]]):
            if other in path:
                found.append(" -> ".join([*path[path.index(other) :], other]))
            elif other not in finished:
                visit([*path, other])
        finished.add(path[-1])

    for start in sorted(graph):
        if start not in finished:
            visit([start])
    return found


def import_circles(package: str) -> list[str]:
    return circles(import_graph(package))


def breaches(files: list[str], find: Finder) -> list[str]:
    return [f"{file}:{line} {what}" for file in files for line, what in find(Source(file))]


def test_pure_modules_import_nothing_that_acts() -> None:
    pure = [file for place in sorted(PURE) for file in source_files(place) if is_pure(file)]
    assert breaches(pure, impure_imports) == []


def test_pure_modules_import_only_pure_modules_of_the_project() -> None:
    pure = [file for place in sorted(PURE) for file in source_files(place) if is_pure(file)]
    assert breaches(pure, imports_of_shells) == []


def test_nothing_is_unpickled_or_evaluated() -> None:
    files = [file for file in source_files("pathways_ray") if file not in READS_CODE]
    assert breaches(files, unsafe_uses) == []


def test_jax_internals_are_used_in_one_place() -> None:
    files = [file for file in package_files(*PACKAGES, "tests") if file not in IMPORTS_JAX_INTERNALS]
    assert breaches(files, jax_internals) == []


def test_queues_are_waited_for_where_the_limit_holds() -> None:
    files = [file for file in source_files("pathways_ray") if file not in TIMED_GETS]
    assert breaches(files, timed_gets) == []


def test_files_and_functions_can_be_read_at_a_time() -> None:
    files = package_files(*PACKAGES)
    assert [f for f in files if len((ROOT / f).read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES] == []
    assert breaches(files, long_functions) == []


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_downward(package: str) -> None:
    files = [file for file in source_files(package) if room_of(file) not in {"__init__", "__main__"}]
    assert breaches(files, upward_imports) == []


@pytest.mark.parametrize("package", FLOORS)
def test_each_folder_is_on_one_floor(package: str) -> None:
    rooms = sorted({room_of(file) for file in source_files(package)} - {"__init__", "__main__"})
    assert sorted(room for floor in FLOORS[package] for room in floor) == rooms


def test_the_page_for_contributors_has_the_floors() -> None:
    """The rows of its table, from the top, name the rooms of each floor of the runtime."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| floor of `pathways_ray/` | has |")[2].partition("\n\n")[0]
    floors = FLOORS["pathways_ray"]
    rooms = set[str]().union(*floors)
    rows = [
        {name.removesuffix("/").removesuffix(".py") for name in re.findall("`([^`]+)`", row)}
        for row in table.split("\n")
    ]
    assert [row & rooms for row in rows[2:]] == floors[::-1]


def test_only_what_starts_actors_imports_them() -> None:
    assert all(source_files(file) for file in IMPORTS_ACTORS)
    files = [file for file in package_files(*PACKAGES) if file not in IMPORTS_ACTORS]
    assert breaches(files, actor_imports) == []


@pytest.mark.parametrize("package", WITHOUT_CIRCLES)
def test_imports_have_no_circle(package: str) -> None:
    assert import_circles(package) == []


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, ["a -> b -> a"]),
        ({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}, ["b -> c -> d -> b"]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"a"}}, ["a -> b -> a", "a -> c -> a"]),
    ],
)
def test_a_circle_is_found_and_a_diamond_is_none(graph: dict[str, set[str]], found: list[str]) -> None:
    assert circles(graph) == found


def test_imports_for_types_and_in_functions_count() -> None:
    source = "if TYPE_CHECKING:\n    from megatron_ptdp.models import split\ndef f():\n    import megatron_ptdp.errors"
    found = {module_file(name) for _, name in Source("megatron_ptdp/a.py", source).imports}
    assert found == {"megatron_ptdp/errors.py", "megatron_ptdp/models/split.py"}


@pytest.mark.parametrize("package", USERS)
def test_users_of_the_runtime_use_its_public_names(package: str) -> None:
    assert breaches(source_files(package), private_uses) == []


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
        (private_uses, "megatron_ptdp/a.py", "from pathways_ray.client.slices import VirtualSlice"),
        (private_uses, "megatron_ptdp/a.py", "import pathways_ray.ir.plan"),
        (private_uses, "megatron_ptdp/a.py", "def f():\n    from pathways_ray import client"),
        (private_uses, "megatron_ptdp/a.py", "import pathways_ray as pw\npw.client.api.put(1)"),
        (actor_imports, "pathways_ray/cli/a.py", "from pathways_ray.executor import actor"),
        (actor_imports, "benchmarks/a.py", "from pathways_ray.executor.actor import HostExecutor"),
        (timed_gets, "pathways_ray/a.py", "self.inbox.get(timeout=1.0, block=True)"),
        (timed_gets, "pathways_ray/a.py", "inbox.get(True, 1.0)"),
        (long_functions, "benchmarks/a.py", "def f():\n" + 60 * "    pass\n"),
    ],
)
def test_each_rule_sees_a_breach(find: Finder, file: str, source: str) -> None:
    assert list(find(Source(file, source)))


@pytest.mark.parametrize(
    ("find", "file", "source"),
    [
        (impure_imports, "pathways_ray/ir/a.py", "import dataclasses, msgspec, numpy"),
        (imports_of_shells, "pathways_ray/scheduler/a.py", "from pathways_ray.errors import PathwaysError"),
        (unsafe_uses, "pathways_ray/a.py", "model.eval(); numpy.load(f, allow_pickle=False)"),
        (jax_internals, "examples/a.py", "import jax.experimental.transfer"),
        (upward_imports, "pathways_ray/client/a.py", "from pathways_ray.ir import graph"),
        (private_uses, "megatron_ptdp/a.py", "import pathways_ray as pw\npw.put(1)"),
        (private_uses, "megatron_ptdp/a.py", "from pathways_ray.errors import PathwaysError"),
        (private_uses, "megatron_ptdp/a.py", "from pathways_ray import errors, put"),
        (actor_imports, "pathways_ray/controller/actor.py", "from ray.actor import ActorHandle"),
        (timed_gets, "pathways_ray/a.py", "ray.get(answer, timeout=1.0); inbox.get(); known.get(True)"),
        (long_functions, "benchmarks/a.py", 'def f():\n    """What\n    it does."""\n' + 59 * "    pass\n"),
    ],
)
def test_no_rule_sees_a_breach_where_there_is_none(find: Finder, file: str, source: str) -> None:
    assert list(find(Source(file, source))) == []
