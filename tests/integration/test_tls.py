"""TLS: clients and the runtime's own processes talk encrypted, nobody comes in past it; without it, loopback only."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.transport import streams
from tests.certificates import self_signed

UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""Ends of a call that no server answered, not even with a refusal."""
TOKEN = "alice-token-0123456789"
TENANTS = {"tenants": [{"name": "alice", "token": TOKEN}]}


@pytest.fixture(scope="module")
def address() -> str:
    """Where other machines would reach this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        found: str = probe.getsockname()[0]
        return found


@pytest.fixture(scope="module")
def cluster(python, tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("operator")
    # The name of the runtime, and the address of the client service; that of the hosts is another one in a cluster.
    certificate, key = self_signed(folder, ["pathways.test", address])
    tenants = folder / "tenants.json"
    tenants.write_text(json.dumps(TENANTS))
    process = python.start("tls_cluster", str(certificate), str(key), str(tenants), address)
    said = process.stdout.readline()
    assert said, process.communicate()[1]
    yield {**json.loads(said), "ca": str(certificate)}
    process.stdin.write("end\n")
    process.stdin.flush()
    python.finish(process)


def test_a_runtime_that_would_be_open_does_not_start(cluster: dict[str, Any], address: str) -> None:
    messages = cluster["refused"]
    assert len(messages) == 8
    both, tokens, tls, everywhere, key, two, table, none = messages
    assert (
        f"would listen at {address} without TLS (tls=(certificate, key)) and tokens for tenants (tenants=file)" in both
    )
    assert f"would listen at {address} without tokens for tenants" in tokens
    assert f"would listen at {address} without TLS" in tls
    assert "0.0.0.0 is no address to connect to" in everywhere
    assert "does not work" in key
    assert "tls takes (certificate, key) or (certificate, key, ca)" in two
    assert "not a table of tenants" in table
    assert "cannot be read" in none


def test_clients_and_islands_work_encrypted(cluster: dict[str, Any]) -> None:
    assert cluster["right"] == [2.0, 3.0, 4.0, 5.0]
    assert cluster["url"].startswith("grpcs://")
    for ca in (cluster["ca"], Path(cluster["ca"]).read_bytes()):
        with pw.connect(cluster["url"], TOKEN, ca=ca) as session, session.virtual_slice((2,), ("x",)) as s:
            x = pw.put(np.arange(1 << 16, dtype=np.float32), slice=s, spec=P("x"))
            doubled = pw.compiled(lambda v: v * 2, slice=s, in_specs=P("x"), out_specs=P("x"))
            np.testing.assert_array_equal(np.asarray(doubled(x)), np.arange(1 << 16, dtype=np.float32) * 2)


def test_a_client_may_name_the_certificate_in_a_variable_and_leave_the_scheme_to_it(
    cluster: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pw.connect(cluster["url"].replace("grpcs://", "grpc://"), TOKEN, ca=cluster["ca"]) as session:
        assert len(session.status()["islands"]) == 2
    monkeypatch.setenv("PATHWAYS_CA", cluster["ca"])
    with pw.connect(cluster["url"], TOKEN) as session:
        assert len(session.status()["islands"]) == 2


def test_unencrypted_connections_and_untrusted_certificates_are_refused(
    cluster: dict[str, Any], within, tmp_path: Path
) -> None:
    plain = cluster["url"].replace("grpcs://", "grpc://")
    with within(8), pytest.raises(pw.errors.ControllerLost, match="does not answer"):
        pw.connect(plain, TOKEN, timeout=2.0)
    with within(8), pytest.raises(pw.errors.ControllerLost, match="does not answer"):
        pw.connect(cluster["url"], TOKEN, timeout=2.0)  # the system does not know this CA
    with pytest.raises(pw.errors.UsageError, match="no certificates in PEM form"):
        pw.connect(cluster["url"], TOKEN, ca=b"-----BEGIN CERTIFICATE-----\nnonsense")
    with pytest.raises(pw.errors.AuthenticationError, match="the token is missing or wrong"):
        pw.connect(cluster["url"], "wrong", ca=cluster["ca"])
    for endpoint in [cluster["url"].removeprefix("grpcs://"), *cluster["links"]]:
        with grpc.insecure_channel(endpoint) as channel:
            for method in (streams.CLIENT_STREAM, streams.ISLAND_STREAM, streams.HOST_STREAM, streams.DATA_STREAM):
                with pytest.raises(grpc.RpcError) as refused:
                    list(channel.stream_stream(method)(iter(()), timeout=2.0))
                assert refused.value.code() in UNREACHABLE


def test_only_what_clients_need_listens_elsewhere(cluster: dict[str, Any], address: str) -> None:
    """The controller's client service and one port of each host; links and JAX's transfer servers stay on loopback."""
    assert all(link.startswith("127.0.0.1:") for link in cluster["links"])
    for pid in cluster["pids"]:
        found = [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        listening = [c.laddr.ip.removeprefix("::ffff:") for c in found]
        # Ray's own server in the process listens everywhere.
        assert set(listening) <= {"127.0.0.1", address, "::", "0.0.0.0"}
        assert listening.count(address) == 1
