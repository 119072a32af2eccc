"""Starting a runtime: Ray, the actors, and their end. Beside `islands`, the only module that imports actors.

Who starts whom: `start` starts Ray where none runs, then all actors at once. They find each other through the resource
manager: controller and schedulers publish their addresses there, hosts ask for their scheduler's.

An embedded runtime ends with the process that started it. A detached one stays until `detached.remove`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray

from pathways_ray import names
from pathways_ray.controller.actor import Controller
from pathways_ray.controller.metrics_server import metrics_url
from pathways_ray.deployment import detached, growing, keeper, placement, tracing
from pathways_ray.deployment.fork_server import ForkServer
from pathways_ray.deployment.islands import IslandActors, Processes, actor, await_started, kill, start_island
from pathways_ray.deployment.options import Options, usable_port
from pathways_ray.deployment.ray_connection import Leave, connect_ray
from pathways_ray.deployment.ray_processes import never_started
from pathways_ray.deployment.tenant_islands import TenantIslands
from pathways_ray.deployment.topology import Island, Resources, Topology, lacking
from pathways_ray.errors import AlreadyInitialized, PathwaysError, Unschedulable, UsageError
from pathways_ray.executor.profiling import crash_log
from pathways_ray.observe.predictions import Prediction
from pathways_ray.observe.timeline import Interval
from pathways_ray.resource_manager.actor import GROUPS, ResourceManager

RECORD_LIMIT_S = 600.0

LAST_COMPUTED_S = 60.0
"""How long hosts wait for the last computations of a record."""

NO_WAIT_S = 10.0
"""How long the answers of hosts are waited for that wait for none."""


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
    processes: Processes
    ca: str = ""
    metrics: str = ""
    ends_ray: bool = False
    stopped: bool = False

    @property
    def resource_manager(self) -> Any:
        return self.actors[0]

    @property
    def hosts(self) -> dict[int, Any]:
        """The actors of the hosts, by number."""
        return {number: host for island in self.islands for number, host in island.hosts.items()}

    def add_island(self, platform: str, hosts: int, devices: int, memory: int = 0, **links: Any) -> int:
        """Starts another island and waits for it; returns its number. `links` are the further fields of `Island`, the
        errors those of `growing.add_island`."""
        return self._add(Island(platform, hosts, devices, memory, **links))

    def _add(self, island: Island, node: str = "") -> int:
        try:
            with never_started():
                added, group = growing.add_island(self.processes, island, node=node)
        except Exception as error:
            if self.stopped:
                raise PathwaysError("the cluster was stopped while the island was started") from error
            raise
        self.islands.append(added)
        self.actors += added.all()
        self.groups.append(group)
        return added.number

    def spread(self, deadline_s: float) -> list[tuple[int, int]]:
        """Replaces islands that share a Ray node while another one has fewer; see `keeper.spread`."""
        replaced = []
        for old, new in keeper.spread(self.processes, (self.url, self.token, self.ca), deadline_s, self._add):
            self.forget_island(old)  # at once: a later one may fail
            replaced.append((old, new))
        return replaced

    def forget_island(self, number: int) -> None:
        """Lets go of an island that was removed."""
        gone = {id(one) for island in self.islands if island.number == number for one in island.all()}
        self.islands = [island for island in self.islands if island.number != number]
        self.actors = [one for one in self.actors if id(one) not in gone]

    def record(self) -> None:
        """Has every host note when each of its computations runs, until `recorded`."""
        _answers([host.record.remote() for host in self.hosts.values()])

    def recorded(self, waits: bool = True) -> dict[int, Sequence[Any]]:
        """Computations of each host since `record`, in the order in which they were enqueued, as
        `executor.profiling.profiler.Computed`; empty where a host did not answer.

        Args:
            waits: for those that are under way.
        """
        limits_s = (LAST_COMPUTED_S, RECORD_LIMIT_S) if waits else (0.0, NO_WAIT_S)
        answers = _answers([host.recorded.remote(limits_s[0]) for host in self.hosts.values()], limits_s[1])
        return dict(zip(self.hosts, answers, strict=True)) if answers else {}

    def trace(
        self,
        path: Path,
        since: float,
        client: Mapping[int, list[Interval]],
        predictions: Iterable[Prediction] = (),
    ) -> None:
        """Writes what all processes have recorded since then; see `tracing`."""
        actors: dict[str, Any] = {f"host {number}": host for number, host in self.hosts.items()}
        actors |= {f"scheduler {island.number}": island.scheduler for island in self.islands}
        tracing.write(tracing.trace({"controller": self.controller, **actors}, since, client, predictions), path)

    def predictions(self, path: str | os.PathLike[str] | None) -> list[Prediction]:
        """The prediction in a file, for `trace`; an empty list without one."""
        return [tracing.read_prediction(Path(path))] if path is not None else []

    def stop(self) -> None:
        """Kills every actor; leaves Ray, or stops it, where `start` had joined or started it."""
        self.stopped = True
        try:
            with never_started():  # its user may have ended Ray before
                kill(reversed(self.actors))  # hosts first
                if not self.ends_ray:  # which frees them, and may be gone already: it would be looked for for a minute
                    placement.free(self.groups)
            crash_log.forget(self.runtime)
        finally:
            if self.leave_ray is not None:
                self.leave_ray()


class Starting:
    """The actors of a runtime that is being started.

    All find each other by name: a handle among the arguments would keep Ray from restarting them.
    """

    def __init__(self, topology: Topology, options: Options) -> None:
        self.topology = topology
        self.options = options
        self.runtime = options.name or f"embedded-{secrets.token_hex(8)}"
        listen = options.listen(sorted({node["NodeManagerAddress"] for node in placement.alive_nodes()}))
        # The successor of a controller serves on the same port, so that the url stays.
        self.listen = msgspec.structs.replace(listen, port=usable_port(listen.front, listen.port))
        self.metrics_at = options.metrics_at()
        self.token = options.token or secrets.token_hex(16)
        self.link_secrets = (secrets.token_hex(16), secrets.token_hex(16))
        self.members = topology.members()
        self.common = Processes(
            self.runtime,
            self.listen,
            options.policy,
            options.launch_limit_s,
            options.compile_limit_s,
            options.silence_limit_s,
            options.check_order,
            bool(options.name),
            placement.here(),
            options.placement,
            options.isolation == "process",
        )
        self.made: list[Any] = []
        self.groups: list[Any] = []
        self.started: list[IslandActors] = []

    def _actor(self, kind: type, name: str, *arguments: Any, **settings: Any) -> Any:
        made = actor(self.common, kind, name, num_cpus=0, **settings)
        self.made.append(made.options(scheduling_strategy=placement.near(self.common.near)).remote(*arguments))
        return self.made[-1]

    def manager(self) -> None:
        """The first actor. It has the name of the runtime for itself: of two that start at once, one gets here.

        Raises:
            AlreadyInitialized: another one has it.
        """
        options, runtime = self.options, self.runtime
        common = msgspec.msgpack.encode(self.common)
        limits = (options.silence_limit_s, options.lost_after_s)
        settings = (runtime, self.members, *self.link_secrets, *limits, common, self.topology.specs())
        groups = dict(GROUPS)
        try:
            self._actor(
                ResourceManager,
                names.resource_manager(runtime),
                *settings,
                max_concurrency=1000,
                concurrency_groups=groups,
            )
        except ValueError as error:
            raise AlreadyInitialized(
                f"a runtime named {runtime!r} is on this Ray cluster; 'pathways status' shows it, 'pathways down' "
                "ends it, and --name starts another one beside it"
            ) from error
        islands, nodes = dict(enumerate(self.topology.islands)), dict(enumerate(self.topology.nodes))
        self.groups += placement.place(
            islands, runtime, options.placement, self.common.detached, options.limit_s, nodes
        ).values()

    def controller(self) -> None:
        """The controller."""
        options = self.options
        self._actor(
            Controller,
            names.controller(self.runtime),
            self.runtime,
            self.listen,
            self.token,
            self.link_secrets,
            options.dispatch == "parallel",
            options.fusion,
            options.policy,
            self.metrics_at,
            self.members,
            options.compile_limit_s,
            options.isolation == "process",
            options.silence_limit_s,
            options.launch_limit_s,
            options.coalesce,
            options.lost_after_s,
            max_concurrency=4,
        )

    def islands(self) -> None:
        """Schedulers and hosts, and who starts those of tenants."""
        for number, members in self.members.items():
            island = start_island(self.common, number, members, self.topology.islands[number], self.groups[number])
            self.started.append(island)
            self.made += island.all()
        if self.options.isolation == "process":
            name = names.tenant_islands(self.runtime)
            self._actor(TenantIslands, name, self.common, self.topology, self.groups, max_concurrency=4)

    def wait(self, leave_ray: Leave | None, ends_ray: bool) -> Cluster:
        """The cluster, once all serve. Raises `PathwaysError` for one that did not start in time."""
        deadline = time.monotonic() + self.options.limit_s
        listen, controller = self.listen, self.made[1]
        [url] = await_started({"the controller": controller.start.remote()}, deadline - time.monotonic())
        answers = {name: answer for island in self.started for name, answer in island.started().items()}
        await_started(answers, deadline - time.monotonic())
        if self.common.detached and (self.options.auto is not None or len(placement.alive_nodes()) > 1):
            self._actor(keeper.IslandKeeper, names.keeper(self.runtime), self.common, self.options.auto)
        return Cluster(
            listen.scheme + url,
            self.token,
            self.runtime,
            self.topology,
            controller,
            self.started,
            self.made,
            self.groups,
            leave_ray,
            self.common,
            listen.tls.ca if listen.tls is not None else "",
            metrics_url(*self.metrics_at, listen.tls) if self.metrics_at is not None else "",
            ends_ray,
        )

    def undo(self) -> None:
        """Ends what was started. Where that is nothing, what is there under the name is another runtime's."""
        if not self.made:
            return
        if self.common.detached:
            with contextlib.suppress(PathwaysError):
                detached.remove(self.runtime)  # by name: an interrupted call may have made what it did not return
        else:
            kill(self.made)
            placement.free(self.groups)
            crash_log.forget(self.runtime)


