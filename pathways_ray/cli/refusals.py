"""`pathways refusals`: the programs that a cluster refuses since they ended hosts, and how to let one run again."""

from __future__ import annotations

import json

import click

from pathways_ray.cli.output import console_beside, readable
from pathways_ray.cli.status import ask, cluster_meant, cluster_to_change, of_cluster, refusals_table
from pathways_ray.client.asking import call
from pathways_ray.transport import messages


@click.command("refusals")
@of_cluster
@click.option("--lift", metavar="ID", help="Let this program run again; what it did before is forgotten.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
def command(url: str | None, token: str | None, ca: str | None, lift: str | None, as_json: bool) -> None:
    """Programs that are refused since they ended hosts.

    Without --url, of the cluster that this user started on this machine.
    """
    url, token, ca = (cluster_to_change if lift else cluster_meant)(url, token, ca)
    if lift:
        call(url, token, messages.LiftRefusal(0, lift), ca=ca)
    found = ask(url, token, ca=ca)["refusals"]
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif found:
        console_beside(None, markup=False).print(refusals_table(readable(found)))
    else:
        click.echo("no program is refused")
