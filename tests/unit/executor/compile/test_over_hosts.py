"""Computations whose sums go from one process to the other: which they are, with the bits of XLA's collectives."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRAWN_OVER_HOSTS = 5
"""Of the steps that are drawn at least so many are taken apart."""


def island(devices: int, directory: Path) -> list[dict[str, Any]]:
    """What both hosts of an island have found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "tests.unit.executor.compile.island_host"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(host), str(devices), str(port), str(directory)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for host in (0, 1)
    ]
    try:
        said = [one.communicate(timeout=240)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_sums_over_hosts_have_the_bits_of_gloo(devices: int, tmp_path: Path) -> None:
    """Whether the values are exchanged or XLA runs the computation, as it does where a host is not there in time."""
    first, second = island(devices, tmp_path)
    assert first == second
    assert all(case["same"] for case in first.values()), {name for name, case in first.items() if not case["same"]}
    if devices == 1:
        exchanged = {name for name, case in first.items() if case["over"]}
        names = (
            "float32",
            "float64",
            "int32",
            "uint64",
            "the same on all",
            "in another order",
            *(f"bits {seed}" for seed in range(9)),
        )
        assert exchanged.issuperset(names)
        assert sum(name.startswith("drawn") for name in exchanged) >= DRAWN_OVER_HOSTS
    else:
        assert first["one host"]["by_device"]
        assert not any(case["by_device"] for name, case in first.items() if name != "one host")
