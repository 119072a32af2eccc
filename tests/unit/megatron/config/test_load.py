"""Files of models, clusters and software: what is shipped is sound, what is wrong is refused by name."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from megatron_ptdp.config import load
from megatron_ptdp.config.cluster import Device, Software
from megatron_ptdp.errors import BadFigure, PlanningError, UnknownName

A100 = tomllib.loads((load.PRESETS / "clusters" / "a100-80g.toml").read_text())


def changed(*path: str, value: Any = None, drop: bool = False) -> dict[str, Any]:
    """The A100 file with one field replaced or dropped; `network.0.size` walks into a list."""
    table: Any = copy.deepcopy(A100)
    inner = table
    for name in path[:-1]:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    if drop:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return dict(table)


@pytest.mark.parametrize("name", load.names("models"))
def test_shipped_models_load_and_name_their_source(name: str) -> None:
    model = load.model(name)
    assert model.name == name
    assert model.source


@pytest.mark.parametrize("name", load.names("clusters"))
def test_shipped_clusters_load_and_name_software_that_is_shipped(name: str) -> None:
    cluster = load.cluster(name)
    assert cluster.software in load.names("software")
    assert cluster.source


def test_models_of_table_1_have_the_printed_sizes() -> None:
    printed = {"1.7b": 1.7, "3.6b": 3.6, "7.5b": 7.5, "18b": 18.4, "39b": 39.1, "76b": 76.1}
    printed |= {"145b": 145.6, "310b": 310.1, "530b": 529.6, "1t": 1008.0}
    for name, billions in printed.items():
        assert load.model(f"gpt-{name}").parameters / 1e9 == pytest.approx(billions, abs=0.06)


@pytest.mark.parametrize(
    ("loader", "name", "near"),
    [(load.model, "gtp3-175b", "gpt3-175b"), (load.cluster, "a100", "a100-80g"), (load.software, "ptpd", "ptdp")],
)
def test_unknown_names_are_refused_with_the_nearest(loader: Any, name: str, near: str) -> None:
    with pytest.raises(UnknownName, match=f"{name!r}; did you mean {near!r}"):
        loader(name)


def test_files_load_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("layers = 2\nhidden = 64\nheads = 4\nsequence = 32\nvocabulary = 100\n")
    assert load.model(str(path)).name == "mine"
    with pytest.raises(PlanningError, match="there is no model file"):
        load.model(str(tmp_path / "yours.toml"))
    path.write_text("layers = = 2")
    with pytest.raises(PlanningError, match=r"mine\.toml cannot be read: Invalid value.*; it must be a TOML file"):
        load.model(str(path))


@pytest.mark.parametrize("field", [field.name for field in fields(Device) if field.default is MISSING])
def test_each_field_of_a_device_is_needed(field: str) -> None:
    with pytest.raises(BadFigure, match=rf"here \[device\]: the field '{field}' is missing"):
        load.cluster_of(changed("device", field, drop=True), "here", "x")


@pytest.mark.parametrize("part", ["device", "network", "operations"])
def test_each_table_is_needed(part: str) -> None:
    with pytest.raises(BadFigure, match=rf"the table \[+{part}\]+ is missing"):
        load.cluster_of(changed(part, drop=True), "here", "x")


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("device", "peak_flops"), -1.0, "peak_flops is -1.0, must be above 0"),
        (("device", "peak_flops"), 0, "peak_flops is 0, must be above 0"),
        (("device", "peak_flops"), float("nan"), "peak_flops is nan, must be a finite number"),
        (("device", "peak_flops"), 1e-300, "peak_flops is 1e-300, must be 1e-15 to 1e.25: nothing is so small"),
        (("device", "memory_bandwidth"), 1e300, "memory_bandwidth is 1e.300, must be 1e-15 to 1e.25"),
        (("device", "peak_flops"), "fast", "peak_flops is 'fast', must be a number"),
        (("device", "peak_flops"), 10**400, "peak_flops is 10,000,.*, must be 1e-15 to 1e.25"),
        (("device", "units"), 10**400, "units is 10,000,.*, must be 1e-15 to 1e.25"),
        (("device", "fragmentation"), -(10**400), "fragmentation is -10000.*, must be 0 or more"),
        (("device", "units"), 1.5, "units is 1.5, must be a whole number"),
        (("device", "units"), True, "units is True, must be a whole number"),
        (("device", "matrix_efficiency"), 1.2, "matrix_efficiency is 1.2, must be a share, 1 at most"),
        (("device", "fragmentation"), -0.1, "fragmentation is -0.1, must be 0 or more"),
        (("device", "tiles"), [[0.5, 128, 1.0]], r"a tile is \[0.5, 128, 1.0\], must be .* two whole numbers"),
        (("device", "tiles"), [[128, 128, float("inf")]], r"a tile is \[128, 128, inf\]"),
        (("device", "tiles"), [[10**400, 128, 1.0]], "two whole numbers and a number above 0, 1e.25 at most"),
        (("device", "tiles"), [[128, 128, 10**400]], "two whole numbers and a number above 0, 1e.25 at most"),
        (("device", "tiles"), [[128, 0, 1.0]], r"a tile is \[128, 0, 1.0\], must be \[rows, columns, speed\]"),
        (("network", "0", "bandwidth"), 0, "bandwidth is 0, must be above 0"),
        (("network", "1", "oversubscription"), 0.5, "oversubscription is 0.5, must be 1 or more"),
        (("network", "0", "size"), 1, "'nvlink' joins 1 devices, must be more than the 1 of the level below"),
        (("network", "1", "name"), "nvlink", "2 networks are named 'nvlink'; name each differently"),
        (("network", "1", "size"), 12, "'infiniband' must join a multiple of 8 devices"),
        (("software",), 3, "software is 3, must be a text"),
    ],
)
def test_figures_that_cannot_be_are_refused(path: tuple[str, ...], value: Any, text: str) -> None:
    with pytest.raises(BadFigure, match=text):
        load.cluster_of(changed(*path, value=value), "here", "x")


def test_unknown_fields_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="'memory_byte'; did you mean 'memory_bytes'"):
        load.cluster_of(changed("device", "memory_byte", value=1.0), "here", "x")


def test_software_is_checked_too() -> None:
    with pytest.raises(BadFigure, match="the field 'weight_bytes' is missing"):
        load.build(Software, {"name": "x"}, "here")


@pytest.mark.parametrize("tiles", [[], 5, "128x128"])
def test_tiles_that_are_no_list_are_refused(tiles: Any) -> None:
    with pytest.raises(BadFigure, match=r"\[device\]: tiles is .*, must be a list of \[rows, columns, speed\]"):
        load.cluster_of(changed("device", "tiles", value=tiles), "a.toml", "a")


def test_sizes_that_were_never_meant_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    path.write_text("layers=4000000000\nhidden=128\nheads=4\nsequence=128\nvocabulary=256\n")
    with pytest.raises(BadFigure, match="layers is 4,000,000,000, must be 10,000 at most"):
        load.model(str(path))
