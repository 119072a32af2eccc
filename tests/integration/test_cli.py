"""The command line, as a user runs it: commands in processes of their own, against real clusters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import registry

CLI = ("-m", "pathways_ray.cli")
NO_CLUSTER_SET = {"PATHWAYS_URL": "", "PATHWAYS_TOKEN": ""}
PNG = b"\x89PNG\r\n\x1a\n"
MEBIBYTE = np.zeros(1 << 18, np.float32)

MODES = {
    "pathways": ["opbyop", "chained", "fused"],
    "jax": ["opbyop", "fused"],
    "ray": ["opbyop", "chained", "fused"],
}


@pytest.fixture
def run(python, tmp_path):
    """Runs `pathways` with its temporary files in a folder of its own; returns exit status, stdout and stderr."""

    def run_command(*arguments: str, timeout: float = 60.0, **environment: str) -> tuple[int, str, str]:
        # Ray has paths of limited length, so its files stay where they are.
        folders = {"TMPDIR": str(tmp_path), "RAY_TMPDIR": "/tmp"}
        process = python.command(*CLI, *arguments, **{**NO_CLUSTER_SET, **folders, **environment})
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err

    return run_command


def test_help(run) -> None:
    code, out, err = run("bench", "dispatch", "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: pathways bench dispatch")


# --- status -----------------------------------------------------------------------------------------------------------


def test_status_shows_who_holds_what(run, session, slices) -> None:
    with pw.virtual_slice((2,), ("x",), island=1, name="pair") as pair:
        held = pw.put(MEBIBYTE, slice=pair, spec=P("x")).block_until_ready()
        code, out, err = run("status", "--url", session.url, "--token", session.token, "--json")
        shown = run("status", "--url", session.url, "--token", session.token)
        del held
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["url"] == session.url
    assert [island["island"] for island in found["islands"]] == [0, 1]
    (mine,) = [one for one in found["slices"] if one["name"] == "pair"]
    assert (mine["mesh"], mine["island"], mine["devices"]) == ({"x": 2}, 1, list(pair.devices))
    devices = {
        device["device"]: device["slices"]
        for island in found["islands"]
        for host in island["hosts"]
        for device in host["devices"]
    }
    assert len(devices) == 8
    assert {name for name, holders in devices.items() if "session 1: pair" in holders} == set(pair.devices)
    (client,) = found["sessions"]  # the command itself has no session
    assert client["name"] == "init"
    assert client["buffers"] >= 1
    assert client["bytes"] >= MEBIBYTE.nbytes
    assert {"programs", "in_flight", "waiting"} <= client.keys()
    assert shown[0] == 0
    assert "pair" in shown[1]
    assert "session 1 init" in shown[1]


def test_status_names_the_log_of_every_process(run, session, slices) -> None:
    _, out, _ = run("status", "--url", session.url, "--token", session.token, "--json")
    logs = {log["process"]: Path(log["path"]) for log in json.loads(out)["logs"]}
    assert {"controller", "resource manager", "scheduler 0", "host 0"} <= logs.keys()
    events = {
        process: [json.loads(line)["event"] for line in path.read_text().splitlines()] for process, path in logs.items()
    }
    assert all(events.values()), "each process has logged its start"
    assert "host joined" in events["scheduler 0"]


def test_status_finds_the_cluster_of_this_user(run, session, tmp_path) -> None:
    """`pw.init` left a record; a process that is told nothing finds the cluster by it."""
    (record,) = [one for one in registry.running() if one.pid == os.getpid()]
    assert (record.url, record.token) == (session.url, session.token)
    there = tmp_path / registry.folder().name
    there.mkdir(mode=0o700)
    shutil.copy(registry.folder() / f"{record.pid}.json", there)
    code, out, _ = run("status", "--json")
    assert code == 0
    assert json.loads(out)["url"] == session.url
    code, out, _ = run("status", "--json", PATHWAYS_URL=session.url)  # its token is known
    assert code == 0

    # A second cluster: the user has to say which.
    other = registry.Record("grpc://127.0.0.1:1", "t", os.getppid())
    (there / f"{other.pid}.json").write_text(json.dumps({"url": other.url, "token": other.token, "pid": other.pid}))
    code, out, err = run("status")
    assert (code, out) == (2, "")
    assert err.startswith("pathways: several clusters of yours run on this machine:")
    assert f"{session.url} (process {os.getpid()})" in err
    assert err.endswith("choose one with --url\n")


def test_status_takes_the_environment(run, session) -> None:
    code, out, _ = run("status", "--json", PATHWAYS_URL=session.url, PATHWAYS_TOKEN=session.token)
    assert code == 0
    assert json.loads(out)["url"] == session.url


@pytest.mark.parametrize(
    ("url", "token", "says"),
    [
        (None, None, "no cluster of yours runs on this machine"),
        ("running", "wrong", "the token is missing or wrong"),
        ("running", "", "it needs --token as well"),
        ("grpc://127.0.0.1:1", "token", "no cluster answers at grpc://127.0.0.1:1:"),
        ("grpc://no-such-host.invalid:1", "token", "no cluster answers at"),
        ("localhost", "token", "looks like grpc://host:port"),
    ],
)
def test_status_says_what_is_wrong(run, session, within, url, token, says) -> None:
    options = ["--url", session.url if url == "running" else url, "--token", token] if url else []
    with within(15.0):
        code, out, err = run("status", *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("pathways: ")
    assert says in line


# --- bench ------------------------------------------------------------------------------------------------------------


def check_dispatch(result: dict[str, Any]) -> None:
    """The form that readers of the JSON rely on."""
    assert result["benchmark"] == "dispatch"
    assert result["machine"]["cores"] >= 1
    found: dict[str, list[str]] = {}
    for row in result["rows"]:
        assert {"system", "mode", "hosts", "devices_per_host", "computations_per_second"} == row.keys()
        assert (row["hosts"], row["devices_per_host"]) == (1, 4)
        rate = row["computations_per_second"]
        assert 0 < rate["min"] <= rate["median"] <= rate["max"]
        found.setdefault(row["system"], []).append(row["mode"])
    assert {system: sorted(found[system]) for system in MODES} == {name: sorted(modes) for name, modes in MODES.items()}
    assert result["ratios"]
    assert all(0 < ratio["min"] <= ratio["median"] <= ratio["max"] for ratio in result["ratios"])


@pytest.mark.long
@pytest.mark.timeout(240)
def test_bench_dispatch(run, python, tmp_path) -> None:
    figure = tmp_path / "new" / "dispatch.png"
    code, out, err = run("bench", "dispatch", "--smoke", "--json", "-", "--figure", str(figure), timeout=200.0)
    assert code == 0, err
    check_dispatch(json.loads(out))
    assert "computations per second" in err
    assert figure.read_bytes().startswith(PNG)
    python.assert_none_left()


# --- demo -------------------------------------------------------------------------------------------------------------


def check_demo(result: dict[str, Any], steps: int) -> None:
    assert result["ok"] is True
    programs = {program["program"]: program for program in result["programs"]}
    assert list(programs) == ["figure2", "ping_pong", "language_model"]
    assert all(check["ok"] for program in programs.values() for check in program["checks"])
    assert programs["figure2"]["checks"][0]["came"] == "[3.0, 5.0], [2.0, 4.0]"
    assert len(programs["language_model"]["losses"]) == steps
    check_dispatch(result["dispatch"])


@pytest.mark.long
@pytest.mark.timeout(240)
def test_demo(run, python, tmp_path) -> None:
    results = tmp_path / "results"
    code, out, err = run("demo", "--smoke", "--output", str(results), timeout=200.0)
    assert code == 0, err
    check_demo(json.loads((results / "demo.json").read_text()), steps=3)
    assert (results / "dispatch.png").read_bytes().startswith(PNG)
    for text in ("figure2", "ping_pong", "language_model", "bits of plain JAX", "computations per second", "in all"):
        assert text in out
    python.assert_none_left()
    assert [one.name for one in (tmp_path / registry.folder().name).iterdir() if one.name != "logs"] == []


def launches(run) -> int:
    """Launches that the cluster has admitted so far."""
    code, out, err = run("status", "--json")
    assert code == 0, err
    return json.loads(out)["launches"]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_ctrl_c_ends_the_demo_and_its_cluster(run, python, tmp_path) -> None:
    process = python.command(*CLI, "demo", "--output", str(tmp_path), TMPDIR=str(tmp_path), RAY_TMPDIR="/tmp")
    for line in process.stdout:
        if line.startswith("language_model"):
            break
    assert len(python.alive()) > 5
    before = launches(run)
    while launches(run) == before:  # until it trains
        pass
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=30.0)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert "Aborted!" in err
    python.assert_none_left()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_whole_demo(run, python, tmp_path) -> None:
    results = tmp_path / "results"
    start = time.monotonic()
    code, _, err = run("demo", "--output", str(results), timeout=500.0)
    print(f"the demo took {time.monotonic() - start:.0f} s")
    assert code == 0, err
    check_demo(json.loads((results / "demo.json").read_text()), steps=200)
    python.assert_none_left()
