"""What a training goes on with after a loss, and when it gives up. Trainings, clusters and snapshots are stand-ins."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import pathways_ray as pw
from megatron_ptdp.errors import BadSizes, CheckpointError, TooManyRestarts, TrainingStopped
from megatron_ptdp.models import preset
from megatron_ptdp.parallel.step_state import State
from megatron_ptdp.train import survivor
from megatron_ptdp.train.checkpoints import About, Restored
from megatron_ptdp.train.config import load
from megatron_ptdp.train.survivor import MAX_IN_VAIN, MAX_REFUSALS, Start, Survivor
from pathways_ray.errors import BufferLost, HostLost, QuotaExceeded, SessionClosed, Unschedulable


class Step:
    """A step of a training; `parts` are of one group of replicas."""

    parts: tuple[Any, ...] = ((),)
    renewed = 0

    def renew(self) -> None:
        self.renewed += 1

    def gather(self, state: Any) -> Any:
        return {"whole": state}

    def place(self, whole: Any) -> Any:
        return ("placed", dict(whole))


class Training:
    def __init__(self, fit: Any) -> None:
        self.fit, self.step, self.released = fit, Step(), False
        self.islands = frozenset(fit.islands or (0, 1))

    @property
    def used(self) -> dict[int, int]:
        return dict.fromkeys(self.islands, 1)

    def first_state(self) -> str:
        return "first"

    def release(self) -> None:
        self.released = True


class Snapshot:
    def __init__(self, state: Any) -> None:
        self.state, self.whole, self.fails = state, True, 0

    def is_ready(self) -> bool:
        return True

    def is_whole(self) -> bool:
        return self.whole

    def wait(self, timeout: float | None = None) -> None:
        pass

    def restore(self, timeout: float | None = None) -> Any:
        if self.fails:
            self.fails -= 1
            raise BufferLost("another host is gone")
        return self.state

    values = restore


class Checkpoints:
    """Those of some steps; there is none to begin with. Some are damaged."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.damaged: list[int] = []

    def settle(self) -> None: ...

    def latest(self, after: int = -1, until: int = sys.maxsize) -> Restored | None:
        able = [step for step in self.steps if after < step <= until]
        whole = [step for step in able if step not in self.damaged]
        if able and not whole:
            raise CheckpointError("all are damaged")
        about = About(step=whole[-1], model=preset("gpt-tiny"), data={}, crc32={}) if whole else None
        return Restored(about, {"of": whole[-1]}) if about else None


class Cluster:
    """A session, whose islands are in these states one look after the other; the last look goes on."""

    def __init__(self) -> None:
        self.looks: list[tuple[str, ...]] = [("up", "up")]

    def status(self) -> Any:
        states = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        hosts = [{"up": True, "devices": [{}]}]
        return {"islands": [{"island": k, "state": state, "hosts": hosts} for k, state in enumerate(states) if state]}


class Story:
    """A survivor of stand-ins; `said` are the lines that it shows."""

    def __init__(self, directory: Path, *settings: str, restarts: int = 0) -> None:
        given = ("data=2", "data_islands=2", "min_data=1", "batch=4", *settings)
        self.said: list[str] = []
        self.cluster = Cluster()
        config, said = load(None, ["model=gpt-tiny", *given]), self.said.append
        self.checkpoints = Checkpoints()
        checkpoints: Any = self.checkpoints
        self.survivor = Survivor(config, self.cluster, checkpoints, directory, restarts, said)
        self.records = directory / "recoveries.jsonl"

    def steps(self, first: int, last: int) -> None:
        for done in range(first, last):
            self.survivor.before(state_of(done), done)
            self.survivor.landed(done + 1)

    def lost(self) -> Start:
        return self.survivor.recovered(HostLost("host 1 is gone"))


