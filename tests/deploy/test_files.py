"""What is in `deploy/`, as far as it can be checked without the services: forms, schemas, options that exist."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start

from pathways_ray.cli import commands

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FOLDERS = sorted(path for path in DEPLOY.iterdir() if path.is_dir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = [DEPLOY / "make-files.sh", DEPLOY / "docker" / "serve.sh", DEPLOY / "slurm" / "pathways.sbatch"]


def texts() -> Iterator[tuple[Path, str]]:
    """Every file, with continued lines joined."""
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file():
            yield path, re.sub(r"\s*\\\n\s*", " ", path.read_text())


def calls(*words: str) -> list[Any]:
    """Arguments of every call of a command in a line of its own, a quoted one, or after a condition."""
    found = []
    for path, text in texts():
        for match in re.finditer(rf"(?<![\w`'-]){' '.join(words)}(?: +([^\n`]*))?(?=\n)", text):
            line = (match.group(1) or "").split(" > ")[0].split("; do")[0].split(" || ")[0].split(" &")[0]
            line = line.removesuffix('"]').rstrip("'")
            if "..." not in line and not path.name.startswith("Dockerfile"):
                found.append(pytest.param(shlex.split(line), id=f"{path.parent.name}/{path.name}"))
    assert found, words
    return found


def test_every_folder_has_a_page_that_names_its_files() -> None:
    assert [folder.name for folder in FOLDERS] == ["docker", "kuberay", "monitoring", "ray-up", "slurm"]
    index = (DEPLOY / "README.md").read_text()
    for folder in FOLDERS:
        page = (folder / "README.md").read_text()
        assert f"({folder.name}/README.md)" in index
        for file in folder.iterdir():
            if file.name not in ("README.md", "Dockerfile.dockerignore"):
                assert file.name in page, f"{file} is not on the page of its folder"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_scripts(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


PATHWAYS_UP = shlex.split("--islands 2 --devices-per-host 4")
"""What the environment of KubeRay's head says by itself; see `test_shapes_of_kuberay_fit_to_their_workers`."""


def parse(command: click.Command, words: list[str], tmp_path: Path) -> dict[str, Any]:
    """The settings that a command would see; files that it opens at once are those of a folder."""
    (tmp_path / "token").write_text("0123456789abcdef\n")
    words = [str(tmp_path / "token") if word.endswith("/token") else word for word in words if word != "${up[@]}"]
    with command.make_context(command.name, words) as context:
        return dict(context.params)


@pytest.mark.parametrize("words", [*calls("pathways", "up"), *calls("pathways-serve")])
def test_options_of_up_exist(words: list[str], tmp_path: Path) -> None:
    words = [part for word in words for part in (PATHWAYS_UP if word == "$PATHWAYS_UP" else [word])]
    said = {"${PATHWAYS_PORT:-8476}": "8476", "$PATHWAYS_NODES": "3", "${#nodes[@]}": "2"}
    words = [said.get(word, word) for word in words if word not in ("$@", "${safe[@]}")]
    found = parse(commands.commands["up"], words, tmp_path)
    if found["bind"] not in ("", "127.0.0.1", "$address"):
        assert found["tls_cert"]
        assert found["tls_key"]
        assert found["tenants"]


@pytest.mark.parametrize("words", calls("ray", "start"))
def test_options_of_ray_start_exist(words: list[str]) -> None:
    """Each names the ports that Ray would take, whoever has them: its client server's, without which a head ends, and
    its agent's. So there may be a second Ray on a machine."""
    said = {"$((port + 1))": "6380", "$port": "6379", "$agent": "--dashboard-agent-listen-port=0"}
    words = [functools.reduce(lambda word, one: word.replace(*one), said.items(), word) for word in words]
    with ray_start.make_context("start", words) as context:
        assert context.params["head"] or context.params["address"]
        assert context.params["ray_client_server_port"] == (6380 if context.params["head"] else None)
        assert context.params["dashboard_agent_listen_port"] == 0


@pytest.mark.parametrize("words", calls("pathways", "tenants", "add"))
def test_options_of_tenants_exist(words: list[str]) -> None:
    tenants = commands.commands["tenants"]
    assert isinstance(tenants, click.Group)
    with tenants.commands["add"].make_context("add", words) as context:
        assert context.params["name"] == "alice"


