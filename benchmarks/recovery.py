"""Training that goes on: losses of each kind at random, beside a run that is not disturbed.

A small GPT with two replicas on two islands (`data_islands=2`, `min_data=1`, `snapshot_every=10`, a checkpoint every 20
steps) trains on a cluster of its own, once without losses, and once with some of each kind: *host*, its process is
killed; *island*, its process is killed and it is removed, and ten steps after training has gone on another one is
added; *controller*, *scheduler* (of one of the islands) and *manager*, their process is killed; *both*, a host's and
the controller's are killed at once.

The time to go on is from the kill, or from the command, until the loss of the first step after it was seen. Where
training does not notice, it is the longest time without a step until the process that was killed is there again.

Run it with `python -m benchmarks run recovery --json recovery.json --figure recovery.png`; about twelve minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import pydoc_data.topics
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import measure
from benchmarks.harness import Benchmark, Output, Progress, Result, drawn_by, option
from benchmarks.printing import Table, shows

KINDS = ("host", "island", "controller", "scheduler", "manager", "both")
LIMIT_S = 300.0
"""The longest wait for a step, or for training to go on."""

LOOK_S = 0.01
APART = 10
"""Steps that training goes on for with fewer replicas, before an island comes."""

UNNOTICED = 4
"""Steps after a kill, more than are in flight, after which training has not noticed it."""


@dataclass(frozen=True)
class Settings:
    steps: int = option(300, "of each run")
    losses: int = option(5, "of each kind")
    kinds: tuple[str, ...] = option(KINDS, choices=KINDS)
    sequence: int = option(128, "tokens of an example")
    seed: int = option(0, "of the steps at which something is lost")

    def __post_init__(self) -> None:
        if self.apart < 2 * APART:
            needed = 2 * APART * self.losses * 5 // 4
            raise ValueError(f"{self.losses} losses of a kind in {self.steps} steps: give --steps {needed} or more")

    @property
    def apart(self) -> int:
        """Steps from one loss to the next; the last ones are for the last island to come."""
        return self.steps * 4 // 5 // max(self.losses, 1)


SMOKE = Settings(steps=200, losses=1, kinds=("host", "island"), sequence=16)


class Lines:
    """The files that a training writes, as they grow."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def of(self, name: str) -> list[dict[str, Any]]:
        """The whole lines of a file; none while it is not there."""
        path = self.directory / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def step(self) -> int:
        return int(steps[-1]["step"]) if (steps := self.of("metrics.jsonl")) else 0


