"""Certificates for tests of encrypted connections: signed by themselves, for a day."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def self_signed(folder: Path, names: Iterable[str]) -> tuple[Path, Path]:
    """Writes a certificate of names, IP addresses, URIs and mail addresses, perhaps of none, and its key into a folder;
    returns both."""
    key = ec.generate_private_key(ec.SECP256R1())
    alternatives = [_alternative(name) for name in names]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    )
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    made = builder.sign(key, hashes.SHA256())
    folder.mkdir(exist_ok=True)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate, secret = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(pem))
    secret.write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    return certificate, secret


def _alternative(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    if "@" in name:
        return x509.RFC822Name(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