def start(
    topology_on: Callable[[Resources], Topology],
    address: str | None,
    options: Options,
    ray_options: dict[str, Any],
    server: ForkServer | None = None,
    meanwhile: Callable[[], object] = bool,
) -> Cluster:
    """Starts a cluster and waits until every host has joined.

    Args:
        topology_on: makes the topology from what the Ray nodes have.
        address: of the Ray cluster; None starts Ray here.
        server: what the processes of a Ray that starts here are forked by, which ends with it.
        meanwhile: called while the processes start.

    Raises:
        UsageError: a bad option.
        AlreadyInitialized: a detached runtime of this name is there.
        Unschedulable: a machine on which Ray starts here has too few accelerators; Ray cannot place the hosts.
        PathwaysError: a process did not come up in time.
    """
    options.check()
    leave_ray = connect_ray(address, ray_options, server)
    try:
        nodes = {node["NodeID"]: node["Resources"] for node in placement.alive_nodes()}
        topology = options.auto.topology(nodes) if options.auto is not None else topology_on(list(nodes.values()))
        started_here = address is None and leave_ray is not None  # no other node will come
        if started_here and (few := lacking(list(nodes.values()), topology)):
            raise Unschedulable(
                f"this machine has {few}: ask for fewer, have CPU devices (platform='cpu'), or give the address of a "
                "Ray cluster that has them"
            )
        others = ", ".join({island.platform for island in topology.islands} - {"cpu"})
        if options.isolation == "process" and others:
            raise UsageError(f"isolation='process' is there for platform cpu only, and the runtime has {others}")
        starting = Starting(topology, options)
        try:
            starting.manager()
            starting.controller()
            starting.islands()
            meanwhile()
            return starting.wait(leave_ray, ends_ray=started_here)
        except BaseException:
            starting.undo()
            raise
    except BaseException:
        if leave_ray is not None:
            leave_ray()
        raise


def _answers(asked: list[Any], limit_s: float = RECORD_LIMIT_S) -> list[Any]:
    """Answers of actors; none where one of them has died or is too slow: a launch reports that better."""
    try:
        answers: list[Any] = ray.get(asked, timeout=limit_s)
    except ray.exceptions.RayError:
        return []
    return answers
