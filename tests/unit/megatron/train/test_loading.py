"""Batches that hosts load are those that the client sends, on the same slices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ptdp.data import Batches, TokenFile, TokenWriter
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.models import DATA, TENSOR, Gpt, ModelConfig
from megatron_ptdp.parallel import Sizes
from megatron_ptdp.parallel.batch_feed import BatchFeed
from megatron_ptdp.train.loading import Loaded, loader_of
from tests.unit.client.local import LocalSession, opened

SIZES = Sizes(pipeline=2, data=4, islands=2, microbatches=2, examples=1)


@pytest.fixture
def session() -> Iterator[LocalSession]:
    made = opened()
    yield made
    made.close()


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    with TokenWriter(tmp_path / "a", 1000, "count") as writer:
        writer.add(np.arange(121))
    return Batches(TokenFile.open(tmp_path / "a"), {"tokens": 5}, SIZES.batch, seed=1)


def training(session: LocalSession, loader: str) -> Any:
    """Of two groups of two replicas, on two pipeline devices, of which the second looks at the batch."""
    model = Gpt(ModelConfig("gpt", layers=1, hidden=8, heads=2, sequence=4, vocabulary=1000))
    feed = BatchFeed(model, SIZES, [frozenset(), frozenset({"tokens"})], "float32")
    slices = [[session.virtual_slice((2, 1), (DATA, TENSOR)) for _ in range(2)] for _ in range(2)]
    config = SimpleNamespace(data=SimpleNamespace(loader=loader))
    return SimpleNamespace(
        config=config, model=model, sizes=SIZES, step=SimpleNamespace(feed=feed), layout=SimpleNamespace(slices=slices)
    )


def test_batches_of_hosts_have_the_bits_of_those_of_the_client(session: LocalSession, batches: Batches) -> None:
    """From a step in the middle of a pass on, as after a loss."""
    client, hosts = (training(session, loader) for loader in ("client", "hosts"))

    def steps(one: Any) -> list[Loaded]:
        return list(islice(loader_of(one, batches).starting_at(2), 3))

    for sent, read in zip(steps(client), steps(hosts), strict=True):
        fed, there = client.step.feed(sent.batch), hosts.step.feed(read.batch)
        assert (sent.tokens, fed.scales) == (read.tokens, there.scales)
        for groups, row in zip(fed.arrays, there.arrays, strict=True):
            assert [list(arrays) for arrays in groups] == [list(arrays) for arrays in row] == [[], ["tokens"]]
            np.testing.assert_array_equal(groups[1]["tokens"], np.asarray(row[1]["tokens"]))
        assert there.arrays[1][1]["tokens"].slice is hosts.layout.slices[1][1]


def test_hosts_load_for_tenants_that_are_trusted(session: LocalSession, batches: Batches) -> None:
    one = training(session, "hosts")
    session.trusted = False
    with pytest.raises(ConfigError, match=r"tenants add NAME --trusted\); take loader=client"):
        loader_of(one, batches)
