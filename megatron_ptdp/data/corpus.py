"""Texts to train on: named files, or the sources of the standard library, which need no download.

The default corpus is the reference text behind `help()` (pydoc_data/topics.py, some 0.7 MB of English) and the sources
of the standard library (some 12 MB), as the interpreter that runs has them: another version has other texts.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

from megatron_ptdp.errors import TokenFileError

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TOPICS = Path("pydoc_data") / "topics.py"
TEXT_ENDINGS = (".txt", ".md", ".rst", ".py")


def default_corpus() -> list[Path]:
    """`pydoc_data/topics.py`, then the library's other .py files by name; tests and installed packages are left out.

    Raises:
        TokenFileError: there is no such source, as in an interpreter without its library's text.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = sorted(
        (path for path in library.rglob("*.py") if not _LEFT_OUT.intersection(path.relative_to(library).parts)),
        key=lambda path: (path.relative_to(library) != _TOPICS, path.relative_to(library).as_posix()),
    )
    if not found:
        raise TokenFileError(f"there are no Python sources below {library}; name text files to prepare")
    return found


def files_in(paths: Iterable[str | Path]) -> list[Path]:
    """The files of these paths, in the order given; of a folder, its text files (.txt, .md, .rst, .py) by name.

    Raises:
        TokenFileError: a path does not exist, or a folder has no text.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in TEXT_ENDINGS and file.is_file())
            if not inside:
                raise TokenFileError(f"folder {path} has no file that ends in {', '.join(TEXT_ENDINGS)}")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise TokenFileError(f"there is no file {path}")
    return found
