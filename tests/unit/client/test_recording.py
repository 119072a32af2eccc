"""`pw.recording` without a cluster of one's own; tests/integration/test_training.py records a step of a real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import pathways_ray as pw
from pathways_ray.client import api
from pathways_ray.errors import UsageError


def test_only_the_process_that_started_the_hosts_can_record_them() -> None:
    with pytest.raises(UsageError, match=r"only by the process that started them: use pw\.init"), pw.recording():
        pass


class Recorder:
    """A cluster that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def record(self) -> None:
        self.asked.append("record")

    def recorded(self, waits: bool) -> dict[int, list[str]]:
        self.asked.append(waits)
        return {0: ["step"]}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """The cluster of this process."""
    found = Recorder()
    monkeypatch.setattr(api, "own_cluster", lambda: SimpleNamespace(cluster=found))
    return found


def test_a_record_ends_with_its_block(cluster: Recorder) -> None:
    with pw.recording() as computed:
        assert computed == {}
    assert computed == {0: ["step"]}
    assert cluster.asked == ["record", True]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_record_ends_with_a_block_that_raises(cluster: Recorder, error: type[BaseException]) -> None:
    """Hosts would go on with it. Nothing is waited for: what is under way may never end."""
    with pytest.raises(error), pw.recording() as computed:
        raise error
    assert computed == {0: ["step"]}
    assert cluster.asked == ["record", False]
