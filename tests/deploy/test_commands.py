"""The commands inside the files of `deploy/`, run for real on this machine, with its addresses in place of theirs.

What belongs to a service is played by small scripts: `srun` runs its command here, `scontrol` names this machine as
the job's only node. `ray stop` would stop every Ray of this machine, so here it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.integration.conftest import SCRIPTS, Scripts, environment_apart, free_port

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

SHIMS = {
    "ray": """\
if [[ $1 == stop ]]; then exit 0; fi
if [[ $1 == start ]]; then
    set -- "$@" --num-cpus=2 --object-store-memory=100000000
fi
exec "$TEST_PYTHON" -m ray.scripts.scripts "$@"
""",
    "pathways": 'exec "$TEST_PYTHON" -m pathways_ray.cli "$@"\n',
    "python3": 'exec "$TEST_PYTHON" "$@"\n',
    "hostname": "echo 127.0.0.1\n",
    "scontrol": '[[ "$1 $2" == "show hostnames" ]] && echo "$3"\n',
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
}


@pytest.fixture
def machine(python: Scripts, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """The environment of a machine on which the commands run, with the files of `make-files.sh`."""
    for name, body in SHIMS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    shutil.copy(SCRIPTS / "deploy_client.py", tmp_path / "client.py")
    made = [str(DEPLOY / "make-files.sh"), str(tmp_path / "files"), "127.0.0.1", "localhost"]
    subprocess.run(made, check=True, capture_output=True)
    before = (tmp_path / "files" / "key.pem").read_bytes()
    subprocess.run(made, check=True, capture_output=True)
    assert (tmp_path / "files" / "key.pem").read_bytes() == before
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "files").iterdir())
    with environment_apart() as environment:
        yield {
            **environment,
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "TEST_PYTHON": sys.executable,
            "RAY_PORT": str(free_pair()),
            "PATHWAYS_PORT": str(free_port()),
        }
    python.kill_all()


def free_pair() -> int:
    """An even port that nobody has, nor the one after it: those of Ray's head and of its client server."""
    while (port := free_port()) % 2 or free_port() != port + 1:
        pass
    return port


def shell(python: Scripts, machine: dict[str, Any], *words: str) -> subprocess.Popen[str]:
    """A command with bash, known to `python` by its environment, in a process group of its own."""
    source = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
    return python.command("-c", source, *words, **machine)


def compute(python: Scripts, machine: dict[str, Any], folder: Path, url: str) -> str:
    token = (folder / "files" / "token").read_text().strip()
    known: dict[str, Any] = {"PATHWAYS_URL": url, "PATHWAYS_TOKEN": token}
    if url.startswith("grpcs"):
        known["PATHWAYS_CA"] = str(folder / "files" / "cert.pem")
    return python.finish(python.command(str(folder / "client.py"), **{**machine, **known}))


def ours(python: Scripts) -> list[str]:
    """Our actors that run."""
    kinds = ("HostExecutor", "IslandScheduler", "Controller", "ResourceManager")
    lines = []
    for process in python.alive():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            lines.append(" ".join(process.cmdline()))
    return [line for line in lines if any(f"ray::{kind}" in line for kind in kinds)]


