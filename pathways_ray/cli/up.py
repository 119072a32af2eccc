"""`pathways up`: starts the runtime on a running Ray cluster, says where it is, and ends; the runtime stays.

Nothing of a start that fails, or that is interrupted, stays behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

import click

from pathways_ray import limits
from pathways_ray.cli.output import NumberRange
from pathways_ray.client import registry
from pathways_ray.errors import AlreadyInitialized, UsageError
from pathways_ray.liveness import SILENCE_LIMIT_S
from pathways_ray.process_log import note_operator

if TYPE_CHECKING:
    from pathways_ray.deployment.options import Options
    from pathways_ray.deployment.topology import Resources, Topology

NAME = "pathways"
SHORTEST_TOKEN = 16

name_option = click.option("--name", default=NAME, show_default=True, help="Of the runtime, on its Ray cluster.")


def join_ray(address: str | None, name: str) -> None:
    """Joins the Ray cluster at an address; left out, the one where this user started the runtime, else `auto`.

    Raises:
        UsageError: Ray is not there.
    """
    from pathways_ray import names
    from pathways_ray.deployment import ray_connection

    known = [record.ray for record in registry.all_records() if record.name == name]
    try:
        ray_connection.connect_ray(address or next(iter(known), "auto"), {"namespace": names.NAMESPACE})
    except UsageError as error:
        own = [record.label for record in registry.all_records() if record.pid]
        if address or known or not own:
            raise
        raise UsageError(
            f"{error}. What pw.init started in {own[0]} is its own: pw.trace there, and it ends with it"
        ) from error


@click.command("up")
@click.option("--address", default="auto", show_default=True, help="Of the Ray cluster.")
@name_option
@click.option(
    "--islands",
    metavar="N|auto",
    help="How many islands, all alike; auto: one for each Ray node, as nodes come and go.",
)
@click.option("--hosts-per-island", type=click.IntRange(min=1), help="Left out, 1.")
@click.option("--devices-per-host", type=click.IntRange(min=1), help="Left out, what Ray's nodes have.")
@click.option("--platform", default="auto", help="cpu, gpu or tpu; left out, the best that Ray's nodes have.")
@click.option(
    "--island", "listed", multiple=True, metavar="PLATFORM:hosts=N,devices=N,memory=BYTES", help="An island; repeat it."
)
@click.option(
    "--placement",
    type=click.Choice(["pack", "spread"]),
    default="pack",
    show_default=True,
    help="Of an island's hosts: on one Ray node if they fit, or on as many as there are.",
)
@click.option("--dispatch", type=click.Choice(["parallel", "sequential"]), default="parallel", show_default=True)
@click.option(
    "--policy", default="fifo", show_default=True, help="fifo, share, priority, preempt, or package.module:function."
)
@click.option(
    "--launch-limit",
    "launch_limit_s",
    type=NumberRange(min=0, min_open=True),
    default=limits.LAUNCH_LIMIT_S,
    show_default=True,
    help="Seconds that a launch may keep its devices; tenants may have limits of their own.",
)
@click.option(
    "--compile-limit",
    "compile_limit_s",
    type=NumberRange(min=0, min_open=True),
    default=limits.COMPILE_LIMIT_S,
    show_default=True,
    help="Seconds that a host may compile one program.",
)
@click.option(
    "--silence-limit",
    "silence_limit_s",
    type=NumberRange(min=0, min_open=True),
    default=SILENCE_LIMIT_S,
    show_default=True,
    help="Seconds of silence after which a process counts as lost.",
)
@click.option("--bind", default="", help="The address to serve on; left out, one that all Ray nodes reach.")
@click.option("--tls-cert", default="", help="Certificate (PEM); the same path on every machine.")
@click.option("--tls-key", default="", help="Its key.")
@click.option("--tls-ca", default="", help="What vouches for it, if not it itself.")
@click.option("--tenants", default="", help="File with the tenants (pathways tenants); read again when it changes.")
@click.option(
    "--isolation",
    type=click.Choice(["shared", "process"]),
    default="shared",
    show_default=True,
    help="Whether tenants share host processes, or have their own.",
)
@click.option("--insecure", is_flag=True, help="Listen beyond this machine although TLS or tenants are missing.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the controller; left out, a free one.")
@click.option(
    "--client-ports",
    default="",
    metavar="FIRST-LAST",
    help="For clients beside --port, on the controller's machine and those of hosts; left out, free ones.",
)
@click.option(
    "--token-file",
    type=click.File(encoding="utf-8", errors="replace"),
    envvar="PATHWAYS_TOKEN_FILE",
    show_envvar=True,
    help="Its first line lets clients in; left out, a token is made and printed.",
)
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve Prometheus metrics there.")
@click.option("--metrics-bind", default="127.0.0.1", show_default=True, help="At this address.")
@click.option(
    "--lost-after",
    type=NumberRange(min=1.0),
    default=limits.LOST_AFTER_S,
    show_default=True,
    help="Seconds without one of its hosts after which an island gets no slices.",
)
@click.option(
    "--wait",
    type=NumberRange(0.0, 1e6),
    default=90.0,
    show_default=True,
    help="Seconds for room on the nodes, and for the processes.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    help="Ray nodes to wait for, up to --wait seconds; left out, those that are there.",
)
@click.option(
    "--exist-ok",
    is_flag=True,
    help="When the runtime is there already, or being started, show it once it serves, and end well.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(exist_ok: bool, as_json: bool, **settings: Any) -> None:
    """Start the runtime on a Ray cluster; it stays until 'pathways down'.

    Without --islands and --island, every Ray node becomes a host, and nodes that are alike form an island.
    """
    found = up(exist_ok=exist_ok, **settings)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)


def up(
    address: str,
    islands: str | None,
    hosts_per_island: int | None,
    devices_per_host: int | None,
    platform: str,
    listed: tuple[str, ...],
    nodes: int | None,
    exist_ok: bool,
    **settings: Any,
) -> dict[str, Any]:
    """Starts the runtime, or finds it where it may exist; what came of it as JSON.

    Args:
        settings: the other options of the command.

    Raises:
        UsageError: the caller has to change something.
        AlreadyInitialized: a runtime of this name is there.
        PathwaysError: it did not come up; nothing of it is left.
    """
    import ray

    from pathways_ray import names
    from pathways_ray.deployment import cluster, detached, placement, ray_connection, topology

    auto = topology.Auto(platform, devices_per_host) if islands == "auto" else None
    topology_on = _topology_on(islands, hosts_per_island, devices_per_host, platform, listed)
    options = _options(auto=auto, **settings)
    ray_connection.connect_ray(address, {"namespace": names.NAMESPACE})
    end_on_signals()
    try:
        if nodes is not None and not detached.actors(options.name):  # one that is there has them, or misses some
            placement.await_nodes(nodes, options.limit_s)
        where = str(ray.get_runtime_context().gcs_address)
        found: dict[str, Any] = {"name": options.name, "ray": where, "started": True}
        try:
            made = cluster.start(topology_on, address, options, {})
            _ignore(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # it stays, so its url and token are to be told
            islands_made = [dataclasses.asdict(island) for island in made.topology.islands]
            found.update(url=made.url, token=made.token, ca=made.ca, metrics=made.metrics, islands=islands_made)
        except AlreadyInitialized:
            if not exist_ok:
                raise
            found["url"], found["token"], found["ca"] = detached.find(options.name, options.limit_s)
            found["started"] = False
    finally:
        ray.shutdown()
    if found["started"]:
        note_operator(found["name"], "runtime started", f"at {found['url']}, on the Ray cluster at {where}")
    registry.keep(registry.Record(found["url"], found["token"], name=options.name, ray=where, ca=found["ca"]))
    return found


def _topology_on(
    islands: str | None,
    hosts_per_island: int | None,
    devices_per_host: int | None,
    platform: str,
    listed: tuple[str, ...],
) -> Callable[[Resources], Topology]:
    """The topology that the options of the command ask for, once it is known what the Ray nodes have.

    Raises:
        UsageError: they do not go together.
    """
    from pathways_ray.deployment import topology

    if islands == "auto" and hosts_per_island is not None:
        raise UsageError("--islands auto has one host for each Ray node: leave out --hosts-per-island")
    if listed and any((islands, hosts_per_island, devices_per_host)):
        raise UsageError("--island says all of an island: leave out --islands, --hosts-per-island, --devices-per-host")
    wanted = [topology.parse_island(text) for text in listed] or _number_of(islands)

    def topology_on(nodes: Resources) -> Topology:
        if wanted or hosts_per_island:
            return topology.topology_on(nodes, wanted or 1, hosts_per_island or 1, devices_per_host, platform)
        return topology.shape_of_nodes(nodes, platform, devices_per_host)

    return topology_on


def _options(
    tls_cert: str,
    tls_key: str,
    tls_ca: str,
    tenants: str,
    client_ports: str,
    token_file: TextIO | None,
    lost_after: float,
    wait: float,
    **same: Any,
) -> Options:
    """The runtime's options from those of the command, most of which are the `same`."""
    from pathways_ray.deployment.options import Options

    options = Options(
        client_ports=_ports(client_ports) if client_ports else (0, 0),
        token=_first_line(token_file) if token_file else "",
        tls=tuple(os.path.abspath(path) for path in (tls_cert, tls_key, tls_ca) if path),
        tenants=os.path.abspath(tenants) if tenants else "",
        lost_after_s=lost_after,
        limit_s=wait,
        **same,
    )
    if bool(tls_cert) != bool(tls_key) or (tls_ca and not tls_cert):
        raise UsageError("TLS needs --tls-cert and --tls-key; --tls-ca goes with them")
    options.check()
    return options


