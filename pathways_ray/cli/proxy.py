"""`pathways proxy`: a door for unmodified JAX programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pathways_ray.cli.output import NumberRange
from pathways_ray.cli.status import ask, cluster_meant, found_here, of_cluster
from pathways_ray.client import registry
from pathways_ray.errors import Unschedulable, UsageError

if TYPE_CHECKING:
    from pathways_ray.proxy.server import ProxyServer
    from pathways_ray.proxy.spare import SpareSession

QUIET = "TF_CPP_MIN_LOG_LEVEL", "2"
"""jaxlib's client warns as it connects, and writes a stack trace of its own as a program ends well; both are below
errors. JAX itself sets 1."""

ENDS = signal.SIGTERM, signal.SIGHUP
"""Signals that ask a process to end, beside Ctrl-C, which Python takes by itself."""

DEFAULT_DEVICES = 4
"""Devices of an embedded cluster, where nobody says how many."""

ALONE_LIMIT_S = 24 * 3600.0
"""What a launch and a compilation may take in an embedded cluster, where nobody else waits for its devices: plain JAX
has no limit, and a whole training may be one call."""


@click.command("proxy", context_settings={"allow_interspersed_args": False})
@of_cluster
@click.option("--devices", type=click.IntRange(min=0), default=0, help="Devices of each client; 0: all of an island.")
@click.option("--shape", default="", help="The same as a grid, such as 2x2.")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Listen on a port of loopback, with a token.")
@click.option(
    "--launch-limit",
    "launch_limit_s",
    type=NumberRange(min=0, min_open=True),
    default=None,
    help="Seconds that a call may take in a cluster that this command starts.  [default: a day]",
)
@click.option("--name", default="proxy", show_default=True, help="The name of its sessions in status.")
@click.option("--json", "as_json", is_flag=True, help="Print the variables as JSON.")
@click.option("--until-eof", is_flag=True, help="End when standard input does.")
@click.option("--exec", "executed", is_flag=True, help="Run the command that follows with the variables set.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def command(
    url: str | None,
    token: str | None,
    ca: str | None,
    devices: int,
    shape: str,
    port: int | None,
    launch_limit_s: float | None,
    name: str,
    as_json: bool,
    until_eof: bool,
    executed: bool,
    program: tuple[str, ...],
) -> None:
    """Let unmodified JAX programs use the cluster: pathways proxy --devices 4 --exec -- python train.py

    It prints the variables to set, and serves until it is stopped; with --exec, until the command ends, whose exit
    status it has. Each program that attaches gets devices of its own. Without a cluster of this user on this machine,
    and without --url, it starts one here, for itself, which ends with it: of GPUs if there are enough, else of CPU
    devices.
    """
    if bool(program) != executed:
        raise UsageError("--exec and the command to run come together: pathways proxy --exec -- python train.py")
    _on_end(_interrupt)
    given = dict(os.environ)  # this process's own changes, JAX's among them, are not meant for the command
    with _serving(url, token, ca, _size(devices, shape), port, name, launch_limit_s) as (variables, server):
        if executed:
            sys.exit(_run(program, given, variables))
        with contextlib.suppress(KeyboardInterrupt):
            if as_json:
                click.echo(json.dumps({"target": variables["JAX_BACKEND_TARGET"], "env": variables}))
            else:
                for key, value in variables.items():
                    click.echo(f"export {key}={shlex.quote(value)}")
            sys.stdout.flush()
            if until_eof:
                while sys.stdin.read(1):
                    pass
                if as_json:
                    click.echo(json.dumps(server.account))
            else:
                signal.pause()


def _on_end(handler: Callable[[int, FrameType | None], None]) -> None:
    """Has a function take the signals that ask a process to end, but for those that who started it leaves out
    (`nohup`)."""
    for number in ENDS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Ends the command as Ctrl-C does, once: what it has made is removed on the way."""
    _on_end(lambda *_: None)
    raise KeyboardInterrupt


