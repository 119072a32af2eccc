"""`pathways-plan calibrate`: measures a cluster, writes its file and prints it. JAX and Ray load when it runs."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_ptdp.config import load
from megatron_ptdp.config.files import write_text
from megatron_ptdp.errors import BadFigure, PlanningError
from megatron_ptdp.planner.calibration.file import cluster_text
from megatron_ptdp.planner.calibration.fit import cluster_of, step_seconds


@click.command()
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="the cluster file to write"
)
@click.option("--address", help="a Ray cluster, or auto; left out, one is started on this machine")
@click.option("--islands", type=click.IntRange(1), default=2, show_default=True)
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="hosts of an island")
@click.option("--devices", type=click.IntRange(1), default=2, show_default=True, help="devices of a host")
@click.option("--platform", type=click.Choice(["cpu", "gpu", "tpu"]), default="cpu", show_default=True)
@click.option("--memory", type=float, default=8e9, show_default=True, help="bytes that a device may use")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="of measurements; more are better")
def calibrate(
    output: Path,
    address: str | None,
    islands: int,
    hosts: int,
    devices: int,
    platform: str,
    memory: float,
    rounds: int,
) -> None:
    """Measure products, copies, launches, links and small training steps of a cluster through the runtime; write its
    file."""
    if not 0 < memory < float("inf"):
        raise BadFigure(f"memory is {memory}, must be a finite number above 0")
    if output.suffix != ".toml" or not output.absolute().parent.is_dir():  # before minutes of measuring
        raise PlanningError(f"--output is {output}, must be a .toml file in a folder that is there")
    import pathways_ray as pw
    from megatron_ptdp.planner.calibration.measure import measure

    software = load.software("xla-f32" if platform == "cpu" else "xla")
    # Without fusion, as training: each action is a launch.
    with pw.init(islands, hosts, devices, address=address, platform=platform, fusion=False):
        seen = measure(platform, range(islands), rounds, lambda text: click.echo(text, err=True))
    made = cluster_of(seen, memory, software, output.stem)
    write_text(output, cluster_text(made))
    made = load.cluster(str(output))
    device = made.device
    click.echo(
        f"{output}: {device.peak_flops / 1e9:,.4g} GFLOP/s × {device.matrix_efficiency:.2f}, memory "
        f"{device.memory_bandwidth / 1e9:.3g} GB/s × {device.memory_efficiency:.2f}, action "
        f"{device.action * 1e6:,.0f} us, iteration {device.step * 1e3:.1f} ms"
    )
    for one in made.levels:
        click.echo(
            f"  {one.name}: all-reduce {one.bandwidth / 1e9:.3g} GB/s, {one.latency * 1e6:,.0f} us; messages "
            f"{one.message_bandwidth / 1e9:.3g} GB/s, {one.message_latency * 1e6:,.0f} us, "
            f"{one.message_share:.0%} of it taken from computation"
        )
    off = [step_seconds(made, one, software) / taken - 1 for one, taken in seen.steps.items()]
    click.echo(
        f"  the model is off by {max(map(abs, off)):.0%} at most on the {len(off)} reference steps it was fitted to"
    )
