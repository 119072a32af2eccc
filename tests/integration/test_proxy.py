"""Unmodified JAX programs on the cluster, through JAX's IFRT proxy."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.client.proxy_process import ProxyProcess
from pathways_ray.proxy.devices import open_session
from pathways_ray.proxy.plugin import environment
from pathways_ray.proxy.server import ProxyServer
from tests.integration import ray_logs

SCRIPTS = Path(__file__).resolve().parent / "scripts"
ROOT = Path(__file__).resolve().parents[2]
GONE_WITHIN_S = 20.0


def run(env: dict[str, str], *command: str) -> subprocess.Popen[str]:
    """A program in a process of its own, without the settings of JAX that this process has."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    return subprocess.Popen(
        [sys.executable, *command],
        env=clean | env,
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def printed(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def plain() -> Any:
    """What the program prints on four CPU devices without a cluster."""
    program = str(SCRIPTS / "jax_program.py")
    return printed(run({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}, program))


@pytest.fixture(scope="module")
def proxy(cluster: ClusterSession) -> Iterator[ProxyProcess]:
    with cluster.proxy(devices=4) as started:
        yield started


def sessions(cluster: pw.Session) -> int:
    return len(cluster.status()["sessions"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ordinary_programs_at_the_same_time_have_devices_of_their_own_and_the_bits_of_plain_jax(
    proxy: ProxyProcess, plain: Any, session: pw.Session
) -> None:
    """Operations, transformations, random numbers, loops, linear algebra, sharded arrays, collectives, copies between
    devices, donation, types of 64 bits and of 4, and errors."""
    both = [run(proxy.env, str(SCRIPTS / "jax_program.py")) for _ in range(2)]
    assert [printed(process) for process in both] == [plain, plain]


ENDLESS = """
import jax, jax.numpy as jnp
x = jnp.ones((64, 64))
step = jax.jit(lambda v: v * 1.001)
print("running", flush=True)
while True:
    x = step(x)
"""


def test_a_program_that_is_killed_leaves_nothing(proxy: ProxyProcess, session: pw.Session) -> None:
    """1. A program launches without end. 2. It is killed. 3. Its session ends, with all that it had."""
    before = sessions(session)
    process = run(proxy.env, "-c", ENDLESS)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + GONE_WITHIN_S
    while sessions(session) > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sessions(session) <= before


def test_garbage_on_the_socket_ends_a_connection_and_nothing_else(proxy: ProxyProcess, plain: Any) -> None:
    path = proxy.target.removeprefix("grpc://unix:")
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(range(256)),
        os.urandom(4096),
    ):
        with closing(socket.socket(socket.AF_UNIX)) as sock:
            sock.connect(path)
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(5.0)
            try:
                while sock.recv(4096):
                    pass
            except (ConnectionError, TimeoutError):
                pass
    assert printed(run(proxy.env, "-c", "import jax.numpy as jnp; print(int(jnp.arange(4).sum()))")) == 6


def test_its_socket_is_its_owners_alone(proxy: ProxyProcess) -> None:
    folder = Path(proxy.target.removeprefix("grpc://unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700


REFUSED = """
import json, os
from jax.extend.backend import ifrt_proxy
found = []
for token in (None, b"wrong", os.environ["RIGHT"].encode()):
    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = 1
    if token:
        options.initialization_data = {"token": token}
    try:
        found.append(len(ifrt_proxy.get_client(os.environ["TARGET"], options).devices()))
    except Exception as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""


def test_on_a_port_it_asks_for_a_token(session: ClusterSession) -> None:
    command = [sys.executable, "-m", "pathways_ray.cli", "proxy", "--port", "0", "--devices", "2", "--json"]
    given = {"PATHWAYS_URL": session.url, "PATHWAYS_TOKEN": session.token}
    with subprocess.Popen(
        [*command, "--until-eof"],
        env=os.environ | given,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        said = json.loads(server.stdout.readline())
        env = said["env"] | {"RIGHT": said["env"]["PATHWAYS_PROXY_TOKEN"], "TARGET": said["target"]}
        assert printed(run(env, "-c", REFUSED)) == ["JaxRuntimeError", "JaxRuntimeError", 2]


def test_what_the_cluster_cannot_give_is_said_at_the_start(session: ClusterSession) -> None:
    command = [sys.executable, "-m", "pathways_ray.cli", "proxy", "--devices", "99"]
    given = {"PATHWAYS_URL": session.url, "PATHWAYS_TOKEN": session.token}
    done = subprocess.run(command, env=os.environ | given, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "no island can hold a slice of shape (99,)" in done.stderr


ORDINARY = """
import jax.numpy as jnp
print(jnp.arange(4.0).sum().dtype)
"""


@pytest.mark.parametrize(("variables", "dtype"), [({}, "float32"), ({"JAX_ENABLE_X64": "1"}, "float64")])
def test_a_command_has_the_settings_that_it_is_given_and_no_warnings(
    session: ClusterSession, variables: dict[str, str], dtype: str
) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "TF_"))}
    given = {"PATHWAYS_URL": session.url, "PATHWAYS_TOKEN": session.token} | variables
    command = [sys.executable, "-m", "pathways_ray.cli", "proxy", "--devices", "1", "--exec", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", ORDINARY], env=clean | given, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{dtype}\n", "")


PUTS = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def right(value, *where):
    return bool((np.asarray(jax.device_put(value, *where)) == value).all())

big = np.arange(2 << 20, dtype=np.float32).reshape(4, -1)
rows = NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x"))
"""

MANY = """
print(json.dumps([right(big), right(big, jax.devices()[1]), right(big.T), right(big[:3]), right(big, rows)]))
"""

CUT_OFF = """
found = [right(big)]
print("put", flush=True)
sys.stdin.readline()
print(json.dumps(found + [right(big + 1), right(big + 2), right(big.astype(np.int32))]))
"""


def test_big_arrays_for_one_device_go_on_to_their_host_by_pipes_and_others_as_ever(cluster: ClusterSession) -> None:
    with cluster.proxy(devices=4) as started:
        assert printed(run(started.env, "-c", PUTS + MANY)) == [True] * 5
    assert started.account == {"passed_on": 2, "read_here": 0}


def test_where_hosts_take_pipes_no_longer_the_proxy_reads_them_and_refuses_further_types(
    session: ClusterSession, tmp_path: Path
) -> None:
    """1. An array goes to its host by a pipe. 2. The local socket to the host breaks. 3. The proxy reads arrays of that
    type; one of another type the program puts as ever."""
    opened = open_session(session.url, session.token, "", 4, "proxy")
    server = ProxyServer(lambda: opened, f"unix:{tmp_path}/s")
    server.start()
    try:
        process = run(environment(f"grpc://unix:{tmp_path}/s"), "-c", PUTS + CUT_OFF)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "put\n"
        for link in opened[0]._driver.data._links.values():
            link.is_local = False
        process.stdin.write("\n")
        assert printed(process) == [True] * 4
        assert server.account == {"passed_on": 1, "read_here": 2}
    finally:
        server.stop()


# --- an island of two hosts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over_hosts(pairs: Any) -> Iterator[ProxyProcess]:
    with ProxyProcess(pairs.url, pairs.token, "", 4, "proxy") as started:
        yield started


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_devices_of_two_hosts_compute_as_one(over_hosts: ProxyProcess, plain: Any) -> None:
    for _ in range(3):
        found = printed(run(over_hosts.env, str(SCRIPTS / "jax_program.py")))
        if "ControllerLost" not in json.dumps(found) or not ray_logs.say("it stood still"):
            break  # else it got no core for seconds, and ended itself as it should; of any other end this is the test
    other = {name: (value, plain["results"].get(name)) for name, value in found["results"].items()}
    assert not {name: both for name, both in other.items() if both[0] != both[1]}, "all that differs, at full length"
    assert found == plain


LOSES_A_HOST = """
import json, os, re, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.extend import backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def failure(act):
    try:
        act()
    except jax.errors.JaxRuntimeError as error:
        return str(error).partition(":")[0]

def started():
    mesh = Mesh(np.array(jax.devices()), "x")
    x = jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, P("x")))
    return x, jax.jit(lambda v: v + v.sum())

x, step = started()
float(step(x)[0])
pending = x
for _ in range(200):
    pending = step(pending) / 100
host = int(re.search(r"at=(\\d+)", str(jax.devices()[3]))[1])
os.kill(int(sys.argv[1 + host]), signal.SIGKILL)
found = {"pending": failure(pending.block_until_ready), "later": failure(lambda: np.asarray(step(x)))}
backend.clear_backends()
begun = time.monotonic()
while True:
    try:
        x, step = started()
        found["again"] = float(step(x)[1])
        break
    except RuntimeError:  # no backend, while no island has room
        if time.monotonic() - begun > 60:
            raise
        backend.clear_backends()
        time.sleep(0.5)
print(json.dumps(found))
"""


@pytest.mark.timeout(300)
def test_a_killed_host_is_an_error_of_jax_and_the_program_goes_on(over_hosts: ProxyProcess, pairs: Any) -> None:
    """1. Launches are under way. 2. A host is killed. 3. Their values raise, and so do later uses of what it held.
    4. After `clear_backends` the same program computes, as soon as the island is back."""
    found = printed(run(over_hosts.env, "-c", LOSES_A_HOST, *map(str, pairs.tables()["pids"])))
    assert found == {"pending": "UNAVAILABLE", "later": "UNAVAILABLE", "again": 29.0}
