"""Settings of a plan by name: read, checked, and written as a configuration that `pathways-train run` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ptdp.config.files import split_setting, toml_value
from megatron_ptdp.config.model import Model
from megatron_ptdp.config.parallel import RECOMPUTE, ZERO
from megatron_ptdp.errors import BadFigure, Illegal, UnknownName
from megatron_ptdp.planner.plan import Plan, illegal
from megatron_ptdp.schedules import ScheduleError, rules_of, schedule_names

SETTINGS = tuple(Plan.__dataclass_fields__)
FLAGS = ("sequence_parallel", "scatter_gather")
NAMES = ("schedule", "recompute")
WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
"""Values of a flag."""


def check_setting(name: str, value: Any) -> None:
    """Makes sure that there is a setting of this name, and that some plan can have the value.

    Raises:
        UnknownName, BadFigure.
    """
    if name not in SETTINGS:
        raise UnknownName.of("setting", name, SETTINGS)
    if name == "schedule":
        if value not in schedule_names():
            raise UnknownName.of("schedule", str(value), schedule_names())
        try:
            rules_of(value)
        except ScheduleError as error:
            raise BadFigure(f"schedule {value} cannot be planned: {error}") from error
    elif name == "recompute":
        if value not in RECOMPUTE:
            raise UnknownName.of("kind of recompute", str(value), RECOMPUTE)
    elif name in FLAGS:
        if not isinstance(value, bool):
            raise BadFigure(f"{name} is {value!r}, must be true or false")
    elif not isinstance(value, int) or isinstance(value, bool):
        raise BadFigure(f"{name} is {value!r}, must be a whole number")
    elif name == "zero":
        if value not in ZERO:
            raise BadFigure(f"zero is {value}, must be 0, 1, 2 or 3")
    elif value < 1:
        raise BadFigure(f"{name} is {value}, must be at least 1")


def check(plan: Plan, model: Model) -> None:
    """Makes sure that the plan can run this model.

    Raises:
        UnknownName, BadFigure: as `check_setting`.
        Illegal: its sizes break a rule.
    """
    for name, value in plan.as_dict().items():
        check_setting(name, value)
    if fault := illegal(plan, model):
        raise Illegal(f"{plan.label()}: {fault}")


def with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    """The plan with some settings replaced.

    Raises:
        UnknownName, BadFigure: as `check_setting`.
    """
    for name, value in settings.items():
        check_setting(name, value)
    return replace(plan, **settings)


def plan_from(settings: Mapping[str, Any], where: str) -> Plan:
    """A plan from the settings of a configuration; those left out have the defaults of `Plan`, and chunks those of the
    schedule, as in training.

    Raises:
        UnknownName, BadFigure: as `check_setting`.
    """
    for name in settings:
        if name not in SETTINGS:
            raise UnknownName.of(f"setting in {where}:", name, SETTINGS)
    plan = with_settings(Plan(), settings)
    rules = rules_of(plan.schedule)
    return replace(plan, **{"chunks": max(rules.chunks, rules.full_chunks), **settings})


def parse_setting(text: str) -> tuple[str, Any]:
    """`tensor=8` as a name and a value of the setting's kind.

    Raises:
        UnknownName, BadFigure: as `check_setting`.
    """
    name, value = split_setting(text)
    if not value:
        raise BadFigure(f"{text!r} is no setting: write name=value, as in tensor=8")
    if name not in SETTINGS:
        raise UnknownName.of("setting", name, SETTINGS)
    parsed: Any = value
    if name in FLAGS:
        parsed = WORDS.get(value.lower(), value)
    elif name not in NAMES:
        try:
            parsed = int(value)
        except ValueError:
            parsed = value
    check_setting(name, parsed)
    return name, parsed


def config_text(model: str, plan: Plan) -> str:
    """The TOML of a configuration. A schedule that updates on the way has no norm to clip by."""
    values: dict[str, Any] = {"model": model, **plan.as_dict()}
    if rules_of(plan.schedule).stale:
        values["clip"] = 0.0
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items())
