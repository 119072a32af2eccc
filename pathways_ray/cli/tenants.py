"""`pathways tenants`: who may use a runtime, in a file that its controller reads again whenever it changes.

The file keeps the SHA-256 of each token, never a token. It is replaced as a whole, so no process reads half of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.filesize import decimal
from rich.table import Table

from pathways_ray.cli.output import console_beside
from pathways_ray.controller.tenants import Quota, Tenant, TenantBook, add, change, decode, encode, remove, token_digest
from pathways_ray.errors import UsageError

file_option = click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="PATHWAYS_TENANTS",
    show_envvar=True,
    required=True,
    help="The table, as given to 'pathways up --tenants'.",
)
whole = click.IntRange(min=0)


@click.group("tenants")
def command() -> None:
    """Keep the table of those who may use a runtime."""


@command.command("add")
@click.argument("name")
@file_option
@click.option("--weight", default=1.0, show_default=True, help="Part of the device time under the policy 'share'.")
@click.option("--priority", default=0, show_default=True, help="Rank under the policy 'priority'; higher goes first.")
@click.option("--max-devices", type=whole, help="Devices of its slices together.")
@click.option("--max-bytes", type=whole, help="Bytes of its buffers on devices.")
@click.option("--max-launches", type=whole, help="Launches without an outcome.")
@click.option("--max-message-bytes", type=whole, help="Bytes of one message to the controller.")
@click.option("--max-nodes", type=whole, help="Nodes of one program.")
@click.option("--launch-limit-s", type=float, help="Seconds that a launch may keep its devices; else the runtime's.")
@click.option("--trusted", is_flag=True, help="Its code runs unchecked, and can reach the data of others.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def add_command(
    name: str,
    path: Path,
    weight: float,
    priority: int,
    max_devices: int | None,
    max_bytes: int | None,
    max_launches: int | None,
    max_message_bytes: int | None,
    max_nodes: int | None,
    launch_limit_s: float | None,
    trusted: bool,
    as_json: bool,
) -> None:
    """Add a tenant, and print its token: this once, since the file keeps only its SHA-256."""
    token = secrets.token_urlsafe(24)
    quota = Quota(max_devices, max_bytes, max_launches, max_message_bytes, max_nodes)
    with changing(path) as table:
        table[0] = add(table[0], Tenant(name, weight, priority, quota, launch_limit_s, trusted), token_digest(token))
    if as_json:
        click.echo(json.dumps({"name": name, "token": token, "file": str(path)}))
    else:
        click.echo(token)


@command.command("set")
@click.argument("name")
@file_option
@click.argument("values", nargs=-1, required=True, metavar="NAME=VALUE...")
def set_command(name: str, path: Path, values: tuple[str, ...]) -> None:
    """Change values of a tenant, whose token stays: max-devices=4 weight=2 launch-limit-s=none.

    A controller that runs takes them within seconds, for what is asked from then on.
    """
    with changing(path) as table:
        found = table[0].named(name)
        if found is None:
            remove(table[0], name)  # says who is there
            return
        for value in values:
            found = changed(found, value)
        table[0] = change(table[0], found)


def changed(tenant: Tenant, text: str) -> Tenant:
    """A tenant with one value changed.

    Raises:
        UsageError: `text` is not NAME=VALUE of a value that there is.
    """
    key, _, value = text.partition("=")
    field = key.replace("-", "_")
    kinds: dict[str, Callable[[str], Any]] = {"weight": float, "priority": int, "launch_limit_s": float}
    kinds |= {"trusted": _truth, **dict.fromkeys(QUOTAS, int)}
    if field not in kinds:
        known = ", ".join(one.replace("_", "-") for one in kinds)
        raise UsageError(f"{text!r} changes nothing: give NAME=VALUE with one of {known}")
    none = value == "none" and field in ("launch_limit_s", *QUOTAS)
    try:
        new = None if none else kinds[field](value)
    except ValueError:
        raise UsageError(f"{value!r} is no value of {key}") from None
    if field in QUOTAS:
        return msgspec.structs.replace(tenant, quota=msgspec.structs.replace(tenant.quota, **{QUOTAS[field]: new}))
    return msgspec.structs.replace(tenant, **{field: new})


def _truth(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


@command.command("remove")
@click.argument("name")
@file_option
def remove_command(name: str, path: Path) -> None:
    """Remove a tenant; a controller that runs ends its sessions."""
    with changing(path) as table:
        table[0] = remove(table[0], name)


@command.command("list")
@file_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_command(path: Path, as_json: bool) -> None:
    """Show the tenants, without their tokens."""
    tenants = [tenant for tenant, _ in read(path, missing_ok=False).entries]
    if as_json:
        plain = [
            {
                "name": t.name,
                "weight": t.weight,
                "priority": t.priority,
                "trusted": t.trusted,
                "quota": {k: getattr(t.quota, k) for k in FIELDS},
                "launch_limit_s": t.launch_limit_s,
            }
            for t in tenants
        ]
        click.echo(json.dumps(plain, indent=2))
        return
    table = Table("tenant", title="tenants")
    for heading in ("weight", "priority", "trusted", *(field.replace("_", " ") for field in FIELDS), "launch limit"):
        table.add_column(heading, justify="right")
    for tenant in tenants:
        limit = f"{tenant.launch_limit_s:g} s" if tenant.launch_limit_s is not None else "-"
        quota = [_limit(field, getattr(tenant.quota, field)) for field in FIELDS]
        trusted = "yes" if tenant.trusted else "-"
        table.add_row(tenant.name, f"{tenant.weight:g}", str(tenant.priority), trusted, *quota, limit)
    console_beside(None, markup=False).print(table)


FIELDS: tuple[str, ...] = Quota.__struct_fields__
QUOTAS = dict(zip(("max_devices", "max_bytes", "max_launches", "max_message_bytes", "max_nodes"), FIELDS, strict=True))
"""The fields of quotas, by the names that options have for them."""


def _limit(field: str, value: int | None) -> str:
    if value is None:
        return "-"
    return decimal(value) if field.endswith("bytes") else str(value)


def read(path: Path, missing_ok: bool) -> TenantBook:
    """The table in a file; an empty one where there is no file and that is fine.

    Raises:
        UsageError: the file cannot be read, or holds no table.
    """
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        if missing_ok:
            return TenantBook()
        raise UsageError(f"there is no file {path}; 'pathways tenants add NAME --file {path}' makes it") from None
    except OSError as error:
        raise UsageError(f"the tenants file {path} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def changing(path: Path) -> Iterator[list[TenantBook]]:
    """The table of a file, in a list of one; what stands there afterwards is written. One process at a time.

    A new file can be read by its owner alone; one that is there keeps its mode and owner. A link stays one: the file
    that it leads to changes.

    Raises:
        UsageError: the file cannot be read or written, or holds no table.
    """
    path = Path(os.path.realpath(path))
    folder = path.parent
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{folder} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = [read(path, missing_ok=True)]
        yield table
        _write(path, encode(table[0]))
    except OSError as error:
        raise UsageError(f"the tenants file {path} cannot be written: {error.strerror}") from error
    finally:
        os.close(lock)


def _write(path: Path, data: bytes) -> None:
    before = path.stat() if path.exists() else None
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            os.chmod(unfinished, before.st_mode & 0o777)
            os.chown(unfinished, before.st_uid, before.st_gid)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
