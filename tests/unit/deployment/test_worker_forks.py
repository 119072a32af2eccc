"""Workers as forks of one server, with workers that are small programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pathways_ray.deployment import worker_forks

WORKER = """
import json, os, sys
print(json.dumps([sys.argv, os.environ["WHO"], os.getcwd(), os.getpid(), os.getppid(), __name__]), flush=True)
print("an error", file=sys.stderr)
sys.stdin.readline()
"""
SERVE = """
import sys
from pathways_ray.deployment import worker_forks
worker_forks.PRELOADED = ("numpy.random",)
worker_forks.serve(sys.argv[1], sys.argv[2])
"""


class Server:
    """A server of forks in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.path, self.folder = str(folder / "forks"), folder
        (folder / "worker.py").write_text(WORKER)
        root = str(Path(worker_forks.__file__).parents[2])
        environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid()), "PYTHONPATH": root}
        self.process = subprocess.Popen([sys.executable, "-c", SERVE, self.path, root], env=environment)

    def ask(self, who: str, *words: str, job: str = "01") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", worker_forks.__file__, "ask", self.path, "-s", "worker.py", *words],
            env={"WHO": who, "RAY_JOB_ID": job},
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
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
    said = json.loads(ours.stdout.readline())  # type: ignore[union-attr]
    other = server.ask("other", job="02")
    out, _ = other.communicate("\n", timeout=30.0)
    ours.communicate("\n", timeout=30.0)
    assert said[4] == server.process.pid
    assert json.loads(out)[1:5] == ["other", str(server.folder), other.pid, os.getpid()]


def test_without_a_server_who_asks_is_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    program = "from pathways_ray.deployment import worker_forks as forks; forks.SERVER_LIMIT_S = 0.1; "
    program += "forks.ask('gone', ['worker.py', 'x'])"
    monkeypatch.setenv("WHO", "alone")
    monkeypatch.setenv("PYTHONPATH", str(Path(worker_forks.__file__).parents[2]))
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate("\n", timeout=30.0)
    words, who, _, pid, parent, _ = json.loads(out)
    assert (words, who, pid, parent) == (["worker.py", "x"], "alone", process.pid, os.getpid())