def test_the_image() -> None:
    lines = [line.split(None, 1) for line in (DEPLOY / "docker" / "Dockerfile").read_text().splitlines() if line]
    users = [rest for word, rest in lines if word == "USER"]
    assert users == ["pathways"]
    assert [word for word, _ in lines].index("USER") < [word for word, _ in lines].index("CMD")
    for word, rest in lines:
        if word == "COPY":
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            for source in sources:
                assert source == "megatron_ptdp" or (ROOT / source).exists(), source
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().split()
    copied = {part for word, rest in lines if word == "COPY" for part in rest.split()[:-1] if not part.startswith("--")}
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    (installed,) = [rest for word, rest in lines if word == "RUN" and "pip install" in rest]
    assert '".${EXTRAS}"' in installed
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    for package in ("openssh-client", "rsync", "tini", "wget"):
        assert package in text, f"KubeRay's probes, ray up or the entry point use {package}"


def test_the_image_has_what_its_packages_import() -> None:
    """The modules that are loaded with each file of the image, but for the peers that benchmarks compare with."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    (extras,) = re.findall(r'ARG EXTRAS="\[([\w,]+)\]"', text)
    optional = PROJECT["project"]["optional-dependencies"]
    there = closure(
        [*PROJECT["project"]["dependencies"], *(one for extra in extras.split(",") for one in optional[extra])]
    )
    own = {*PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], *sys.stdlib_module_names}
    files = [path for package in own for path in (ROOT / package).rglob("*.py") if "peers" not in path.parts]
    loaded = {name: path for path in files for name in re.findall(IMPORT, path.read_text(), re.M)}
    missing = {
        (name, str(path.relative_to(ROOT)))
        for name, path in loaded.items()
        if name not in own and canonicalize_name(DISTRIBUTIONS.get(name, name)) not in there
    }
    assert missing == set()


DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-sdk",
    "orbax": "orbax-checkpoint",
}
"""Those whose names are not that of their module."""

IMPORT = r"^(?:import (?=\w[\w.]*(?: as \w+)?$)|from (?=\w[\w.]* import ))(\w+)"


def closure(required: list[str]) -> set[str]:
    """The names of distributions with all that they require in turn, as far as they are installed."""
    found: set[tuple[str, str]] = set()
    left = [Requirement(one) for one in required]
    while left:
        one = left.pop()
        for extra in ("", *one.extras):
            if (one.name, extra) not in found:
                found.add((one.name, extra))
                with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                    more = map(Requirement, importlib.metadata.requires(one.name) or [])
                    left += [each for each in more if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {canonicalize_name(name) for name, _ in found}


def test_ray_up_takes_the_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = yaml.safe_load((DEPLOY / "ray-up" / "cluster.yaml").read_text())
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path)
    assert config["auth"].keys() == {"ssh_user", "ssh_private_key"}, "the head starts the others by ssh"
    page = (DEPLOY / "ray-up" / "README.md").read_text()
    assert "--build-arg PATHWAYS_UID=" in page, "files are mounted that their owner alone may read"
    assert "useradd --create-home --uid ${PATHWAYS_UID}" in (DEPLOY / "docker" / "Dockerfile").read_text()
    prepared = prepare_config(config)  # with what the provider leaves to Ray
    validate_config(prepared)
    assert prepared["max_workers"] == len(config["provider"]["worker_ips"])


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay" / name).read_text()))


def test_the_ray_cluster_of_kuberay() -> None:
    (cluster,) = documents("raycluster.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    head = spec["headGroupSpec"]
    groups = [head, *spec["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        options = [word for key, value in group["rayStartParams"].items() for word in (f"--{key}", value)]
        with ray_start.make_context("start", ["--head", *options]):
            pass
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert {"name", "image", "command", "args", "resources", "volumeMounts"} <= container.keys()
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        subprocess.run(["bash", "-n", "-c", container["args"][0]], check=True)
    assert "enableInTreeAutoscaling" not in spec, "its sidecar on the head asks the API with the pod's token"
    for worker in spec["workerGroupSpecs"]:
        assert worker["minReplicas"] <= worker["replicas"] <= worker["maxReplicas"]
        assert worker["groupName"]
        secret = worker["template"]["spec"]["volumes"][0]["secret"]
        assert [item["path"] for item in secret["items"]] == ["cert.pem", "key.pem"], (
            "the operator's token is the head's"
        )
        assert secret["secretName"] == head["template"]["spec"]["volumes"][0]["secret"]["secretName"]
    page = (DEPLOY / "kuberay" / "README.md").read_text()
    assert head["template"]["spec"]["volumes"][0]["secret"]["secretName"] in page


def patched(cluster: Any, patch: str) -> Any:
    """The cluster with a JSON patch of operations `add` and `replace`, which have to find what they change."""
    made = copy.deepcopy(cluster)
    for operation in yaml.safe_load((DEPLOY / "kuberay" / patch).read_text()):
        assert set(operation) == {"op", "path", "value"}
        *way, last = [part.replace("~1", "/") for part in operation["path"].split("/")[1:]]
        place = made
        for part in way:
            place = place[int(part)] if isinstance(place, list) else place[part]
        key: Any = int(last) if isinstance(place, list) else last
        there = key < len(place) if isinstance(place, list) else key in place
        assert there == (operation["op"] == "replace"), operation["path"]
        place[key] = operation["value"]
    return made


@pytest.mark.parametrize(
    ("patch", "resource", "shape"),
    [("", "cpu", (2, 1, 4)), ("gpu.yaml", "nvidia.com/gpu", (2, 1, 4)), ("tpu.yaml", "google.com/tpu", (1, 2, 4))],
)
def test_shapes_of_kuberay_fit_to_their_workers(
    patch: str, resource: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    """Islands, hosts and devices of `pathways up` are those of the workers and of their limits."""
    (cluster,) = documents("raycluster.yaml")
    cluster = patched(cluster, patch) if patch else cluster
    (head,) = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["env"][0]["name"] == "PATHWAYS_UP"
    words = shlex.split(head["env"][0]["value"])
    assert patch or words == PATHWAYS_UP
    found = parse(commands.commands["up"], words, tmp_path)
    islands, hosts, devices = int(found["islands"]), found["hosts_per_island"] or 1, found["devices_per_host"]
    assert (islands, hosts, devices) == shape
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    pods = workers["replicas"] * workers.get("numOfHosts", 1)
    assert islands * hosts == pods
    assert head["env"][1] == {"name": "PATHWAYS_NODES", "value": str(1 + pods)}, "this one and the workers"
    assert int(worker["resources"]["limits"][resource]) == devices
    assert worker["resources"]["limits"] == worker["resources"]["requests"], "accelerators are not shared"
    assert found["platform"] == {"cpu": "auto", "nvidia.com/gpu": "gpu", "google.com/tpu": "tpu"}[resource]
    if patch:
        built = (DEPLOY / "docker" / "README.md").read_text()
        assert worker["image"] in built


EVERY_PORT = range(1, 1 << 16)
RAYS = {6379, 6380, 6381, 8265, 10001, 52365, *range(10010, 20000)}
"""Ray's ports there: its store, node and object managers, dashboard, client, agent, and workers."""


