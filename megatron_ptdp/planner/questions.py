"""Questions of the command line: the options that ask them, and plans that are given as files or settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from megatron_ptdp.config import load
from megatron_ptdp.config.files import read_toml
from megatron_ptdp.errors import BadFigure, PlanningError
from megatron_ptdp.planner.estimate import Question
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.settings import parse_setting, plan_from

F = TypeVar("F", bound=Callable[..., Any])


def question_options(needed: bool) -> Callable[[F], F]:
    """The options that make a question."""

    def add(command: F) -> F:
        for option in reversed(
            (
                click.option("--model", required=needed, help="a shipped name (see `list`) or a TOML file"),
                click.option("--cluster", default="a100-80g", show_default=True, help="a shipped name or a TOML file"),
                click.option("--software", help="a shipped name or a TOML file; left out, the cluster's own"),
                click.option("--devices", type=int, required=needed, help="how many devices"),
                click.option("--batch", type=int, required=needed, help="examples per iteration"),
                click.option("--tokens", type=float, default=300e9, show_default=True, help="tokens of the whole run"),
                click.option(
                    "--fix", "fixes", multiple=True, metavar="NAME=VALUE", help="a setting to keep, as tensor=8"
                ),
                click.option("--json", "as_json", is_flag=True, help="print JSON"),
            )
        ):
            command = option(command)
        return command

    return add


def ask(model: str, cluster: str, software: str | None, devices: int, batch: int, tokens: float) -> Question:
    """The question of the options."""
    machine = load.cluster(cluster)
    return Question(load.model(model), machine, load.software(software or machine.software), devices, batch, tokens)


def settings(fixes: Sequence[str]) -> dict[str, Any]:
    """The fixed settings; one option may hold several, separated by commas."""
    found: dict[str, Any] = {}
    for part in (part for fix in fixes for part in fix.split(",") if part):
        name, value = parse_setting(part)
        if found.setdefault(name, value) != value:
            raise BadFigure(f"{name} is fixed to {found[name]} and to {value}; keep one of them")
    return found


def read_plan(text: str, model: str | None = None) -> tuple[str | None, Plan]:
    """A plan, from a configuration's path or from `tensor=8,pipeline=12,…`; and `model`, or, left out, perhaps the one
    that it names."""
    path = Path(text)
    if path.suffix != ".toml":
        return model, plan_from(settings([text]), "the plan")
    table = read_toml(path)
    named = table.pop("model", None)
    table.pop("clip", None)  # `settings.config_text` writes it for training; it changes no time
    return model or _named(named, path.name), plan_from(table, path.name)


def _named(model: Any, where: str) -> str | None:
    """The model that a configuration names, as `model = "gpt-1.7b"` or as the preset of its table."""
    if isinstance(model, dict) and list(model) == ["preset"]:
        model = model["preset"]
    if model is not None and not isinstance(model, str):
        said = f"a table of {', '.join(model) or 'nothing'}" if isinstance(model, dict) else repr(model)
        raise BadFigure(f"model in {where} is {said}, must be a shipped name or a TOML file; or give --model")
    return model


def question_of(
    text: str, model: str | None, cluster: str, software: str | None, tokens: float
) -> tuple[Question, Plan]:
    """The question that a plan answers: its own devices and batch."""
    named, plan = read_plan(text, model)
    if not named:
        raise PlanningError("--model is missing, and the plan names none")
    return ask(named, cluster, software, plan.devices, plan.batch, tokens), plan
