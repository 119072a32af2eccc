"""The tables of docs/errors.md, made from the classes: `python -m pathways_ray.error_page docs/errors.md` writes them.

A class says when it is raised and what to do, in two paragraphs of its docstring.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from pathways_ray import errors

_PARTS = re.compile(r"\nWhen: (.*?)\nDo: (.*)", re.DOTALL)

SECTIONS: dict[str, list[type[errors.PathwaysError]]] = {
    "The call was wrong: change the call": [errors.UsageError],
    "The cluster cannot serve it: ask for less, or use another cluster": [errors.ResourceError],
    "A launch failed: the cluster goes on": [errors.ExecutionError, errors.Cancelled],
    "The session failed": [
        errors.ControllerLost,
        errors.AuthenticationError,
        errors.WireError,
        errors.SuspensionDamaged,
        errors.WaitTimeout,
    ],
}
"""The sections of the page with a table, and the branches of the tree that each one has."""


def branch(kind: type[errors.PathwaysError]) -> Iterator[type[errors.PathwaysError]]:
    """An error and all below it, as the module defines them."""
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from branch(below)


def drawing() -> str:
    """The tree, as the docstring of the module draws it."""
    text = inspect.getdoc(errors) or ""
    lines = text[text.index("    PathwaysError") :].split("\n\n")[0].splitlines()
    return "\n".join(line[4:] for line in lines)


def table(kinds: list[type[errors.PathwaysError]]) -> str:
    """A row for each error that is raised as such."""
    rows = ["| error | when | what to do |", "|---|---|---|"]
    for kind in (one for root in kinds for one in branch(root)):
        found = _PARTS.search(inspect.getdoc(kind) or "")
        if found is not None:
            when, remedy = (" ".join(part.split()) for part in found.groups())
            rows.append(f"| `{kind.__name__}` | {when} | {remedy} |")
    return "\n".join(rows)


def rewritten(page: str) -> str:
    """The page with the tree and the tables of today."""
    page = re.sub(r"(?s)```\nPathwaysError\n.*?```", lambda _: f"```\n{drawing()}\n```", page, count=1)
    for title, kinds in SECTIONS.items():
        start = page.index("| error |", page.index(f"## {title}\n"))
        page = page[:start] + table(kinds) + page[page.index("\n\n", start) :]
    return page


def main() -> None:
    """Rewrites the page that is named."""
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
