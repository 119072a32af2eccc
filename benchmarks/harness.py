"""The harness of all benchmarks: options from settings, progress, JSON and figures.

A benchmark module defines its settings (a frozen dataclass whose fields are its options), a function that measures and
returns the JSON form of the result, one that prints a result (`printing.shows`), and a `Benchmark` of them:

    BENCHMARK = Benchmark("hotpath", __doc__, Settings, SMOKE, run, show)

`benchmarks.registry` lists all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass, replace
from importlib import import_module
from math import inf
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from benchmarks import measure

S = TypeVar("S")
Result = dict[str, Any]

PLAIN_WIDTH = 130
"""Columns of text that does not go to a terminal; rich would take 80, in which tables break."""


class Progress:
    """Reports what is under way on stderr, and saves the result so far.

    Args:
        target: the JSON file; None keeps the result in memory only.
        quiet: reports nothing.
    """

    def __init__(self, target: Path | None = None, quiet: bool = False) -> None:
        self._target, self._quiet = target, quiet
        self.head: Result = {}

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def about(self, what: str) -> Callable[[str], None]:
        """Reports with a word before each line."""
        return lambda text: self.say(f"{what}: {text}")

    def save(self, result: Result, complete: bool = False) -> bool:
        """Writes what is known so far, behind the head of the result; a file that stays incomplete says so. Where it
        cannot be written, as on a disk that is full, the measurement goes on. Returns whether it is written."""
        if self._target:
            marked = {**self.head, **result, "complete": complete}
            try:
                self._target.write_text(json.dumps(marked, indent=2) + "\n")
            except OSError as error:
                print(f"{self._target} is not written: {error.strerror}", file=sys.stderr, flush=True)
                return False
        return True


QUIET = Progress(quiet=True)


def check_writable(path: Path) -> None:
    """Makes the folder of a file that is to be written. Raises `OSError` where the file cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = path.exists()
    path.open("a").close()
    if not there:
        path.unlink()


def has_rows(result: Result) -> bool:
    """Whether anything was measured: no system may have started."""
    return bool(result["rows"])


