"""The command line `pathways`: `demo`, `bench`, `up`, `down`, `island`, `drill`, `status`, `why`, `top`,
`dashboard`, `trace`, `spans`, `proxy`, `logs`, `usage`, `refusals`, `tenants`, `doctor`, `completion`.

Commands load what they run (JAX, Ray, the benchmarks) when they are called, so that `--help` and `status` answer at
once. An error of the project ends a command with one line, `pathways: what happened`, and exit status 2 where the
caller has to change something, 1 where a run went wrong.
"""

from __future__ import annotations

from typing import Any

import click

import pathways_ray
from pathways_ray.cli import (
    bench,
    dashboard,
    demo,
    doctor,
    down,
    drill,
    island,
    logs,
    proxy,
    refusals,
    spans,
    status,
    tenants,
    top,
    trace,
    up,
    why,
)
from pathways_ray.cli.output import CommandFailed, WronglyCalled
from pathways_ray.errors import AuthenticationError, PathwaysError, UsageError


class Commands(click.Group):
    """A group of commands that shows the errors of the project as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PathwaysError as error:
            kind = WronglyCalled if isinstance(error, (UsageError, AuthenticationError)) else CommandFailed
            raise kind(str(error) or type(error).__name__) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pathways_ray.__version__, prog_name="pathways")
def commands() -> None:
    """An open Pathways on Ray: one controller, many islands of accelerators, programs of JAX functions."""


for _module in (
    demo,
    bench,
    up,
    down,
    island,
    drill,
    status,
    why,
    top,
    dashboard,
    trace,
    spans,
    proxy,
    refusals,
    tenants,
):
    commands.add_command(_module.command)
for _command in (logs.logs, logs.usage, doctor.doctor, doctor.completion):
    commands.add_command(_command)


def main() -> None:
    """The entry point of `pathways`."""
    commands(prog_name="pathways")