def state_of(done: int) -> Any:
    return State(((f"params {done}",),), ((f"slots {done}",),))


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivor, "_built", Training)
    monkeypatch.setattr(survivor, "LOOK_S", 0.0)
    monkeypatch.setattr(survivor, "GROW_LOOK_S", 0.0)
    monkeypatch.setattr(pw, "snapshot", lambda state, local: Snapshot(state))


def test_a_loss_costs_the_steps_since_the_last_snapshot(tmp_path: Path) -> None:
    """
    1. Seven steps, with snapshots of steps 0, 3 and 6. A host is lost, and is back at the third look.
    2. Slices and programs stay; the state is that after step 6.
    3. The record is written when the next loss is seen.
    """
    story = Story(tmp_path, "snapshot_every=3")
    story.survivor.begin(None)
    training: Any = story.survivor.training
    story.steps(0, 7)
    story.cluster.looks = [("up", "away"), ("up", "away"), ("up", "up")]
    start = story.lost()
    assert (start.done, start.state) == (6, state_of(6))
    assert (story.survivor.training, training.released, training.step.renewed) == (training, False, 1)
    assert not story.records.exists()
    story.steps(6, 7)
    record = json.loads(story.records.read_text())
    assert (record["reached"], record["step"], record["source"], record["data"]) == (7, 6, "snapshot", 2)
    assert re.match("HostLost: host 1 is gone; goes on from step 6 .snapshot. with 2 replicas on 2 dev", story.said[0])


