"""The command line `pathways-train`: text to tokens, training, and the verification of both.

    pathways-train prepare --output corpus.tokens
    pathways-train run --config tiny.toml --set pipeline=4
    pathways-train compare runs/a runs/b
    pathways-train verify --grid full

An error ends a command with one line, `pathways-train: what happened`; exit status 2 where the question has to change,
1 where training could not go on, or where a check of parity failed.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from megatron_ptdp.command_line import Failed, WronglyAsked, console
from megatron_ptdp.errors import ConfigError
from pathways_ray.errors import PathwaysError, UsageError

NAME = "pathways-train"


class Commands(click.Group):
    """A group that shows errors as one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PathwaysError as error:
            ended = WronglyAsked if isinstance(error, UsageError) else Failed
            raise ended(NAME, f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def needing_extras() -> Iterator[None]:
    """Adds to a missing package how to install it.

    Raises:
        ConfigError: a package of the extra `train` is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"training needs the package {error.name}: pip install '.[train]'") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def commands() -> None:
    """Train models with pipeline, tensor and data parallelism on a Pathways runtime."""


@commands.command()
@click.argument("texts", nargs=-1, type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="the token file")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a JSON file of the `tokenizers` library; left out, each byte is a token",
)
def prepare(texts: tuple[Path, ...], output: Path, tokenizer: Path | None) -> None:
    """Write a token file from TEXTS: files, or folders with .txt, .md, .rst and .py files.

    Without TEXTS: Python's own reference text and the sources of its standard library.
    """
    with needing_extras():
        from megatron_ptdp import data
    files = data.files_in(texts) if texts else data.default_corpus()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=console(stderr=True)) as progress:
        line = progress.add_task(f"{len(files):,} files", total=sum(file.stat().st_size for file in files))
        header = data.prepare(output, files, data.tokens_named(tokenizer), lambda n: progress.update(line, advance=n))
    click.echo(
        f"{output}: {header.count:,} tokens of {header.documents:,} texts, vocabulary {header.vocabulary:,}, "
        f"{header.dtype}, tokenizer {header.tokenizer}"
    )


@commands.command()
@click.option("--config", "path", type=click.Path(dir_okay=False, path_type=Path), help="a TOML file")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="a setting that goes before the file's: pipeline=4"
)
@click.option(
    "--max-restarts", type=click.IntRange(0), default=0, show_default=True, help="from checkpoints, without snapshots"
)
@click.option("--trace-step", type=click.IntRange(1), help="the number of a step to draw, next to its prediction")
@click.option(
    "--schedules",
    type=click.Path(dir_okay=False, path_type=Path),
    help="a Python file that registers your own schedules",
)
def run(
    path: Path | None, settings: tuple[str, ...], max_restarts: int, trace_step: int | None, schedules: Path | None
) -> None:
    """Train a model, from the newest checkpoint of its directory on if there is one.

    SIGINT or SIGTERM ends it after the step that runs, with a checkpoint; a second one at once.
    """
    with needing_extras():
        from megatron_ptdp.train.config import load, load_schedules
        from megatron_ptdp.train.run import RunOptions, train
    # Ray starts its processes with fork and exec at once, which is safe; jax, once imported, warns of every fork.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    if schedules:
        load_schedules(schedules)
    config = load(path, settings)
    done = train(config, RunOptions(max_restarts, trace_step or 0), console(stderr=True))
    click.echo(f"{done} of {config.run.steps} steps done; metrics and checkpoints are in {config.run.directory}")


@commands.command()
@click.option("--grid", type=click.Choice(["small", "full"]), default="small", show_default=True, help="which cases")
@click.option(
    "--only", multiple=True, metavar="NAME=VALUE,...", help="checks with these settings: p=2,t=2 (repeatable)"
)
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="where to write all figures")
@click.option("--mistakes", is_flag=True, help="plant mistakes instead, one by one: each must be found")
@click.option(
    "--cases", "part", metavar="FIRST:LAST", help="of what is left, only these, counted from 0: 10:20 are ten"
)
def verify(grid: Any, only: tuple[str, ...], dtype: Any, path: Path | None, mistakes: bool, part: str | None) -> None:
    """Compare loss and gradients with one device, in many combinations of settings.

    Exit status 1 if anything differs by more than it may, or a planted mistake is not found.
    """
    from megatron_ptdp.verify.command import verify as proven

    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # see `run`
    if not proven(grid, dtype, only, mistakes, path, console(stderr=True), console(), part or ":"):
        raise click.exceptions.Exit(1)


@commands.command()
@click.argument("one", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path))
@click.option("--bound", type=click.FloatRange(0), default=1e-4, show_default=True, help="for losses, in nats a token")
def compare(one: Path, other: Path, bound: float) -> None:
    """Compare the losses of two runs, given by their directories, at the steps that both have.

    Exit status 1 if they differ by more than the bound.
    """
    with needing_extras():
        from megatron_ptdp.train.compare import difference
    found = difference(one, other)
    click.echo(str(found))
    if not found.loss <= bound:
        raise click.exceptions.Exit(1)


def main() -> None:
    """The entry point of `pathways-train`."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # of a GPU, whose memory hosts here need
    commands(prog_name=NAME)


if __name__ == "__main__":
    main()
