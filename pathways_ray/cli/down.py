"""`pathways down`: ends a runtime of `pathways up`, and leaves nothing of it, whatever state it is in."""

from __future__ import annotations

import click

from pathways_ray.cli.up import join_ray, name_option
from pathways_ray.client import registry
from pathways_ray.errors import UsageError
from pathways_ray.process_log import note_operator


@click.command("down")
@click.option("--address", help="Of the Ray cluster; left out, where this user started the runtime, else auto.")
@name_option
def command(address: str | None, name: str) -> None:
    """End the runtime on a Ray cluster; programs that run are lost. Ray itself goes on.

    Ends well when there is no runtime. Works without the controller, and after half a start.
    """
    click.echo(down(address, name))


def down(address: str | None, name: str) -> str:
    """Removes a runtime; says what was done.

    Raises:
        UsageError: Ray is not there, or the caller has to say where.
        PathwaysError: some of it could not be removed.
    """
    import ray

    from pathways_ray import names
    from pathways_ray.deployment import detached

    names.check_name(name)
    known = [record for record in registry.all_records() if record.name == name]
    if address is None and len(known) > 1:
        there = ", ".join(record.ray for record in known)
        raise UsageError(
            f"runtimes named {name!r} of yours are on several Ray clusters: choose with --address: {there}"
        )
    try:
        join_ray(address, name)
    except UsageError:
        if address is None and known and not registry.answers(known[0]):
            registry.forget(known[0])
            return f"the Ray cluster at {known[0].ray} is gone, and runtime {name!r} with it"
        raise
    try:
        where = str(ray.get_runtime_context().gcs_address)
        actors, groups = detached.remove(name)
    finally:
        ray.shutdown()
    registry.forget(registry.Record("", "", name=name, ray=where))
    if not actors and not groups:
        return f"no runtime named {name!r} was on the Ray cluster at {where}"
    note_operator(name, "runtime ended", f"{actors} processes on the Ray cluster at {where}")
    return f"runtime {name!r} is down: {actors} process(es) ended, {groups} placement group(s) freed"