def test_an_island_that_is_lost_for_good_leaves_fewer_replicas_and_one_that_comes_brings_them_back(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path, "snapshot_every=2")
    story.survivor.begin(None)
    first: Any = story.survivor.training
    story.steps(0, 3)
    assert not story.survivor.pauses()
    story.cluster.looks = [("up", "away"), ("up", "lost")]
    start = story.lost()
    small: Any = story.survivor.training
    assert (start.done, start.state) == (2, ("placed", {"whole": state_of(2)}))
    assert (first.released, small.fit.sizes.data, small.fit.sizes.microbatches, small.islands) == (True, 1, 4, {0})
    story.steps(2, 4)
    assert not story.survivor.pauses()
    story.cluster.looks = [("up", "lost", "up")]
    assert story.survivor.pauses()
    start = story.survivor.grown(Start(4, "the state on the devices"))
    assert (start.done, start.state) == (4, ("placed", {"whole": "the state on the devices"}))
    grown: Any = story.survivor.training
    assert (small.released, grown.fit.sizes.data, grown.islands) == (True, 2, {0, 2})
    story.steps(4, 5)
    assert [json.loads(line)["data"] for line in story.records.read_text().splitlines()] == [1, 2]
    assert not story.survivor.pauses()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Refusals of the next trainings that are built, in order."""
    found: list[Exception] = []

    def built(fit: Any) -> Training:
        if found:
            raise found.pop(0)
        return Training(fit)

    monkeypatch.setattr(survivor, "_built", built)
    return found


def small(tmp_path: Path) -> Story:
    """A training on one of two islands, which is to grow: another one has come."""
    story = Story(tmp_path, "snapshot_every=2")
    story.cluster.looks = [("up", "lost")]
    story.survivor.begin(None)
    story.steps(0, 3)
    story.cluster.looks = [("up", "lost", "up")]
    assert story.survivor.pauses()
    return story


@pytest.mark.parametrize("why", [Unschedulable, QuotaExceeded, BadSizes])
def test_a_training_that_cannot_grow_after_all_goes_on_as_it_was(
    why: type[Exception], tmp_path: Path, refused: list[Exception]
) -> None:
    """The island that had come is drained while the slices are given back. It does not try again at once."""
    story = small(tmp_path)
    before: Any = story.survivor.training
    refused.append(why("island 2 is drained"))
    start = story.survivor.grown(Start(3, "the state on the devices"))
    assert (start.done, start.state) == (3, ("placed", {"whole": "the state on the devices"}))
    again: Any = story.survivor.training
    assert (again is before, before.released, again.released, again.fit.sizes.data) == (False, True, False, 1)
    assert story.said[-1].startswith(f"{why.__name__}: island 2 is drained; goes on from step 3 (devices) with 1 repl")
    assert not story.survivor.pauses()


def test_a_training_that_cannot_grow_goes_on_where_its_own_island_has_gone_too(
    tmp_path: Path, refused: list[Exception]
) -> None:
    story = small(tmp_path)
    refused += [Unschedulable("island 2 is drained"), Unschedulable("island 0 is drained")]
    story.cluster.looks = [("draining", "lost", "draining"), ("draining", "up", "draining")]
    start = story.survivor.grown(Start(3, "the state on the devices"))
    assert (start.done, start.state) == (3, ("placed", {"whole": "the state on the devices"}))
    assert story.survivor.training.used.keys() == {1}


def test_a_recovery_takes_what_fits_where_an_island_goes_meanwhile(tmp_path: Path, refused: list[Exception]) -> None:
    """
    1. An island is lost for good, and the one that is left is drained as its slices are taken: another one is there.
    2. Slices that are refused again and again end it.
    """
    story = Story(tmp_path, "snapshot_every=2")
    story.survivor.begin(None)
    story.steps(0, 3)
    refused.append(BadSizes("there are 0 devices"))
    story.cluster.looks = [("up", "lost"), ("draining", "lost", "up")]
    start = story.lost()
    assert (start.done, start.state) == (2, ("placed", {"whole": state_of(2)}))
    assert story.survivor.training.used.keys() == {2}
    refused += [Unschedulable("island 2 is full")] * MAX_REFUSALS
    story.survivor.training.release()
    with pytest.raises(Unschedulable, match="island 2 is full"):
        story.lost()
    assert not refused


def test_slices_that_have_moved_are_taken_again_where_islands_are(tmp_path: Path) -> None:
    """They had moved from an island that was drained. As the controller is lost with the session, that one is gone."""
    story = Story(tmp_path, "snapshot_every=2", "data_islands=2")
    story.cluster.looks = [("up", "up", "up")]
    story.survivor.begin(None)
    moved: Any = story.survivor.training
    moved.islands = frozenset({0, 2})
    story.steps(0, 3)
    story.cluster.looks = [("up", "", "up")]
    story.lost()
    assert story.survivor.training is moved, "none of its islands was lost"
    moved.release()
    story.lost()
    again: Any = story.survivor.training
    assert (again.fit.islands, again.fit.sizes.data) == ((0, 2), 2)


def test_a_loss_during_a_recovery_is_another_one(tmp_path: Path) -> None:
    story = Story(tmp_path, "snapshot_every=2")
    story.survivor.begin(None)
    story.steps(0, 3)
    snapshot: Any = story.survivor.kept.taken[-1].snapshot
    snapshot.fails = 2
    assert story.lost().done == 2
    snapshot.fails = MAX_IN_VAIN + 1
    with pytest.raises(TooManyRestarts, match=r"times after step 3 without a further step; .* another host is gone"):
        story.lost()


def test_without_a_whole_snapshot_training_goes_on_from_the_beginning(tmp_path: Path) -> None:
    story = Story(tmp_path, "snapshot_every=2")
    story.survivor.begin(None)
    story.steps(0, 1)
    story.survivor.kept.taken[0].snapshot.whole = False  # type: ignore[attr-defined]
    start = story.lost()
    assert (start.done, start.state) == (0, "first")
    assert "(beginning)" in story.said[0]


@pytest.mark.parametrize(
    ("steps", "damaged", "done", "source"),
    [
        ([60, 80], [], 80, "checkpoint"),
        ([60, 80], [80], 60, "checkpoint"),
        ([60, 80], [60, 80], 50, "snapshot"),
        ([40, 50], [], 50, "snapshot"),
        ([60, 95], [], 60, "checkpoint"),  # the losses of steps 91 to 95 are in no record
    ],
)
def test_training_goes_on_from_the_later_of_snapshot_and_checkpoint(
    tmp_path: Path, steps: list[int], damaged: list[int], done: int, source: str
) -> None:
    story = Story(tmp_path, "snapshot_every=50")
    story.survivor.begin(None)
    story.steps(0, 90)
    story.checkpoints.steps, story.checkpoints.damaged = steps, damaged
    training: Any = story.survivor.training
    start = story.lost()
    assert (story.survivor.training, training.released, training.step.renewed) == (training, False, 1)
    assert (start.done, start.state) == (done, state_of(50) if source == "snapshot" else ("placed", {"of": done}))
    assert f"({source})" in story.said[0]


@pytest.mark.parametrize("lost_in", ["the slices", "the first state"])
def test_a_loss_before_the_first_step_is_survived_as_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_in: str
) -> None:
    story, losses = Story(tmp_path, "snapshot_every=3"), [HostLost("host 1 is gone"), BufferLost("and again")]

    class Unlucky(Training):
        def __init__(self, fit: Any) -> None:
            super().__init__(fit)
            if lost_in == "the slices" and losses:
                raise losses.pop(0)

        def first_state(self) -> str:
            if losses:
                raise losses.pop(0)
            return super().first_state()

    monkeypatch.setattr(survivor, "_built", Unlucky)
    start = story.survivor.begin(None)
    assert (start.done, start.state, losses) == (0, "first", [])
    assert story.survivor.training.used.keys() == {0, 1}


def test_without_snapshots_a_loss_before_the_first_step_says_what_would_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlucky(fit: Any) -> Training:
        raise HostLost("host 1 is gone")

    monkeypatch.setattr(survivor, "_built", unlucky)
    with pytest.raises(HostLost, match="snapshot_every=10 goes on from snapshots"):
        Story(tmp_path).survivor.begin(None)
    with pytest.raises(TooManyRestarts, match=f"{MAX_IN_VAIN + 1} times after step 0"):
        Story(tmp_path, "snapshot_every=3").survivor.begin(None)


def test_without_snapshots_restarts_are_counted(tmp_path: Path) -> None:
    story = Story(tmp_path, restarts=1)
    story.survivor.begin(None)
    story.steps(0, 5)
    assert story.lost().done == 0
    assert "restart 1 of 1 from step 0" in story.said[0]
    with pytest.raises(TooManyRestarts, match="hosts were lost 2 times, --max-restarts is 1"):
        story.lost()
    for error, kind in (
        (HostLost("host 1 is gone"), HostLost),
        (SessionClosed("its controller died"), TrainingStopped),
    ):
        with pytest.raises(kind, match=rf"{error}; .* --max-restarts N does so by itself, and snapshot_every=10"):
            Story(tmp_path).survivor.recovered(error)


def test_what_does_not_come_back_ends_training_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path, "snapshot_every=2", "pipeline=2", "data=1", "data_islands=1", "lost_after=1")
    story.survivor.begin(None)
    monkeypatch.setattr(survivor, "BACK_LIMIT_S", -1.0)
    story.cluster.looks = [("up", "lost")]
    with pytest.raises(
        TrainingStopped, match=r"from 1 replicas up fits .* island 0 is up, 1 devices, island 1 is lost"
    ):
        story.lost()


@pytest.mark.parametrize("why", [Unschedulable, QuotaExceeded])
def test_a_cluster_with_no_place_for_snapshots_is_told_of_once(
    why: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state: Any, local: bool) -> Any:
        raise why("there are 0 beside island 0")

    monkeypatch.setattr(pw, "snapshot", refuse)
    story = Story(tmp_path, "snapshot_every=2")
    story.survivor.begin(None)
    story.steps(0, 8)
    assert story.said == ["no snapshots for now: there are 0 beside island 0"]
