"""The first questions of a controller to the resource manager: one that is silent is killed once, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray

from pathways_ray.controller import succession
from pathways_ray.controller.succession import ASKED, ask_manager


@dataclass
class Method:
    remote: Callable[..., Any]


@dataclass
class Manager:
    """A resource manager: what becomes of each question, in turn, "" for silence; from the last one on the same."""

    answers: list[Any]
    greeted: list[tuple[Any, ...]] = field(default_factory=list)
    asked: int = 0

    @property
    def controller_starts(self) -> Method:
        return Method(lambda *process: self.greeted.append(process))

    @property
    def islands(self) -> Method:
        return Method(self._answer)

    @property
    def slices(self) -> Method:
        async def held(started: int) -> bytes:
            assert started == 7
            return b"slices"

        return Method(held)

    async def _answer(self) -> Any:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if answer == "":
            await asyncio.sleep(3600)
        if isinstance(answer, Exception):
            raise answer
        return answer


def found(manager: Manager) -> tuple[Any, int]:
    """The answer, and how often the resource manager was killed."""
    kills: list[int] = []
    kill = lambda: kills.append(manager.asked)  # noqa: E731
    answer = asyncio.run(ask_manager(manager, (70, 7), lambda: 0.01, kill))
    assert manager.greeted == [(70, 7)] * manager.asked, "one that starts anew has not heard of this process"
    return answer, len(kills)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "RETRY_PAUSE_S", 0.0)
    monkeypatch.setattr(succession, "KILL_PAUSE_S", 0.0)


def test_one_that_answers_is_left_alone() -> None:
    assert found(Manager([[1]])) == (([1], b"slices"), 0)


def test_an_answer_that_is_missed_once_is_asked_for_again() -> None:
    assert found(Manager(["", [1]])) == (([1], b"slices"), 0)


def test_one_that_is_silent_is_killed_and_its_successor_waited_for() -> None:
    gone = ray.exceptions.RayActorError()
    assert found(Manager(["", "", gone, gone, [1]])) == (([1], b"slices"), 1)


def test_one_that_stays_silent_is_killed_once() -> None:
    manager = Manager([""])
    assert found(manager) == (None, 1)
    assert manager.asked == 2 * ASKED


def test_one_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "MANAGER_START_LIMIT_S", -1.0)
    assert found(Manager([ray.exceptions.RayActorError()])) == (None, 0)
