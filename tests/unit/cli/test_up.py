"""`pathways up` with options that cannot be: refused before any Ray cluster is looked for."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from click.testing import CliRunner

from pathways_ray.cli import commands
from pathways_ray.cli.up import end_on_signals
from pathways_ray.client import registry
from pathways_ray.deployment import cluster, ray_connection
from pathways_ray.deployment.options import Options

NOWHERE = "127.0.0.1:1"
"""An address without a Ray cluster, which whatever gets so far complains of."""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--island", "cpu:host=2"),
            "an island is written like cpu:hosts=2,devices=4,topology=2x4,torus, not 'cpu:host=2'",
        ),
        (("--island", "cpu", "--islands", "2"), "--island says all of an island"),
        (("--islands", "0"), "--islands takes a number of at least 1, or auto, not '0'"),
        (("--islands", "auto", "--hosts-per-island", "2"), "--islands auto has one host for each Ray node"),
        (("--islands", "auto", "--island", "cpu"), "--island says all of an island"),
        (("--bind", "0.0.0.0"), "0.0.0.0 is no address to connect to"),
        (("--bind", "192.0.2.77"), "the runtime would listen at 192.0.2.77 without TLS"),
        (("--tenants", "/nowhere/tenants.json"), "cannot be read"),
        (("--tls-cert", "cert.pem"), "TLS needs --tls-cert and --tls-key"),
        (("--policy", "unfair"), "unfair"),
        (("--name", "Bad Name"), "a runtime's name has 1 to 40 lower-case letters"),
        (
            ("--port", "7777", "--metrics-port", "7777"),
            "the controller and its metrics cannot both serve at 127.0.0.1:7777",
        ),
        (("--address", "local"), "a Ray cluster at 'local' ends with this process"),
        ((), f"no Ray cluster at '{NOWHERE}'"),
    ],
)
def test_an_up_that_cannot_be_is_refused_in_one_line(options: tuple[str, ...], says: str) -> None:
    found = CliRunner().invoke(commands, ["up", "--address", NOWHERE, *options], prog_name="pathways")
    assert (found.exit_code, found.stdout) == (2, "")
    assert says in found.stderr
    (line,) = found.stderr.splitlines()
    assert line.startswith("pathways: ")
    assert not ray.is_initialized()


def test_limits_reach_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(Options, "check", lambda self: seen.append(self))
    given = ("--launch-limit", "90", "--compile-limit", "30", "--silence-limit", "12", "--lost-after", "300")
    CliRunner().invoke(commands, ["up", "--address", NOWHERE, *given])
    (options,) = seen
    limits = (options.launch_limit_s, options.compile_limit_s, options.silence_limit_s, options.lost_after_s)
    assert limits == (90.0, 30.0, 12.0, 300.0)


def test_a_terminal_that_closes_may_say_so_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shell does, and it does itself: what ends the start is not interrupted in turn."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which these tests may be started without
        end_on_signals()
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGHUP
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_start_that_is_to_outlive_its_terminal_does() -> None:
    """`nohup` ignores the signal."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        end_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_token_file_of_other_bytes_than_text_is_refused_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(bytes(range(128, 256)))
    found = CliRunner().invoke(commands, ["up", "--token-file", str(file)], prog_name="pathways")
    assert found.exit_code == 2
    assert f"{file} must begin with a line of at least" in found.stderr
    assert "Traceback" not in found.stderr


def test_an_interrupt_does_not_hide_a_runtime_that_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the command leaves Ray: the runtime stays, so its url and token are told, and kept."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    made = SimpleNamespace(topology=SimpleNamespace(islands=()), url="grpc://127.0.0.1:1", token="t", ca="", metrics="")
    kept: list[registry.Record] = []
    monkeypatch.setattr(ray_connection, "connect_ray", lambda *_: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:2"))
    monkeypatch.setattr(cluster, "start", lambda *_: made)
    monkeypatch.setattr(ray, "shutdown", lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(registry, "keep", kept.append)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    try:
        found = CliRunner().invoke(commands, ["up", "--json"], prog_name="pathways")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found.exit_code == 0
    assert json.loads(found.stdout)["token"] == "t"
    assert [record.token for record in kept] == ["t"]
