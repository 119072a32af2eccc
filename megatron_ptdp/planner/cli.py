"""The command line `pathways-plan`: finds parallel configurations, times them and explains them.

    pathways-plan --model gpt3-175b --cluster a100-80g --devices 1024 --batch 1536

searches. `simulate`, `compare`, `explain` and `calibrate` are commands beside it, `list` names what is shipped. An
error ends a command with one line, `pathways-plan: what happened`; exit status 2 where the question has to change, 1
where nothing fits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from megatron_ptdp.command_line import Failed, WronglyAsked, console
from megatron_ptdp.config import load
from megatron_ptdp.config.files import write_text
from megatron_ptdp.errors import BadFigure, PlanningError
from megatron_ptdp.planner.calibration.command import calibrate
from megatron_ptdp.planner.estimate import Question, pipeline_work
from megatron_ptdp.planner.explain import records, report
from megatron_ptdp.planner.explain.reasons import heuristics, what_binds, why_slower
from megatron_ptdp.planner.questions import ask, question_of, question_options, read_plan, settings
from megatron_ptdp.planner.search import Found, estimate_exactly, search
from megatron_ptdp.planner.settings import config_text
from megatron_ptdp.planner.simulated import timeline
from megatron_ptdp.schedules import ScheduleError, chrome_trace
from pathways_ray.errors import PathwaysError, UsageError

NAME = "pathways-plan"
MAX_DRAWN = 200_000
"""Actions of a timeline: some tens of seconds."""


class Commands(click.Group):
    """A group that searches when no command is named, takes `--fix a=1 b=2`, and shows errors as one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, spread_fixes(args))
        except click.UsageError as error:
            raise WronglyAsked(NAME, error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise WronglyAsked(NAME, error.format_message()) from error
        except UsageError as error:
            raise WronglyAsked(NAME, str(error)) from error
        except PathwaysError as error:
            raise Failed(NAME, str(error)) from error


def spread_fixes(args: Sequence[str]) -> list[str]:
    """`--fix a=1 b=2` as `--fix a=1 --fix b=2`."""
    spread: list[str] = []
    fixing = False
    for argument in args:
        if fixing and "=" in argument and not argument.startswith("-") and spread[-1] != "--fix":
            spread += ["--fix", argument]
            continue
        if not (fixing and spread and spread[-1] == "--fix"):
            fixing = argument == "--fix"
        spread.append(argument)
    return spread


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@question_options(needed=False)
@click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, help="plans to show")
@click.option("--config-out", type=click.Path(dir_okay=False, path_type=Path), help="write the best plan as TOML")
@click.pass_context
def commands(
    ctx: click.Context,
    model: str | None,
    cluster: str,
    software: str | None,
    devices: int | None,
    batch: int | None,
    tokens: float,
    fixes: tuple[str, ...],
    as_json: bool,
    top: int,
    config_out: Path | None,
) -> None:
    """Search all parallel configurations of a model on a cluster, before a single device is rented.

    Settings for --fix: pipeline, tensor, data, chunks, microbatch, batch, schedule, recompute, sequence_parallel, zero,
    scatter_gather, token_slices.
    """
    if ctx.invoked_subcommand:
        return
    missing = [
        f"--{name}" for name, value in (("model", model), ("devices", devices), ("batch", batch)) if value is None
    ]
    if missing or model is None or devices is None or batch is None:
        raise PlanningError(f"{', '.join(missing)} missing; see {NAME} --help")
    question = ask(model, cluster, software, devices, batch, tokens)
    found = search(question, settings(fixes), top)
    if config_out:
        write_text(config_out, config_text(load.lasting("models", model), found.best[0].plan))
    if as_json:
        click.echo(json.dumps(found_record(question, found), indent=2))
    else:
        report.show_found(question, found, console())


def found_record(question: Question, found: Found) -> dict[str, Any]:
    best = found.best[0]
    runner_up = found.best[1] if len(found.best) > 1 else None
    return {
        "question": records.question_record(question),
        "search": {"families": found.families, "opened": found.opened, "legal": found.legal, "timed": found.evaluated},
        "plans": [records.estimate_record(question, one) for one in found.best],
        "binds": what_binds(question, best),
        "runner_up": runner_up and {"plan": runner_up.plan.as_dict(), "why": why_slower(best, runner_up)},
    }


