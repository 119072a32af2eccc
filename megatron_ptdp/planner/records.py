"""Estimates as plain data: what `--json` prints, and the configuration that `pathways-train run` takes."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from megatron_ptdp.planner.errors import BadFigure, UnknownName
from megatron_ptdp.planner.estimate import Estimate, Question
from megatron_ptdp.planner.goodput import goodput
from megatron_ptdp.planner.memory import Memory
from megatron_ptdp.planner.plan import Plan, check_setting
from megatron_ptdp.planner.traffic import traffic

CONFIG_KEYS = ("model", *Plan.__dataclass_fields__)


def question_record(question: Question) -> dict[str, Any]:
    return {
        "model": question.model.name,
        "parameters": question.model.parameters,
        "cluster": question.cluster.name,
        "software": question.software.name,
        "devices": question.devices,
        "batch": question.batch,
        "tokens": question.tokens,
    }


def estimate_record(question: Question, one: Estimate) -> dict[str, Any]:
    """All figures of a plan; bytes, seconds, FLOP/s, hours in SI units, days and prices by their names."""
    return {
        "plan": one.plan.as_dict(),
        "fits": one.fits,
        "memory_limit_bytes": one.limit,
        "memory_bytes": {
            "first": memory_record(one.memory.first),
            "middle": memory_record(one.memory.middle),
            "last": memory_record(one.memory.last),
        },
        "seconds": {**asdict(one.time), "total": one.seconds},
        "simulated": one.simulated,
        "closed_form_seconds": one.closed_form,
        "flops_per_device": {"hardware": one.hardware_flops, "model": one.model_flops, "peak": one.peak_flops},
        "tokens_per_second": one.tokens_per_second,
        "days": one.days,
        "energy_kwh": one.energy,
        "price": one.price,
        "traffic_bytes_per_device": [{**asdict(level), "total": level.total} for level in traffic(question, one)],
        "failures": {
            name: value if isfinite(value) else None for name, value in asdict(goodput(question, one)).items()
        },
    }


def memory_record(memory: Memory) -> dict[str, float]:
    return {**asdict(memory), "total": memory.total}


def config_text(model: str, plan: Plan) -> str:
    """The TOML of a configuration."""
    values: dict[str, Any] = {"model": model, **plan.as_dict()}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def plan_from(settings: dict[str, Any], where: str) -> Plan:
    """A plan from the settings of a configuration; those left out have the defaults of `Plan`.

    Raises:
        UnknownName, BadFigure: a setting that a plan does not have, or a value it cannot take.
    """
    known = Plan.__dataclass_fields__
    for name, value in settings.items():
        if name not in known:
            raise UnknownName.of(f"setting in {where}:", name, known)
        check_setting(name, value)
    return Plan(**settings)


def parse_setting(text: str) -> tuple[str, Any]:
    """`tensor=8` as a name and a value of the setting's kind.

    Raises:
        UnknownName, BadFigure: as `plan_from`.
    """
    name, equals, value = text.partition("=")
    name, value = name.strip().replace("-", "_"), value.strip()
    if not equals or not value:
        raise BadFigure(f"{text!r} is no setting: write name=value, as in tensor=8")
    known = Plan.__dataclass_fields__
    if name not in known:
        raise UnknownName.of("setting", name, known)
    parsed: Any = value
    if name in ("sequence_parallel", "scatter_gather"):
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        parsed = words.get(value.lower(), value)
    elif name not in ("schedule", "recompute"):
        try:
            parsed = int(value)
        except ValueError:
            parsed = value
    check_setting(name, parsed)
    return name, parsed
