"""Reads TOML files and writes text files; every failure becomes an error of the caller's kind that names the file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from megatron_ptdp.errors import PlanningError
from pathways_ray.errors import UsageError


def read_toml(path: Path, name: str = "", error: type[UsageError] = PlanningError) -> dict[str, Any]:
    """The tables of a file.

    Args:
        path: of the file
        name: of the file in messages; left out, the last part of its path
        error: raised when the file cannot be read, or is not TOML
    """
    name = name or path.name
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as cause:
        raise error(f"{name} cannot be read: {cause}; it must be a TOML file") from cause
    except (OSError, UnicodeDecodeError) as cause:
        raise error(f"{name} cannot be read: {cause}") from cause


def split_setting(text: str) -> tuple[str, str]:
    """`tensor=8` as the name of a setting and the text of its value; "" for the name or the value that is missing.
    Dashes in a name stand for underscores."""
    name, _, value = text.partition("=")
    return name.strip().replace("-", "_"), value.strip()


def toml_value(value: Any) -> str:
    """A number, a boolean or a text as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    # TOML takes JSON's escapes: the path of a file may have quotes.
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def write_text(path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        PlanningError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanningError(f"{path.name} cannot be written: {error.strerror}") from error
