"""Sizes on the islands that there are: fewer replicas after a loss, more of them again, and the same batch."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ptdp.train.config import load
from megatron_ptdp.train.fitting import Fit, There, after_loss, fitting, islands_there, larger


def config_of(*settings: str) -> Any:
    return load(None, ["model=gpt-tiny", *settings])


FOUR = ("data=4", "data_islands=4", "min_data=1", "microbatch=2", "batch=24")  # three microbatches on each replica


def up(*islands: int, devices: int = 1) -> list[There]:
    return [There(island, "up", devices) for island in islands]


@pytest.mark.parametrize(("islands", "data", "microbatches"), [(4, 4, 3), (3, 3, 4), (2, 2, 6), (1, 1, 12)])
def test_fewer_replicas_have_more_microbatches_each(islands: int, data: int, microbatches: int) -> None:
    found = fitting(config_of(*FOUR), dict.fromkeys(range(islands), 1))
    assert found is not None
    sizes = found.sizes
    assert (sizes.data, sizes.islands, sizes.microbatches, sizes.batch) == (data, islands, microbatches, 24)
    assert (found.schedule.microbatches, found.islands) == (microbatches, tuple(range(islands)))


def test_numbers_of_replicas_that_do_not_divide_the_batch_are_left_out() -> None:
    found = fitting(config_of("data=4", "data_islands=4", "min_data=1", "microbatch=2", "batch=16"), {0: 1, 1: 1, 2: 1})
    assert found is not None
    assert (found.sizes.data, found.sizes.microbatches) == (2, 4)


def test_replicas_gather_on_fewer_islands_where_these_have_the_devices() -> None:
    found = fitting(config_of("data=4", "data_islands=2", "batch=8"), {3: 4})
    assert found is not None
    assert (found.sizes.data, found.sizes.islands, found.islands) == (4, 1, (3,))


def test_no_fewer_than_min_data_and_by_default_none_fewer() -> None:
    assert fitting(config_of("data=4", "min_data=3", "batch=12"), {0: 2}) is None
    assert fitting(config_of("data=2", "batch=4"), {0: 1}) is None
    assert fitting(config_of("data=2", "batch=4"), {}) is None
    assert fitting(config_of("pipeline=4", "schedule=interleaved", "chunks=1", "batch=4"), {0: 3}) is None


def test_after_a_loss_training_waits_for_islands_that_are_expected_and_leaves_those_that_are_not() -> None:
    config = config_of(*FOUR)
    current = fitting(config, dict.fromkeys(range(4), 1))
    assert current is not None
    used = dict.fromkeys(range(4), 1)
    assert after_loss(config, current, used, up(0, 1, 2, 3)) is current
    assert after_loss(config, current, used, [*up(0, 1, 2), There(3, "away", 1)]) is None
    for there in ([*up(0, 1, 2), There(3, "lost", 1)], up(0, 1, 2), [*up(0, 1, 2), There(3, "draining", 1)]):
        found = after_loss(config, current, used, there)
        assert found is not None
        assert (found.sizes.data, found.islands) == (3, (0, 1, 2))
    assert after_loss(config, current, used, []) is None


def test_slices_that_have_moved_to_an_island_that_is_too_small_are_too_many() -> None:
    """The runtime maps slices of a lost island to what is there, several of them to the same devices."""
    config = config_of(*FOUR)
    current = Fit.of(config)
    there = [There(0, "up", 2), *up(1, 2), There(3, "lost", 1)]
    assert after_loss(config, current, {0: 2, 1: 1, 2: 1}, there) is current
    found = after_loss(config, current, {0: 1, 1: 2, 2: 1}, there)
    assert found is not None
    assert (found.sizes.data, found.islands) == (3, (0, 1, 2))


def test_another_island_takes_the_place_of_a_lost_one() -> None:
    config = config_of("pipeline=2")
    found = after_loss(config, Fit.of(config), {0: 1, 1: 1}, up(0, 2))
    assert found is not None
    assert (found.sizes.data, found.islands) == (1, (0, 2))


def test_training_grows_up_to_what_is_configured() -> None:
    config = config_of(*FOUR)
    small = fitting(config, {0: 1, 1: 1})
    assert small is not None
    assert larger(config, small, up(0, 1)) is None
    assert larger(config, small, [*up(0, 1), There(2, "away", 1)]) is None
    found = larger(config, small, up(0, 1, 5, 6, 7))
    assert found is not None
    assert (found.sizes.data, found.islands) == (4, (0, 1, 5, 6, 7))
    assert larger(config, found, up(0, 1, 5, 6, 7, 8)) is None
    grown = after_loss(config, small, {0: 1, 1: 1}, up(0, 1, 2))
    assert grown is not None
    assert grown.sizes.data == 3, "a loss is a chance to look, too"


def test_an_island_whose_host_is_down_is_away_whatever_is_said_of_it() -> None:
    def island(number: int, state: str, *hosts: bool) -> dict[str, Any]:
        return {"island": number, "state": state, "hosts": [{"up": one, "devices": [{}, {}]} for one in hosts]}

    status = {"islands": [island(0, "up", True, True), island(1, "up", True, False), island(2, "lost", False)]}
    assert islands_there(status) == [There(0, "up", 4), There(1, "away", 4), There(2, "lost", 2)]


def test_a_run_grows_on_islands_where_it_gets_slices() -> None:
    def island(number: int, tenant: str) -> dict[str, Any]:
        return {"island": number, "state": "up", "tenant": tenant, "hosts": [{"up": True, "devices": [{}]}]}

    shared, bobs = [island(0, ""), island(1, "")], [island(2, "bob"), island(3, "bob")]
    assert [one.island for one in islands_there({"islands": bobs + shared})] == [0, 1], "the operator sees all"
    assert [one.island for one in islands_there({"islands": bobs})] == [2, 3]
