"""The functions behind `pw.`: start or join a cluster, slices, arrays, what there is."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pathways_ray.client import context, orbax_arrays, registry
from pathways_ray.client import derivatives as derivatives  # what JAX does with calls, once it is loaded
from pathways_ray.client import eager as eager  # and with arrays
from pathways_ray.client import islands as changing
from pathways_ray.client.session import Session
from pathways_ray.client.slices import VirtualSlice
from pathways_ray.errors import UsageError
from pathways_ray.observe.client_trace import ClientTrace


def connect(
    url: str,
    token: str,
    *,
    name: str = "",
    timeout: float = 10.0,
    ca: str | bytes | os.PathLike[str] | None = None,
) -> Session:
    """A further client of a running cluster; needs no Ray. Becomes the current session of this process.

        session = pw.connect("grpc://127.0.0.1:41003", token)
        s = pw.virtual_slice((4,), ("x",))

    Args:
        url: `grpc://host:port`, or `grpcs://host:port` for a cluster with TLS, as `pw.init(...).url` says.
        token: a tenant's, or `pw.init(...).token`, which is the operator's.
        name: of the session, as status shows it.
        timeout: seconds for each answer until the session is open, and for its direct link.
        ca: the CA certificate that vouches for the cluster: a path, or PEM bytes. Left out, the file that PATHWAYS_CA
            names, else what the system trusts. Given, the connection is encrypted, whatever the URL says.

    Raises:
        AuthenticationError: the token is wrong.
        ControllerLost: nothing answers at `url` within `timeout`.
    """
    session = Session.connect(url, token, name, timeout, ca)
    context.enter(session)
    return session


def virtual_slice(
    shape: Sequence[int],
    axes: Sequence[str] | None = None,
    *,
    island: int | None = None,
    platform: str | None = None,
    name: str = "",
    topology: Sequence[int] | None = None,
    memory: int = 0,
    generation: str = "",
) -> VirtualSlice:
    """A mesh of virtual devices, mapped by the resource manager to the least loaded devices of one island: to whole
    hosts before parts, and with its axes along their links. `s.explain()` shows how it lies.

        s = pw.virtual_slice((4,), ("x",), island=0)

    Args:
        shape: one to three sizes.
        axes: as many names; left out `x`, `y`, `z`.
        island: the island to use; left out, the resource manager chooses.
        platform: "cpu", "gpu" or "tpu"; left out, any.
        name: shown in status.
        topology: the sides of the sub-grid of linked devices that it is to be, in any order, as (2, 4); left out, any.
        memory: bytes that each device has for arrays, at least.
        generation: what the devices are called, by `pw.Island` or by JAX ("TPU v4"); left out, any.

    Raises:
        Unschedulable: no island can hold it; the message says what exists.
    """
    orbax_arrays.register()
    return context.current_session().virtual_slice(
        shape,
        axes,
        island=island,
        platform=platform,
        name=name,
        topology=topology,
        memory=memory,
        generation=generation,
    )


def islands() -> list[dict[str, Any]]:
    """The islands: their platform, hosts, and devices with the slices that hold them.

        print([island["state"] for island in pw.islands()])

    They are those of the cluster of the current session.

    Raises:
        NotInitialized: there is no session.
        ControllerLost: the controller does not answer.
    """
    found: list[dict[str, Any]] = context.current_session().status()["islands"]
    return found


def devices() -> list[dict[str, Any]]:
    """All devices, one entry each: `device`, `island`, `host`, `platform`, `up`, its `place` in the island's links, the
    part of its time for which it was `busy` lately, `slices`.

        print([device["device"] for device in pw.devices() if not device["slices"]])

    They are those of the cluster of the current session.

    Raises:
        As `pw.islands`.
    """
    return [
        {
            "device": device["device"],
            "island": island["island"],
            "host": host["host"],
            "platform": island["platform"],
            "up": host["up"],
            "place": device["place"],
            "busy": device["busy"],
            "slices": device["slices"],
        }
        for island in islands()
        for host in island["hosts"]
        for device in host["devices"]
    ]


@contextlib.contextmanager
def recording() -> Iterator[Mapping[int, Sequence[Any]]]:
    """Records when each computation runs on the hosts of this process's own cluster, while the block runs.

        with pw.recording() as computed:
            step(x).block_until_ready()
        print([one.name for one in computed[0]])

    Yields a mapping that is filled when the block ends: for each host its computations, in the order in which they were
    enqueued, 65,536 at most, without the oldest ones beyond. Each has a `name` (of the user's function), `devices`
    (their numbers on the host), and `start` and `end` in seconds of the host's `time.perf_counter`. The mapping stays
    empty where a host did not answer. Wait for results inside the block: the record ends with it, also where it raises,
    and then has what was over. Recording costs some 0.1 ms for each computation.

    Raises:
        UsageError: this process did not start the cluster by `pw.init`.
    """
    session = own_cluster()
    if session is None:
        raise UsageError("hosts can be recorded only by the process that started them: use pw.init, not pw.connect")
    computed: dict[int, Sequence[Any]] = {}
    waits = False  # where the block raises, what is still under way may never end
    try:
        session.cluster.record()
        yield computed
        waits = True
    finally:
        if session.cluster is not None:
            computed.update(session.cluster.recorded(waits))


@contextlib.contextmanager
def trace(path: str | os.PathLike[str], predicted: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Writes what runs while the block runs as one timeline for Perfetto: this client, controller, schedulers, hosts.

        with pw.trace("t.json"):
            step(x).block_until_ready()

    Each launch is a slice on every process that had it, joined by a flow from the call to the devices. For the cluster
    of this process; `pathways trace` does the same from a shell. Wait for results inside the block. A launch costs the
    client some 0.2 us more meanwhile; what the other processes record they always do.

    Args:
        predicted: a file with the expected course of a program, as `pathways-train` writes it (`predicted.json`), which
            is drawn beside each of its launches.

    Raises:
        UsageError: this process did not start the cluster by `pw.init`, the folder of `path` is not there,
            or `predicted` is no prediction.
    """
    session = own_cluster()
    if session is None:
        raise UsageError("only the process that started a cluster by pw.init can trace it; else use 'pathways trace'")
    target = Path(path)
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is no folder to write a trace to")
    predictions = session.cluster.predictions(predicted)
    mine = {one.id: one for one in context.sessions}
    traces = {number: ClientTrace() for number in mine}
    for one in mine.values():
        one.await_outcomes()  # of what came before
    since = time.monotonic()
    for number, one in mine.items():
        one.set_trace(traces[number])
    try:
        yield
    finally:
        for one in mine.values():
            one.await_outcomes()
            one.set_trace(None)
        if session.cluster is not None:
            calls = {number: found.intervals() for number, found in traces.items()}
            session.cluster.trace(target, since, calls, predictions)


def shutdown() -> None:
    """Closes every session of this process, and stops the cluster if this process started it.

        pw.init()
        pw.shutdown()

    Twice is fine.
    """
    for session in reversed(context.sessions[:]):
        try:
            session.close()
        finally:
            with contextlib.suppress(ValueError):  # another thread closes them as well
                context.sessions.remove(session)


class ClusterSession(Session):
    """The session of `pw.init`: closing it stops the cluster. `token` lets others in by `pw.connect(url, token)`."""

    cluster: Any = None
    token = ""
    dashboard: Any = None

    @property
    def dashboard_url(self) -> str:
        """The address of the live page, with its token; "" without one."""
        return self.dashboard.url if self.dashboard is not None else ""

    def add_island(
        self, platform: str = "auto", hosts: int = 1, devices: int = 1, memory: int = 0, **further: Any
    ) -> int:
        """Starts another island, waits until its hosts have joined, and returns its number.

            number = session.add_island("cpu", hosts=1, devices=4)

        Args:
            platform, hosts, devices, memory: see `pw.Island`; `further` are the other fields that it has.

        Raises:
            UsageError: a bad value, or `isolation="process"`.
            Unschedulable: no Ray node has such devices, or there is no room.
            PathwaysError: it did not come up in time; nothing of it stays.
        """
        self.check_open()
        added: int = self.cluster.add_island(platform, hosts, devices, memory, **further)
        return added

    def spread_islands(self, deadline_s: float = changing.DRAIN_LIMIT_S) -> list[tuple[int, int]]:
        """Replaces islands that share a Ray node while another one has fewer, such as one that has come back: another
        island like each of them is started there, takes its slices within `deadline_s` seconds, and it is removed.

            for before, after in session.spread_islands():
                print(f"island {after} is in the place of {before}")

        Returns:
            The number of each island that was replaced, and of its successor.

        Raises:
            PathwaysError: an island could not be started, drained or removed; those before it have been replaced.
        """
        self.check_open()
        replaced: list[tuple[int, int]] = self.cluster.spread(deadline_s)
        return replaced

    def drain_island(self, island: int, deadline_s: float = changing.DRAIN_LIMIT_S) -> list[dict[str, Any]]:
        """Has an island get no slices any more, and waits until it has none, for at most `deadline_s` seconds.

            if not session.drain_island(2):
                session.remove_island(2)

        Returns:
            The slices that it still has, as status shows them; none once it is empty.

        Raises:
            UsageError: there is no such island, it is the last one that takes slices, or a bad deadline.
        """
        self.check_open()
        return changing.drain(self.url, self.token, island, deadline_s, self.cluster.ca)

    def undrain_island(self, island: int) -> None:
        """Has a drained island get slices again. Those that have left it stay where they are.

            session.undrain_island(2)

        Raises:
            UsageError: the island is not draining.
        """
        self.check_open()
        changing.undrain(self.url, self.token, island, self.cluster.ca)

    def remove_island(self, island: int) -> None:
        """Ends an island for good. One that was removed may be again, without effect.

            session.drain_island(2)
            session.remove_island(2)

        Raises:
            UsageError: there was no such island; it is the last one that takes slices; or it has slices, and the
                deadline of its drain is not over.
        """
        self.check_open()
        changing.remove(self.url, self.token, island, self.cluster.ca)
        self.cluster.forget_island(island)

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        if self.cluster is not None:
            _parents_clusters.append(self.cluster)
            self.cluster = self.dashboard = None

    def close(self) -> None:
        """Closes the session, then stops every process of the cluster (and Ray, if `pw.init` started it)."""
        try:
            super().close()
        finally:
            with context.starting_or_stopping:
                cluster, self.cluster = self.cluster, None
                dashboard, self.dashboard = self.dashboard, None
                if dashboard is not None:
                    dashboard.stop()
                if cluster is not None:
                    registry.remove()
                    cluster.stop()


def check_no_fork() -> None:
    """Raises `UsageError` in a fork of a process that runs a cluster."""
    if _parents_clusters:
        raise UsageError(
            "this process is a fork of one that runs a cluster, and Ray does not go on in a fork: start processes by "
            "multiprocessing's 'spawn', or call pw.connect(url, token) here"
        )


_parents_clusters: list[Any] = []
"""Clusters of the parent, in a fork. Kept, since Ray would take the end of its handles here for that of the actors."""


def _leave_to_parent() -> None:
    context.starting_or_stopping = threading.RLock()  # perhaps held by a thread that is not here
    for session in context.sessions:
        session.leave_to_parent()


def own_cluster() -> ClusterSession | None:
    """The session of the cluster this process started, if it runs."""
    return next((s for s in context.sessions if isinstance(s, ClusterSession) and s.cluster is not None), None)


def adopt(cluster: Any) -> ClusterSession:
    """Opens the first session of a cluster that was just started."""
    try:
        session = ClusterSession.connect(cluster.url, cluster.token, "init", ca=cluster.ca or None)
    except BaseException:
        cluster.stop()
        raise
    atexit.unregister(shutdown)
    atexit.register(
        shutdown
    )  # before Ray's own handlers, which were registered since: a call after them starts Ray again
    session.cluster, session.token = cluster, cluster.token
    context.enter(session)
    registry.write(cluster.url, cluster.token, cluster.ca)
    return session


atexit.register(shutdown)
os.register_at_fork(after_in_child=_leave_to_parent)
