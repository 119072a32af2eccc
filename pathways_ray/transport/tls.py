"""TLS: from files to what gRPC and links take, and the check that a certificate is any good before it is relied on."""

from __future__ import annotations

import contextlib
import os
import ssl
from pathlib import Path

import grpc
import msgspec

from pathways_ray.errors import UsageError
from pathways_ray.transport.endpoints import Tls

CA_VARIABLE = "PATHWAYS_CA"
"""A file with the certificates that clients trust, when the caller names none."""

DIALLED = ("DNS", "IP Address")
"""The kinds of a subjectAltName that a client looks for. Others, as the URI of a service mesh, are no place to dial."""


class Trust(msgspec.Struct, frozen=True):
    """The expectation of one end of a connection: a certificate that `roots` (PEM) vouch for, or, where they are
    empty, one that the system trusts; with `name` in it, or, where that is empty, the address that was dialled."""

    roots: bytes = b""
    name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.roots or None)

    def options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.name)] if self.name else []


def trust_of(tls: Tls | None) -> Trust | None:
    """The trust between processes of a runtime. Raises `UsageError` for a file that cannot be read."""
    return None if tls is None else Trust(_read(tls.ca), tls.name)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Raises `UsageError` for a file that cannot be read."""
    return grpc.ssl_server_credentials([(_read(tls.key), _read(tls.certificate))])


def server_context(tls: Tls) -> ssl.SSLContext:
    """The same for a link (`transport.links`). Raises `UsageError` for files that cannot be read or do not fit, and for
    a key with a pass phrase."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _show(context, tls.certificate, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"certificate {tls.certificate} with key {tls.key} does not work: {error}") from None
    return context


def client_context(trust: Trust) -> ssl.SSLContext:
    """The context of a dialling end of a link, which checks the other end's certificate."""
    context = ssl.create_default_context(cadata=_text(trust.roots) if trust.roots else None)
    # Python 3.13 demands extensions by default that gRPC does not, and that many certificates lack.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def client_roots(ca: str | bytes | os.PathLike[str] | None) -> bytes | None:
    """The PEM certificates that a client trusts: those given, or those of the file that PATHWAYS_CA names, or None.

    Args:
        ca: a path, or the PEM bytes themselves.

    Raises:
        UsageError: no certificate was found there.
    """
    if ca is None:
        ca = os.environ.get(CA_VARIABLE) or None
    if ca is None:
        return None
    roots = ca if isinstance(ca, bytes) else _read(os.fspath(ca))
    try:  # unlike `create_default_context`, which takes the system's certificates for none
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(roots))
    except (ssl.SSLError, ValueError) as error:
        what = "the bytes given as ca" if isinstance(ca, bytes) else f"the file {os.fspath(ca)!r} given as ca"
        raise UsageError(f"{what} hold no certificates in PEM form: {error}") from None
    return roots


def checked(certificate: str, key: str, ca: str = "") -> Tls:
    """Files of a certificate that works: the key is its own, `ca` (or it itself) vouches for it, it is valid today.

    Both ends of a connection are played in memory. Raises `UsageError` otherwise, with the reason.
    """
    vouching = ca or certificate
    for path in (certificate, key, vouching):
        _read(path)
    try:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _show(server, certificate, key)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.load_verify_locations(cafile=vouching)
        found = _shake_hands(server, client)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(f"certificate {certificate} with key {key} and CA {vouching} does not work: {error}") from None
    names = [str(value) for kind, value in found.get("subjectAltName", ()) if kind in DIALLED]
    if not names:
        raise UsageError(
            f"certificate {certificate} has no subjectAltName, which clients check; add the name "
            "or the address of the runtime (DNS or IP)"
        )
    return Tls(certificate, key, vouching, names[0])


def _show(context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Has a context show a certificate.

    Raises:
        UsageError: the key has a pass phrase, for which OpenSSL would ask at the terminal.
        ssl.SSLError, OSError: the files do not fit, or cannot be read.
    """

    def ask() -> str:
        raise UsageError(f"key {key} is encrypted; give one without a pass phrase")

    context.load_cert_chain(certificate, key, ask)


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, tuple[tuple[str, str], ...]]:
    """The server's certificate, as a client that trusts it sees it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        for end in (one, other):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    found: dict[str, tuple[tuple[str, str], ...]] = one.getpeercert() or {}  # type: ignore[assignment]
    return found


def _text(roots: bytes) -> str:
    """Certificates as `ssl` takes them: without the letters that only comments have, as names of authorities do."""
    return roots.decode("ascii", "ignore")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read: {error.strerror}") from None
