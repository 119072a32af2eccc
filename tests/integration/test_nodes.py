"""Several machines, and the links between them: Ray nodes in network namespaces of this one, joined by a bridge.

Each node has an address, a loopback and a set of ports of its own, so whatever would connect to "this machine" where
it means another one fails here as it would between machines. Needs root and `ip`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pathways_ray.controller import tenants
from tests.certificates import self_signed
from tests.integration.conftest import environment_apart

SIZE = 3
TOKEN = "a tenant's token 0123456789abcdef"
LIGHT = {
    # Nodes that do nothing but host our actors, on few cores.
    "RAY_num_prestart_python_workers": "0",
    "RAY_prestart_worker_first_driver": "0",
    "JAX_PLATFORMS": "cpu",
}


def why_not() -> str:
    """Why this machine cannot have network namespaces; "" if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (iproute2)"
    name = f"pwtry{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"this machine has no network namespaces: {tried.stderr.strip()}"
    made = ["ip", "-n", name, "link", "add", "name", "veth-a", "type", "veth", "peer", "name", "veth-b"]
    tried = subprocess.run(made, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"this machine has no veth pairs: {tried.stderr.strip()}" if tried.returncode else ""


pytestmark = [
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "-"),
    pytest.mark.timeout(240),
]


@dataclass
class Machines:
    """Namespaces with one address each; the first is the Ray head's."""

    name: str
    bridge: str

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def inside(self, number: int) -> tuple[str, ...]:
        """What runs a command on a machine."""
        return ("ip", "netns", "exec", f"{self.name}n{number}")

    def link(self, number: int, state: str) -> None:
        """Cuts ("down") or mends ("up") the link of a machine."""
        ip("-n", self.bridge, "link", "set", f"v{number}", state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made = Machines(f"pw{os.getpid()}", f"pw{os.getpid()}net")
    spaces = [made.bridge]
    ip("netns", "add", made.bridge)
    try:
        ip("-n", made.bridge, "link", "add", "name", "bridge", "type", "bridge")
        ip("-n", made.bridge, "link", "set", "bridge", "up")
        for number in range(SIZE):
            space = f"{made.name}n{number}"
            spaces.append(space)
            ip("netns", "add", space)
            ip(
                "-n",
                made.bridge,
                "link",
                "add",
                "name",
                f"v{number}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                space,
            )
            ip("-n", made.bridge, "link", "set", f"v{number}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{made.address(number)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield made
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture(scope="module")
def environment(python) -> Iterator[dict[str, str]]:
    with environment_apart() as environment:
        yield {**environment, **LIGHT}


@pytest.fixture(scope="module")
def nodes(python, machines: Machines, environment: dict[str, str]) -> Iterator[str]:
    """Ray on every machine; the head takes no hosts. The address of the Ray cluster."""
    head = f"{machines.address(0)}:6379"
    small = ("--object-store-memory=80000000", "--dashboard-agent-listen-port=0")
    for number in range(SIZE):
        role = (
            ("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false")
            if number == 0
            else (
                f"--address={head}",
                "--num-cpus=1",
            )
        )
        words = ("start", *role, f"--node-ip-address={machines.address(number)}", *small)
        started = python.command("-m", "ray.scripts.scripts", *words, prefix=machines.inside(number), **environment)
        python.finish(started, 60.0)
    yield head
    python.kill_all()


@pytest.fixture(scope="module")
def files(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for all machines, its key, and a table with one tenant."""
    folder = tmp_path_factory.mktemp("files")
    self_signed(folder, [machines.address(number) for number in range(SIZE)])
    book = tenants.add(tenants.TenantBook(), tenants.Tenant("alice"), tenants.token_digest(TOKEN))
    (folder / "tenants.json").write_bytes(tenants.encode(book))
    return folder


@pytest.fixture
def runtime(python, machines, environment, nodes: str, files: Path) -> Iterator[dict[str, Any]]:
    """A runtime on the machines: island 0 on one node, island 1 on another, island 2 on both."""
    words = ("up", "--json", "--address", nodes, "--placement", "spread")
    islands = ("--island", "cpu:devices=2", "--island", "cpu:devices=2", "--island", "cpu:hosts=2,devices=1")
    safe = ("--tls-cert", str(files / "cert.pem"), "--tls-key", str(files / "key.pem"))
    known = ("--tenants", str(files / "tenants.json"))
    started = pathways(python, machines, environment, *words, *islands, *safe, *known)
    yield json.loads(python.finish(started))
    python.finish(pathways(python, machines, environment, "down", "--address", nodes))


def pathways(python, machines: Machines, environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return python.command("-m", "pathways_ray.cli", *words, prefix=machines.inside(0), **environment)


@pytest.mark.slow
def test_a_runtime_on_three_machines_wants_tls_and_tenants(python, machines, environment, nodes) -> None:
    process = pathways(python, machines, environment, "up", "--address", nodes, "--islands", "1")
    out, err = process.communicate(timeout=60.0)
    assert (process.returncode, out) == (2, "")
    assert "without TLS" in err


@dataclass
class Client:
    """A process that runs a program over some islands, and says what became of it."""

    process: subprocess.Popen[str]

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def tell(self, moment: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{moment}\n")
        self.process.stdin.flush()


@pytest.mark.long
def test_a_cut_link(python, machines, environment, nodes, runtime) -> None:
    """
    1. Islands 0 and 1 are on two machines, island 2 on both; programs of four sessions run on each and across all.
    2. The link of island 1's machine is cut. Launches that need it end in a typed error within 10 s; island 0 goes on.
    3. The link is mended. Within 20 s the same programs run again, by themselves.
    """
    status = pathways(python, machines, environment, "status", "--json")
    islands = json.loads(python.finish(status))["islands"]
    where = [{host["node"] for host in island["hosts"]} for island in islands]
    assert len(where[0] | where[1]) == 2
    assert where[2] == where[0] | where[1]
    victim = machine_of(next(iter(where[1])), python, machines, environment, nodes)

    access = (runtime["url"], TOKEN, runtime["ca"])
    clients = {
        name: Client(python.start("nodes_client", *access, *islands, prefix=machines.inside(0), **environment))
        for name, islands in {"near": "0", "far": "1", "across": "2", "chain": "012"}.items()
    }
    for client in clients.values():
        assert client.hear() == {"ready": True}
    machines.link(victim, "down")
    cut = time.time()
    try:
        for client in clients.values():
            client.tell(cut)
        found = {name: client.hear() for name, client in clients.items()}
    finally:
        machines.link(victim, "up")
    mended = time.time()
    print(f"cut for {mended - cut:.1f} s:", found)
    for client in clients.values():
        client.tell(mended)
    after = {name: client.hear() for name, client in clients.items()}
    print(after)
    for client in clients.values():
        python.finish(client.process)

    assert found["near"]["outcomes"] == ["right"] * 5
    assert found["near"]["slowest"] < 4.0  # it never waited for the others, which are missed after eight seconds
    for name in ("far", "across", "chain"):
        assert set(found[name]["outcomes"]) <= {"HostLost", "BufferLost"}
        assert found[name]["known"] < 10.0
    assert max(one["serving"] for one in after.values()) < 20.0


def machine_of(node: str, python, machines: Machines, environment: dict[str, str], head: str) -> int:
    """The number of the machine of a Ray node."""
    out = python.finish(python.start("nodes_addresses", head, prefix=machines.inside(0), **environment))
    address = json.loads(out.splitlines()[-1])[node]
    return next(number for number in range(SIZE) if machines.address(number) == address)


@pytest.mark.long
def test_a_machine_that_is_gone_for_good(python, machines, environment, nodes, runtime) -> None:
    """
    1. Islands 0 and 1 are on two machines; one program runs on island 0, another one on both.
    2. The machine of island 1 vanishes: no reset leaves it. Launches that need it end in a typed error within 10 s.
    3. Island 0 goes on. Half a minute later nothing of those launches is left there; status says which island is away.
    """
    islands = json.loads(python.finish(pathways(python, machines, environment, "status", "--json")))["islands"]
    assert [island["state"] for island in islands] == ["up"] * 3
    victim = machine_of(islands[1]["hosts"][0]["node"], python, machines, environment, nodes)
    access = (runtime["url"], TOKEN, runtime["ca"])
    clients = {
        name: Client(python.start("nodes_client", *access, *used, prefix=machines.inside(0), **environment))
        for name, used in {"near": "0", "both": "01"}.items()
    }
    for client in clients.values():
        assert client.hear() == {"ready": True}
    machines.link(victim, "down")
    gone = time.time()
    try:
        for client in clients.values():
            client.tell(gone)
        found = {name: client.hear() for name, client in clients.items()}
        time.sleep(max(0.0, gone + 30.0 - time.time()))
        left = json.loads(python.finish(python.start("nodes_left", nodes, prefix=machines.inside(0), **environment)))
        states = json.loads(python.finish(pathways(python, machines, environment, "status", "--json")))["islands"]
        clients["near"].tell(time.time())
        near = clients["near"].hear()
    finally:
        machines.link(victim, "up")
        clients["both"].process.kill()
    python.finish(clients["near"].process)
    print(found, left, near)
    assert found["near"]["outcomes"] == ["right"] * 5
    assert set(found["both"]["outcomes"]) <= {"HostLost", "BufferLost"}
    assert found["both"]["known"] < 10.0
    assert left["active"] == 0
    assert [island["state"] for island in states] == ["up", "away", "away"]
    assert near["serving"] < 5.0
