"""The folders in which clients leave big arrays: a process's own, and gone with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pathways_ray.proxy.arrays import Refused
from pathways_ray.proxy.folders import PREFIX, SHARED_MEMORY, folder_of, own_folder, remove_left, taken

MAKES_ONE = """
import os, sys
from pathways_ray.proxy.folders import own_folder
print(own_folder(), flush=True)
sys.stdin.read()
os.abort()
"""


FORKS = """
import os, sys
from pathways_ray.proxy.folders import own_folder
path = own_folder()
if os.fork() == 0:
    sys.exit()
os.wait()
print(path, os.path.isdir(path))
"""


def test_a_folder_is_this_users_alone_and_stays_while_its_process_lives() -> None:
    path = Path(own_folder())
    assert path.stat().st_mode & 0o777 == 0o700
    assert own_folder() == str(path)
    remove_left(path, 0.0)
    assert path.is_dir()


def test_the_folder_of_a_process_that_was_killed_is_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().decode().strip())
        (path / "lt_1").write_bytes(b"1234")
        process.kill()
        process.wait()
    remove_left(path)
    assert not path.exists()
    remove_left(path)


def test_folders_of_processes_that_were_killed_with_their_proxies_are_removed_by_the_next_one() -> None:
    """Not one that is new, and may be about to be locked, and not one whose process lives."""
    old, new = (Path(tempfile.mkdtemp(prefix=PREFIX, dir=SHARED_MEMORY)) for _ in range(2))
    (old / "lt_1").write_bytes(b"1234")
    with subprocess.Popen([sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().decode().strip())
        for path in (old, held):
            os.utime(path, (0, 0))
        try:
            subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True)
            assert [path.exists() for path in (old, new, held)] == [False, True, True]
        finally:
            process.kill()
            new.rmdir()
            remove_left(held)


def test_the_end_of_a_fork_leaves_the_folder_and_that_of_its_process_removes_it() -> None:
    found = subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True, text=True).stdout.split()
    assert found[1] == "True"
    assert not Path(found[0]).exists()


def test_bytes_are_taken_once_and_only_as_many_as_announced(tmp_path: Path) -> None:
    (tmp_path / "lt_7").write_bytes(b"12345678")
    assert bytes(taken(tmp_path, 7, 8)) == b"12345678"
    with pytest.raises(FileNotFoundError):
        taken(tmp_path, 7, 8)
    (tmp_path / "lt_-2147483648").write_bytes(b"1234")
    with pytest.raises(ValueError, match="it has 4 bytes, and 8 were announced"):
        taken(tmp_path, 1 << 31, 8)
    secret = tmp_path / "secret"
    secret.write_bytes(b"12345678")
    (tmp_path / "lt_8").symlink_to(secret)
    with pytest.raises(OSError, match="lt_8"):
        taken(tmp_path, 8, 8)
    os.mkfifo(tmp_path / "lt_9")
    with pytest.raises(OSError, match="Invalid argument"):
        taken(tmp_path, 9, 8)


def test_a_folder_that_others_may_enter_or_that_is_none_is_refused(tmp_path: Path) -> None:
    assert folder_of("") is None
    own, others, file, link = (tmp_path / f"{PREFIX}{name}" for name in ("own", "others", "file", "link"))
    own.mkdir(0o700)
    others.mkdir(0o755)
    file.touch()
    link.symlink_to(own)
    (tmp_path / "name").mkdir(0o700)
    assert folder_of(str(own)) == own
    for wrong in (others, file, link, tmp_path / "name", tmp_path / f"{PREFIX}none"):
        with pytest.raises(Refused):
            folder_of(str(wrong))
    with pytest.raises(Refused):
        folder_of(f"{PREFIX}relative")