class Losses(threading.Thread):
    """Has something lost at some steps of a training, and waits each time until it has gone on.

    Args:
        session: of the process that started the cluster.
        at: steps.
    """

    def __init__(self, kind: str, session: Any, directory: Path, at: Iterable[int], seed: int) -> None:
        super().__init__(name="losses", daemon=True)
        self.kind, self.session, self.lines, self.at = kind, session, Lines(directory), list(at)
        self.random = random.Random(seed)
        self.events: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for step in self.at:
                self._until(lambda step=step: self.lines.step >= step)  # type: ignore[misc]
                getattr(self, f"_{self.kind}")()
        except Ended:
            pass
        except BaseException as error:
            self.error = error

    def _until(self, reached: Callable[[], Any]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not reached():
            if self.over.wait(LOOK_S):
                raise Ended
            if time.monotonic() > deadline:
                raise TimeoutError(f"training did not come from step {self.lines.step} within {LIMIT_S:.0f} s")

    def _event(self, what: str, act: Callable[[], None], missed: Callable[[], bool] = lambda: False) -> None:
        """Does something, and notes when training has gone on after it; not at all where it has `missed` it."""
        known, began = len(self.lines.of("recoveries.jsonl")), time.time()
        act()
        self._until(lambda: len(self.lines.of("recoveries.jsonl")) > known or missed())
        lines = self.lines.of("recoveries.jsonl")[known:]
        if not lines:
            line = self.lines.of("metrics.jsonl")[-1]
            seen = {"time": began + self._pause(began), "step": line["step"], "reached": line["step"]}
            lines = [{**seen, "data": line["devices"], "source": "devices"}]
        found = lines[0]
        again = found["reached"] - found["step"]
        event = {"what": what, "time": began, "seconds": found["time"] - began, "steps_again": again}
        self.events.append({**event, "reached": found["reached"], "data": found["data"], "source": found["source"]})

    def _pids(self) -> dict[int, list[int]]:
        """The processes of the hosts of each island that is up."""
        islands = self.session.status()["islands"]
        return {one["island"]: [h["pid"] for h in one["hosts"]] for one in islands if one["state"] == "up"}

    def _host(self) -> None:
        pids = [pid for of_island in self._pids().values() for pid in of_island]
        self._event("host killed", lambda: _kill(self.random.choice(pids)))

    def _pause(self, began: float) -> float:
        """The longest time without a step since then."""
        seen = [began, *(line["time"] for line in self.lines.of("metrics.jsonl") if line["time"] > began)]
        return max(after - before for before, after in itertools.pairwise(seen))

    def _killed(self, what: str, actor: str, *others: int) -> None:
        """Kills a process of a class of actors, and processes beside it; waits until it is there again."""
        before = _pids_of(actor)
        self._event(
            what,
            lambda: _kill(self.random.choice(before), *others),
            lambda step=self.lines.step: self.lines.step >= step + UNNOTICED and _replaced(actor, before),  # type: ignore[misc]
        )
        self._until(lambda: _replaced(actor, before))

    def _controller(self) -> None:
        self._killed("controller killed", "Controller")

    def _scheduler(self) -> None:
        self._killed("scheduler killed", "IslandScheduler")

    def _manager(self) -> None:
        self._killed("resource manager killed", "ResourceManager")

    def _both(self) -> None:
        pids = [pid for of_island in self._pids().values() for pid in of_island]
        self._killed("host and controller killed", "Controller", self.random.choice(pids))

    def _island(self) -> None:
        pids = self._pids()
        island = self.random.choice(sorted(pids))

        def lose() -> None:
            _kill(*pids[island])
            self.session.drain_island(island, deadline_s=0.0)
            self.session.remove_island(island)

        self._event("island lost", lose)
        reached = self.lines.step
        self._until(lambda: self.lines.step >= reached + APART)
        self._event("island added", lambda: self.session.add_island(platform="cpu", devices=1))


class Ended(Exception):
    """Training is over."""


def _kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def _pids_of(actor: str) -> list[int]:
    """The processes of a class of actors."""
    found = measure.runtime_processes()
    return [process.pid for name, process in found.items() if name.rpartition(" ")[0] == actor]


def _replaced(actor: str, before: Sequence[int]) -> bool:
    """Whether there are as many processes of a class as before, and not all the same."""
    now = _pids_of(actor)
    return len(now) == len(before) and set(now) != set(before)


def trained(settings: Settings, kind: str, folder: Path) -> Result:
    """One run, with losses of a kind, or of none ("none"): its curve, and what happened to it."""
    import pathways_ray as pw
    from megatron_ptdp import data
    from megatron_ptdp.train.config import load
    from megatron_ptdp.train.run import RunOptions, train

    tokens, directory = folder / "corpus.tokens", folder / kind
    if not tokens.exists():
        data.prepare(tokens, [Path(pydoc_data.topics.__file__)], data.tokens_named(None))
    given = (
        "model=gpt-tiny", f"sequence={settings.sequence}", "data=2", "data_islands=2", "min_data=1", "microbatch=2",
        "batch=8", f"steps={settings.steps}", "learning_rate=1e-3", "snapshot_every=10", "checkpoint_every=20",
        "keep=1", "peak_flops=1e10", f"path={tokens}", f"directory={directory}",
    )  # fmt: skip
    apart = settings.apart
    chosen = random.Random(settings.seed)
    at = [10 + k * apart + chosen.randrange(max(1, apart // 4)) for k in range(settings.losses)]
    with pw.init(islands=2, devices_per_host=1) as session:
        config = load(None, [*given, f"url={session.url}", f"token={session.token}"])
        losses = Losses(kind, session, directory, at if kind != "none" else [], settings.seed)
        losses.start()
        began = time.time()
        try:
            train(config, RunOptions(), Console(quiet=True))
        finally:
            losses.over.set()
            losses.join(LIMIT_S)
        if losses.error is not None:
            raise losses.error
        seconds = time.time() - began
    lines = losses.lines.of("metrics.jsonl")
    curve = [[round(line["time"] - began, 3), line["step"], line["loss"], line["devices"]] for line in lines]
    events = [{**event, "time": event["time"] - began} for event in losses.events]
    return {"kind": kind, "seconds": seconds, "curve": curve, "events": events}


def run(settings: Settings, progress: Progress) -> Result:
    """A run without losses, then one for each kind; needs no Ray to be running."""
    runs: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("none", *settings.kinds):
            progress.say(f"training with losses: {kind}")
            runs.append(trained(settings, kind, Path(folder)))
    return {"runs": runs, "rows": rows_of(runs), "kinds": kinds_of(runs)}


def rows_of(runs: list[Result]) -> list[Result]:
    """Each kind of event: how long it took to go on, and steps that were run again."""
    events = [(event["what"], event) for one in runs for event in one["events"]]
    return [
        {
            "what": what,
            "times": sum(name == what for name, _ in events),
            "seconds": measure.spread([event["seconds"] for name, event in events if name == what]),
            "steps_again": measure.spread([event["steps_again"] for name, event in events if name == what]),
        }
        for what in dict.fromkeys(name for name, _ in events)
    ]


def kinds_of(runs: list[Result]) -> list[Result]:
    """Each run beside the one without losses."""
    calm = runs[0]
    found = []
    for one in runs:
        pairs = list(zip(one["curve"], calm["curve"], strict=True))
        largest = max(abs(own[2] - other[2]) for own, other in pairs)
        last = one["curve"][-1]
        figures = {"seconds": one["seconds"], "steps": last[1], "last_loss": last[2], "largest_difference": largest}
        events = len(one["events"])
        found.append({"losses": one["kind"], "events": events, **figures, "same_bits": largest == 0.0})
    return found


def has_all_losses(result: Result) -> bool:
    """Whether all came that were asked for: training may be over before. An island that is lost comes again."""
    each = {"none": 0, "island": 2}
    losses = result["settings"]["losses"]
    return all(len(one["events"]) == each.get(one["kind"], 1) * losses for one in result["runs"])


show = shows(
    Table("to go on after", "rows", "what", "times", "seconds:.1f", "steps_again:.0f"),
    Table(
        "whole runs",
        "kinds",
        "losses",
        "events",
        "seconds:.0f",
        "steps",
        "last_loss:.6f",
        "largest_difference:.2g",
        "same_bits",
    ),
)

BENCHMARK = Benchmark(
    "recovery",
    __doc__,
    Settings,
    SMOKE,
    run,
    show,
    outputs=(Output("--figure", drawn_by("recovery"), "recovery.png"),),
    succeeded=has_all_losses,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
