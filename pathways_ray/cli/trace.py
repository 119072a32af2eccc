"""`pathways trace`: what runs on a cluster as one timeline for Perfetto, from now on or in the time that is over."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from pathways_ray.cli.output import FILE, FOLDER, STDOUT, NumberRange, with_folder, writing
from pathways_ray.cli.up import join_ray, name_option
from pathways_ray.errors import UsageError

SECONDS = NumberRange(min=0.1, max=3600.0)


@click.command("trace")
@click.option(
    "--seconds", type=SECONDS, default=5.0, show_default=True, help="Trace from now on for this long, or until Ctrl-C."
)
@click.option("--last", type=SECONDS, help="In place of that, what ran in the last seconds.")
@click.option(
    "--output",
    type=FILE,
    callback=with_folder,
    help="The file, - is stdout; left out, trace.json, with --xprof beside the profiles.",
)
@click.option(
    "--xprof",
    type=FOLDER,
    callback=with_folder,
    help="JAX's profiler too, on all hosts, as one session of TensorBoard.",
)
@click.option(
    "--predicted",
    type=FILE,
    multiple=True,
    help="The expected course of a program, drawn beside it: predicted.json of a pathways-train run. Repeat it.",
)
@click.option("--address", help="Of the Ray cluster; left out, where this user started the runtime, else auto.")
@name_option
def command(
    seconds: float,
    last: float | None,
    output: Path | None,
    xprof: Path | None,
    predicted: tuple[Path, ...],
    address: str | None,
    name: str,
) -> None:
    """Write a timeline of controller, schedulers, hosts and devices, to be opened at ui.perfetto.dev.

    Runs on a machine of the Ray cluster. Processes always note the last 131,072 launches, so --last costs nothing
    before it is asked for. Of more than a file can hold the last part is written.
    """
    if xprof is not None and last is not None:
        raise UsageError("--xprof begins now: JAX's profiler knows nothing of what is over; leave out --last")
    import ray

    from pathways_ray import names
    from pathways_ray.deployment import tracing

    names.check_name(name)
    predictions = [tracing.read_prediction(path) for path in predicted]
    join_ray(address, name)
    try:
        actors = tracing.processes(name)
        since = time.monotonic()
        if last is not None:
            since -= last
        elif xprof is not None:
            with writing(xprof):
                session, lacking = tracing.profile(actors, seconds, xprof)
            click.echo(
                f"{session}: JAX's profiles of the hosts; tensorboard --logdir {xprof} shows them", err=output == STDOUT
            )
            for process, reason in lacking.items():
                click.echo(f"no profile of {process}: {reason}", err=True)
            output = output or session / "trace.json"
        else:
            with contextlib.suppress(KeyboardInterrupt):  # what there is so far
                time.sleep(seconds)
        found = tracing.trace(actors, since, predictions=predictions)
        output = output or Path("trace.json")
        if output == STDOUT:
            click.echo(tracing.text(found))
        else:
            with writing(output):
                tracing.write(found, output)
    finally:
        ray.shutdown()
    worst = max((clock.within_s for clock in found.clocks.values()), default=0.0)
    click.echo(
        f"{output}: {len(found.ended)} launches on {len(found.ran)} hosts; clocks agree within {worst * 1e6:.0f} us",
        err=output == STDOUT,
    )
    if found.left_out_s:
        click.echo(f"the first {found.left_out_s:.1f} s are left out: a file holds no more launches", err=True)
    silent = sorted(set(actors) - set(found.clocks))
    if silent:
        click.echo(f"left out, since they did not answer: {', '.join(silent)}", err=True)
