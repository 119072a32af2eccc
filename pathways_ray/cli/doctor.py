"""`pathways doctor`: whether this machine can run the runtime, and what to do where it cannot; shell completion."""

from __future__ import annotations

import importlib.metadata
import json
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import click
from click.shell_completion import get_completion_class
from rich.table import Table

from pathways_ray.cli.output import console_beside
from pathways_ray.client import registry

MIN_PYTHON = (3, 11)
MIN_MEMORY = 4 << 30
"""Bytes: each process of the control plane takes some 0.1 GiB, a host 0.3 GiB and its arrays, Ray 1 GiB."""

MIN_SHARED = 1 << 30
MIN_DISK = 2 << 30
MIN_FILES = 4096
"""Open files: a controller has two for each client, a host one."""

NEEDED = ("jax", "jaxlib", "ray", "grpcio", "msgspec", "numpy", "prometheus-client", "aiohttp")
RAY_AT_LEAST = (2, 52)


class Check(NamedTuple):
    """One check: what was found, and, where it is not `ok`, what to do. One that is no `error` is advice."""

    name: str
    ok: bool
    found: str
    do: str = ""
    error: bool = True


def checks() -> list[Check]:
    """All checks; one that cannot be made has failed."""
    found = []
    for check in CHECKS:
        try:
            found.append(check())
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            found.append(Check(name, False, f"{type(error).__name__}: {error}", "see the message"))
    return found


def _python() -> Check:
    have = ".".join(map(str, sys.version_info[:3]))
    least = ".".join(map(str, MIN_PYTHON))
    return Check("python", sys.version_info >= MIN_PYTHON, have, f"use Python {least} or newer")


def _packages() -> Check:
    missing, there = [], []
    for name in NEEDED:
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Check("packages", False, f"no {', '.join(missing)}", "pip install pathways-ray")
    return Check("packages", True, ", ".join(there[:3]))


def _ray() -> Check:
    version = importlib.metadata.version("ray")
    new = tuple(int(part) for part in version.split(".")[:2]) >= RAY_AT_LEAST
    token = os.environ.get("RAY_AUTH_MODE", "")
    found = f"{version}, authentication {token}" if token else version
    return Check("ray", new, found, "install ray>=2.52: older ones let in everybody")


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    do = "with one core all processes take turns: tests and benchmarks will be slow"
    return Check("cores", cores >= 2, str(cores), do, error=False)


def _memory() -> Check:
    size = available_memory()
    do = f"free memory, or use fewer hosts: {MIN_MEMORY >> 30} GiB are needed for two islands"
    return Check("memory", size >= MIN_MEMORY, f"{size / (1 << 30):.1f} GiB free", do, error=False)


def available_memory(meminfo: str = "/proc/meminfo") -> int:
    """Bytes that this machine can give to processes: those that are free, and those of files that it would drop."""
    with open(meminfo, encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))


def _shared_memory() -> Check:
    size = shutil.disk_usage("/dev/shm").total
    do = "start the container with --shm-size=2g: Ray's object store lies there, and is slow elsewhere"
    return Check("shared memory", size >= MIN_SHARED, f"/dev/shm of {size / (1 << 30):.1f} GiB", do, error=False)


def _disk() -> Check:
    folder = tempfile.gettempdir()
    size = shutil.disk_usage(folder).free
    do = "Ray writes its sessions and the runtime its logs there: make room, or set TMPDIR"
    return Check("disk", size >= MIN_DISK, f"{size / (1 << 30):.1f} GiB free at {folder}", do)


def _open_files() -> Check:
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Check("open files", limit >= MIN_FILES, f"{limit} of at most {most}", "ulimit -n 65536", error=False)


def _ports() -> Check:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=2.0):
            pass
    return Check("loopback ports", True, "connections to this machine come through")


def _name() -> Check:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Check("host name", False, f"{name}: {error}", "Ray looks it up: add it to /etc/hosts")
    return Check("host name", True, f"{name} is {address}")


def _jax() -> Check:
    import jax

    devices = jax.devices()
    return Check("jax", bool(devices), f"{len(devices)} {devices[0].platform} device(s)")


def _transfers() -> Check:
    """Takes an array from this process's own transfer server, as hosts take them from each other."""
    import jax
    import numpy as np
    from jax.experimental import transfer

    device = jax.local_devices()[0]
    anywhere = "127.0.0.1:0"
    server = transfer.start_transfer_server(
        device.client, anywhere, [anywhere] * 2, transfer_size=1 << 16, max_num_parallel_copies=4
    )
    sent = jax.device_put(np.arange(8, dtype=np.float32), device)
    server.await_pull(1, [sent])
    kind = jax.ShapeDtypeStruct(sent.shape, sent.dtype, sharding=sent.sharding)
    (came,) = server.connect(server.address()).pull(1, [kind])
    ok = bool((np.asarray(came) == np.asarray(sent)).all())
    do = "hosts cannot send arrays to each other: install the jaxlib of requirements.lock"
    return Check("transfers", ok, f"an array came through JAX's transfer server on {device.platform}", do)


def _gloo() -> Check:
    from jaxlib import _jax

    there = hasattr(_jax, "make_gloo_tcp_collectives")
    do = "this jaxlib has no gloo: islands of several CPU hosts cannot start; use one host for each island"
    return Check("gloo", there, "collectives between CPU hosts" if there else "none", do, error=False)


def _clusters() -> Check:
    silent = [record.label for record in registry.silent()]
    running = [record.url for record in registry.running()]
    if silent:
        text = f"{', '.join(silent)} do not answer"
        return Check("clusters", False, text, "'pathways down' clears what is left", error=False)
    return Check("clusters", True, ", ".join(running) or "none runs here")


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _packages,
    _ray,
    _cores,
    _memory,
    _shared_memory,
    _disk,
    _open_files,
    _ports,
    _name,
    _jax,
    _transfers,
    _gloo,
    _clusters,
)


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON in place of a table.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check this machine: packages, Ray, JAX, ports, memory, cores, and say what to do. Ends with 1 for an error."""
    found = checks()
    if as_json:
        click.echo(json.dumps([check._asdict() for check in found], indent=2))
    else:
        table = Table("check", "", "found", "to do")
        for check in found:
            verdict = "ok" if check.ok else "error" if check.error else "advice"
            table.add_row(check.name, verdict, check.found, "" if check.ok else check.do)
        console_beside(None, markup=False).print(table)
    ctx.exit(1 if any(not check.ok and check.error for check in found) else 0)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes a shell complete commands: eval "$(pathways completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "pathways", "_PATHWAYS_COMPLETE").source())
