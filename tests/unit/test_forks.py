"""Processes as forks of one server: workers, and readers, that are small programs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pathways_ray import forks
from tests.waiting import until

WORKER = """
import json, os, sys
print(json.dumps([sys.argv, os.environ["WHO"], os.getcwd(), os.getpid(), os.getppid(), __name__]), flush=True)
print("an error", file=sys.stderr)
sys.stdin.readline()
"""
READER = """
import json, os, sys
KNOWN = dict(os.environ)
def main():
    print(json.dumps([sys.argv, os.environ["WHO"], "SECRET" in KNOWN, os.getpid(), os.getppid()]), flush=True)
    sys.stdin.readline()
"""
SERVE = """
import sys
from pathways_ray import forks
forks.READERS, forks.READ_WITH, forks.OTHERS, forks.WITH_RAY = ("reader",), (), ("numpy.random",), ("settings",)
forks.serve(sys.argv[1], *map(int, sys.argv[2:]))
"""
SETTINGS = """
import os
assert os.environ["RAY_JOB_ID"] == "01000000" and os.environ["SECRET"] == "known"
"""


class Server:
    """A server of forks in a process of its own; the test, or another process, is its owner and raylet."""

    def __init__(self, folder: Path, owner: int = 0) -> None:
        self.folder, self.sockets = folder, folder / "sockets"
        self.path, self.readers = str(self.sockets / "workers"), str(self.sockets / "readers")
        self.sockets.mkdir()
        for name, text in (("worker.py", WORKER), ("reader.py", READER), ("settings.py", SETTINGS)):
            (folder / name).write_text(text)
        listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, path in zip(listeners, (self.readers, self.path), strict=True):
            listener.bind(path)
            listener.listen(128)
        numbers = [listener.fileno() for listener in listeners]
        root = str(Path(forks.__file__).parents[1])
        words = [SERVE, str(folder), str(owner or os.getpid()), *map(str, numbers)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", *words],
            env={**os.environ, "PYTHONPATH": root},
            pass_fds=numbers,
            stdin=subprocess.PIPE,
            text=True,
        )
        for listener in listeners:
            listener.close()

    def prepare(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"SECRET": "known"}))
        self.process.stdin.close()

    def ask(self, who: str, *words: str, job: str = forks.FIRST_JOB, raylet: int = 0) -> subprocess.Popen[str]:
        environment = {"WHO": who, "RAY_JOB_ID": job, "RAY_RAYLET_PID": str(raylet or os.getpid())}
        return self._ask(self.path, ["-s", "worker.py", *words], environment)

    def read(self, who: str, module: str = "reader") -> subprocess.Popen[str]:
        return self._ask(self.readers, ["-m", module], {"WHO": who, "PYTHONPATH": str(self.folder)})

    def _ask(self, path: str, words: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *forks.asking(path, words)],
            env=environment,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def said_by(process: subprocess.Popen[str]) -> list[object]:
    """The first line that a process writes."""
    assert process.stdout is not None
    said: list[object] = json.loads(process.stdout.readline())
    return said


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name, wherever those of other tests are: that of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.prepare()
    yield made
    made.process.kill()
    made.process.wait()


def test_a_worker_is_a_fork_with_the_words_environment_and_files_of_who_asked(server: Server) -> None:
    asked = [server.ask(f"worker {k}", f"--number={k}") for k in range(3)]
    said = [json.loads(one.stdout.readline()) for one in asked]  # type: ignore[union-attr]
    for k, (words, who, folder, _, parent, name) in enumerate(said):
        assert (words, who) == (["worker.py", f"--number={k}"], f"worker {k}")
        assert (folder, parent, name) == (str(server.folder), server.process.pid, "__main__")
    assert len({pid for *_, pid, _, _ in said}) == 3
    assert all(one.poll() is None for one in asked), "who asked waits for the end of the fork"
    assert [one.communicate("\n", timeout=30.0) for one in asked] == [("", "an error\n")] * 3
    assert [one.returncode for one in asked] == [0] * 3


def test_a_fork_ends_with_who_asked_and_who_asked_with_the_fork(server: Server) -> None:
    first, second = server.ask("first"), server.ask("second")
    forks = [psutil.Process(json.loads(one.stdout.readline())[3]) for one in (first, second)]  # type: ignore[union-attr]
    first.kill()
    forks[0].wait(30.0)
    assert second.poll() is None
    forks[1].send_signal(signal.SIGKILL)
    assert second.wait(30.0) == 0
    first.communicate()
    second.communicate()
    third = server.ask("third")
    third.communicate("\n", timeout=30.0)
    assert third.returncode == 0


def test_who_asked_may_end_at_once_with_the_fork(server: Server) -> None:
    """The server sees both ends, or that of one who was refused, at one look."""
    ours, others = server.ask("ours"), [server.ask(f"worker {k}") for k in range(3)]
    forks = [json.loads(one.stdout.readline())[3] for one in (ours, *others)][1:]  # type: ignore[union-attr]
    server.process.send_signal(signal.SIGSTOP)
    for one, fork in zip(others, forks, strict=True):
        one.kill()
        os.kill(fork, signal.SIGKILL)
        one.communicate()
    late = server.ask("late", job="02")
    time.sleep(0.3)
    late.kill()
    late.wait()
    server.process.send_signal(signal.SIGCONT)
    again = server.ask("again")
    assert json.loads(again.stdout.readline())[4] == server.process.pid  # type: ignore[union-attr]
    for one in (late, ours, again):
        one.communicate("\n" if one is not late else None, timeout=30.0)


def test_forks_draw_different_numbers(server: Server) -> None:
    (server.folder / "worker.py").write_text("import numpy, random\nprint(numpy.random.rand(), random.random())\n")
    drawn = [server.ask("drawer").communicate(timeout=30.0)[0].split() for _ in range(3)]
    assert len({word for words in drawn for word in words}) == 6


def test_a_worker_of_another_job_is_no_fork(server: Server) -> None:
    """Ray reads the number of the job when it is imported."""
    ours = server.ask("ours")
    said = said_by(ours)
    other = server.ask("other", job="02")
    out, _ = other.communicate("\n", timeout=30.0)
    ours.communicate("\n", timeout=30.0)
    assert said[4] == server.process.pid
    assert json.loads(out)[1:5] == ["other", str(server.folder), other.pid, os.getpid()]


def test_readers_are_forks_of_a_process_that_knows_no_secret_and_serve_before_the_environment_comes(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    asked = [server.read(f"reader {k}") for k in range(2)]
    said = [said_by(one) for one in asked]
    for k, (words, who, secret, _, parent) in enumerate(said):
        assert (words, who, secret) == (["reader"], f"reader {k}", False)
        assert psutil.Process(int(str(parent))).ppid() == server.process.pid
    (tmp_path / "other.py").write_text("import os\nprint(os.getpid())\n")
    other = server.read("other", "other")
    assert other.communicate(timeout=30.0)[0].split() == [str(other.pid)], "it does not fork for other modules"
    server.prepare()
    worker = server.ask("worker")
    assert said_by(worker)[4] == server.process.pid
    for one in (*asked, worker):
        assert one.communicate("\n", timeout=30.0)[0] == ""
    server.process.kill()
    server.process.wait()


def test_a_reader_that_is_killed_ends_its_fork(server: Server) -> None:
    asked = server.read("reader")
    fork = psutil.Process(int(str(said_by(asked)[3])))
    asked.kill()
    fork.wait(30.0)
    assert not fork.is_running()
    asked.communicate()


@pytest.mark.parametrize("who", ["owner", "raylet"])
def test_the_server_ends_with_its_owner_and_with_the_raylet_and_leaves_no_socket(tmp_path: Path, who: str) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        server = Server(tmp_path, owner=other.pid if who == "owner" else 0)
        server.prepare()
        readers = psutil.Process(int(str(said_by(reading := server.read("reader"))[4])))
        asked = server.ask("worker", raylet=other.pid if who == "raylet" else 0)
        said_by(asked)
        other.kill()
        server.process.wait(30.0)
        readers.wait(30.0)
    until(lambda: not server.sockets.exists(), within_s=30.0)
    for one in (asked, reading):
        one.communicate("\n", timeout=30.0)


def test_a_server_without_an_environment_ends(tmp_path: Path) -> None:
    server = Server(tmp_path)
    assert server.process.stdin is not None
    server.process.stdin.close()
    assert server.process.wait(30.0) == 0


def test_who_waits_for_a_server_that_ends_is_the_process(server: Server) -> None:
    """It imports, or serves another one, while questions wait for it."""
    server.process.send_signal(signal.SIGSTOP)
    asked = server.ask("waiting")
    time.sleep(0.3)
    server.process.kill()
    assert said_by(asked)[3] == asked.pid
    asked.communicate("\n", timeout=30.0)
    assert asked.returncode == 0


def asking_at(path: Path) -> subprocess.Popen[str]:
    """Asks at a path, in the folder of that, for a worker."""
    return subprocess.Popen(
        [sys.executable, *forks.asking(str(path), ["worker.py", "x"])],
        env={"WHO": "alone"},
        cwd=path.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_who_asks_a_server_that_ends_before_it_forks_is_the_process(tmp_path: Path) -> None:
    """It has read the question."""
    (tmp_path / "worker.py").write_text(WORKER)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "workers"))
        listener.listen()
        with asking_at(tmp_path / "workers") as process:
            connection, _ = listener.accept()
            with connection:
                header, files, _, _ = socket.recv_fds(connection, 8, 3)
                connection.recv(int.from_bytes(header), socket.MSG_WAITALL)
                for file in files:
                    os.close(file)
            out, _ = process.communicate("\n", timeout=30.0)
    words, who, _, pid, _, _ = json.loads(out)
    assert (words, who, pid) == (["worker.py", "x"], "alone", process.pid)


def test_without_a_server_who_asks_is_the_process(tmp_path: Path) -> None:
    """Also where one listened, and has ended."""
    (tmp_path / "worker.py").write_text(WORKER)
    gone = tmp_path / "gone"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(gone))
    for path in (tmp_path / "never", gone):
        with asking_at(path) as process:
            out, _ = process.communicate("\n", timeout=30.0)
        words, who, _, pid, parent, _ = json.loads(out)
        assert (words, who, pid, parent) == (["worker.py", "x"], "alone", process.pid, os.getpid())
