"""`pathways dashboard`: the live page of a cluster, in a browser on this machine."""

from __future__ import annotations

import contextlib

import click

from pathways_ray.cli.output import CommandFailed
from pathways_ray.cli.status import check_token, cluster_meant, of_cluster


@click.command("dashboard")
@of_cluster
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="The port of the page; left out, a free one.")
def command(url: str | None, token: str | None, ca: str | None, port: int) -> None:
    """Serves the page on loopback, prints its address, and goes on until Ctrl-C.

    The address has a token of its own, which opens the page. With a tenant's --token the page shows what is the
    tenant's. From elsewhere: ssh -L PORT:127.0.0.1:PORT.
    """
    url, token, ca = cluster_meant(url, token, ca)
    check_token(url, token, ca)
    from pathways_ray.dashboard.server import serve

    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve(url, token, ca, port, started=click.echo)
    except OSError as error:
        raise CommandFailed(f"the page cannot be served at port {port}: {error.strerror}") from error
