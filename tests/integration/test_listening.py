"""What listens on a machine: by default, nothing that another machine could reach; and Ray asks for its token."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import Scripts, environment_apart, ray_head

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def listening(python: Scripts) -> dict[str, list[str]]:
    """The addresses at which processes of the scripts listen, as `ss -ltnp` would say, with the processes."""
    found: dict[str, list[str]] = {}
    for process in python.alive():
        try:
            name = " ".join(process.cmdline())[:80]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(connection.laddr.ip, []).append(f"{name} {connection.laddr.port}")
        except psutil.NoSuchProcess:
            continue
    return found


def reachable(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """What listens at other addresses than loopback."""

    def is_loopback(address: str) -> bool:
        ip = ipaddress.ip_address(address)
        return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback

    return {address: names for address, names in found.items() if not is_loopback(address)}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_embedded_cluster_listens_on_loopback_and_asks_for_a_token(
    python: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    1. A user who has no token of Ray's starts a cluster. Nothing of it, nor of Ray, listens beyond loopback.
    2. Ray answers those with the token, which is in the environment, and nobody else.
    3. Nothing was written into the user's home; after the end, the environment is as it was.
    """
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with environment_apart() as apart:
        apart = {k: v for k, v in apart.items() if not k.startswith("RAY_AUTH")} | {"HOME": str(tmp_path)}
        script = python.start("listening", **apart)
        assert script.stdout is not None
        line = script.stdout.readline()
        assert line, script.communicate()[1]
        address, said = json.loads(line)
        assert said["RAY_AUTH_MODE"] == "token"
        assert len(said["RAY_AUTH_TOKEN"]) == 32
        found = listening(python)
        assert sum(map(len, found.values())) > 10, found
        assert reachable(found) == {}

        def asks(token: str) -> int:
            shown: dict[str, Any] = {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": token,
                "RAY_NUM_REDIS_GET_RETRIES": "1",
            }
            settings = {**apart, **LOOPBACK, **shown}
            cli = python.command("-m", "ray.scripts.scripts", "status", "--address", address, **settings)
            cli.communicate(timeout=60.0)
            return cli.returncode

        assert asks(said["RAY_AUTH_TOKEN"]) == 0
        assert asks("0" * 32) != 0
        out, err = script.communicate("end\n", timeout=60.0)
        assert script.returncode == 0, err
        assert json.loads(out) == dict.fromkeys(said)
        assert not (tmp_path / ".ray").exists()
    python.assert_none_left()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_detached_runtime_on_one_machine_listens_on_loopback(python: Scripts) -> None:
    """Ray is told to stay on loopback when it is started, since by itself it listens everywhere."""
    with environment_apart() as environment:
        apart: dict[str, Any] = {**environment, **LOOPBACK}
        with ray_head(python, apart) as address:
            assert address.startswith("127.0.0.1:")
            cli = ("-m", "pathways_ray.cli")
            python.finish(python.command(*cli, "up", "--islands", "1", "--hosts-per-island", "2", **apart))
            found = listening(python)
            assert sum(map(len, found.values())) > 10, found
            assert reachable(found) == {}
            python.finish(python.command(*cli, "down", **apart))
