"""Estimates as tables for people."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ptdp.planner.estimate import Estimate, Question, TimeSplit
from megatron_ptdp.planner.explain.reasons import Heuristic, device_seconds, measure, shares, what_binds, why_slower
from megatron_ptdp.planner.goodput import goodput
from megatron_ptdp.planner.memory import Memory
from megatron_ptdp.planner.search import Found
from megatron_ptdp.planner.traffic import traffic


def show_question(question: Question, console: Console) -> None:
    console.print(
        f"[bold]{question.model.name}[/] ({question.model.parameters / 1e9:.1f}B parameters) on {question.devices:,} × "
        f"{question.cluster.device.name} ({question.cluster.name}, {question.software.name}), "
        f"batch {question.batch:,}, {question.tokens / 1e9:,.0f}B tokens"
    )


def show_found(question: Question, found: Found, console: Console) -> None:
    """The plans side by side, each in detail, what binds the best and why the runner-up lost."""
    show_question(question, console)
    console.print(
        f"{found.families:,} families of plans, {found.opened:,} looked into, {found.legal:,} legal plans there, "
        f"{found.evaluated:,} that fit were timed; times of those shown are simulated\n"
    )
    show_plans(found.best, console)
    for number, one in enumerate(found.best, 1):
        console.print(f"[bold]{number}.[/] ", end="")
        show_details(question, one, console)
        console.print()
    best = found.best[0]
    console.print(f"[bold]binds[/]      {what_binds(question, best)}")
    if len(found.best) > 1:
        console.print(f"[bold]runner-up[/]  {found.best[1].plan.label()}: {why_slower(best, found.best[1])}")


def show_plans(plans: list[Estimate], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("plan")
    for name in ("fits", "GB", "s/iter", "TFLOP/s", "model", "tokens/s", "days", "MWh"):
        table.add_column(name, justify="right")
    for one in plans:
        table.add_row(
            one.plan.label(),
            "yes" if one.fits else "no",
            f"{one.memory.most / 1e9:.1f}",
            _seconds(one.seconds),
            f"{one.hardware_flops / 1e12:.4g}",
            f"{one.model_flops / 1e12:.4g}",
            f"{one.tokens_per_second:,.0f}",
            f"{one.days:,.1f}",
            f"{one.energy / 1000:,.1f}",
        )
    console.print(table)
    console.print("TFLOP/s per device: what runs, recomputation included; and what the model needs\n", style="dim")


def show_details(question: Question, one: Estimate, console: Console) -> None:
    """Memory by class and stage, time by part, traffic by level, failures and money of one plan."""
    console.print(f"[bold]{one.plan.label()}[/]")
    memory = Table(box=None, pad_edge=False, header_style="bold")
    unit, divisor = ("GB", 1e9) if one.memory.most >= 1e9 else ("MB", 1e6)
    memory.add_column(f"{unit} per device")
    for field in fields(Memory):
        memory.add_column(field.name, justify="right")
    memory.add_column("total", justify="right")
    for name in ("first", "middle", "last"):
        stage: Memory = getattr(one.memory, name)
        figures = [*asdict(stage).values(), stage.total]
        memory.add_row(f"{name} stage", *(f"{value / divisor:.2f}" for value in figures))
    console.print(memory)
    console.print(f"of {one.limit / 1e9:.1f} GB; lost: fragmentation and what the runtime holds\n", style="dim")

    parts = shares(one.time)
    console.print(
        "time        "
        + ", ".join(f"{name} {_seconds(getattr(one.time, name))} s ({share:.1%})" for name, share in parts.items())
    )
    if one.simulated:
        console.print(
            f"            simulated; the closed form of the search is {one.closed_form / one.seconds - 1:+.2%} off"
        )
    for level in traffic(question, one):
        console.print(
            f"{level.level[:11]:<11} {_bytes(level.total)} per device and iteration (tensor {_bytes(level.tensor)}, "
            f"pipeline {_bytes(level.pipeline)}, data {_bytes(level.data)}), links busy {level.busy:.1%}"
        )
    run = goodput(question, one)
    console.print(
        f"failures    one in {run.mtbf / 3600:,.1f} h; checkpoint {_bytes(run.checkpoint_bytes)} in "
        f"{run.save:,.0f} s every {run.interval / 60:,.0f} min; goodput {run.share:.1%}, {run.days:,.1f} days, "
        f"{run.failures:,.1f} failures, price {run.price:,.0f}"
    )


def show_comparison(a: Estimate, b: Estimate, console: Console) -> None:
    show_plans([a, b], console)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("seconds per iteration", "A", "B", "B - A"):
        table.add_column(name, justify="left" if name.startswith("seconds") else "right")
    for part in fields(TimeSplit):
        first, second = getattr(a.time, part.name), getattr(b.time, part.name)
        table.add_row(part.name, _seconds(first), _seconds(second), f"{second - first:+.3g}")
    table.add_row("total", _seconds(a.seconds), _seconds(b.seconds), f"{b.seconds - a.seconds:+.3g}")
    console.print(table)
    winner, loser, name = (a, b, "A") if device_seconds(a) <= device_seconds(b) else (b, a, "B")
    console.print(f"\n{name} is faster{measure(a, b)}; the other: {why_slower(winner, loser)}")


def show_heuristics(found: list[Heuristic], console: Console) -> None:
    for number, one in enumerate(found, 1):
        verdict = "[green]agrees[/]" if one.agrees else "[yellow]differs[/]"
        console.print(f"\n[bold]{number}.[/] {one.rule}\n   rule    {one.says}\n   search  {one.found}\n   {verdict}")


def _bytes(value: float) -> str:
    """Bytes with a unit that leaves one to three digits before the point."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def heuristic_record(one: Heuristic) -> dict[str, Any]:
    return asdict(one)
