"""Values of arrays, as a session fetches them: with the cause where that fails, and small results beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pathways_ray.client.ahead import plans_along
from pathways_ray.client.argument_types import ArgumentType
from pathways_ray.client.array_pieces import FetchPlan, plan_of
from pathways_ray.client.buffer import DELETED, PENDING, BufferRecord
from pathways_ray.client.core import ClientCore
from pathways_ray.client.data import DataLinks
from pathways_ray.client.driver import Driver
from pathways_ray.client.events import Wake
from pathways_ray.client.questions import Done, Question, ask, ask_whether_there, hosts_of
from pathways_ray.errors import PathwaysError, from_failure
from pathways_ray.transport.shared_memory import SharedFile

CAUSE_LIMIT_S = 10.0
"""A fetch that failed waits this long for the controller to name the cause."""

SYMPTOMS = ("HostLost", "BufferDeleted")
"""What is said of an array that the session has, and the cause of which is on the way: its host is gone, or has dropped
it for the controller, which refuses the upload."""

AWAY_LIMIT_S = 120.0
"""A session without a controller is back, or has ended, within this time."""


class Fetches:
    """The fetches of one session."""

    def __init__(self, core: ClientCore, data: DataLinks, driver: Driver) -> None:
        self._core, self._data, self._driver = core, data, driver

    def value(self, record: BufferRecord, kind: ArgumentType) -> np.ndarray[Any, Any]:
        """The value of an array. Small results of its launch may come along, for when they are asked for."""
        self._core.early.looked_at(record)
        if record.results is None:
            return self._fetch(record, plan_of(kind))
        siblings = self._driver.siblings
        found: np.ndarray[Any, Any] | None = siblings.take(record.id)
        if found is not None:
            self._driver.check_fetch(record)
            return found
        plan = plan_of(kind)
        early: dict[int, np.ndarray[Any, Any]] = {}
        numbers = siblings.of(record.results, record.id)
        also = plans_along(numbers, record.results, self._core.buffers, plan) if numbers else None
        found = self._fetch(record, plan, also, early)
        if early:
            siblings.keep(record.results, early)
            for number in early:
                kept = self._core.buffers.get(number)
                if kept is None or kept.state is DELETED:  # its last handle went meanwhile, or it was donated
                    siblings.forget(number)
        return found

    def shard(
        self, record: BufferRecord, kind: ArgumentType, place: int, into: SharedFile | None = None
    ) -> np.ndarray[Any, Any]:
        """The shard of an array on device number `place` of its slice; a file in memory of its size may take it."""
        return self._fetch(record, _plan_of_shard(kind, place), None, None, into)

    def ask_for_shard(self, record: BufferRecord, kind: ArgumentType, place: int, done: Done) -> Question | None:
        """Asks for the shard on device number `place`, without a wait; None where that is not possible, or where a
        fetch would have to wait before it asks."""
        driver = self._driver
        if record.failure is not None or not driver.begin_read():
            return None

        def answered(value: np.ndarray[Any, Any] | None) -> None:
            driver.end_read()
            if value is not None:
                self._core.early.came(record)
            done(value)

        plan = _plan_of_shard(kind, place)
        if plan is kind.cover:  # as values are asked for with calls
            self._core.early.looked_at(record)
        question = ask(self._data, record.id, plan, answered)
        if question is None:
            driver.end_read()
        return question

    def take_back(self, question: Question) -> bool:
        """Gives a question up; False when it has been answered."""
        if not question.take_back():
            return False
        self._driver.end_read()
        return True

    def hasten(self, record: BufferRecord) -> Question | None:
        """Has watchers hear soon of a buffer that is made by a call which was handed to its host: that says when it is
        there, or what was sent of the call leaves at once. Does not wait.

        Returns: what is to be taken back (`Question.take_back`) once the buffer has its outcome.
        """

        def told(came: bool) -> None:
            if came:
                self._core.early.came(record)
                self._driver.do((Wake(fetches=False),))
            else:
                self._driver.hurry()

        alone = hosts_of(self._data, record) == (record.host,)
        question = ask_whether_there(self._data, record.id, record.host, told) if alone else None
        if question is None:
            self._driver.hurry()
        return question

    def _fetch(self, record: BufferRecord, plan: FetchPlan, *along: Any) -> np.ndarray[Any, Any]:
        try:
            found = self._data.fetch(record.id, plan, partial(self._driver.check_fetch, record), *along)
            self._core.early.came(record)
            return found
        except PathwaysError as error:
            if error.failure is not None and record.names_cause_of(error.failure):
                self._driver.wait(record)  # without a limit, as who waits for the array: every launch has an outcome
            elif error.failure is not None and (record.state is PENDING or error.failure.kind in SYMPTOMS):
                self._wait_for_cause(record)
            if record.failure is not None:
                raise from_failure(record.failure) from None
            raise

    def _wait_for_cause(self, record: BufferRecord) -> None:
        """A host saw a symptom; the controller knows the cause, and names it shortly after. Where it is gone as well,
        its successor does, once the session is back."""
        driver, core = self._driver, self._core

        def known() -> bool:
            return record.failure is not None or record.state is DELETED

        driver.hurry()
        driver.wait_until(lambda: known() or core.away, CAUSE_LIMIT_S)
        if core.away and not known():
            driver.wait_until(lambda: known() or not core.away, AWAY_LIMIT_S)
            driver.wait_until(known, CAUSE_LIMIT_S)


def _plan_of_shard(kind: ArgumentType, place: int) -> FetchPlan:
    """The way in which a shard is fetched; one that is all of the array, as that is."""
    assert kind.slice is not None
    placed, whole = kind.slice.placed, plan_of(kind)
    if len(whole.shards) == 1 and whole.shards[0][1] == placed.devices[place]:
        return whole
    return FetchPlan.of_shard(kind.array, kind.spec, placed, place)