def _size(devices: int, shape: str) -> int:
    """Raises `UsageError` for a shape that is no grid, or for another number of devices than it has."""
    if not shape:
        return devices
    try:
        sizes = [int(size) for size in shape.lower().split("x")]
    except ValueError:
        sizes = [0]
    found = math.prod(sizes)
    if min(sizes) < 1 or devices not in (0, found):
        raise UsageError(f"--shape is a grid of devices such as 2x2, and agrees with --devices; got {shape!r}")
    return found


@contextlib.contextmanager
def _serving(
    url: str | None,
    token: str | None,
    ca: str | None,
    devices: int,
    port: int | None,
    name: str,
    launch_limit_s: float | None,
) -> Iterator[tuple[dict[str, str], ProxyServer]]:
    """The variables of clients of a proxy that serves, and the proxy."""
    # Set before JAX is loaded, which computes nothing here.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_X64"] = "1"

    from pathways_ray.proxy import plugin
    from pathways_ray.proxy.server import ProxyServer
    from pathways_ray.proxy.socket_folders import socket_path

    found = not url and bool(registry.shared())
    with contextlib.ExitStack() as stack:
        if url or found:
            if launch_limit_s is not None:
                raise UsageError("--launch-limit is for a cluster that this command starts; one that runs has its own")
            url, token, ca = cluster_meant(url, token, ca, shared=True)
        else:
            url, token, ca = _embedded(stack, devices or DEFAULT_DEVICES, launch_limit_s or ALONE_LIMIT_S)
            _on_end(_interrupt)  # Ray has its own handlers
        sessions = _sessions(url, token, ca, devices, name, found)
        stack.callback(sessions.close)
        secret = ""
        if port is None:
            address = f"unix:{stack.enter_context(socket_path())}"
        else:
            secret = secrets.token_hex(16)
            address = f"127.0.0.1:{port}"
        server = ProxyServer(sessions.take, address, secret, sessions.devices)
        stack.callback(server.stop)
        server.start()
        if port is not None:
            address = f"127.0.0.1:{server.port}"
        yield plugin.environment(f"grpc://{address}", secret), server


def _sessions(url: str, token: str, ca: str, devices: int, name: str, found: bool) -> SpareSession:
    """The sessions of clients, on a cluster that is named to the user where nobody named it and it was `found`: who
    thinks of one of their own may ask for more than it has."""
    from pathways_ray.proxy.spare import SpareSession

    if not found:
        return SpareSession(url, token, ca, devices, name)
    which = found_here(url)
    try:
        sessions = SpareSession(url, token, ca, devices, name)
    except Unschedulable as error:
        text = (
            "ask for fewer devices, name another cluster with --url, or stop this one: then the command starts its own"
        )
        raise Unschedulable(f"{error}. That is {which}; {text}") from error
    hosts = [host for island in ask(url, token, ca=ca)["islands"] for host in island["hosts"]]
    count = sum(len(host["devices"]) for host in hosts if host["up"])
    click.echo(f"pathways: each program has {sessions.devices} of the {count} devices of {which}", err=True)
    return sessions


def _embedded(stack: contextlib.ExitStack, devices: int, launch_limit_s: float) -> tuple[str, str, str]:
    import pathways_ray as pw

    # Its hosts have as many devices as they are told, and 64-bit types where programs have them.
    started = pw.init(islands=1, devices_per_host=devices, launch_limit_s=launch_limit_s, compile_limit_s=ALONE_LIMIT_S)
    cluster: Any = stack.enter_context(started)
    registry.write(cluster.url, cluster.token, private=True)
    return cluster.url, cluster.token, ""


def _run(program: tuple[str, ...], given: dict[str, str], variables: dict[str, str]) -> int:
    """Runs a command, which gets the signals that this process gets; its exit status, as shells have it."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    _on_end(pass_on)
    try:
        child = subprocess.Popen(program, env=dict([QUIET]) | given | variables)
    except OSError as error:
        raise UsageError(f"{program[0]} cannot be run: {error}") from None
    for number in early:
        child.send_signal(number)
    while True:
        try:
            status = child.wait()
        except KeyboardInterrupt:
            continue  # the command got it too, and decides what follows
        return status if status >= 0 else 128 - status
