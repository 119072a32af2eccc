"""`pathways top`: what runs and what waits, in a terminal, again each second."""

from __future__ import annotations

import sys

import click

from pathways_ray.cli.output import CommandFailed, NumberRange
from pathways_ray.cli.status import check_token, cluster_meant, of_cluster
from pathways_ray.errors import UsageError


@click.command("top")
@of_cluster
@click.option("--every", type=NumberRange(0.5, 1e6), default=1.0, show_default=True, help="Seconds between looks.")
def command(url: str | None, token: str | None, ca: str | None, every: float) -> None:
    """Devices, tenants, launches, queue, programs, transfers, memory and events, as they are.

    Enter on a launch says why it is not over. Needs the extra `top`.
    """
    url, token, ca = cluster_meant(url, token, ca)
    check_token(url, token, ca)
    if not sys.stdout.isatty():
        raise UsageError("'pathways top' draws on a terminal, and its output goes elsewhere; 'pathways status' prints")
    try:
        from pathways_ray.cli.top_app import TopApp
    except ModuleNotFoundError as error:
        text = f"this command needs {error.name}, which is not installed: pip install '.[top]' in a checkout"
        raise CommandFailed(text) from error
    TopApp(url, token, ca, every).run()
