"""`pathways spans`: launches as OpenTelemetry spans, to a collector."""

from __future__ import annotations

import contextlib
import time

import click

from pathways_ray.cli.output import CommandFailed, NumberRange
from pathways_ray.cli.up import join_ray, name_option
from pathways_ray.errors import PathwaysError


@click.command("spans")
@click.option("--endpoint", help="http://HOST:4318/v1/traces; else OTEL_EXPORTER_OTLP_ENDPOINT, or this machine.")
@click.option("--sample", type=NumberRange(0.0, 1.0), default=1.0, show_default=True, help="Part of the launches.")
@click.option("--every", type=NumberRange(1.0, 1e6), default=5.0, show_default=True, help="Seconds between looks.")
@click.option("--address", help="Of the Ray cluster; left out, where this user started the runtime, else auto.")
@name_option
def command(endpoint: str | None, sample: float, every: float, address: str | None, name: str) -> None:
    """Send launches to an OpenTelemetry collector, each as a trace, until Ctrl-C.

    Runs on a machine of the Ray cluster, and reads what processes note anyway. Headers, certificates and time limits
    are OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS and so on). Needs the extra `otel`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        text = f"this command needs {error.name}, which is not installed: pip install '.[otel]' in a checkout"
        raise CommandFailed(text) from error
    import ray

    from pathways_ray import names
    from pathways_ray.deployment import span_export, tracing

    names.check_name(name)
    join_ray(address, name)
    sent = 0
    try:
        tracing.processes(name)  # says so at once where there is no such runtime
        export = span_export.SpanExport(
            OTLPSpanExporter(endpoint=endpoint),
            name,
            sample,
            lambda since: tracing.trace(tracing.processes(name), since),
        )
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(every)
                try:
                    sent += export.round()
                except PathwaysError as error:  # the controller is away, and looked for again
                    click.echo(str(error), err=True)
    finally:
        ray.shutdown()
    click.echo(f"{sent} launches, {export.lost} spans that the collector did not take")
    if export.left_out_s:
        text = "launches were too many to be gathered: look more often (--every), or take a sample"
        click.echo(f"{export.left_out_s:.1f} s are left out, in which {text}", err=True)
