"""The addresses at which a runtime listens, and the TLS and tokens that it needs to listen there.

The rule: on loopback anything goes; elsewhere clients are let in only by TLS and with tokens of their own. A runtime
that would listen elsewhere without them does not start, unless its operator has said `insecure`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import msgspec

from pathways_ray.errors import UsageError


class Tls(msgspec.Struct, frozen=True):
    """Files on every machine of the runtime: its certificate, the key, and the certificates that vouch for it.

    `name` is one of the names in the certificate: the runtime's processes expect it of each other, whatever address
    they are at.
    """

    certificate: str
    key: str
    ca: str
    name: str = ""


class ListenConfig(msgspec.Struct, frozen=True):
    """The addresses of a runtime's processes. An empty one is the address at which Ray reaches each machine.

    Args:
        front: the controller's address for clients.
        port: the controller's; 0 is a free one.
        data: the hosts' address for clients.
        links: the address for the runtime's own processes.
        tls: None for no encryption.
        tenants: the file with the table of tenants, on the controller's machine; "" for no tenants.
        client_ports: the first and the last of the ports for direct links and data streams, which a firewall has to
            let clients to; (0, 0) for any that are free.
    """

    front: str = "127.0.0.1"
    port: int = 0
    data: str = "127.0.0.1"
    links: str = "127.0.0.1"
    tls: Tls | None = None
    tenants: str = ""
    client_ports: tuple[int, int] = (0, 0)

    @property
    def scheme(self) -> str:
        return "grpc://" if self.tls is None else "grpcs://"


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine can connect to what listens at `address`."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False  # a name: who can reach it is not known here


def check_exposure(listen: ListenConfig, machines: Iterable[str], insecure: bool) -> None:
    """Raises `UsageError` for a runtime that would accept unauthenticated peers from the network.

    Args:
        machines: the addresses of the machines, for an address that is left open.
        insecure: the operator knows, and wants it.
    """
    if not 0 <= listen.port < 1 << 16:
        raise UsageError(f"port {listen.port} is invalid; choose one of 0 (a free one) to 65535")
    first, last = listen.client_ports
    if (first, last) != (0, 0) and not 0 < first <= last < 1 << 16:
        raise UsageError(f"client ports {first}-{last} are invalid; choose a first and a last one of 1 to 65535")
    everywhere = list(machines)
    listening = [a for bind in (listen.front, listen.data, listen.links) for a in ([bind] if bind else everywhere)]
    open_to = sorted({address for address in listening if not is_loopback(address)})
    missing = [
        text
        for text, there in (
            ("TLS (tls=(certificate, key))", listen.tls is not None),
            ("tokens for tenants (tenants=file)", bool(listen.tenants)),
        )
        if not there
    ]
    if open_to and missing and not insecure:
        raise UsageError(
            f"the runtime would listen at {', '.join(open_to)} without {' and '.join(missing)}: anybody on the network "
            "could read along or come in. Give both, or listen on loopback, or say insecure=True if the network is "
            "yours alone"
        )


def joined(address: str, port: int) -> str:
    """`address:port`, with brackets where the address itself has colons."""
    return f"[{address}]:{port}" if ":" in address and not address.startswith("[") else f"{address}:{port}"
