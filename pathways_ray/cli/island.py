"""`pathways island`: islands that are added to a runtime, drained and removed while it runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click

from pathways_ray.cli.output import CommandFailed, NumberRange
from pathways_ray.cli.status import cluster_to_change, of_cluster
from pathways_ray.cli.up import end_on_signals, name_option
from pathways_ray.client.islands import DRAIN_LIMIT_S, drain, remove, undrain
from pathways_ray.errors import UsageError


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
@click.option("--topology", default="", metavar="2x4", help="Sides of the grid of links between its devices.")
@click.option("--torus", is_flag=True, help="The links of the grid are rings.")
@click.option("--generation", default="", help="What its devices are called; left out, what JAX calls them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def add_command(address: str, name: str, as_json: bool, topology: str, **fields: Any) -> None:
    """Start another island of a runtime of 'pathways up', and wait until it has joined.

    Runs where 'pathways up' does. To a cluster of pw.init, its own process adds islands.
    """
    sides = topology.split("x") if topology else []
    if not all(side.isdecimal() for side in sides):
        raise UsageError(f"--topology takes the sides of a grid, such as 2x4, not {topology!r}")
    number = add(address, name, topology=tuple(map(int, sides)), **fields)
    click.echo(json.dumps({"island": number}) if as_json else f"island {number} is up")


def add(address: str, name: str, **fields: Any) -> int:
    """The number of the island that was started; `fields` are those of `Island`, the errors those of
    `growing.add_island`."""
    from pathways_ray.deployment import growing, topology

    island = topology.Island(**fields)
    with _ray(address, name):
        added, _ = growing.add_island(growing.processes_of(name), island)
    return added.number


@contextlib.contextmanager
def _ray(address: str, name: str) -> Iterator[None]:
    """Is connected to the Ray cluster of a runtime, while the block runs."""
    import ray

    from pathways_ray import names
    from pathways_ray.deployment import ray_connection

    names.check_name(name)
    ray_connection.connect_ray(address, {"namespace": names.NAMESPACE})
    end_on_signals()
    try:
        yield
    finally:
        ray.shutdown()


@command.command("spread")
@click.option("--address", default="auto", show_default=True, help="Of the Ray cluster.")
@name_option
@click.option(
    "--deadline",
    type=NumberRange(min=0),
    default=DRAIN_LIMIT_S,
    show_default=True,
    help="Seconds for each island.",
)
def spread_command(address: str, name: str, deadline: float) -> None:
    """Replace islands that share a Ray node while another node has fewer, as one that has come back.

    Another island like each of them is started there, its slices move, and it is removed. Runs where 'pathways up'
    does.
    """
    from pathways_ray.deployment import detached, growing, keeper

    replaced = 0
    with _ray(address, name):
        for old, new in keeper.spread(growing.processes_of(name), detached.find(name), deadline):
            click.echo(f"island {new} took the place of island {old}")
            replaced += 1
    if not replaced:
        click.echo("islands are spread as far as they can be")


@command.command("drain")
@click.argument("island", type=click.IntRange(min=0))
@click.option("--deadline", type=NumberRange(min=0), default=DRAIN_LIMIT_S, show_default=True, help="Seconds to wait.")
@of_cluster
def drain_command(island: int, deadline: float, url: str | None, token: str | None, ca: str | None) -> None:
    """Have an island get no slices any more, and wait until it has none.

    Ends with 1 if slices are left when the deadline is over; from then on the island can be removed all the same.
    """
    url, token, ca = cluster_to_change(url, token, ca)
    left = drain(url, token, island, deadline, ca)
    if left:
        names = ", ".join(f"{one['name'] or one['slice']} of session {one['session']}" for one in left)
        raise CommandFailed(f"island {island} still has {len(left)} slice(s): {names}")
    click.echo(f"island {island} is empty")


@command.command("undrain")
@click.argument("island", type=click.IntRange(min=0))
@of_cluster
def undrain_command(island: int, url: str | None, token: str | None, ca: str | None) -> None:
    """Take a drain back: the island gets slices again. Those that have left it stay where they are."""
    url, token, ca = cluster_to_change(url, token, ca)
    undrain(url, token, island, ca)
    click.echo(f"island {island} takes slices again")


@command.command("remove")
@click.argument("island", type=click.IntRange(min=0))
@of_cluster
def remove_command(island: int, url: str | None, token: str | None, ca: str | None) -> None:
    """End an island for good: one without slices, or whose drain is over its deadline."""
    url, token, ca = cluster_to_change(url, token, ca)
    remove(url, token, island, ca)
    click.echo(f"island {island} is gone")
