"""The training loop's checkpoints: what is in one when a run ends, and what is in the records by then. Trainings are
stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ptdp.train.config import load
from megatron_ptdp.train.loop import Loop
from megatron_ptdp.train.speed import Peak


class Checkpoints:
    """Checkpoints of a run, of which only the steps are kept."""

    def __init__(self, *steps: int) -> None:
        self.written = list(steps)

    def steps(self) -> list[int]:
        return self.written

    def save(self, step: int, state: Any, data: Any) -> None:
        self.written.append(step)

    def wait(self) -> None:
        pass


class Step:
    """A step whose state is the number of steps that are done."""

    def __call__(self, state: int, batch: Any) -> tuple[int, dict[str, Any]]:
        return state + 1, {"loss": np.float32(1), "norm": np.float32(1), "applied": np.bool_(True)}

    def snapshot(self, state: int) -> int:
        return state


class Loader:
    def starting_at(self, step: int) -> Iterator[Any]:
        while True:
            yield None, 1.0


def loop(checkpoints: Any, *settings: str, asked: bool = False) -> Loop:
    """A loop, which was `asked` to end before its first step or not."""
    training: Any = SimpleNamespace(
        config=load(None, ["model=gpt-tiny", *settings]), step=Step(), sizes=SimpleNamespace(devices=1)
    )
    guard: Any = SimpleNamespace(pauses=lambda: False, before=lambda state, done: None, landed=lambda number: None)
    display: Any = SimpleNamespace(waits=lambda what: None, step=lambda *seen: None)
    batches: Any = SimpleNamespace(passes=lambda number: 0.0)
    records: Any = SimpleNamespace(lines=[])
    records.write = lambda number, values: records.lines.append(number)
    stop: Any = SimpleNamespace(asked=asked)
    return Loop(training, Loader(), batches, {}, checkpoints, records, display, stop, Peak(1.0, ""), guard)


@pytest.mark.parametrize(
    ("steps", "done", "written"),
    [
        ((), 0, []),
        ((30,), 30, [30]),
        ((30,), 37, [30, 37]),  # of a snapshot: the end was asked for while a loss was survived
        ((), 37, [37]),
    ],
)
def test_a_run_that_ends_at_once_leaves_a_checkpoint_of_all_that_is_done(
    steps: tuple[int, ...], done: int, written: list[int]
) -> None:
    checkpoints = Checkpoints(*steps)
    assert loop(checkpoints, asked=True).run(done, done) == (done, None)
    assert checkpoints.written == written


@pytest.mark.parametrize(("in_flight", "every"), [(1, 1), (2, 1), (4, 3)])
def test_a_step_is_in_the_records_before_its_checkpoint_is_waited_for(in_flight: int, every: int) -> None:
    """Else what ends the run meanwhile leaves a checkpoint behind the records, which then never have the step."""

    class Waiting(Checkpoints):
        def save(self, step: int, state: Any, data: Any) -> None:
            assert set(self.written) <= set(one.records.lines)  # type: ignore[attr-defined]
            super().save(step, state, data)

    checkpoints = Waiting()
    one = loop(checkpoints, "steps=8", f"in_flight={in_flight}", f"checkpoint_every={every}")
    assert one.run(0, 0) == (8, None)
    assert checkpoints.written == [*range(every, 8, every), 8]
    assert one.records.lines == list(range(1, 9))  # type: ignore[attr-defined]
