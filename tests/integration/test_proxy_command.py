"""`pathways proxy` as a command: the cluster that it starts for itself, and its ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pathways_ray.cli.proxy import ALONE_LIMIT_S
from pathways_ray.client import registry
from pathways_ray.client.api import ClusterSession
from tests.drawn import some

ROOT = Path(__file__).resolve().parents[2]
CLI = sys.executable, "-m", "pathways_ray.cli"


@pytest.fixture
def elsewhere() -> Iterator[dict[str, str]]:
    """The environment of a user who has no cluster: records of those that run are in another folder."""
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PATHWAYS_"))}
        yield kept | {"TMPDIR": folder, "RAY_TMPDIR": "/tmp"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("options", "limit_s"), some([(("--launch-limit", "7.5"), 7.5), ((), ALONE_LIMIT_S)]))
def test_in_a_cluster_of_its_own_calls_may_take_a_day_or_as_long_as_it_is_told(
    elsewhere: dict[str, str], options: tuple[str, ...], limit_s: float
) -> None:
    command = [
        *CLI,
        "proxy",
        "--devices",
        "1",
        *options,
        "--exec",
        *CLI,
        "status",
        "--json",
    ]  # its own options, without --
    done = subprocess.run(command, env=elsewhere, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["launch_limit_s"] == limit_s


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_cluster_that_it_started_for_a_command_is_that_commands_alone(elsewhere: dict[str, str]) -> None:
    """Else it would end under who joined it."""
    command = [*CLI, "proxy", "--devices", "1", "--exec", "--"]
    command += [*command, "sh", "-c", "ls $TMPDIR/pathways-*/*.json"]
    done = subprocess.run(command, env=elsewhere, cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2  # the records of both


def test_the_limit_of_a_cluster_that_runs_is_that_clusters_own(session: ClusterSession) -> None:
    given = {"PATHWAYS_URL": session.url, "PATHWAYS_TOKEN": session.token}
    command = [*CLI, "proxy", "--launch-limit", "90"]
    done = subprocess.run(command, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    assert "--launch-limit is for a cluster that this command starts" in done.stderr


def test_a_cluster_that_it_found_is_named(
    session: ClusterSession, elsewhere: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nobody named may be another one than the user thinks of, and have fewer devices."""
    monkeypatch.setattr(tempfile, "tempdir", elsewhere["TMPDIR"])
    registry.write(session.url, session.token)
    which = f"the cluster at {session.url} (process {os.getpid()}), which runs on this machine"
    there = sum(len(host["devices"]) for island in session.status()["islands"] for host in island["hosts"])

    def run(devices: int) -> subprocess.CompletedProcess[str]:
        command = [*CLI, "proxy", "--devices", str(devices), "--exec", "--", "echo", "done"]
        return subprocess.run(command, env=elsewhere, cwd=ROOT, capture_output=True, text=True, timeout=110)

    few, many = run(1), run(there + 1)
    assert (few.returncode, few.stdout) == (0, "done\n"), few.stderr
    assert few.stderr == f"pathways: each program has 1 of the {there} devices of {which}\n"
    assert (many.returncode, many.stdout) == (1, "")
    assert f"That is {which}; ask for fewer devices" in many.stderr


@pytest.mark.parametrize(
    ("options", "number", "status"),
    some(
        [
            (("--until-eof",), signal.SIGTERM, 0),
            ((), signal.SIGHUP, 0),
            (("--exec", "--", "sh", "-c", "echo up; exec sleep 100"), signal.SIGTERM, 128 + signal.SIGTERM),
            (("--exec", "--", "sh", "-c", "echo up; exec sleep 100"), signal.SIGHUP, 128 + signal.SIGHUP),
        ]
    ),
)
def test_a_signal_that_ends_it_ends_its_command_and_leaves_no_folder(
    session: ClusterSession, elsewhere: dict[str, str], options: tuple[str, ...], number: int, status: int
) -> None:
    given = elsewhere | {"PATHWAYS_URL": session.url, "PATHWAYS_TOKEN": session.token}
    assert ended(given, options, number) == status


@pytest.mark.timeout(180)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_a_cluster_of_its_own_too(elsewhere: dict[str, str], whole: bool) -> None:
    """Ray may get the signal too, as from `timeout`, Slurm or systemd: nothing is asked of it that is gone by then."""
    assert ended(elsewhere, ("--until-eof",), signal.SIGTERM, whole) == 0


def ended(env: dict[str, str], options: tuple[str, ...], number: int, whole: bool = False) -> int:
    """The exit status of a proxy that gets a signal once it serves, or the whole group of its processes does; it leaves
    nothing in the user's folder for temporary files, and Ray says nothing."""
    with subprocess.Popen(
        [*CLI, "proxy", "--devices", "1", *options],
        env=env,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which whoever started the tests may ignore
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        (_folder,) = Path(env["TMPDIR"]).glob("pathways-proxy-*")
        if whole:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        found = process.wait(60)
        assert b"GCS" not in process.stderr.read()
    assert not list(Path(env["TMPDIR"]).glob("pathways-proxy-*"))
    return found


def test_started_with_nohup_it_outlives_its_terminal(session: ClusterSession, elsewhere: dict[str, str]) -> None:
    given = elsewhere | {"PATHWAYS_URL": session.url, "PATHWAYS_TOKEN": session.token}
    hang_up = "kill -HUP $PPID; sleep 1; exit 3"
    command = ["nohup", *CLI, "proxy", "--devices", "1", "--exec", "--", "sh", "-c", hang_up]
    done = subprocess.run(command, env=given, cwd=ROOT, capture_output=True, timeout=110)
    assert done.returncode == 3