@commands.command()
@click.argument("a")
@click.argument("b")
@click.option("--model", help="left out, the one that the configurations name")
@click.option("--cluster", default="a100-80g", show_default=True)
@click.option("--software")
@click.option("--tokens", type=float, default=300e9, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def compare(
    a: str, b: str, model: str | None, cluster: str, software: str | None, tokens: float, as_json: bool
) -> None:
    """Compare two plans: configuration files, or settings as tensor=8,pipeline=12,batch=1536."""
    named = read_plan(a, model)[0] or read_plan(b, model)[0]  # one of the two may leave it to the other
    (asked_a, plan_a), (asked_b, plan_b) = (
        question_of(text, read_plan(text, model)[0] or named, cluster, software, tokens) for text in (a, b)
    )
    first, second = estimate_exactly(asked_a, plan_a), estimate_exactly(asked_b, plan_b)
    if as_json:
        both = {"a": records.estimate_record(asked_a, first), "b": records.estimate_record(asked_b, second)}
        click.echo(json.dumps(both, indent=2))
        return
    report.show_question(asked_a, console())
    if asked_b != asked_a:
        report.show_question(asked_b, console())
    report.show_comparison(first, second, console())


@commands.command()
@question_options(needed=True)
def explain(
    model: str,
    cluster: str,
    software: str | None,
    devices: int,
    batch: int,
    tokens: float,
    fixes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Go through the PTD-P paper's three heuristics for this case, and where the search differs."""
    question, fixed = ask(model, cluster, software, devices, batch, tokens), settings(fixes)
    best = search(question, fixed, top=1).best[0]
    rules = heuristics(question, best, fixed)
    if as_json:
        record = {"best": records.estimate_record(question, best), "rules": [report.heuristic_record(r) for r in rules]}
        click.echo(json.dumps(record, indent=2))
        return
    to = console()
    report.show_question(question, to)
    report.show_plans([best], to)
    to.print(f"binds: {what_binds(question, best)}")
    report.show_heuristics(rules, to)


@commands.command()
@click.argument("plan")
@click.option("--model", help="left out, the one that the configuration names")
@click.option("--cluster", default="a100-80g", show_default=True)
@click.option("--software")
@click.option("--microbatches", type=click.IntRange(1), help="number of microbatches that are drawn")
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="write a picture")
@click.option("--perfetto", type=click.Path(dir_okay=False, path_type=Path), help="write a trace for ui.perfetto.dev")
def simulate(
    plan: str,
    model: str | None,
    cluster: str,
    software: str | None,
    microbatches: int | None,
    png: Path | None,
    perfetto: Path | None,
) -> None:
    """Run a plan's action lists through the event simulator; draw its timeline."""
    question, one = question_of(plan, model, cluster, software, 300e9)
    estimate = estimate_exactly(question, one)
    each = 2 * one.stages * one.token_slices
    actions = each * (microbatches or one.microbatches)
    if actions > MAX_DRAWN:
        most = max(1, MAX_DRAWN // each)
        raise BadFigure(f"a timeline of {actions:,} actions cannot be read; draw fewer: --microbatches {most} at most")
    try:
        steps = timeline(one, pipeline_work(question, one)[0], microbatches)
    except ScheduleError as error:
        raise BadFigure(f"{error}; --microbatches is {microbatches}") from error
    to = console()
    report.show_question(question, to)
    report.show_plans([estimate], to)
    bubble = steps.bubble
    to.print(
        f"timeline of {microbatches or one.microbatches} microbatches: {steps.makespan:.3f} s, "
        f"bubble {bubble.of_ideal:.1%} of the work, {bubble.of_total:.1%} of the time"
    )
    if png:
        from megatron_ptdp.schedules.draw import draw

        try:
            draw(steps, png, title=f"{question.model.name}: {one.label()}")
        except OSError as error:
            raise PlanningError(f"{png.name} cannot be written: {error.strerror}") from error
        except ValueError as error:  # of an ending that Matplotlib does not know
            raise BadFigure(f"{png.name} cannot be drawn: {error}") from error
    if perfetto:
        write_text(perfetto, chrome_trace(steps))


commands.add_command(calibrate)


@commands.command(name="list")
def list_presets() -> None:
    """Name the models, clusters and software that are shipped."""
    for kind in ("models", "clusters", "software"):
        click.echo(f"{kind:<9} {' '.join(load.names(kind))}")


def main() -> None:
    """The entry point of `pathways-plan`."""
    commands(prog_name=NAME)
