"""The folders of proxies' sockets: gone with the proxy, or with the next one."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_ray.proxy.folders import OLD_S
from pathways_ray.proxy.socket_folders import PREFIX, SOCKET, socket_path


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder for temporary files."""
    with tempfile.TemporaryDirectory(prefix="pw-", dir="/tmp") as made:  # of small letters
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_a_folder_is_its_owners_alone_and_goes_with_what_uses_it(where: Path) -> None:
    with socket_path() as path, listening(path):
        assert path.parent.parent == where
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(where.iterdir()) == []


def test_folders_of_proxies_that_were_killed_are_removed_by_the_next_one(where: Path) -> None:
    """Not one that is new, and may be about to have its socket, not one at whose socket somebody listens, and nobody
    else's, by whatever name."""
    bare, left, lives, new = (where / f"{PREFIX}{name}" for name in ("bare", "left", "lives", "new"))
    other, results, notes = where / "pathways-other", where / f"{PREFIX}results", where / f"{PREFIX}notes"
    for one in (bare, left, lives, new, other, results, notes):
        one.mkdir()
    (results / "data").mkdir()
    (notes / SOCKET).write_text("no socket")
    listening(left / SOCKET).close()
    with listening(lives / SOCKET):
        then = time.time() - 2 * OLD_S
        for one in (bare, left, lives, other, results, notes):
            os.utime(one, (then, then))
        with socket_path():
            assert {one.exists() for one in (bare, left)} == {False}
            assert {one.exists() for one in (lives, new, other, results / "data", notes / SOCKET)} == {True}


def test_where_names_are_long_or_have_capitals_it_is_in_the_systems_folder(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Capital", "l" * 80):
        (where / name).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(where / name))
        with socket_path() as path:
            assert path.parent.parent == Path("/tmp")