def option(
    default: Any,
    about: str = "",
    *,
    flags: Sequence[str] = (),
    choices: Sequence[Any] | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A field of settings that is also an option.

    A tuple takes several values. A bool is a switch that inverts its default.

    Args:
        default: of the field.
        about: help text.
        flags: names of the option; by default that of the field.
        parse: makes the value from one word; by default the type of the default does, for each word.
    """
    return field(default=default, metadata={"about": about, "flags": flags, "choices": choices, "parse": parse})


def drawn_by(name: str) -> Callable[[Result, Path], None]:
    """A function of `benchmarks.figures`, imported when it is called: nothing that measures needs matplotlib."""

    def draw(result: Result, path: Path) -> None:
        getattr(import_module("benchmarks.figures"), name)(result, path)

    return draw


@dataclass(frozen=True)
class Output:
    """A file, or a folder of files, that a result can be written to beside its JSON.

    Attributes:
        flag: the option that takes the path.
        write: writes a result to a path.
        file: the usual name of the file; empty where the path is a folder.
    """

    flag: str
    write: Callable[[Result, Path], None]
    file: str = ""

    def write_below(self, result: Result, folder: Path) -> None:
        """Writes to a folder, under the usual name."""
        self.write(result, folder / self.file if self.file else folder)


@dataclass(frozen=True)
class Benchmark(Generic[S]):
    """One benchmark.

    Attributes:
        name: of its module below `benchmarks`.
        about: its first line is the description.
        settings: a dataclass; what each field with `option` means is in its help text.
        smoke: the smallest settings, to see that everything runs; the numbers mean nothing.
        run: measures; returns what is written to JSON beside the name, the machine and the settings.
        show: prints what was measured, on what, and the numbers.
        outputs: what a result can be written to.
        result: the name that results have, if not the benchmark's.
        succeeded: whether a result is as it must be; if not, the exit status is 1.
        uses_peers: it measures processes of other systems, and has no other children: however it ends, none is left.
    """

    name: str
    about: str
    settings: type[S]
    smoke: S
    run: Callable[[S, Progress], Result]
    show: Callable[[Result, Console], None]
    outputs: tuple[Output, ...] = ()
    succeeded: Callable[[Result], bool] = lambda result: True
    uses_peers: bool = False
    result: str = ""

    def parser(self) -> argparse.ArgumentParser:
        description = self.about.splitlines()[0]
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=description)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
        parser.add_argument("--smoke", action="store_true", help="the smallest sizes, to see that everything runs")
        for output in self.outputs:
            kind = "FILE" if output.file else "FOLDER"
            parser.add_argument(output.flag, type=Path, metavar=kind, help=f"write {output.file or 'pictures'} here")
        for one, default in _options(self.settings()):
            _add_option(parser, one, default)
        return parser

    def settings_of(self, options: argparse.Namespace) -> S:
        """The usual settings, or the smallest ones, with what the options change.

        Raises:
            ValueError: they are refused, or a number is not above 0 and finite, as the usual ones are.
        """
        made = _changed(self.smoke if options.smoke else self.settings(), vars(options))
        for (one, value), (_, usual) in zip(_options(made), _options(self.settings()), strict=True):
            for number in _numbers(value):
                if not 0 < number < inf and number not in _numbers(usual):
                    wanted = "finite" if number == inf else "above 0"
                    raise ValueError(f"{_flags(one)[0]}: {number:g} is not {wanted}")
        return made

    def measured(self, settings: Any, progress: Progress = QUIET, smoke: bool = False) -> Result:
        """Runs the benchmark and returns its result as it is written to JSON; one of the smallest sizes says so."""
        name = self.result or self.name
        progress.head = {"benchmark": name, "machine": measure.machine(), "settings": asdict(settings)}
        if smoke:
            progress.head["smoke"] = True
        return {**progress.head, **self.run(settings, progress)}

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the benchmark as its options say; returns the exit status."""
        parser = self.parser()
        options = parser.parse_args(arguments)
        try:
            settings = self.settings_of(options)
        except ValueError as error:
            parser.error(str(error))
        outputs = [(one, getattr(options, one.flag.removeprefix("--"))) for one in self.outputs]
        files = [("--json", options.json), *((one.flag, path) for one, path in outputs if one.file)]
        for flag, path in files:  # known before the measurement, not behind it
            if path is not None:
                if path.is_dir():
                    parser.error(f"{flag}: {path} is a folder")
                try:
                    check_writable(path)
                except OSError as error:
                    parser.error(f"{flag}: {path} cannot be written: {error.strerror}")
        progress = Progress(options.json)
        with contextlib.ExitStack() as stack:
            if self.uses_peers:
                stack.enter_context(import_module("benchmarks.peers.process").leaving_nothing())
            result = self.measured(settings, progress, options.smoke)
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        self.show(result, console)
        saved = progress.save(result, complete=True)
        for output, path in outputs:
            if path is not None:
                (path.parent if output.file else path).mkdir(parents=True, exist_ok=True)
                output.write(result, path)
        return 0 if saved and self.succeeded(result) else 1


def _options(settings: Any) -> Iterator[tuple[Field[Any], Any]]:
    """All fields that are options, with their values, also those of settings inside."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            yield from _options(value)
        elif "about" in one.metadata:
            yield one, value


def _flags(one: Field[Any]) -> Sequence[str]:
    return one.metadata["flags"] or [f"--{one.name.replace('_', '-')}"]


def _numbers(value: Any) -> list[float]:
    """The numbers of an option's value."""
    values = value if isinstance(value, tuple) else (value,)
    return [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]


def _add_option(parser: argparse.ArgumentParser, one: Field[Any], default: Any) -> None:
    flags = _flags(one)
    about, choices, parse = (one.metadata[key] for key in ("about", "choices", "parse"))
    more: dict[str, Any] = {"dest": one.name, "default": argparse.SUPPRESS}
    if isinstance(default, bool):
        parser.add_argument(*flags, action=f"store_{str(not default).lower()}", help=about, **more)
        return
    several = isinstance(default, tuple)
    if several and parse is None:
        more["nargs"] = "+"
    if "default" not in about:
        about = f"{about} (default: {' '.join(map(str, default)) if several else default})".strip()
    kind = parse or type(default[0] if several else default)
    parser.add_argument(*flags, type=kind, choices=choices, help=about, **more)


def _changed(settings: Any, given: Mapping[str, Any]) -> Any:
    """Settings with the given fields, also those of settings inside; the same object where nothing changes."""
    changes: dict[str, Any] = {}
    for one in fields(settings):
        value = getattr(settings, one.name)
        if is_dataclass(value):
            inner = _changed(value, given)
            if inner is not value:
                changes[one.name] = inner
        elif "about" in one.metadata and one.name in given:
            new = given[one.name]
            changes[one.name] = tuple(new) if isinstance(new, list) else new
    return replace(settings, **changes) if changes else settings