def show(found: dict[str, Any]) -> None:
    """The outcome of `up` as text."""
    if found["started"]:
        islands = found["islands"]
        hosts = sum(island["hosts"] for island in islands)
        devices = sum(island["hosts"] * island["devices"] for island in islands)
        click.echo(f"runtime {found['name']!r} is up: {len(islands)} island(s), {hosts} host(s), {devices} device(s)")
    else:
        click.echo(f"runtime {found['name']!r} was up already")
    click.echo(f"  url    {found['url']}")
    click.echo(f"  token  {found['token']}")
    if found["ca"]:
        click.echo(f"  ca     {found['ca']}")
    if found.get("metrics"):
        click.echo(f"  metrics {found['metrics']} (Authorization: Bearer <token>)")
    click.echo("clients call pw.connect(url, token); 'pathways status' shows the runtime, 'pathways down' ends it")


def _number_of(islands: str | None) -> int | None:
    """The number of islands that are alike; None where there is no word of it, or they follow the nodes."""
    if islands is None or islands == "auto":
        return None
    if not (islands.isdecimal() and int(islands) >= 1):
        raise UsageError(f"--islands takes a number of at least 1, or auto, not {islands!r}")
    return int(islands)


def _ports(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        raise UsageError(f"--client-ports takes a first and a last port, such as 20000-20099, not {text!r}")
    return int(first), int(last)


def _first_line(file: TextIO) -> str:
    token = file.readline().strip()
    if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable()) or " " in token:
        raise UsageError(
            f"{file.name} must begin with a line of at least {SHORTEST_TOKEN} printable ASCII characters, the token; "
            "'openssl rand -hex 16' makes one"
        )
    return token


def end_on_signals() -> None:
    """A terminal that closes, or an operator's `kill`, ends a start as Ctrl-C does: nothing of it stays. A signal that
    is ignored, as by `nohup`, stays so."""

    def end(number: int, _frame: object) -> None:
        _ignore(signal.SIGTERM, signal.SIGHUP)  # a terminal that closes may say so twice: by its shell, and itself
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def _ignore(*numbers: signal.Signals) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
