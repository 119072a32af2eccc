"""Tests on the real runtime: one embedded cluster of two islands, four devices each, for the whole run.

`session` is that cluster; a test that takes it must leave it computing, and with as many buffers as before. `pairs` is
another one for the whole run, of islands of two hosts, in a process of its own. `python` runs a file of `scripts/` in a
process of its own, for what one process can do only once: a second client, other options, a signal.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil
import pytest
import ray
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.client.context import sessions
from pathways_ray.transport import frames
from pathways_ray.transport.messages import encode
from tests.integration import ray_logs

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
MARK = "PATHWAYS_TEST_PROCESS"
BUFFERS_FREE_WITHIN_S = 20.0
PROBE_LIMIT_S = 30.0
FAILED = pytest.StashKey[bool]()
BROKEN = pytest.StashKey[str]()


class Slices(NamedTuple):
    """Slices that tests share: making one costs a call to the controller."""

    a4: pw.VirtualSlice  # island 0, x=4
    b4: pw.VirtualSlice  # island 1, x=4
    a22: pw.VirtualSlice  # island 0, x=2, y=2, on the devices of a4
    b2: pw.VirtualSlice  # island 1, x=2
    a1: pw.VirtualSlice  # island 0, x=1


@pytest.fixture(scope="session")
def cluster() -> Iterator[ClusterSession]:
    # Launches on the first island run out of memory where they run; those on the other are refused before.
    with pw.init(islands=[pw.Island("cpu", devices=4, memory=1 << 50), pw.Island("cpu", devices=4)]) as session:
        yield session


@pytest.fixture(scope="session")
def slices(cluster: pw.Session) -> Slices:
    return Slices(
        cluster.virtual_slice((4,), ("x",), island=0, name="a4"),
        cluster.virtual_slice((4,), ("x",), island=1, name="b4"),
        cluster.virtual_slice((2, 2), ("x", "y"), island=0, name="a22"),
        cluster.virtual_slice((2,), ("x",), island=1, name="b2"),
        cluster.virtual_slice((1,), ("x",), island=0, name="a1"),
    )


@pytest.fixture(scope="session")
def probe(slices: Slices) -> Callable[[], None]:
    """Runs a program over both islands and checks its result."""
    here = pw.compiled(lambda v: v + 1.0, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(lambda v: v * 2.0, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: there(here(v)), name="probe")

    def run() -> None:
        v = np.arange(8, dtype=np.float32)
        result = program(v).block_until_ready(timeout=PROBE_LIMIT_S)
        np.testing.assert_array_equal(np.asarray(result), (v + 1) * 2)

    return run


@pytest.fixture
def inc(slices: Slices) -> Callable[..., Any]:
    return pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))


@pytest.fixture(scope="module")
def doubles() -> Iterator[None]:
    """JAX has types of 64 bits."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests with clusters of their own first, then those that share `cluster`, then those that share `pairs`:
    the idle processes of a shared cluster take a good part of a core, and these live until the last test has run."""
    items.sort(key=_clusters_shared)


def _clusters_shared(item: pytest.Item) -> int:
    if not isinstance(item, pytest.Function):
        return 0
    names = item.fixturenames
    return ("cluster" in names and not hasattr(item.module, "cluster")) + 2 * ("pairs" in names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    item.stash[FAILED] = report.failed or item.stash.get(FAILED, False)
    if report.failed:
        report.sections.append(("the last lines of Ray's logs", ray_logs.last_words()))
    return report


@pytest.fixture
def session(
    request: pytest.FixtureRequest, cluster: ClusterSession, probe: Callable[[], None]
) -> Iterator[ClusterSession]:
    """The shared cluster; afterwards it must compute, and hold no buffer that it did not hold before."""
    if since := request.config.stash.get(BROKEN, ""):
        pytest.fail(f"the shared cluster does not compute since {since}")
    before = held(cluster)
    yield cluster
    try:
        probe()
    except BaseException:
        request.config.stash[BROKEN] = request.node.nodeid
        raise
    if request.node.stash[FAILED]:
        return  # its traceback holds arrays
    deadline = time.monotonic() + BUFFERS_FREE_WITHIN_S
    while (now := held(cluster)) > before and time.monotonic() < deadline:
        gc.collect()  # traced functions lie in cycles
        gc.freeze()  # what lives now lives on: the next collection need not look at it
        time.sleep(0.01)
    assert now <= before, f"{now} buffers live after the test, {before} before it: {cluster.status()['sessions']}"


@pytest.fixture
def tenant(session: ClusterSession) -> Iterator[pw.Session]:
    """A session of its own, which is the current one."""
    with pw.connect(session.url, session.token, name="tenant") as tenant:
        yield tenant
    sessions.remove(tenant)


def held(cluster: ClusterSession) -> int:
    """Buffers that the controller knows, and those in the stores of all hosts."""
    hosts = ray.get([host.statistics.remote() for host in cluster.cluster.hosts.values()])
    return cluster.status()["buffers"] + sum(host["buffers"] for host in hosts)


@contextmanager
def stopped(session: pw.Session, island: int) -> Iterator[None]:
    """Hosts of an island that do nothing for a moment: what is launched there is under way until the end of the block,
    however quick the machine is. They are taken for dead after eight seconds."""
    pids = [host["pid"] for one in session.status()["islands"] if one["island"] == island for host in one["hosts"]]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture(name="held")
def held_fixture() -> Callable[[ClusterSession], int]:
    return held


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails when the block takes longer; prints how long it took."""
    start = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - start
        print(f"took {took:.2f} s")
    assert took < seconds, f"took {took:.1f} s, the bound is {seconds} s"


