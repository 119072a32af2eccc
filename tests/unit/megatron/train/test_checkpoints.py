"""Checkpoints: what is written is what is read; what is damaged, unfinished or of another model is never used so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from megatron_ptdp.errors import CheckpointError, TrainingStopped
from megatron_ptdp.models import preset
from megatron_ptdp.train import checkpoints
from megatron_ptdp.train.checkpoints import Checkpoints, flattened, nested
from pathways_ray.errors import HostLost

MODEL = preset("gpt-tiny")
DATA = {"crc32": 1, "seed": 2, "examples": 8}


def tree(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {
        "params": {"layers": {"w": rng.standard_normal((4, 30, 50), np.float32)}, "b": np.array([step], np.float32)},
        "slots": {"mu": {"layers": {"w": rng.standard_normal((4, 30, 50), np.float32)}}},
        "counts": {"count": np.int32(step)},
    }


class Warnings(list[str]):
    """What was said."""


@pytest.fixture
def warned() -> Warnings:
    return Warnings()


@pytest.fixture
def kept(tmp_path: Path, warned: Warnings) -> Iterator[Checkpoints]:
    """Three checkpoints of which two stay."""
    with Checkpoints(tmp_path / "c", MODEL, 2, warned.append) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, lambda step=step: tree(step), DATA)  # type: ignore[misc]
        checkpoints.wait()
        yield checkpoints


def again(kept: Checkpoints, warned: Warnings, model: Any = MODEL) -> Checkpoints:
    return Checkpoints(kept.folder, model, 2, warned.append)


def files(kept: Checkpoints, step: int, part: str) -> list[Path]:
    """The files of data of a checkpoint, largest first."""
    found = [path for path in (kept.folder / str(step) / part).rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_size)


def test_the_newest_comes_back_bit_by_bit_and_old_ones_go(kept: Checkpoints, warned: Warnings) -> None:
    assert kept.steps() == [20, 30]
    with again(kept, warned) as checkpoints:
        found = checkpoints.latest()
    assert found is not None
    assert (found.about.step, found.about.model, found.about.data) == (30, MODEL, DATA)
    expected = flattened(tree(30))
    state = flattened(found.state)
    assert sorted(state) == sorted(expected)
    for name, array in expected.items():
        assert (state[name].dtype, state[name].tobytes()) == (array.dtype, array.tobytes())
    assert warned == []


def test_there_may_be_none(tmp_path: Path, warned: Warnings) -> None:
    with Checkpoints(tmp_path / "c", MODEL, 2, warned.append) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.steps() == []


def test_a_file_in_the_place_of_the_folder_is_said_at_once(tmp_path: Path, warned: Warnings) -> None:
    (tmp_path / "c").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file: move it away"):
        Checkpoints(tmp_path / "c", MODEL, 2, warned.append)
    assert (tmp_path / "c").read_text() == "mine"


@pytest.mark.parametrize("part", ["state", "about"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_one_is_passed_over_with_a_warning(
    kept: Checkpoints, warned: Warnings, part: str, damage: str
) -> None:
    path = files(kept, 30, part)[0]
    data = bytearray(path.read_bytes())
    match damage:
        case "truncate":
            os.truncate(path, len(data) // 2)
        case "flip":
            data[len(data) // 2] ^= 0x10
            path.write_bytes(data)
        case "remove":
            path.unlink()
    with again(kept, warned) as checkpoints:
        found = checkpoints.latest()
    assert found is not None
    assert found.about.step == 20
    assert len(warned) == 1
    assert "checkpoint 30" in warned[0]
    assert warned[0].endswith("going on from step 20")


def test_when_all_are_damaged_nothing_is_used(kept: Checkpoints, warned: Warnings) -> None:
    for step in (20, 30):
        path = files(kept, step, "state")[0]
        os.truncate(path, path.stat().st_size // 2)
    with again(kept, warned) as checkpoints, pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        checkpoints.latest()


def test_one_that_was_not_written_to_its_end_is_not_used(kept: Checkpoints, warned: Warnings) -> None:
    (kept.folder / "30").rename(kept.folder / "30.orbax-checkpoint-tmp")  # as it is called while it is written
    with again(kept, warned) as checkpoints:
        found = checkpoints.latest()
    assert found is not None
    assert found.about.step == 20
    assert warned == [f"checkpoint 30 in {kept.folder} was not written to its end; going on from step 20"]


def test_one_between_two_steps_may_be_asked_for(kept: Checkpoints, warned: Warnings) -> None:
    found = kept.latest(10, 29)
    assert found is not None
    assert found.about.step == 20
    assert (kept.latest(20, 29), kept.latest(30)) == (None, None)
    os.truncate(files(kept, 20, "state")[0], 5)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        kept.latest(10, 29)
    assert warned == []


def test_training_goes_on_over_a_damaged_one(kept: Checkpoints, warned: Warnings) -> None:
    os.truncate(files(kept, 30, "state")[0], 5)
    with again(kept, warned) as checkpoints:
        checkpoints.save(30, lambda: tree(31), DATA)
        checkpoints.wait()
        assert checkpoints.read(30).state["counts"]["count"] == 31


@pytest.mark.parametrize("step", [15, 20, 30])
@pytest.mark.parametrize("killed", [False, True])
def test_those_that_a_later_run_replaces_are_there_until_it_is_whole(
    kept: Checkpoints, warned: Warnings, monkeypatch: pytest.MonkeyPatch, step: int, killed: bool
) -> None:
    """
    1. A loss before steps 20 and 30 was not seen, so they are run again. While the next checkpoint is written the disk
       is full, or the process is killed. Those that were there come back.
    2. Once it is whole, those of its step and of later ones are gone.
    """

    class Killed(BaseException):
        """Nothing is done behind it."""

    def full(*_: Any, **__: Any) -> None:
        raise Killed if killed else ValueError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kept._manager, "save", full)
        if killed:
            patch.setattr(checkpoints, "_put_back", lambda folder: False)
        kept.save(step, lambda: tree(step + 1), DATA)
        with pytest.raises(Killed if killed else TrainingStopped):
            kept.wait()
    with again(kept, warned) as found:
        assert found.steps() == [20, 30]
        assert found.read(30).state["counts"]["count"] == 30
        found.save(step, lambda: tree(step + 1), DATA)
        found.wait()
        assert found.steps() == sorted({one for one in (20, 30) if one < step} | {step})[-2:]
        assert found.read(step).state["counts"]["count"] == step + 1
    assert sorted(path.name for path in kept.folder.iterdir()) == [str(one) for one in found.steps()]
    assert warned == []


def test_one_that_is_whole_when_its_process_is_killed_takes_the_place_of_later_ones(
    kept: Checkpoints, warned: Warnings
) -> None:
    (kept.folder / "30").rename(kept.folder / "30.replaced-by-20")
    with again(kept, warned) as found:
        assert found.steps() == [20]


def test_another_model_is_refused_with_both_sizes(kept: Checkpoints, warned: Warnings) -> None:
    other = preset("gpt-tiny", layers=6, hidden=256)
    with (
        again(kept, warned, other) as checkpoints,
        pytest.raises(
            CheckpointError,
            match=r"checkpoint 30 in .* is of another model: layers is 4 there and 6 here, hidden is 128 there and 256",
        ),
    ):
        checkpoints.latest()


def test_nothing_is_written_when_there_is_no_state(kept: Checkpoints) -> None:
    kept.save(40, lambda: None, DATA)
    kept.wait()
    assert kept.steps() == [20, 30]


def test_what_cannot_be_written_is_said_once(kept: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax raises what its threads met again when it is closed."""

    def full(*_: Any) -> None:
        raise ValueError("no space left on device")

    def save() -> None:
        with kept:
            kept.save(40, lambda: tree(40), DATA)
            kept.wait()

    monkeypatch.setattr(kept._manager, "wait_until_finished", full)
    monkeypatch.setattr(kept._manager, "close", full)
    with pytest.raises(TrainingStopped, match=r"checkpoint 40 in .* cannot be written: no space left on device"):
        save()


