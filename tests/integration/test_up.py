"""`pathways up`, `down` and `status` on a Ray cluster that somebody started: the runtime outlives its shell, and goes
without leaving anything."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.drawn import some
from tests.integration.conftest import FAILED, free_port

CLI = ("-m", "pathways_ray.cli")
OURS = ("HostExecutor", "IslandScheduler", "Controller", "ResourceManager")


@pytest.fixture
def run(request, python, shared_head) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs `pathways` beside the Ray cluster; what a test leaves of the runtime is gone afterwards."""

    def run_command(*arguments: str, timeout: float = 90.0, **environment: str) -> tuple[int, str, str]:
        process = python.command(*CLI, *arguments, **{**shared_head.environment, **environment})
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err

    yield run_command
    if ours(python) or request.node.stash[FAILED]:  # to ask Ray takes seconds, which most tests can do without
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: run_command("down", "--name", name), ("pathways", "other")))


def ours(python, kinds: Iterable[str] = OURS) -> list[psutil.Process]:
    """The processes of our actors (of these kinds) that live, or are zombies of them."""
    found = []
    for process in python.alive():
        try:
            if any(f"ray::{name}" in " ".join(process.cmdline()) for name in kinds):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(python, within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while (left := [*ours(python), *zombies(python)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def assert_no_zombies(python) -> None:
    """A process that has just ended is one until its parent has waited for it."""
    assert zombies(python) == []


def zombies(python) -> list[psutil.Process]:
    """Dead processes below those of the Ray cluster that nobody has waited for."""
    found = []
    for parent in python.alive():
        try:
            found += [child for child in parent.children() if child.status() == psutil.STATUS_ZOMBIE]
        except psutil.Error:
            continue
    return found


def up(run, *arguments: str) -> dict[str, Any]:
    code, out, err = run("up", "--json", *arguments)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_up_outlives_its_shell_until_down(python, shared_head, run, tmp_path) -> None:
    """
    1. A shell starts the runtime, and ends.
    2. A client without Ray computes on both islands; `status` finds the runtime without being told.
    3. A second `up` says that it is there, `--exist-ok` shows it. Another name goes beside it, here with islands given
       one by one and a token of the user's own.
    4. `down` leaves no process, no actor, no placement group, no record; a second one is fine.
    """
    command = [sys.executable, *CLI, "up", "--json", "--islands", "2", "--devices-per-host", "2"]
    shell = ["bash", "-c", '"$0" "$@"; exit', *command]
    process = python.command(
        "-c", f"import subprocess; subprocess.run({shell!r}, check=True)", **shared_head.environment
    )
    found = json.loads(python.finish(process))
    assert len(ours(python)) == 6

    out = python.run("up_client", found["url"], found["token"], **shared_head.environment)
    assert out == "2\n"
    code, out, err = run("status", "--json")
    assert (code, err) == (0, "")
    status = json.loads(out)
    assert status["url"] == found["url"]
    assert [len(island["hosts"]) for island in status["islands"]] == [1, 1]

    code, out, err = run("up")
    assert (code, out) == (2, "")
    assert err.startswith("pathways: a runtime named 'pathways' is on this Ray cluster;")
    again = up(run, "--exist-ok")
    assert (again["url"], again["token"], again["started"]) == (found["url"], found["token"], False)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    other = up(
        run,
        *("--name", "other", "--island", "cpu:hosts=2,devices=1", "--island", "cpu:devices=4"),
        *("--token-file", str(tmp_path / "token"), "--placement", "spread"),
    )
    assert other["url"] != found["url"]
    assert other["token"] == "0123456789abcdef"
    there = ("--url", other["url"], "--token", other["token"])
    islands = json.loads(run("status", "--json", *there)[1])["islands"]
    assert [[len(host["devices"]) for host in island["hosts"]] for island in islands] == [[1, 1], [4]]
    assert python.run("up_client", other["url"], other["token"], **shared_head.environment) == "2\n"
    code, _, err = run("status")
    assert code == 2
    assert "(runtime 'pathways')" in err
    assert "(runtime 'other')" in err
    assert run("down", "--name", "other")[:2] == (
        0,
        "runtime 'other' is down: 7 process(es) ended, 2 placement group(s) freed\n",
    )
    assert python.run("up_client", found["url"], found["token"], **shared_head.environment) == "2\n"

    code, out, _ = run("down")
    assert (code, out) == (0, "runtime 'pathways' is down: 6 process(es) ended, 2 placement group(s) freed\n")
    assert_nothing_left(python)
    code, out, _ = run("down")
    assert code == 0
    assert out.startswith("no runtime named 'pathways' was on the Ray cluster")
    code, _, err = run("status")
    assert code == 2
    assert "no cluster of yours runs on this machine" in err
    assert idle(python, shared_head)


def idle(python, shared_head) -> bool:
    """Whether nobody holds anything on the Ray cluster."""
    deadline = time.monotonic() + 30
    while True:
        if python.run("up_idle", **shared_head.environment) == "True\n":
            return True
        if time.monotonic() > deadline:
            return False


def scrape(url: str, token: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10.0) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_tenants_come_and_go_and_metrics_show_them(python, shared_head, run, tmp_path) -> None:
    """
    1. A runtime is started with a table of one tenant, and with metrics.
    2. A second tenant is added; without a restart its token lets it in, and metrics show its device time.
    3. It is removed, and its token is worth nothing. 4. Metrics are for the operator's token alone.
    """
    file = tmp_path / "tenants.json"
    table = ("--file", str(file))
    assert run("tenants", "add", "alice", *table, "--weight", "2")[0] == 0
    shape = ("--islands", "2", "--devices-per-host", "2")
    found = up(run, *shape, "--tenants", str(file), "--metrics-port", "0")
    code, token, _ = run("tenants", "add", "bob", *table)
    assert code == 0
    bob = token.strip()
    with_token = ("up_client", found["url"], bob)
    assert within_seconds(30, lambda: python.run(*with_token, **shared_head.environment)) == "2\n"

    code, page = scrape(found["metrics"], found["token"])
    assert code == 200
    seen = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}
    assert seen['pathways_hosts_up{island="1",platform="cpu"}'] == 1
    assert seen["pathways_launches_total"] >= 2
    assert seen['pathways_tenant_device_seconds_total{tenant="bob"}'] > 0
    assert {scrape(found["metrics"], wrong)[0] for wrong in ("", bob)} == {401}
    status = json.loads(run("status", "--json")[1])
    assert status["metrics"] == found["metrics"]
    assert "bob" in run("status")[1]

    assert run("tenants", "remove", "bob", *table)[0] == 0

    def refused() -> None:
        code, _, err = run("status", "--url", found["url"], "--token", bob)
        assert code == 2
        assert "token" in err

    within_seconds(30, refused)


def within_seconds(limit: float, do: Callable[[], Any], on: type[Exception] = AssertionError) -> Any:
    """What a call gives, tried again until it passes or the time is over."""
    deadline = time.monotonic() + limit
    while True:
        try:
            return do()
        except on:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    some(
        [
            (("--platform", "gpu", "--wait", "3"), 1, "Ray has no room for island 0, Island(platform='gpu', hosts=1,"),
            (("--bind", "192.0.2.77", "--insecure"), 2, "the controller cannot serve at 192.0.2.77:0 of this machine:"),
            (("--metrics-port", "0", "--metrics-bind", "192.0.2.77"), 2, "which needs TLS beyond loopback"),
        ]
    ),
)
def test_an_up_that_cannot_be_leaves_nothing(python, run, options, code, says) -> None:
    found, out, err = run("up", *options)
    assert (found, out) == (code, ""), err
    assert says in err
    (line,) = err.splitlines()
    assert line.startswith("pathways: ")
    assert_nothing_left(python)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, marks=pytest.mark.long),
    ],
)
def test_an_interrupted_up_cleans_up(python, shared_head, run, number) -> None:
    ignored = signal.getsignal(number) is signal.SIG_IGN  # as `nohup` has it, and whoever is started by this process
    before = signal.signal(number, signal.SIG_DFL) if ignored else None
    try:
        process = begin(python, shared_head)
    finally:
        if ignored:
            signal.signal(number, before)
    process.send_signal(number)
    out, err = process.communicate(timeout=60.0)
    assert process.returncode not in (0, None)
    assert (out, "Traceback" in err) == ("", False), err
    assert_nothing_left(python)
    assert run("down")[1].startswith("no runtime named")


