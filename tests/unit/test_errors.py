"""The one error tree: its picture, and its way through processes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from pathways_ray import error_page, errors
from pathways_ray.errors import (
    CompileError,
    ExecutionError,
    Failure,
    GraphError,
    HostLost,
    PathwaysError,
    SpecError,
    from_failure,
    to_failure,
)


def subclasses(kind: type[PathwaysError]) -> list[type[PathwaysError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in subclasses(child))]


OWN = [kind for kind in subclasses(PathwaysError) if kind.__module__ == errors.__name__]


def drawn_tree(text: str = errors.__doc__ or "") -> dict[str, str]:
    """Name of each class in a drawing, by default that of the module, with the name of the class it hangs from."""
    parents: dict[str, str] = {}
    branch: list[str] = []
    for line in text.splitlines():
        found = re.fullmatch(r" {4}((?:│   | {4})*)(?:├── |└── )?(\w+)( {2,}.*)?", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 + (1 if "──" in line else 0)
        branch[depth:] = [found[2]]
        parents[found[2]] = branch[depth - 1] if depth else "Exception"
    return parents


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert drawn_tree() == {kind.__name__: kind.__bases__[0].__name__ for kind in OWN}
    assert len(OWN) > 15


def test_every_error_says_what_it_means() -> None:
    assert all(kind.__doc__ for kind in OWN)


@pytest.mark.parametrize("kind", OWN)
def test_an_error_crosses_processes_as_a_value(kind: type[PathwaysError]) -> None:
    """
    1. A host catches an error and makes a failure of it, with the node and the line.
    2. The client makes an error of the same kind of it, with all that in its text.
    3. Passed on again it stays the failure it was: the root cause is not wrapped.
    """
    failure = to_failure(kind("it broke"), "f", "user.py:3", 7)
    assert failure == Failure(kind.__name__, "it broke", "f", "user.py:3", 7)
    error = from_failure(failure)
    assert type(error) is kind
    assert str(error) == "it broke [node f, user.py:3, host 7]"
    assert to_failure(error, "other", "elsewhere.py:1", 1) is failure


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (Failure("HostLost", "gone"), "gone"),
        (Failure("HostLost", "gone", host=3), "gone"),
        (Failure("HostLost", "gone", "f"), "gone [node f]"),
        (Failure("HostLost", "gone", "f", "a.py:1"), "gone [node f, a.py:1]"),
        (Failure("HostLost", "gone", "f", "", 0), "gone [node f, host 0]"),
    ],
)
def test_the_text_names_what_is_known(failure: Failure, text: str) -> None:
    assert str(from_failure(failure)) == text


def test_foreign_exceptions_become_execution_errors() -> None:
    assert to_failure(ZeroDivisionError("by zero"), "f") == Failure("ExecutionError", "ZeroDivisionError: by zero", "f")
    assert type(from_failure(Failure("SomethingNew", "from a newer version"))) is ExecutionError
    assert type(from_failure(Failure("SystemExit", "no class of ours"))) is ExecutionError


@pytest.mark.parametrize("kind", OWN)
def test_errors_survive_pickling_with_their_failure(kind: type[PathwaysError]) -> None:
    error = from_failure(Failure(kind.__name__, "it broke", "f", "user.py:3", 7))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert copy.failure == error.failure
    assert pickle.loads(pickle.dumps(kind("plain"))).failure is None


def test_errors_are_caught_by_what_they_are() -> None:
    with pytest.raises(GraphError, match="a spec is part of the graph"):
        raise SpecError("a spec is part of the graph")
    with pytest.raises(ExecutionError, match="gone"):
        raise from_failure(Failure("HostLost", "gone"))
    assert not issubclass(CompileError, HostLost)


def test_the_page_is_made_from_the_classes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    assert error_page.rewritten(page) == page, "run: python -m pathways_ray.error_page docs/errors.md"
    assert all(f"| `{kind.__name__}` |" in page for kind in OWN if not kind.__subclasses__())
