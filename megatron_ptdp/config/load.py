"""Reads models, clusters and software from TOML files: shipped ones by name, others by path.

A file holds exactly the fields of its data type. A missing field, an unknown one, a figure of the wrong kind or out of
range is refused with the file's name, the field and what was expected.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from megatron_ptdp.config.cluster import Cluster, Device, Level, Operations, Software
from megatron_ptdp.config.files import read_toml
from megatron_ptdp.config.model import Model
from megatron_ptdp.errors import BadFigure, PlanningError, UnknownName

PRESETS = Path(__file__).parent / "presets"
T = TypeVar("T")

MAY_BE_ZERO = {
    "size", "latency", "kernel_overhead", "launch", "reserved_bytes", "fragmentation", "power_idle", "price",
    "forward_overlap", "backward_overlap", "pipeline_overlap", "data_overlap", "gather_overlap", "wait_seconds",
    "restart_seconds", "tile_depth", "kernels_forward", "kernels_inputs", "kernels_weights", "encoder_layers",
    "encoder_sequence", "key_heads", "head_size", "ffn", "action", "step", "message_bandwidth", "message_latency",
    "message_share",
}  # fmt: skip
SHARES = {
    "matrix_efficiency", "memory_efficiency", "efficiency", "fragmentation", "forward_overlap", "backward_overlap",
    "pipeline_overlap", "data_overlap", "gather_overlap", "message_share", "inputs_share",
    "attention_efficiency",
}  # fmt: skip

MIN_FIGURE, MAX_FIGURE = 1e-15, 1e25
"""Bounds of a figure that may not be 0, in SI units: beyond, times would be 0 or infinite."""


def names(kind: str) -> list[str]:
    """The shipped names of a kind: `models`, `clusters` or `software`."""
    return sorted(path.stem for path in (PRESETS / kind).glob("*.toml"))


def is_file(kind: str, name: str) -> bool:
    """Whether this is the path of a file, and not a name: shipped names go first."""
    return name not in names(kind) and (Path(name).suffix == ".toml" or Path(name).parent != Path())


def lasting(kind: str, name: str) -> str:
    """A shipped name, or a path that holds in every folder: what a file that is read later says."""
    return str(Path(name).absolute()) if is_file(kind, name) else name


def model(name: str) -> Model:
    """A model by its shipped name or the path of its file."""
    where, stem, table = _read("model", "models", name)
    return build(Model, {"name": stem, **table}, where)


def software(name: str) -> Software:
    """Software by its shipped name or the path of its file."""
    where, stem, table = _read("software", "software", name)
    return build(Software, {"name": stem, **table}, where)


def cluster(name: str) -> Cluster:
    """A cluster by its shipped name or the path of its file."""
    where, stem, table = _read("cluster", "clusters", name)
    return cluster_of(table, where, stem)


def cluster_of(table: dict[str, Any], where: str, name: str) -> Cluster:
    """A cluster from the tables of its file.

    Raises:
        BadFigure: a field is missing, unknown or out of range.
    """
    rest = dict(table)
    known = {"name", "source", "software", "device", "network", "operations"}
    for field in rest:
        if field not in known:
            raise UnknownName.of(f"field in {where}:", field, known)
    parts = {}
    for part, kind in (("device", dict), ("network", list), ("operations", dict)):
        if not isinstance(rest.get(part), kind):
            header = "[[network]]" if part == "network" else f"[{part}]"
            raise BadFigure(f"{where}: the table {header} is missing")
        parts[part] = rest.pop(part)
    made = dict(parts["device"])
    if "tiles" in made:
        if not isinstance(made["tiles"], list) or not made["tiles"]:
            raise BadFigure(f"{where} [device]: tiles is {made['tiles']!r}, must be a list of [rows, columns, speed]")
        made["tiles"] = tuple(_tile(tile, where) for tile in made["tiles"])
    rest["device"] = build(Device, made, f"{where} [device]")
    rest["levels"] = tuple(
        build(Level, level, f"{where} [[network]] {i + 1}") for i, level in enumerate(parts["network"])
    )
    rest["operations"] = build(Operations, parts["operations"], f"{where} [operations]")
    return build(Cluster, {"name": name, **rest}, where)


def build(kind: type[T], table: dict[str, Any], where: str) -> T:
    """A data type from a table, each field checked.

    Raises:
        UnknownName: a field that the type does not have, with the nearest one.
        BadFigure: a field is missing, of the wrong kind, or out of range.
    """
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in table:
        if name not in known:
            raise UnknownName.of(f"field in {where}:", name, known)
    values = {}
    for name, field in known.items():
        if name not in table:
            if field.default is MISSING:
                raise BadFigure(f"{where}: the field {name!r} is missing")
            continue
        values[name] = _checked(name, str(field.type), table[name], where)
    return kind(**values)


def _checked(name: str, kind: str, value: Any, where: str) -> Any:
    if kind == "bool" and not isinstance(value, bool):
        raise BadFigure(f"{where}: {name} is {value!r}, must be true or false")
    if kind == "str" and not isinstance(value, str):
        raise BadFigure(f"{where}: {name} is {value!r}, must be a text")
    if kind not in ("int", "float"):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind == "int" and isinstance(value, float)):
        raise BadFigure(f"{where}: {name} is {value!r}, must be a {'whole ' if kind == 'int' else ''}number")
    whole = isinstance(value, int)  # which may be larger than any float
    if not whole and not isfinite(value):
        raise BadFigure(f"{where}: {name} is {value}, must be a finite number")
    if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
        raise BadFigure(f"{where}: {name} is {value}, must be {'0 or more' if name in MAY_BE_ZERO else 'above 0'}")
    if value > MAX_FIGURE or (value < MIN_FIGURE and name not in MAY_BE_ZERO):
        between = f"{MIN_FIGURE:g} to {MAX_FIGURE:g}"
        shown = f"{value:,}" if whole else f"{value:g}"
        raise BadFigure(f"{where}: {name} is {shown}, must be {between}: nothing is so small or large")
    if name in SHARES and value > 1:
        raise BadFigure(f"{where}: {name} is {value}, must be a share, 1 at most")
    if name == "oversubscription" and value < 1:
        raise BadFigure(f"{where}: {name} is {value}, must be 1 or more")
    return float(value) if kind == "float" else value


def _tile(tile: Any, where: str) -> tuple[int, int, float]:
    """A tile of a product: whole rows and columns, and a speed, all above 0 and none beyond `MAX_FIGURE`."""
    if isinstance(tile, list) and len(tile) == 3 and not any(isinstance(x, bool) for x in tile):
        rows, columns, speed = tile
        numbers = isinstance(rows, int) and isinstance(columns, int) and isinstance(speed, (int, float))
        if numbers and all(0 < number <= MAX_FIGURE for number in tile):
            return rows, columns, float(speed)
    raise BadFigure(
        f"{where} [device]: a tile is {tile!r}, must be [rows, columns, speed]: two whole numbers and a number above "
        f"0, {MAX_FIGURE:g} at most"
    )


@lru_cache(maxsize=64)
def _parsed(path: Path, modified: float) -> dict[str, Any]:
    """The tables of a file as it was at that time."""
    return read_toml(path)


def _read(kind: str, folder: str, name: str) -> tuple[str, str, dict[str, Any]]:
    """The file's name for messages, without its ending, and its tables."""
    shipped = PRESETS / folder / f"{name}.toml"
    path = shipped if name in names(folder) else Path(name)
    if path.suffix != ".toml" or not path.is_file():
        if is_file(folder, name):
            raise PlanningError(f"there is no {kind} file {name}; shipped: {', '.join(names(folder))}")
        raise UnknownName.of(kind, name, names(folder))
    return path.name, path.stem, dict(_parsed(path, path.stat().st_mtime))
