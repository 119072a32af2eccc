"""The loops of the example of reinforcement learning, where what they need is lost for good."""

from __future__ import annotations

import sys
from typing import Any

import jax
import pytest

import pathways_ray as pw
from examples.rl import __main__ as program
from examples.rl import loops
from pathways_ray.errors import Failure
from tests.unit.client.local import opened


def lose(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        leaf._buffer.record.fail(Failure("HostLost", "host 3 does not come back"))


def test_a_comparison_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rl", "--mode", "streaming", "--compare"])
    monkeypatch.setattr(pw, "init", lambda **_: pytest.fail("a cluster starts"))
    with pytest.raises(SystemExit):
        program.main()
    assert "--compare is for the other modes" in capsys.readouterr().err


@pytest.mark.timeout(100)
@pytest.mark.parametrize("lost", ["learner", "sampler"])
def test_streaming_ends_where_a_side_is_lost_for_good(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened()
    try:
        job = loops.Job(session.virtual_slice((1,), ("x",)), session.virtual_slice((1,), ("t",)), prompts=4)
        if lost == "learner":
            lose(job.state.params)
        else:
            answers = job.answers(0, 4)
            lose(answers[0])
            monkeypatch.setattr(job, "answers", lambda number, groups: answers)
        with pytest.raises(pw.errors.HostLost, match="host 3 does not come back"):
            next(loops.streaming(job, 3))
    finally:
        session.close()