def test_what_went_wrong_in_the_background_is_raised_by_the_next_call(kept: Checkpoints) -> None:
    def lost() -> dict[str, Any]:
        raise HostLost("host 1 is gone")

    kept.save(40, lost, DATA)
    with pytest.raises(HostLost, match="host 1 is gone"):
        kept.save(50, lambda: tree(50), DATA)
    kept.save(40, lost, DATA)
    kept.settle()
    assert kept.steps() == [20, 30]


@pytest.mark.parametrize("next_one", [False, True])
def test_one_that_takes_long_to_write_is_waited_for_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_one: bool
) -> None:
    monkeypatch.setattr(checkpoints, "SLOW_S", 0.0)
    said, goes_on = Warnings(), Event()

    def warn(text: str) -> None:
        said.append(text)
        goes_on.set()

    def slow() -> dict[str, Any]:
        assert goes_on.wait(60)
        return tree(10)

    with Checkpoints(tmp_path / "c", MODEL, 2, warn) as kept:
        kept.save(10, slow, DATA)
        if next_one:
            kept.save(20, lambda: tree(20), DATA)
        kept.wait()
        assert kept.steps() == [10, 20] if next_one else [10]
    assert said[0] == f"training waits for a checkpoint, which is not in {kept.folder} after 0 s yet"


def test_nested_is_the_inverse_of_flattened() -> None:
    once = tree(1)
    assert flattened(nested(flattened(once))).keys() == flattened(once).keys()
    assert nested({"a.b.c": 1, "a.d": 2}) == {"a": {"b": {"c": 1}, "d": 2}}
