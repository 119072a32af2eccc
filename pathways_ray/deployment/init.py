"""`pw.init`: a cluster of one's own, and the first session on it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pathways_ray import limits
from pathways_ray.client import context
from pathways_ray.deployment import fork_server
from pathways_ray.deployment.topology import Island, Resources, Topology, have_devices, topology_on
from pathways_ray.errors import AlreadyInitialized
from pathways_ray.liveness import SILENCE_LIMIT_S

if TYPE_CHECKING:
    from pathways_ray.client.api import ClusterSession


def init(
    islands: int | Sequence[Island] = 1,
    hosts_per_island: int = 1,
    devices_per_host: int = 1,
    *,
    address: str | None = None,
    dispatch: str = "parallel",
    fusion: bool = True,
    coalesce: bool = True,
    policy: str = "fifo",
    check_order: bool = False,
    launch_limit_s: float = limits.LAUNCH_LIMIT_S,
    lost_after_s: float = limits.LOST_AFTER_S,
    compile_limit_s: float = limits.COMPILE_LIMIT_S,
    silence_limit_s: float = SILENCE_LIMIT_S,
    platform: str = "auto",
    placement: str = "pack",
    bind: str = "",
    tls: tuple[str, ...] = (),
    tenants: str = "",
    isolation: str = "shared",
    insecure: bool = False,
    dashboard: bool = False,
    ray_options: dict[str, Any] | None = None,
) -> ClusterSession:
    """Starts a cluster and opens its first session; a context manager that stops it again.

        with pw.init(islands=2, devices_per_host=4):
            a = pw.virtual_slice((4,), ("x",), island=0)

    Embedded (`address=None`) it starts Ray on this machine when none runs in this process. With `address="auto"` or a
    Ray address the same processes start on an existing Ray cluster, hosts spread over its nodes.

    Args:
        islands, hosts_per_island, devices_per_host: the topology. Devices of platform "cpu" are virtual. A list of
            `pw.Island` in place of a number says it for each island; the other two are of no use then.
        dispatch: "parallel", or "sequential": a node's host work starts when the node before it is enqueued.
        fusion: compose chains of nodes on one slice into one computation; results are the same bits.
        coalesce: have calls that repeat each other leave as one message; results are the same bits.
        policy: whose launch goes next when several clients have some: "fifo", "share" (device time in proportion to
            tenants' weights), "priority" (with ageing), "preempt" (so too, and sessions give way where memory is
            short), or "package.module:function" of your own.
        check_order: for debugging, have every host report the order in which it enqueues gangs; an island whose hosts
            differ fails its launches with `OrderMismatch`.
        launch_limit_s: seconds that a launch may keep its devices, unless its tenant has a limit of its own. One that
            takes longer (a loop without end, say) ends with `LaunchTimeout`, and its island is restarted.
        lost_after_s: seconds without one of its hosts after which an island counts as lost: it gets no slices until it
            is back.
        compile_limit_s: seconds that a host may compile one program. One that takes longer fails with `CompileError`,
            and the host's island is restarted.
        silence_limit_s: seconds without a word after which a process of the runtime counts as lost. On a machine that
            is loaded they are stretched; raise them where machines stand still for longer.
        platform: "cpu", "gpu" or "tpu"; "auto" is the best that the Ray nodes have, or, with a warning, "cpu" where Ray
            starts here and this machine has fewer GPUs or TPUs than asked for.
        placement: "pack" puts the hosts of an island on one Ray node if they fit, "spread" on as many as there are.
        bind: the address at which clients come in; left out, loopback, or, when Ray has nodes at several addresses,
            where Ray reaches this machine. Beyond loopback `tls` and `tenants` are needed (docs/security.md).
        tls: paths, the same on every machine, of a certificate, its key, and, where the certificate does not vouch for
            itself, the CA's certificate.
        tenants: path of a file with the tenants, their tokens and quotas; it is read again when it changes.
        isolation: "shared", or "process": each tenant has host processes of its own, on the same devices, so that code
            of one never runs beside data of another (docs/security.md says what that costs). Needs `tenants`.
        insecure: listen beyond loopback without `tls` or `tenants`. Everybody who reaches the machine can read along.
        dashboard: start the live page as a process of its own; the session's `dashboard_url` opens it, on this machine.
        ray_options: further options for `ray.init`. Without a `runtime_env` among them, a Ray that starts here has no
            process that could prepare one for tasks of your own.

    Raises:
        AlreadyInitialized: this process runs a cluster already, or another thread of it starts or stops one.
        UsageError: a bad option, no Ray cluster at `address`, or a fork of a process that runs a cluster.
        Unschedulable: this machine, where Ray starts here, has too few GPUs or TPUs; Ray cannot place the hosts.
    """
    _check_no_cluster()

    topology = partial(_topology, address, (islands, hosts_per_island, devices_per_host), platform)
    topology([])  # raises for what is wrong on whatever nodes, before anything starts
    chosen = {
        "dispatch": dispatch,
        "fusion": fusion,
        "coalesce": coalesce,
        "policy": policy,
        "check_order": check_order,
        "launch_limit_s": launch_limit_s,
        "lost_after_s": lost_after_s,
        "compile_limit_s": compile_limit_s,
        "silence_limit_s": silence_limit_s,
        "placement": placement,
        "bind": bind,
        "tls": tuple(os.path.abspath(path) if path else "" for path in tls),  # Ray's processes may have another folder
        "tenants": os.path.abspath(tenants) if tenants else "",
        "isolation": isolation,
        "insecure": insecure,
    }
    with _alone(), _told(f"{'Ray and ' if address is None else ''}{_text(islands)}"):
        session = _opened(_started(topology, address, chosen, dict(ray_options or {})))
    if dashboard:
        from pathways_ray.deployment.dashboard_process import show

        show(session)
    return session


def _topology(address: str | None, shape: tuple[Any, int, int], platform: str, nodes: Resources) -> Topology:
    """The topology on Ray nodes, with CPU devices where this machine has too few others and nobody asked for them."""
    found = topology_on(nodes, *shape, platform)
    if address is not None or platform != "auto" or have_devices(nodes, found):
        return found
    on_cpus = topology_on(nodes, *shape, "cpu")
    if not have_devices(nodes, on_cpus):
        return found  # some islands say themselves that they take accelerators
    _warn_of_too_few(found)
    return on_cpus


class TooFewAccelerators(UserWarning):
    """This machine has GPUs or TPUs, and fewer than a runtime that leaves its platform open is to have."""


def _warn_of_too_few(wanted: Topology) -> None:
    taken = [island for island in wanted.islands if island.platform != "cpu"]
    count = sum(island.hosts * island.devices for island in taken)
    text = (
        f"this machine has fewer than {count} devices of platform {taken[0].platform!r}, so the runtime has CPU "
        "devices: say platform='cpu' if that is meant, or ask for fewer devices"
    )
    warnings.warn(text, TooFewAccelerators, stacklevel=6)


def _started(
    topology: Callable[[Resources], Topology], address: str | None, chosen: dict[str, Any], ray_options: dict[str, Any]
) -> Any:
    """A cluster, with `options.Options(**chosen)`."""
    # This server imports what the runtime's processes need while this one imports Ray and starts it.
    server = fork_server.begin(address, ray_options)
    try:
        # Ray loads here and not with the package: clients of a remote cluster do without it. JAX, which comes with the
        # client, loads while the processes start.
        from pathways_ray.deployment import cluster, options

        return cluster.start(topology, address, options.Options(**chosen), ray_options, server, _client)
    except BaseException:
        if server is not None:
            server.close()
        raise


def _opened(cluster: Any) -> Any:
    """The first session of a cluster. The client, and JAX with it, has loaded while that started."""
    return _client().adopt(cluster)


def _client() -> Any:
    from pathways_ray.client import api

    return api


def _check_no_cluster() -> None:
    """Raises `AlreadyInitialized` in a process that runs a cluster, and `UsageError` in a fork of one."""
    if "pathways_ray.client.api" in sys.modules:  # else it never ran one
        _client().check_no_fork()
        if (running := _client().own_cluster()) is not None:
            raise AlreadyInitialized(f"this process runs a cluster at {running.url} already; pw.shutdown() stops it")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Is the one thread that starts or stops a cluster, while the block runs.

    Raises:
        AlreadyInitialized: another thread does, or has started one.
    """
    if not context.starting_or_stopping.acquire(blocking=False):
        raise AlreadyInitialized("another thread of this process starts a cluster, or stops one")
    try:
        _check_no_cluster()
        yield
    finally:
        context.starting_or_stopping.release()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Says at a terminal what is started while the block runs, and how long that took."""
    began = time.monotonic()
    _say(f"starting {what}; this takes seconds, and up to a minute on a busy machine")
    with warnings.catch_warnings():
        # JAX warns of every fork; Ray starts its processes with fork and exec at once, which is safe.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        yield
    _say(f"up after {time.monotonic() - began:.0f} s; it ends with this process, or at pw.shutdown()")


def _text(islands: int | Sequence[Island]) -> str:
    count = islands if isinstance(islands, int) else len(islands)
    return f"{count} island{'s' if count != 1 else ''}"


def _say(text: str) -> None:
    """Tells who sits at a terminal or a notebook what is under way; programs and their logs read nothing of it."""
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        print(f"pathways: {text}", file=sys.stderr, flush=True)
