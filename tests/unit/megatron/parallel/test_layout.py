"""The islands that a layout of a training run uses."""

from __future__ import annotations

from typing import Any

import pytest

import pathways_ray as pw
from megatron_ptdp.models import build, preset
from megatron_ptdp.parallel.layout import Layout, devices_there
from megatron_ptdp.train import setup
from megatron_ptdp.train.config import load
from megatron_ptdp.train.setup import Training, schedule_of, sizes_of
from pathways_ray.errors import ControllerLost, Unschedulable


def island(number: int, state: str = "up", tenant: str = "", devices: int = 2) -> dict[str, Any]:
    return {"island": number, "state": state, "tenant": tenant, "hosts": [{"up": True, "devices": [{}] * devices}]}


def test_a_layout_uses_islands_that_take_slices() -> None:
    there = [island(0, "draining"), island(1), island(2, "lost"), island(3), island(4, devices=0)]
    assert devices_there(there) == {1: 2, 3: 2}
    assert devices_there(there, asked=(0, 1)) == {0: 2, 1: 2, 3: 2}, "the error is about the one that was asked for"


def test_the_operator_leaves_the_islands_of_tenants_alone() -> None:
    bobs = [island(2, tenant="bob"), island(3, tenant="bob")]
    assert devices_there([*bobs, island(0), island(1)]) == {0: 2, 1: 2}
    assert devices_there(bobs) == {2: 2, 3: 2}, "as bob sees them"
    assert devices_there([]) == {}


class Slice:
    """A slice on an island; what gives it back may fail."""

    def __init__(self, island: int, fails: bool = False) -> None:
        self.island, self.fails, self.released, self.size = island, fails, False, 1

    def release(self) -> None:
        self.released = True
        if self.fails:
            raise ControllerLost("the controller is gone")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Slice]:
    """The slices that are taken of two islands. The first one's release fails."""
    found: list[Slice] = []

    def virtual_slice(shape: Any, axes: Any, island: int, name: str) -> Slice:
        found.append(Slice(island, not found))
        return found[-1]

    monkeypatch.setattr(pw, "virtual_slice", virtual_slice)
    monkeypatch.setattr(pw, "islands", lambda: [island(0, devices=4) | {"platform": "cpu"}, island(1, devices=4)])
    return found


CONFIG = load(None, ["model=gpt-tiny", "pipeline=4", "microbatches=4", "placement=together"])


def test_a_layout_that_cannot_be_had_gives_back_what_it_has_taken(
    taken: list[Slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    take = pw.virtual_slice

    def refused(*given: Any, **more: Any) -> Any:
        if len(taken) == 3:
            raise Unschedulable("island 1 is drained")
        return take(*given, **more)

    monkeypatch.setattr(pw, "virtual_slice", refused)
    with pytest.raises(Unschedulable, match="island 1 is drained"):
        Layout.of(build(preset("gpt-tiny")), sizes_of(CONFIG, schedule_of(CONFIG)))
    assert [one.released for one in taken] == [True] * 3


def test_a_training_that_cannot_be_built_gives_its_slices_back(
    taken: list[Slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "compute_of", lambda config: None)
    monkeypatch.setattr(setup, "build_step", interrupted)
    schedule = schedule_of(CONFIG)
    with pytest.raises(KeyboardInterrupt):
        Training.of(CONFIG, schedule, sizes_of(CONFIG, schedule))
    assert [one.released for one in taken] == [True] * 4


def test_a_training_is_on_the_islands_where_its_slices_are_now(
    taken: list[Slice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "compute_of", lambda config: None)
    monkeypatch.setattr(setup, "build_step", lambda *_: None)
    schedule = schedule_of(CONFIG)
    training = Training.of(CONFIG, schedule, sizes_of(CONFIG, schedule))
    assert training.used == {0: 4}
    taken[0].island = 3
    assert training.used == {0: 3, 3: 1}
