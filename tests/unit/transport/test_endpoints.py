"""Where a runtime may listen: on loopback as it likes, elsewhere with TLS and tokens, or when its operator insists."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from pathways_ray.errors import UsageError
from pathways_ray.transport import tls
from pathways_ray.transport.endpoints import ListenConfig, Tls, check_exposure, is_loopback, joined
from tests.certificates import self_signed

TLS = Tls("c", "k", "c", "name")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.7", "::1", "[::1]", "localhost"])
def test_loopback(address: str) -> None:
    assert is_loopback(address)
    check_exposure(ListenConfig(front=address, data=address, links=address), ["10.0.0.1"], insecure=False)


@pytest.mark.parametrize(
    "address", ["10.0.0.1", "0.0.0.0", "::", "example.org", "127.0.0.1.example.org", "", "2001:db8::1"]
)
def test_elsewhere(address: str) -> None:
    assert not is_loopback(address)


OPEN = [
    ListenConfig(front="10.0.0.1"),
    ListenConfig(data="10.0.0.1"),
    ListenConfig(links="10.0.0.1"),
    ListenConfig(front=""),
    ListenConfig(links=""),
    ListenConfig(front="example.org"),
]


@pytest.mark.parametrize("listen", OPEN, ids=str)
def test_open_to_others_takes_tls_and_tokens(listen: ListenConfig) -> None:
    machines = ["10.0.0.2", "10.0.0.3"]
    for certificate, tenants, missing in (
        (None, "", r"without TLS \(tls=.*\) and tokens for tenants \(tenants=file\)"),
        (TLS, "", "without tokens for tenants"),
        (None, "file", r"without TLS \(tls=\(certificate, key\)\): anybody"),
    ):
        asked = ListenConfig(listen.front, 0, listen.data, listen.links, certificate, tenants)
        with pytest.raises(UsageError, match=f"would listen at .*{missing}"):
            check_exposure(asked, machines, insecure=False)
        check_exposure(asked, machines, insecure=True)
    check_exposure(ListenConfig(listen.front, 0, listen.data, listen.links, TLS, "file"), machines, insecure=False)


def test_machines_that_are_all_this_one_need_nothing() -> None:
    check_exposure(ListenConfig(front="", data="", links=""), iter(["127.0.0.2", "127.0.0.3"]), insecure=False)


@pytest.mark.parametrize("port", [-1, 65_536])
def test_ports(port: int) -> None:
    with pytest.raises(UsageError, match=f"port {port} is invalid; choose one of 0 "):
        check_exposure(ListenConfig(port=port), [], insecure=True)


def test_addresses_with_ports() -> None:
    assert joined("10.0.0.1", 5) == "10.0.0.1:5"
    assert joined("::1", 5) == joined("[::1]", 5) == "[::1]:5"


# --- certificates -----------------------------------------------------------------------------------------------------


def made(folder: Path, *names: str) -> tuple[str, str]:
    """A self-signed certificate and its key."""
    certificate, key = self_signed(folder, names)
    return str(certificate), str(key)


def test_a_certificate_that_works(tmp_path: Path) -> None:
    certificate, key = made(tmp_path / "good", "pathways.test", "127.0.0.1")
    assert tls.checked(certificate, key) == Tls(certificate, key, certificate, "pathways.test")
    roots = Path(certificate).read_bytes()
    assert tls.client_roots(certificate) == tls.client_roots(Path(certificate)) == tls.client_roots(roots) == roots


def test_nobody_is_asked_for_the_pass_phrase_of_a_key(tmp_path: Path) -> None:
    certificate, key = made(tmp_path / "good", "pathways.test")
    secret = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    Path(key).write_bytes(secret.private_bytes(*form, serialization.BestAvailableEncryption(b"open")))
    for use in (
        lambda: tls.checked(certificate, key),
        lambda: tls.server_context(Tls(certificate, key, certificate, "")),
    ):
        with pytest.raises(UsageError, match=r"key\.pem is encrypted; give one without a pass phrase"):
            use()


def test_a_ca_file_may_have_comments_in_any_language(tmp_path: Path) -> None:
    certificate, key = made(tmp_path / "good", "pathways.test")
    ca = tmp_path / "ca.pem"
    ca.write_bytes("# Autorität für Zürich\n".encode() + Path(certificate).read_bytes())
    assert tls.checked(certificate, key, str(ca)).ca == str(ca)
    roots = tls.client_roots(ca)
    assert roots == ca.read_bytes()
    assert tls.client_context(tls.Trust(roots)).cert_store_stats()["x509"] == 1


@pytest.mark.parametrize("name", ["pathways.test", "127.0.0.1"])
def test_processes_look_for_a_name_or_an_address_that_can_be_dialled(tmp_path: Path, name: str) -> None:
    certificate, key = made(
        tmp_path / "mesh", "spiffe://example.test/pathways", "admin@example.test", name, "other.test"
    )
    assert tls.checked(certificate, key).name == name


def test_certificates_that_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = made(tmp_path / "good", "pathways.test")
    other, other_key = made(tmp_path / "other", "other.test")
    nameless, nameless_key = made(tmp_path / "nameless")
    unreachable, unreachable_key = made(tmp_path / "mesh", "spiffe://example.test/pathways", "admin@example.test")
    for arguments, message in (
        ((certificate, other_key), "does not work: .*KEY_VALUES_MISMATCH"),
        ((certificate, key, other), "does not work: .*CERTIFICATE_VERIFY_FAILED"),
        ((key, key), "does not work"),
        ((certificate, str(tmp_path / "none")), "none' cannot be read: No such file"),
        ((nameless, nameless_key), "has no subjectAltName, which clients check; add the name or the address"),
        ((unreachable, unreachable_key), "has no subjectAltName, which clients check; add the name or the address"),
    ):
        with pytest.raises(UsageError, match=message):
            tls.checked(*arguments)
    for roots in (b"nonsense", "Zürich".encode(), "ü".encode(), b""):
        with pytest.raises(UsageError, match="the bytes given as ca hold no certificates in PEM form"):
            tls.client_roots(roots)
    monkeypatch.delenv(tls.CA_VARIABLE, raising=False)
    assert tls.client_roots(None) is None
    monkeypatch.setenv(tls.CA_VARIABLE, other)
    assert tls.client_roots(None) == Path(other).read_bytes()


@pytest.mark.parametrize("ports", [(1, 0), (0, 5), (5, 4), (1, 65536), (-1, 5)])
def test_client_ports_are_a_first_and_a_last_one(ports: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"client ports .* are invalid; choose a first and a last one"):
        check_exposure(ListenConfig(client_ports=ports), [], insecure=True)
