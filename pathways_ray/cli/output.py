"""Shared by the commands: consoles for text and JSON, the end of a command that failed, lazy imports."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

STDOUT = Path("-")

FILE = click.Path(dir_okay=False, allow_dash=True, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)

PLAIN_WIDTH = 132
"""Columns of text that goes to no terminal; rich would take 80, in which tables break."""


def readable(value: Any) -> Any:
    """The same JSON without characters that would steer a terminal."""
    match value:
        case str():
            return "".join(character if character.isprintable() else "?" for character in value)
        case list():
            return [readable(item) for item in value]
        case dict():
            return {readable(key): readable(item) for key, item in value.items()}
    return value


class NumberRange(click.FloatRange):
    """A number in a range; unlike click's own it refuses what is no number, which is in no range and in every one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return found


class CommandFailed(click.ClickException):
    """Ends a command with one line on stderr and exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(str(readable(" ".join(message.split()))))

    def show(self, file: Any = None) -> None:
        click.echo(f"pathways: {self.message}", err=True)


class WronglyCalled(CommandFailed):
    """The same with exit status 2: the caller has to change something."""

    exit_code = 2


def with_folder(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Makes the folder of a file or folder to be written, or refuses it, before the command does its work."""
    if value is not None and value != STDOUT:
        folder = value if param.type is FOLDER else value.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.BadParameter(f"{folder}: {error.strerror}") from error
        written = value if os.path.exists(value) else folder
        if not os.access(written, os.W_OK):
            raise click.BadParameter(f"{written} cannot be written to")
    return value


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Ends the command with a line where the file or folder cannot be written after all, as on a disk that is full."""
    try:
        yield
    except OSError as error:
        raise CommandFailed(f"{target} cannot be written: {error.strerror or error}") from error


def console_beside(json_target: Path | None, markup: bool = True) -> Console:
    """The console for a command's text: stdout, or stderr when the JSON has stdout for itself.

    Args:
        markup: whether `[bold]` in a text is a style, and `:b:` a picture; False for texts that come from elsewhere.
    """
    # Named now, so that a command may redirect what others print to stdout.
    stream = sys.stderr if json_target == STDOUT else sys.stdout
    console = Console(file=stream, markup=markup, emoji=markup, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def write_json(value: Any, target: Path) -> None:
    """Writes JSON to a path, or to stdout for `-`."""
    text = json.dumps(value, indent=2)
    if target == STDOUT:
        click.echo(text)
    else:
        with writing(target):
            target.write_text(text + "\n")


def load(module: str) -> Any:
    """Imports a module of `examples` or `benchmarks`, which need more packages than the runtime.

    Raises:
        CommandFailed: a package is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"this command needs {error.name}, which is not installed: pip install '.[train,bench]' in a checkout"
        ) from error
