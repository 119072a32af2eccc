"""Options of a runtime beside its topology, which `pw.init`, `pathways up` and the cluster share; where it listens."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from pathways_ray import limits, names
from pathways_ray.controller.tenants_file import TenantsFile
from pathways_ray.deployment.topology import PLACEMENTS, Auto
from pathways_ray.errors import UsageError
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.transport.endpoints import ListenConfig, check_exposure, is_loopback
from pathways_ray.transport.tls import checked

START_LIMIT_S = 90.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    """The options of a runtime beside its topology.

    Args:
        dispatch: "parallel" or "sequential".
        policy: whose launch goes next, see `scheduler.policies`.
        check_order: have hosts report in which order they enqueue gangs, and schedulers compare.
        compile_limit_s: seconds that a host may compile one program.
        launch_limit_s: seconds that a launch may keep its devices; a tenant may have a limit of its own.
        lost_after_s: seconds without one of its hosts after which an island gets no slices any more.
        silence_limit_s: a process that says nothing for this long counts as lost, on a machine that is not loaded.
        placement: "pack" or "spread", the hosts of each island.
        name: makes the runtime a detached one, and is its name.
        bind: the address at which the controller serves; "" is loopback while all Ray nodes are at one address, else
            where Ray reaches its machine.
        port: of the controller; 0 is a free one.
        client_ports: first and last port for direct links and data streams, see `ListenConfig`.
        token: the operator's, which lets clients in as well; "" makes one.
        tls: files on every machine: a certificate, its key, and, where it is not the certificate itself, what vouches
            for it.
        tenants: a file with the table of tenants (`controller.tenants`), on the machine that starts the runtime.
        isolation: "shared", or "process": every tenant has host processes of its own (docs/security.md).
        insecure: listen beyond loopback although TLS or tenants are missing.
        metrics_port: serve Prometheus metrics there; 0 is a free one, None is not to serve them.
        metrics_bind: at this address; beyond loopback with TLS.
        auto: has an island for each Ray node, and islands follow the nodes; needs a name.
        limit_s: how long to wait for room, and again for the processes.
    """

    dispatch: str = "parallel"
    fusion: bool = True
    coalesce: bool = True
    policy: str = "fifo"
    check_order: bool = False
    launch_limit_s: float = limits.LAUNCH_LIMIT_S
    lost_after_s: float = limits.LOST_AFTER_S
    compile_limit_s: float = limits.COMPILE_LIMIT_S
    silence_limit_s: float = SILENCE_LIMIT_S
    placement: str = "pack"
    name: str = ""
    bind: str = ""
    port: int = 0
    client_ports: tuple[int, int] = (0, 0)
    token: str = ""
    tls: tuple[str, ...] = ()
    tenants: str = ""
    isolation: str = "shared"
    insecure: bool = False
    metrics_port: int | None = None
    metrics_bind: str = LOOPBACK
    auto: Auto | None = None
    limit_s: float = START_LIMIT_S

    def check(self) -> None:
        """Raises `UsageError` for an invalid value."""
        for name in ("fusion", "coalesce", "check_order", "insecure"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("policy", "name", "bind", "token", "tenants", "metrics_bind"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(f"{name} must be a text, not {getattr(self, name)!r}")
        if self.dispatch not in ("parallel", "sequential"):
            raise UsageError(f"dispatch must be 'parallel' or 'sequential', not {self.dispatch!r}")
        policy_named(self.policy)
        if not _is_number(self.lost_after_s) or not self.lost_after_s >= 1.0:
            raise UsageError(f"lost_after_s must be at least a second, not {self.lost_after_s!r}")
        if self.placement not in PLACEMENTS:
            raise UsageError(f"placement must be 'pack' or 'spread', not {self.placement!r}")
        if self.isolation not in ("shared", "process"):
            raise UsageError(f"isolation must be 'shared' or 'process', not {self.isolation!r}")
        if self.auto is not None and (self.isolation == "process" or not self.name):
            raise UsageError("islands follow nodes in a runtime that has a name, and islands that all tenants share")
        if self.isolation == "process" and not self.tenants:
            raise UsageError("isolation='process' needs tenants=FILE: processes are separated by tenant")
        for name in ("launch_limit_s", "compile_limit_s", "silence_limit_s"):
            if not _is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise UsageError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        if self.name:
            names.check_name(self.name)
        if self.tls and len(self.tls) not in (2, 3):
            raise UsageError(f"tls takes (certificate, key) or (certificate, key, ca), not {self.tls!r}")
        self.listen([LOOPBACK])  # what is wrong on one machine is wrong on several

    def listen(self, machines: Sequence[str]) -> ListenConfig:
        """The addresses of the processes: loopback while all machines are at one address and nothing else is wanted.

        Where the controller is bound to the address by which Ray's nodes know this machine, machines that come later
        reach it: so hosts and schedulers serve at the addresses of their machines as well.

        Args:
            machines: the addresses of the Ray nodes.

        Raises:
            UsageError: others could not reach the controller there; the certificate or the table of tenants is invalid;
                the runtime would listen beyond loopback without them.
        """
        if self.bind in ("0.0.0.0", "::", "[::]"):
            raise UsageError(f"{self.bind} is no address to connect to; bind to where others reach this machine")
        if is_loopback(self.bind) and not all(map(is_loopback, machines)) and len(machines) > 1:
            raise UsageError(
                f"Ray has nodes at {', '.join(machines)}, which could not reach a controller at {self.bind}"
            )
        tls = checked(*self.tls) if self.tls else None
        TenantsFile(self.tenants, strict=True)
        here = LOOPBACK if len(machines) == 1 and (self.bind not in machines or is_loopback(self.bind)) else ""
        front = self.bind or here
        listen = ListenConfig(front, self.port, front if here else "", here, tls, self.tenants, self.client_ports)
        check_exposure(listen, machines, self.insecure)
        if self.port and (front, self.port) == (self.metrics_bind, self.metrics_port):
            raise UsageError(
                f"the controller and its metrics cannot both serve at {front}:{self.port}; choose two ports"
            )
        return listen

    def metrics_at(self) -> tuple[str, int] | None:
        """Address and port of the metrics. Raises `UsageError` if the operator's token would be sent unencrypted."""
        if self.metrics_port is None:
            return None
        if not (is_loopback(self.metrics_bind) or self.tls or self.insecure):
            raise UsageError(
                f"metrics at {self.metrics_bind} are opened by the operator's token, which needs TLS beyond loopback "
                "(tls=(certificate, key)), or insecure=True on a network that is yours alone"
            )
        return self.metrics_bind, usable_port(self.metrics_bind, self.metrics_port)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def usable_port(address: str, port: int) -> int:
    """The port, or a free one in place of 0: below those that the kernel gives to any connection, so that it is still
    free for who serves there later.

    Raises:
        UsageError: this machine cannot serve there.
    """
    for number in [port] if port else [*random.sample(range(20_000, 30_000), 20), 0]:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.strip("[]"), number))
                return int(probe.getsockname()[1])
            except OSError as error:
                reason = error
    raise UsageError(f"the controller cannot serve at {address}:{port} of this machine: {reason}") from reason
