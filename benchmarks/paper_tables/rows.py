"""Printed figures of the papers, as data: each row of `printed.toml` with its model and its plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_ptdp.config import load
from megatron_ptdp.config.files import read_toml
from megatron_ptdp.config.model import Model
from megatron_ptdp.planner.plan import Plan

CALIBRATION = ("1.7B", "18.4B", "529.6B")
"""The rows of PTD-P table 1 on which `a100-80g` was set: no tensor axis, a full one, and a pipeline of 35 stages."""

H100_CALIBRATION = (("Llama 3", "405B on 8192"), ("Nemotron-4", "340B on 6144"), ("MPT, FSDP, H100", "70b on 64, b=8"))
"""The rows on which `matrix_efficiency` of `h100` was set, by least squares."""

SEEN = (("PaLM", "540B on 6144"),)
"""The row that `matrix_efficiency` of `tpu-v4` was chosen with: no prediction either."""


@dataclass(frozen=True)
class Row:
    """One printed figure.

    Attributes:
        table: where it is printed.
        software: left out, the cluster's.
        printed: the figure, in `unit`; None if only the winner is printed.
        read: whether it was read off a chart.
        compare: rows of one table with the same text here are one comparison, of which the paper shows the winner.
    """

    table: str
    label: str
    model: Model
    plan: Plan
    printed: float | None
    unit: str
    cluster: str
    software: str
    read: bool
    compare: str


@dataclass(frozen=True)
class Line:
    """One row of the page. `printed` is None if only the winner of its comparison is printed; a line that is not
    `counted` is no part of its table's error."""

    table: str
    label: str
    plan: str
    printed: float | None
    predicted: float
    unit: str
    read: bool = False
    calibrated: bool = False
    counted: bool = True
    compare: str = ""
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if self.printed is None else self.predicted / self.printed - 1


@cache
def data() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("printed.toml"))


def model_of(name: str) -> Model:
    """A model of the file, or a shipped one."""
    if name in data()["models"]:
        layers, hidden, heads = data()["models"][name]
        return Model(name, layers, hidden, heads, 2048, 51200)
    if name in data()["mpt"]:
        layers, hidden, heads = data()["mpt"][name]
        return Model(name, layers, hidden, heads, 2048, 50368, bias=False, dropout=False)
    return load.model(name)


def printed(*names: str) -> Iterator[Row]:
    """The rows of the tables whose names begin so; of all without a name."""
    for table in data()["table"]:
        if table["name"].startswith(names or ""):
            for values in table["rows"]:
                yield _row(table, dict(zip(table["columns"], values, strict=True)))


def _row(table: dict[str, Any], cells: dict[str, Any]) -> Row:
    where = {"unit": "TFLOP/s", "cluster": "a100-80g", "software": "", **table}
    label, chart = cells.pop("label"), table.get("chart", False)
    compare, figure = cells.pop("compare", ""), cells.pop("printed")
    model = model_of(cells.pop("model", table.get("model")))
    settings = {**table.get("plan", {}), **cells}
    plan = Plan(**settings, schedule="interleaved" if settings.get("chunks", 1) > 1 else "1f1b")
    if chart:
        compare = f"B={plan.batch}"
        label = f"{label} {compare}"
    place = (where["unit"], where["cluster"], where["software"])
    return Row(table["name"], label, model, plan, None if figure == "" else figure, *place, chart, compare)
