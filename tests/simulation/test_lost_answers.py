"""Answers of a resource manager that lives get lost, some until the controller gives their questions up."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pathways_ray.controller import manager_calls
from pathways_ray.controller.events import CallManager
from pathways_ray.simulation.controller import SimulatedController
from pathways_ray.simulation.settings import Settings
from pathways_ray.simulation.world import World
from tests.drawn import drawn

LOST = ("create_slice", "exchange_slices", "release_session", "release_slice", "hold_slices")


def test_both_know_the_same_slices_whichever_answers_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users move slices and suspend their sessions. Of what was asked for the resource manager has made all, and the
    controller hears of few; it asks for 2.5 s."""
    monkeypatch.setattr(manager_calls, "QUESTION_LIMIT_S", 2.5)
    answered, random = SimulatedController._manager_answered, Random()
    lost: set[str] = set()

    def lose(self: SimulatedController, number: int, answer: Any) -> None:
        command = self.calling.get(number)
        if isinstance(command, CallManager) and command.method in LOST and random.random() < 0.8:
            lost.add(command.method)
            self._missed(number)
        else:
            answered(self, number, answer)

    monkeypatch.setattr(SimulatedController, "_manager_answered", lose)
    for seed in range(drawn(20)):
        random.seed(seed)
        settings = replace(Settings.drawn(seed, 0, ""), islands={0: [0], 1: [1], 2: [2, 3]}, flaws=0.0)
        settings = replace(settings, moves=0.3, suspends=0.2, preempts=0.0, changes=0)
        assert World(seed, settings).run().violations == [], f"seed {seed}"
    assert lost == {*LOST}