@pytest.mark.long
def test_down_after_half_a_start(python, shared_head, run) -> None:
    process = begin(python, shared_head)
    process.kill()
    process.communicate()
    code, _, err = run("up", "--exist-ok", "--wait", "10")
    assert code in (0, 2), err  # the half that is there may be able to serve, or not
    code, out, _ = run("down")
    assert code == 0
    assert out.startswith("runtime 'pathways' is down")
    assert_nothing_left(python)
    up(run, "--islands", "1", "--devices-per-host", "2")


@pytest.mark.slow
def test_two_that_start_a_runtime_at_once_find_the_same(python, shared_head, run) -> None:
    """As on the machines of one job, each of which runs the same command."""
    first = begin(python, shared_head, "--json")
    code, out, err = run("up", "--exist-ok", "--json")
    assert code == 0, err
    said, err = first.communicate(timeout=60.0)
    assert first.returncode == 0, err
    found = json.loads(out)
    assert not found["started"]
    assert json.loads(said)["url"] == found["url"]
    assert python.run("up_client", found["url"], found["token"], **shared_head.environment) == "2\n"


def begin(python, shared_head, *options: str) -> subprocess.Popen[str]:
    """An `up` whose processes are just being started."""
    shape = "--islands", "2", "--hosts-per-island", "2"
    process = python.command(*CLI, "up", *shape, *options, **shared_head.environment)
    deadline = time.monotonic() + 60.0
    while len(ours(python)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process.poll() is None
    return process


# --- the control plane dies -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_controller_comes_back(python, shared_head, run, tmp_path) -> None:
    """
    1. The controller gets SIGKILL with launches under way.
    2. Those that have no value fail with ControllerLost within 10 s. Their session goes on within 20 s, with its array.
    3. A new session at the same url serves, with a number that no session had. 4. All that once more.
    5. No zombie, and no process too many. 6. `down` finds and ends all without a controller, too.
    """
    found = up(run, "--islands", "2", "--devices-per-host", "2")
    victim = tmp_path / "victim"

    def aim() -> None:
        (process,) = ours(python, ["Controller"])
        victim.write_text(str(process.pid))

    aim()
    script = python.start("up_survivor", found["url"], found["token"], str(victim), **shared_head.environment)
    first = script.stdout.readline()
    assert first, script.communicate()[1]
    aim()
    script.stdin.write("\n")
    script.stdin.flush()
    out, err = script.communicate("\n", timeout=90.0)
    print(first, out, err)
    assert script.returncode == 0, err
    assert len(ours(python)) == 6
    within_seconds(30, lambda: assert_no_zombies(python))
    assert json.loads(run("status", "--json")[1])["url"] == found["url"]

    (controller,) = ours(python, ["Controller"])
    controller.kill()
    code, _, err = run("down")
    assert code == 0, err
    assert_nothing_left(python)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_controller_whose_port_of_metrics_is_taken_comes_back_without_them(python, run) -> None:
    """
    1. The controller is killed, and before its successor begins somebody else listens at the port of metrics.
    2. The successor serves its clients all the same.
    3. Once the port is free, metrics are served there.
    """
    port = free_port()
    found = up(run, "--islands", "1", "--devices-per-host", "1", "--metrics-port", str(port))
    (controller,) = ours(python, ["Controller"])
    controller.kill()

    def has_come_back() -> None:
        code, out, err = run("status", "--json")
        assert code == 0, err
        assert json.loads(out)["controller"]["pid"] != controller.pid

    with within_seconds(20, lambda: socket.create_server(("127.0.0.1", port)), OSError):
        within_seconds(60, has_come_back)
    asked = urllib.request.Request(found["metrics"], headers={"Authorization": f"Bearer {found['token']}"})
    with within_seconds(30, lambda: urllib.request.urlopen(asked, timeout=5.0), OSError) as reply:
        assert b"pathways_hosts_up" in reply.read()
    assert run("down")[0] == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_islands_are_changed_by_the_command_and_a_control_plane_that_restarts_knows_them(python, run) -> None:
    """
    1. Another island is added, the first one is drained and removed.
    2. The resource manager is killed, and then the controller with its successor. Those that follow know of the island
       that is there, and of no other one.
    3. `down` ends it with the rest.
    """
    up(run, "--islands", "1", "--devices-per-host", "1")
    assert run("island", "add", "--devices", "2")[:2] == (0, "island 1 is up\n")
    assert run("island", "drain", "0")[:2] == (0, "island 0 is empty\n")
    assert run("island", "remove", "0")[:2] == (0, "island 0 is gone\n")
    code, out, err = run("island", "drain", "1")
    assert (code, out) == (2, "")
    which, _, err = err.partition("\n")
    assert which.startswith("pathways: acting on the cluster at grpc://")
    assert err.startswith("pathways: island 1 is the last one that takes slices")
    code, _, err = run("island", "add", "--name", "nobody")
    assert (code, err[:50]) == (2, "pathways: no runtime named 'nobody' is on this Ray")
    for kinds in (["ResourceManager"], ["ResourceManager", "Controller"]):
        for process in ours(python, kinds):
            process.kill()
        deadline = time.monotonic() + 90.0
        found: list[tuple[int, str]] = []
        while found != [(1, "up")] and time.monotonic() < deadline:
            code, out, _ = run("status", "--json")
            found = [(one["island"], one["state"]) for one in json.loads(out)["islands"]] if code == 0 else []
        assert found == [(1, "up")]
        assert len(ours(python)) == 4
    assert run("down")[0] == 0
    assert_nothing_left(python)