def open_to(policy: dict[str, Any], labels: dict[str, str], namespace: str = "default") -> set[int]:
    """The ports that a network policy opens to pods with these labels, in a namespace."""

    def chosen(selector: dict[str, Any]) -> bool:
        assert selector.keys() <= {"matchLabels", "matchExpressions"}
        for wanted in selector.get("matchExpressions", ()):
            assert wanted["operator"] == "In"
            if labels.get(wanted["key"]) not in wanted["values"]:
                return False
        return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())

    def let_in(source: dict[str, Any]) -> bool:
        assert source.keys() <= {"podSelector", "namespaceSelector"}
        return ("namespaceSelector" in source or namespace == "default") and chosen(source["podSelector"])

    ports: set[int] = set()
    for rule in policy["spec"]["ingress"]:
        assert rule.keys() <= {"from", "ports"}
        assert rule["from"], "a rule without sources lets everybody in"
        if any(let_in(source) for source in rule["from"]):
            for port in rule.get("ports", [{"protocol": "TCP", "port": 1, "endPort": 65535}]):
                assert port["protocol"] == "TCP"
                ports |= set(range(port["port"], port.get("endPort", port["port"]) + 1))
    return ports


def test_the_network_policy_of_kuberay() -> None:
    """Clients reach what is served to clients, and nothing else; the pods of the cluster reach each other."""
    (cluster,), (policy,) = documents("raycluster.yaml"), documents("networkpolicy.yaml")
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    name = cluster["metadata"]["name"]
    assert policy["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": name}
    head = cluster["spec"]["headGroupSpec"]
    (container,) = head["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for group in [head, *cluster["spec"]["workerGroupSpecs"]]:
        params = {key: int(value) for key, value in group["rayStartParams"].items() if key.endswith("port")}
        used = {*params.values(), *range(params["min-worker-port"], params["max-worker-port"] + 1)}
        assert used <= RAYS
    assert {ports["gcs-server"], ports["dashboard"], ports["client"]} <= RAYS

    given = re.search(r"--port (\d+) --client-ports (\d+)-(\d+)", container["args"][0])
    assert given is not None
    service, first, last = map(int, given.groups())
    clients = open_to(policy, {"pathways-client": "true"})
    assert clients == {service, *range(first, last + 1)}
    assert service == ports["pathways"]
    assert not clients & RAYS

    operators = [open_to(policy, {"app.kubernetes.io/name": n}, "ray") for n in ("kuberay-operator", "kuberay")]
    assert operators == [{ports["dashboard"]}] * 2
    assert f"--metrics-port {ports['metrics']}" in container["args"][0]
    assert open_to(policy, {"app.kubernetes.io/name": "prometheus"}, "monitoring") == {ports["metrics"]}
    assert open_to(policy, {"ray.io/cluster": name}) == set(EVERY_PORT)
    assert open_to(policy, {"ray.io/cluster": name}, "elsewhere") == set()
    assert open_to(policy, {"app": "anything"}) == open_to(policy, {"pathways-client": "true"}, "elsewhere") == set()


def test_an_image_has_a_tag_everywhere_and_is_not_pulled_where_it_is() -> None:
    """An image without a tag is pulled each time, from a registry that does not have it."""
    for _, text in texts():
        assert not re.search(r"(?:image: |-t |:ro\" )pathways-ray(?![-:\w])", text)
    found = (DEPLOY / "kuberay" / "raycluster.yaml").read_text()
    assert found.count("imagePullPolicy: IfNotPresent") == found.count("image: pathways-ray:0.1.0")


def test_a_container_ends_with_its_ray_and_says_how_it_is() -> None:
    assert "HEALTHCHECK" in (DEPLOY / "docker" / "Dockerfile").read_text()
    served = (DEPLOY / "docker" / "serve.sh").read_text()
    assert "sleep infinity" not in served
    assert "ray health-check" in served


def test_scripts_take_the_address_of_their_machine_from_outside() -> None:
    """The name of a machine may stand for 127.0.1.1, which is no address for others."""
    for script in SCRIPTS[1:]:
        (line,) = re.findall(r"^address=.*$", script.read_text(), re.M)
        for given, found in (("10.0.0.7", "10.0.0.7"), ("", "127.0.1.1")):
            played = f'head=(eval); hostname() {{ echo "127.0.1.1 10.0.0.7"; }}; {line}; echo "$address"'
            environment = {**os.environ, "PATHWAYS_ADDRESS": given}
            assert subprocess.check_output(["bash", "-c", played], env=environment, text=True) == f"{found}\n"


def test_steps_of_slurm_have_the_cpus_of_their_task() -> None:
    script = (DEPLOY / "slurm" / "pathways.sbatch").read_text()
    assert script.index("SRUN_CPUS_PER_TASK") < script.index("ray start")


def test_what_a_slurm_job_writes_down_is_its_users_alone() -> None:
    """The operator's token is in it, until the job is over. What the job's command writes has the mode that its user
    wants."""
    script = (DEPLOY / "slurm" / "pathways.sbatch").read_text()
    private = '(umask 077 && : > "$runtime")'
    assert script.count("umask") == 1
    (trap,) = re.findall(r"^trap '(.*)' EXIT$", script, re.M)
    assert 'rm -f "$runtime"' in trap.split("; ")
    assert script.index("runtime=$files/") < script.index(trap)
    assert script.index(private) < script.index('"${up[@]}" > "$runtime"')
