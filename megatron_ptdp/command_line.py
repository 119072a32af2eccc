"""The part that `pathways-plan` and `pathways-train` share: errors as one line with an exit status, and the console."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console

PLAIN_WIDTH = 130
"""Columns of text that goes to no terminal; rich would take 80, in which lines and tables break."""


class Failed(click.ClickException):
    """Ends a command with one line on stderr, `COMMAND: what happened`, and exit status 1."""

    def __init__(self, command: str, message: str) -> None:
        super().__init__(" ".join(message.split()))
        self.command = command

    def show(self, file: Any = None) -> None:
        click.echo(f"{self.command}: {self.message}", err=True)


class WronglyAsked(Failed):
    """The same with exit status 2: the question has to change."""

    exit_code = 2


def console(stderr: bool = False) -> Console:
    """A console of stdout, or of stderr where stdout is for what programs read."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made