def assert_gone(python: Scripts) -> None:
    deadline = time.monotonic() + 30
    while (left := ours(python)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_container_serves_until_it_is_told_to_stop(python, machine, tmp_path) -> None:
    """`docker run` as the page has it, but for the container."""
    page = (DEPLOY / "docker" / "README.md").read_text()
    (words,) = re.findall(r"pathways-serve (--islands 2 --devices-per-host 4 --token-file /files/token)\n", page)
    words = words.replace("/files", str(tmp_path / "files"))
    serve = shell(python, {**machine, "PATHWAYS_ADDRESS": "127.0.0.1"}, str(DEPLOY / "docker/serve.sh"), *words.split())
    assert serve.stdout is not None
    for line in serve.stdout:
        if line.startswith("clients call"):
            break
    assert serve.poll() is None, serve.communicate()[1]
    url = f"grpc://127.0.0.1:{machine['PATHWAYS_PORT']}"
    assert compute(python, machine, tmp_path, url) == "computed [0.0, 2.0, 4.0, 6.0] 2\n"
    serve.send_signal(signal.SIGTERM)
    assert serve.wait(60.0) == 0
    assert_gone(python)
    python.kill_all()  # Ray, which `ray stop` would have stopped
    assert "runtime 'pathways' is down" in serve.communicate()[0]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_slurm_job_runs_a_command_and_ends(python, machine, tmp_path) -> None:
    """With TLS and a table of tenants, as on several nodes."""
    job = {"SLURM_JOB_ID": str((free_pair() - 20000) // 2), "SLURM_JOB_NODELIST": "node0"}
    settings = {"PATHWAYS_FILES": str(tmp_path / "files"), "PATHWAYS_UP": "--islands 2 --devices-per-host 4"}
    command = ("python3", str(tmp_path / "client.py"))
    process = shell(python, {**machine, **job, **settings}, str(DEPLOY / "slurm/pathways.sbatch"), *command)
    assert process.wait(150.0) == 0, python.kill_all() or process.communicate()
    assert_gone(python)
    python.kill_all()  # Ray, which ends with its job step
    out, _ = process.communicate()
    assert "the runtime is at grpcs://127.0.0.1:" in out
    assert {file.name for file in (tmp_path / "files").iterdir()} == {"cert.pem", "key.pem", "token", "tenants.json"}
    assert "computed [0.0, 2.0, 4.0, 6.0] 2\n" in out
    assert "runtime 'pathways' is down" in out


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_head_of_kuberay_starts_the_runtime_and_starts_it_again(python, machine, tmp_path) -> None:
    """The head container's command, with the `ray start` that KubeRay would make, killed and started a second time."""
    (cluster,) = yaml.safe_load_all((DEPLOY / "kuberay" / "raycluster.yaml").read_text())
    (container,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    metrics = str(free_port())
    substitutions = {"/files": str(tmp_path / "files"), "8476": machine["PATHWAYS_PORT"], "9476": metrics}
    line = container["args"][0]
    for ours_is, here in substitutions.items():
        line = line.replace(ours_is, here)
    line = line.replace("ulimit -n 65536\n", "")
    start = (
        f"ray start --head --block --port={machine['RAY_PORT']} --node-ip-address=127.0.0.1 --include-dashboard=false"
        f" --ray-client-server-port={int(machine['RAY_PORT']) + 1} --dashboard-agent-listen-port=0"
    )
    said = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    pod = {**machine, **said, "PATHWAYS_NODES": "1", "POD_IP": "127.0.0.1", "KUBERAY_GEN_RAY_START_CMD": start}
    url = f"grpcs://127.0.0.1:{machine['PATHWAYS_PORT']}"
    for _ in range(2):
        head = shell(python, pod, "-c", line)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert compute(python, machine, tmp_path, url) == "computed [0.0, 2.0, 4.0, 6.0] 2\n"
                break
            except AssertionError:
                assert head.poll() is None, head.communicate()
                assert time.monotonic() < deadline
                time.sleep(1.0)
        python.kill_all()
        head.communicate(timeout=30.0)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_ray_up_and_ray_exec(python, machine, tmp_path) -> None:
    """The head's start commands of the cluster file, then what the page has for `ray exec`."""
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "ray-up" / "cluster.yaml").read_text())
    page = (DEPLOY / "ray-up" / "README.md").read_text()
    up, down = re.findall(r"ray exec cluster.yaml '([^\n]*)'\n", page)
    (tmp_path / "files" / "ray-token").write_text(machine["RAY_AUTH_TOKEN"] + "\n")

    def here(line: str) -> str:
        line = line.replace("/tmp/pathways-files", str(tmp_path / "files")).replace("10.0.0.1", "127.0.0.1")
        line = line.replace("--nodes 3", "--nodes 1")
        line = line.replace("--autoscaling-config=~/ray_bootstrap_config.yaml", "--node-ip-address=127.0.0.1")
        line = line.replace("--port=6379", f"--port={machine['RAY_PORT']}").replace("8476", machine["PATHWAYS_PORT"])
        return line.replace("-port=6380", f"-port={int(machine['RAY_PORT']) + 1}")

    for line in config["head_start_ray_commands"]:
        python.finish(shell(python, machine, "-c", here(line)))
    out = python.finish(shell(python, machine, "-c", here(up)))
    url = f"grpcs://127.0.0.1:{machine['PATHWAYS_PORT']}"
    assert url in out
    assert compute(python, machine, tmp_path, url) == "computed [0.0, 2.0, 4.0, 6.0] 2\n"
    assert "runtime 'pathways' is down" in python.finish(shell(python, machine, "-c", here(down)))
    assert_gone(python)
    assert json.loads((tmp_path / "files" / "tenants.json").read_text()) == {"tenants": []}