@pytest.fixture(name="within")
def within_fixture() -> Callable[[float], Any]:
    return within


def equal(actual: Any, expected: Any) -> None:
    """Two pytrees of arrays have the same structure, shapes, dtypes and bits."""
    trees: list[Any] = [jax.tree.structure(actual), jax.tree.structure(expected)]
    assert trees[0] == trees[1]
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(one), np.asarray(other)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes(), f"{a} is not {b}"


@pytest.fixture(name="equal")
def equal_fixture() -> Callable[[Any, Any], None]:
    return equal


class Scripts:
    """Starts scripts in processes of their own, and knows all processes that these started in turn."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, script: str, *arguments: str, prefix: tuple[str, ...] = (), **environment: Any
    ) -> subprocess.Popen[str]:
        """A running script, leader of a process group of its own, with stdin, stdout and stderr as pipes."""
        options = ("-X", "faulthandler", "-W", "error", "-W", "ignore:os.fork() was called:RuntimeWarning")
        return self.command(*options, str(SCRIPTS / f"{script}.py"), *arguments, prefix=prefix, **environment)

    def command(self, *arguments: str, prefix: tuple[str, ...] = (), **environment: Any) -> subprocess.Popen[str]:
        """Python with these command line arguments, in the same way; `prefix` is what runs it."""
        known = {MARK: self.mark, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [*prefix, sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **known, **environment},
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], timeout: float = 90.0) -> str:
        """Waits for the end of a script, which must be a good one; returns its output."""
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # its fault handler says where every thread stands
            out, err = process.communicate(timeout=timeout)
            pytest.fail(f"{process.args!r} did not end within {timeout:g} s\n{out}\n{err}")
        assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
        return out

    def run(self, script: str, *arguments: str, timeout: float = 90.0, **environment: Any) -> str:
        return self.finish(self.start(script, *arguments, **environment), timeout)

    def alive(self) -> list[psutil.Process]:
        """Processes started by these scripts, directly or not, that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill_all(self) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):  # its parent was quicker
                process.kill()

    def stop(self) -> None:
        self.kill_all()
        for script in self.started:
            script.communicate()

    def assert_none_left(self, within_s: float = 30.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"still running: {left}"


class Cluster:
    """A cluster in a process of its own."""

    def __init__(self, python: Scripts, options: dict[str, Any], **environment: Any) -> None:
        self._process = python.start("cluster", json.dumps(options), **environment)
        self._python = python
        self.url, self.token = self._line().split()

    def tables(self) -> dict[str, Any]:
        """What its hosts and its controller hold, and the process ids of the hosts."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        while not (line := self._line()).startswith("{"):
            pass  # Ray says on the same stream that a process was killed, some time after a test did so
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        self._python.finish(self._process)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        return line


@pytest.fixture(scope="session")
def pairs() -> Iterator[Cluster]:
    """Two islands of two hosts with two devices each, which compare the order of gangs; clients share the devices."""
    scripts = Scripts()
    options = {"islands": 2, "hosts_per_island": 2, "devices_per_host": 2, "check_order": True, "policy": "share"}
    cluster = Cluster(scripts, {**options, "launch_limit_s": 60.0})
    yield cluster
    cluster.end()
    scripts.stop()


def linked(
    address: str,
    path: str,
    batches: list[bytes],
    until: Callable[[list[bytes]], bool] | None = None,
    limit_s: float = 20.0,
    **metadata: str,
) -> list[bytes]:
    """What a link, as a data stream is one, answers to batches: all of it, or until that is enough or the time over."""
    host, _, port = address.rpartition(":")
    found: list[bytes] = []
    coming = frames.Frames(1 << 30)
    deadline = time.monotonic() + limit_s
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5.0) as connection:
        connection.sendall(
            frames.frame(encode(frames.Handshake(path, metadata))) + b"".join(map(frames.frame, batches))
        )
        if until is None:
            connection.shutdown(socket.SHUT_WR)
        while until is None or not until(found):
            connection.settimeout(max(0.001, deadline - time.monotonic()))  # signs of life come all the time
            if not (data := connection.recv(1 << 20)):
                break
            found += coming.feed(data)
    return found


@pytest.fixture(scope="module")
def python() -> Iterator[Scripts]:
    scripts = Scripts()
    yield scripts
    scripts.stop()


@contextmanager
def environment_apart() -> Iterator[dict[str, Any]]:
    """Environment that keeps a Ray cluster, and those who look for it, apart from all others."""
    # Ray's sockets lie some 80 characters below its folder, and the name of a socket has at most 107.
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield {
            "RAY_TMPDIR": folder,
            "TMPDIR": folder,
            "RAY_ADDRESS": "",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": uuid.uuid4().hex,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATHWAYS_URL": "",
            "PATHWAYS_TOKEN": "",
        }


@contextmanager
def ray_head(python: Scripts, apart: dict[str, Any]) -> Iterator[str]:
    """The address of what `ray start --head` started on free ports."""
    options = {
        "port": 0,
        "ray-client-server-port": free_port(),
        "dashboard-agent-listen-port": 0,
        "include-dashboard": "false",
        "num-cpus": 2,
        "object-store-memory": 100 << 20,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    out = python.finish(python.command("-m", "ray.scripts.scripts", "start", "--head", *words, **apart))
    assert "Ray runtime started" in out
    yield (Path(apart["TMPDIR"]) / "ray" / "ray_current_cluster").read_text().strip()
    python.kill_all()


def free_port() -> int:
    """A port from 20000 to 29999 that nobody has. Neither the kernel nor Ray gives one of these to who asks for any, so
    it is still free when what a test starts comes to take it."""
    for number in itertools.islice(_NUMBERS, 10_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20_000 + number % 10_000)) as server:
            return int(server.getsockname()[1])
    raise AssertionError("no port from 20000 to 29999 is free")


_NUMBERS = itertools.count(os.getpid())  # no two of a run are the same


@pytest.fixture
def apart() -> Iterator[dict[str, Any]]:
    with environment_apart() as environment:
        yield environment


@pytest.fixture
def head(python: Scripts, apart: dict[str, Any]) -> Iterator[str]:
    with ray_head(python, apart) as address:
        yield address


class Head(NamedTuple):
    """A Ray cluster for the tests of a module."""

    address: str
    environment: dict[str, Any]


@pytest.fixture(scope="module")
def shared_head(python: Scripts) -> Iterator[Head]:
    with environment_apart() as environment, ray_head(python, environment) as address:
        yield Head(address, environment)
