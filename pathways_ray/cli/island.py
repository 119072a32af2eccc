"""`pathways island`: islands that are added to a runtime, drained and removed while it runs."""

from __future__ import annotations

import json

import click

from pathways_ray.cli.output import CommandFailed
from pathways_ray.cli.status import cluster_meant, of_cluster
from pathways_ray.cli.up import name_option
from pathways_ray.client.islands import DRAIN_LIMIT_S, drain, remove


@click.group("island")
def command() -> None:
    """Add, drain and remove islands while the runtime runs; 'pathways status' shows their state."""


@command.command("add")
@click.option("--address", default="auto", show_default=True, help="Of the Ray cluster.")
@name_option
@click.option("--platform", default="auto", show_default=True, help="cpu, gpu or tpu; auto is the best there is.")
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Several form one JAX group.")
@click.option("--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Of each host.")
@click.option("--memory", type=click.IntRange(min=0), default=0, help="Bytes of each device; left out, what it has.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def add_command(address: str, name: str, platform: str, hosts: int, devices: int, memory: int, as_json: bool) -> None:
    """Start another island of a runtime of 'pathways up', and wait until it has joined.

    Runs where 'pathways up' does. To a cluster of pw.init, its own process adds islands.
    """
    number = add(address, name, platform, hosts, devices, memory)
    click.echo(json.dumps({"island": number}) if as_json else f"island {number} is up")


def add(address: str, name: str, platform: str, hosts: int, devices: int, memory: int) -> int:
    """The number of the island that was started; the errors are those of `growing.add_island`."""
    import ray

    from pathways_ray import names
    from pathways_ray.deployment import growing, ray_connection, topology

    names.check_name(name)
    island = topology.Island(platform, hosts, devices, memory)
    ray_connection.connect_ray(address, {"namespace": names.NAMESPACE})
    try:
        added, _ = growing.add_island(growing.processes_of(name), island)
    finally:
        ray.shutdown()
    return added.number


@command.command("drain")
@click.argument("island", type=click.IntRange(min=0))
@click.option(
    "--deadline", type=click.FloatRange(min=0), default=DRAIN_LIMIT_S, show_default=True, help="Seconds to wait."
)
@of_cluster
def drain_command(island: int, deadline: float, url: str | None, token: str | None, ca: str | None) -> None:
    """Have an island get no slices any more, and wait until it has none.

    Ends with 1 if slices are left when the deadline is over; from then on the island can be removed all the same.
    """
    url, token, ca = cluster_meant(url, token, ca)
    left = drain(url, token, island, deadline, ca)
    if left:
        names = ", ".join(f"{one['name'] or one['slice']} of session {one['session']}" for one in left)
        raise CommandFailed(f"island {island} still has {len(left)} slice(s): {names}")
    click.echo(f"island {island} is empty")


@command.command("remove")
@click.argument("island", type=click.IntRange(min=0))
@of_cluster
def remove_command(island: int, url: str | None, token: str | None, ca: str | None) -> None:
    """End an island for good: one without slices, or whose drain is over its deadline."""
    url, token, ca = cluster_meant(url, token, ca)
    remove(url, token, island, ca)
    click.echo(f"island {island} is gone")
