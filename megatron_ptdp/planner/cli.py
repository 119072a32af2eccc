"""The command line `pathways-plan`: which parallel configuration, how fast, and why.

    pathways-plan --model gpt3-175b --cluster a100-80g --devices 1024 --batch 1536

searches. `simulate`, `compare`, `explain` and `calibrate` are commands beside it, `list` names what is shipped. An
error ends a command with one line, `pathways-plan: what happened`; exit status 2 where the question has to change, 1
where nothing fits.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from megatron_ptdp.planner import load, records, report
from megatron_ptdp.planner.errors import BadFigure, PlanningError
from megatron_ptdp.planner.estimate import Question
from megatron_ptdp.planner.plan import Plan
from megatron_ptdp.planner.reasons import heuristics, what_binds, why_slower
from megatron_ptdp.planner.search import Found, estimate_exactly, search
from pathways_ray.errors import PathwaysError, UsageError

NAME = "pathways-plan"
PLAIN_WIDTH = 130  # columns of text that goes to no terminal; rich would take 80, in which tables break
DRAWN = 200_000  # actions of a timeline, at most: some tens of seconds
F = TypeVar("F", bound=Callable[..., Any])


class Failed(click.ClickException):
    """Ends a command with one line on stderr."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    def show(self, file: Any = None) -> None:
        click.echo(f"{NAME}: {self.message}", err=True)


class WronglyAsked(Failed):
    """The same with exit status 2: the question has to change."""

    exit_code = 2


class Commands(click.Group):
    """A group that searches when no command is named, takes `--fix a=1 b=2`, and shows errors as one line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, spread_fixes(args))
        except click.UsageError as error:
            raise WronglyAsked(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise WronglyAsked(error.format_message()) from error
        except UsageError as error:
            raise WronglyAsked(str(error)) from error
        except PathwaysError as error:
            raise Failed(str(error)) from error


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
        name, value = records.parse_setting(part)
        if found.setdefault(name, value) != value:
            raise BadFigure(f"{name} is fixed to {found[name]} and to {value}; keep one of them")
    return found


def console() -> Console:
    made = Console(highlight=False)
    if not made.is_terminal:
        made.width = PLAIN_WIDTH
    return made


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

    Settings for --fix: pipeline, tensor, data, chunks, microbatch, schedule, recompute, sequence_parallel, zero,
    scatter_gather.
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
        write(config_out, records.config_text(question.model.name, found.best[0].plan))
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


def write(path: Path, text: str) -> None:
    """Writes a file, or says why it cannot."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanningError(f"{path.name} cannot be written: {error.strerror}") from error


def read_plan(text: str) -> tuple[str | None, Plan]:
    """A plan and perhaps its model, from a configuration's path or from `tensor=8,pipeline=12,…`."""
    path = Path(text)
    if path.suffix != ".toml":
        return None, records.plan_from(settings([text]), "the plan")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanningError(f"{path.name} cannot be read: {error}") from error
    model = table.pop("model", None)
    return model, records.plan_from(table, path.name)


def question_of(
    text: str, model: str | None, cluster: str, software: str | None, tokens: float
) -> tuple[Question, Plan]:
    """The question that a plan answers: its own devices and batch."""
    named, plan = read_plan(text)
    if not (model or named):
        raise PlanningError("--model is missing, and the plan names none")
    return ask(model or str(named), cluster, software, plan.devices, plan.batch, tokens), plan


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
    named = model or read_plan(a)[0] or read_plan(b)[0]  # one of the two may leave it to the other
    (asked_a, plan_a), (asked_b, plan_b) = (
        question_of(text, model or read_plan(text)[0] or named, cluster, software, tokens) for text in (a, b)
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
@click.option("--microbatches", type=click.IntRange(1), help="draw so many only")
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
    from megatron_ptdp.planner.simulated import timeline
    from megatron_ptdp.schedules import chrome_trace

    question, one = question_of(plan, model, cluster, software, 300e9)
    estimate = estimate_exactly(question, one)
    actions = 2 * one.stages * (microbatches or one.microbatches)
    if actions > DRAWN:
        most = max(1, DRAWN // (2 * one.stages))
        raise BadFigure(f"a timeline of {actions:,} actions cannot be read; draw fewer: --microbatches {most} at most")
    steps = timeline(question, one, microbatches)
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
    if perfetto:
        write(perfetto, chrome_trace(steps))


@commands.command()
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="the cluster file to write"
)
@click.option("--address", help="a Ray cluster, or auto; left out, one is started on this machine")
@click.option("--islands", type=click.IntRange(1), default=2, show_default=True)
@click.option("--hosts", type=click.IntRange(1), default=1, show_default=True, help="hosts of an island")
@click.option("--devices", type=click.IntRange(1), default=2, show_default=True, help="devices of a host")
@click.option("--platform", type=click.Choice(["cpu", "gpu", "tpu"]), default="cpu", show_default=True)
@click.option("--memory", type=float, default=8e9, show_default=True, help="bytes that a device may use")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="of measurements; more are better")
def calibrate(
    output: Path,
    address: str | None,
    islands: int,
    hosts: int,
    devices: int,
    platform: str,
    memory: float,
    rounds: int,
) -> None:
    """Measure products, copies, launches, links and small training steps of a cluster through the runtime; write its
    file."""
    if not 0 < memory < float("inf"):
        raise BadFigure(f"memory is {memory}, must be a finite number above 0")
    if output.suffix != ".toml" or not output.absolute().parent.is_dir():  # before minutes of measuring
        raise PlanningError(f"--output is {output}, must be a .toml file in a folder that is there")
    import pathways_ray as pw
    from megatron_ptdp.planner.calibrate import cluster_of, cluster_text, step_seconds
    from megatron_ptdp.planner.measure import measure

    software = load.software("xla-f32" if platform == "cpu" else "xla")
    # Without fusion, as training: each action is a launch.
    with pw.init(islands, hosts, devices, address=address, platform=platform, fusion=False):
        seen = measure(platform, range(islands), rounds, lambda text: click.echo(text, err=True))
    made = cluster_of(seen, memory, software, output.stem)
    write(output, cluster_text(made))
    made = load.cluster(str(output))
    device = made.device
    click.echo(
        f"{output}: {device.peak_flops / 1e9:,.4g} GFLOP/s × {device.matrix_efficiency:.2f}, memory "
        f"{device.memory_bandwidth / 1e9:.3g} GB/s × {device.memory_efficiency:.2f}, action "
        f"{device.action * 1e6:,.0f} us, iteration {device.step * 1e3:.1f} ms"
    )
    for one in made.levels:
        click.echo(
            f"  {one.name}: all-reduce {one.bandwidth / 1e9:.3g} GB/s, {one.latency * 1e6:,.0f} us; messages "
            f"{one.message_bandwidth / 1e9:.3g} GB/s, {one.message_latency * 1e6:,.0f} us, "
            f"{one.message_share:.0%} of it taken from computation"
        )
    off = [step_seconds(made, one, software) / taken - 1 for one, taken in seen.steps.items()]
    click.echo(
        f"  the model is off by {max(map(abs, off)):.0%} at most on the {len(off)} reference steps it was fitted to"
    )


@commands.command(name="list")
def list_presets() -> None:
    """Name the models, clusters and software that are shipped."""
    for kind in ("models", "clusters", "software"):
        click.echo(f"{kind:<9} {' '.join(load.names(kind))}")


def main() -> None:
    """The entry point of `pathways-plan`."""
    commands(prog_name=NAME)
