"""Starting a runtime: Ray, the actors, and their end. The only module that imports actors.

Who starts whom: `start` starts Ray where none runs, then all actors at once. They find each other through the resource
manager: controller and schedulers publish their addresses there, hosts ask for their scheduler's.

An embedded runtime ends with the process that started it. A detached one stays until `detached.remove`.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray

from pathways_ray import limits, names
from pathways_ray.controller.actor import Controller
from pathways_ray.controller.metrics_server import metrics_url
from pathways_ray.controller.tenants_file import TenantsFile
from pathways_ray.deployment import detached, placement
from pathways_ray.deployment.islands import IslandActors, Processes, actor, kill, start_island
from pathways_ray.deployment.ray_connection import Leave, connect_ray
from pathways_ray.deployment.tenant_islands import TenantIslands
from pathways_ray.deployment.topology import PLACEMENTS, Resources, Topology
from pathways_ray.errors import AlreadyInitialized, PathwaysError, UsageError
from pathways_ray.executor.profiling import crash_log
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.resource_manager.actor import GROUPS, ResourceManager
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.transport.endpoints import ListenConfig, check_exposure, is_loopback
from pathways_ray.transport.tls import checked

START_LIMIT_S = 90.0
RECORD_LIMIT_S = 600.0
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
        limit_s: how long to wait for room, and again for the processes.
    """

    dispatch: str = "parallel"
    fusion: bool = True
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
    limit_s: float = START_LIMIT_S

    def check(self) -> None:
        """Raises `UsageError` for an invalid value."""
        if self.dispatch not in ("parallel", "sequential"):
            raise UsageError(f"dispatch must be 'parallel' or 'sequential', not {self.dispatch!r}")
        policy_named(self.policy)
        if not self.lost_after_s >= 1.0:
            raise UsageError(f"lost_after_s must be at least a second, not {self.lost_after_s!r}")
        if self.placement not in PLACEMENTS:
            raise UsageError(f"placement must be 'pack' or 'spread', not {self.placement!r}")
        if self.isolation not in ("shared", "process"):
            raise UsageError(f"isolation must be 'shared' or 'process', not {self.isolation!r}")
        if self.isolation == "process" and not self.tenants:
            raise UsageError("isolation='process' needs tenants=FILE: processes are separated by tenant")
        for name in ("launch_limit_s", "silence_limit_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be a positive number of seconds, not {getattr(self, name)!r}")
        if self.name:
            names.check_name(self.name)
        if self.tls and len(self.tls) not in (2, 3):
            raise UsageError(f"tls takes (certificate, key) or (certificate, key, ca), not {self.tls!r}")
        self.listen([LOOPBACK])  # what is wrong on one machine is wrong on several

    def listen(self, machines: Sequence[str]) -> ListenConfig:
        """The addresses of the processes: loopback while all machines are at one address and nothing else is wanted.

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
        here = LOOPBACK if len(machines) == 1 else ""
        front = self.bind or here
        listen = ListenConfig(front, self.port, front if here else "", here, tls, self.tenants, self.client_ports)
        check_exposure(listen, machines, self.insecure)
        return listen


@dataclass
class Cluster:
    """The processes of a running cluster, as their owner holds them."""

    url: str
    token: str
    runtime: str
    topology: Topology
    controller: Any
    islands: list[IslandActors]
    actors: list[Any]
    groups: list[Any]
    leave_ray: Leave | None
    ca: str = ""
    metrics: str = ""
    pids: list[int] = field(default_factory=list)

    @property
    def resource_manager(self) -> Any:
        return self.actors[0]

    @property
    def hosts(self) -> dict[int, Any]:
        """The actors of the hosts, by number."""
        return {number: host for island in self.islands for number, host in island.hosts.items()}

    def record(self) -> None:
        """Has every host note when each of its computations runs, until `recorded`."""
        _answers([host.record.remote() for host in self.hosts.values()])

    def recorded(self) -> dict[int, Sequence[Any]]:
        """Computations of each host since `record`, in the order in which they were enqueued, as
        `executor.timeline.Computed`; empty where a host did not answer."""
        answers = _answers([host.recorded.remote() for host in self.hosts.values()])
        return dict(zip(self.hosts, answers, strict=True)) if answers else {}

    def stop(self) -> None:
        """Kills every actor; leaves Ray, or stops it, where `start` had joined or started it."""
        kill(reversed(self.actors))  # hosts first
        placement.free(self.groups)
        crash_log.forget(self.runtime)
        if self.leave_ray is not None:
            self.leave_ray()


def start(
    topology_on: Callable[[Resources], Topology], address: str | None, options: Options, ray_options: dict[str, Any]
) -> Cluster:
    """Starts a cluster and waits until every host has joined.

    Args:
        topology_on: makes the topology from what the Ray nodes have.
        address: of the Ray cluster; None starts Ray here.

    Raises:
        UsageError: a bad option.
        AlreadyInitialized: a detached runtime of this name is there.
        Unschedulable: Ray cannot place the hosts.
        PathwaysError: a process did not come up in time.
    """
    options.check()
    leave_ray = connect_ray(address, ray_options)
    try:
        topology = topology_on([node["Resources"] for node in placement.alive_nodes()])
        others = ", ".join({island.platform for island in topology.islands} - {"cpu"})
        if options.isolation == "process" and others:
            raise UsageError(f"isolation='process' is there for platform cpu only, and the runtime has {others}")
        return _start_actors(topology, leave_ray, options)
    except BaseException:
        if leave_ray is not None:
            leave_ray()
        raise


def _start_actors(topology: Topology, leave_ray: Leave | None, options: Options) -> Cluster:
    outlives = bool(options.name)
    runtime = options.name or f"embedded-{secrets.token_hex(8)}"
    listen = options.listen(sorted({node["NodeManagerAddress"] for node in placement.alive_nodes()}))
    # The successor of a controller serves on the same port, so that the url stays.
    listen = msgspec.structs.replace(listen, port=_usable_port(listen.front, listen.port))
    metrics_at = _metrics_at(options)
    token = options.token or secrets.token_hex(16)
    link_secrets = (secrets.token_hex(16), secrets.token_hex(16))
    islands = topology.members()
    near = placement.here()
    common = Processes(
        runtime,
        listen,
        options.policy,
        options.launch_limit_s,
        options.compile_limit_s,
        options.silence_limit_s,
        options.check_order,
        outlives,
        near,
    )

    made: list[Any] = []
    groups: list[Any] = []
    try:
        # The first one has the name of the runtime for itself: of two that start at once, one gets here.
        # All find it by name: a handle among the arguments would keep Ray from restarting them.
        manager_name = names.resource_manager(runtime)
        first = actor(
            common, ResourceManager, manager_name, num_cpus=0, max_concurrency=1000, concurrency_groups=dict(GROUPS)
        )
        try:
            settings = (runtime, islands, *link_secrets, options.silence_limit_s, options.lost_after_s)
            manager = first.options(scheduling_strategy=near).remote(*settings)
        except ValueError as error:
            raise AlreadyInitialized(
                f"a runtime named {runtime!r} is on this Ray cluster; 'pathways status' shows it, 'pathways down' "
                "ends it, and --name starts another one beside it"
            ) from error
        made.append(manager)
        groups += placement.place(topology, runtime, options.placement, outlives, options.limit_s)
        front = actor(common, Controller, names.controller(runtime), num_cpus=0, max_concurrency=4)
        controller = front.options(scheduling_strategy=near).remote(
            runtime,
            listen,
            token,
            link_secrets,
            options.dispatch == "parallel",
            options.fusion,
            options.policy,
            metrics_at,
            islands,
            options.compile_limit_s,
            options.isolation == "process",
            options.silence_limit_s,
            options.launch_limit_s,
        )
        made.append(controller)
        started: list[IslandActors] = []
        for number, members in islands.items():
            started.append(start_island(common, number, members, topology.islands[number], groups[number]))
            made += started[-1].all()
        if options.isolation == "process":
            starter = actor(common, TenantIslands, names.tenant_islands(runtime), num_cpus=0, max_concurrency=4)
            made.append(starter.options(scheduling_strategy=near).remote(common, topology, groups))
        deadline = time.monotonic() + options.limit_s
        url = _await(controller.start.remote(), "the controller did not start", deadline)
        _await([answer for island in started for answer in island.started()], "an island did not start", deadline)
        ca = listen.tls.ca if listen.tls is not None else ""
        url = listen.scheme + url
        metrics = ""
        if metrics_at is not None:
            metrics = metrics_url(*metrics_at, listen.tls)
        return Cluster(url, token, runtime, topology, controller, started, made, groups, leave_ray, ca, metrics)
    except BaseException:
        if outlives and made:
            with contextlib.suppress(PathwaysError):
                detached.remove(runtime)  # by name, since an interrupted call may have made what it did not return
        else:
            kill(made)
            placement.free(groups)
            crash_log.forget(runtime)
        raise


def _answers(asked: list[Any]) -> list[Any]:
    """Answers of actors; none where one of them has died or is too slow: a launch reports that better."""
    try:
        answers: list[Any] = ray.get(asked, timeout=RECORD_LIMIT_S)
    except ray.exceptions.RayError:
        return []
    return answers


def _metrics_at(options: Options) -> tuple[str, int] | None:
    """Address and port of the metrics. Raises `UsageError` if the operator's token would be sent unencrypted."""
    if options.metrics_port is None:
        return None
    if not (is_loopback(options.metrics_bind) or options.tls or options.insecure):
        raise UsageError(
            f"metrics at {options.metrics_bind} are opened by the operator's token, which needs TLS beyond loopback "
            "(tls=(certificate, key)), or insecure=True on a network that is yours alone"
        )
    return options.metrics_bind, _usable_port(options.metrics_bind, options.metrics_port)


def _usable_port(address: str, port: int) -> int:
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


def _await(refs: Any, what: str, deadline: float) -> Any:
    try:
        return ray.get(refs, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError as error:
        raise PathwaysError(f"{what} in time; the cluster has {ray.cluster_resources()}") from error
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, PathwaysError) else PathwaysError(f"{what}: {error}")) from error
    except ray.exceptions.RayError as error:
        raise PathwaysError(f"{what}: {error}") from error
