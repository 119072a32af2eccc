"""Planted bugs: all that they replace is there, for one thread, and is put back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import Gpt, ModelConfig
from megatron_ptdp.parallel import Sizes, action_order
from megatron_ptdp.parallel.action_order import enqueued
from megatron_ptdp.parallel.batch_feed import BatchFeed
from megatron_ptdp.schedules import Action, build
from megatron_ptdp.verify.planted import PLANTED_BUGS, planted


def replaced(bug: str) -> list[Any]:
    return [getattr(patch.owner, patch.name) for patch in PLANTED_BUGS[bug].patches]


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_a_bug_replaces_functions_until_its_block_ends(bug: str) -> None:
    before = replaced(bug)
    with planted(bug):
        for original, now in zip(before, replaced(bug), strict=True):
            assert now is not original
    assert replaced(bug) == before


def test_a_block_that_fails_takes_its_bug_back() -> None:
    before = replaced("stale-tied")
    with pytest.raises(ZeroDivisionError), planted("stale-tied"):
        _ = 1 // 0
    assert replaced("stale-tied") == before


def test_an_unknown_bug_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no planted bug 'stale'.*stale-tied"), planted("stale"):
        pass


def scale_of_two_microbatches() -> float:
    model = Gpt(ModelConfig("gpt", layers=1, hidden=8, heads=2, sequence=4, vocabulary=8))
    feed = BatchFeed(model, Sizes(microbatches=2), [frozenset({"tokens"})], "float64")
    return float(feed({"tokens": np.zeros((2, 5), np.int32)})[1][0])


def test_only_the_thread_that_planted_a_bug_has_it() -> None:
    """1. A thread plants "mean-twice", and its scale of the loss is half of what it should be.
    2. Meanwhile the scale of another thread is right. 3. So is that of the first one, after the block."""
    right = scale_of_two_microbatches()
    elsewhere: list[float] = []
    with planted("mean-twice"):
        wrong = scale_of_two_microbatches()
        other = threading.Thread(target=lambda: elsewhere.append(scale_of_two_microbatches()))
        other.start()
        other.join()
    assert (wrong, elsewhere, scale_of_two_microbatches()) == (right / 2, [right], right)


def test_two_bugs_are_taken_back_in_the_reverse_order() -> None:
    """Both replace `StageNodes._compiled`."""
    before = replaced("microbatch-twice")
    with planted("microbatch-twice", "wrong-activation"):
        pass
    assert replaced("microbatch-twice") == before


def test_an_early_update_comes_one_backward_too_soon() -> None:
    """Without a backward before the last one, there is no earlier time."""
    two, one = enqueued(build("1f1b", 2, 2)), enqueued(build("1f1b", 2, 1))
    assert action_order.completing(two) == {Action(0, "B", 1), Action(1, "B", 1)}
    with planted("early-update"):
        assert action_order.completing(two) == {Action(0, "B", 0), Action(1, "B", 0)}
        assert action_order.completing(one) == {Action(0, "B", 0), Action(1, "B", 0)}
