"""Loaders of the batches of steps: from this process, or beside the devices, where each host reads its own rows.

A batch depends on the number of its step alone, wherever it is read: so a training that goes back after a loss gets the
same batches again, and hosts that have come back need to know nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

import pathways_ray as pw
from megatron_ptdp.data import Batches, HostRows
from megatron_ptdp.errors import ConfigError
from megatron_ptdp.parallel.batch_feed import Fed
from megatron_ptdp.parallel.stage_specs import BATCH_SPEC
from megatron_ptdp.train.setup import Training

LIMIT_S = 120.0
"""Seconds for one call of a host. The first one starts Python there and opens the file."""


class Loaded(NamedTuple):
    """The batch of a step, and the tokens that it predicts."""

    batch: Mapping[str, np.ndarray] | Fed
    tokens: float


class Loader(Protocol):
    """The batches of a training."""

    def starting_at(self, step: int) -> Iterator[Loaded]:
        """Those of this step, counted from 0, and all later ones."""


def loader_of(training: Training, batches: Batches) -> Loader:
    """The loader that the configuration names.

    Raises:
        ConfigError: hosts are to load, and the operator does not trust the tenant.
    """
    if training.config.data.loader == "client":
        return ClientLoader(training, batches)
    if not training.layout.slices[0][0].session.trusted:
        raise ConfigError(
            "loader=hosts has hosts run Python, which they do for tenants that the operator trusts only (pathways "
            "tenants add NAME --trusted); take loader=client"
        )
    return HostLoader(training, batches)


@dataclass(frozen=True)
class ClientLoader:
    """Batches that this process reads, some ahead."""

    training: Training
    batches: Batches

    def starting_at(self, step: int) -> Iterator[Loaded]:
        for batch in self.batches.starting_at(step):
            yield Loaded(batch, float(self.training.model.tokens(batch)))


class HostLoader:
    """Batches that the hosts of each slice read: a call for each slice whose stages look at the batch. This process
    sends the number of the step."""

    def __init__(self, training: Training, batches: Batches) -> None:
        step, sizes = training.step, training.sizes
        kinds = training.model.batch(sizes.batch)
        self._feed = step.feed
        self._tokens = float(training.model.tokens({n: jax.ShapeDtypeStruct(*kind) for n, kind in kinds.items()}))
        numbers = np.arange(sizes.batch, dtype=np.int32)
        self._places = [self._feed.rows_of(group, numbers) for group in range(sizes.islands)]
        self._calls = [
            [
                self._call(slice, names, self._places[group].shape, kinds, batches)
                for slice, names in zip(row, self._feed.wanted, strict=True)
            ]
            for group, row in enumerate(training.layout.slices)
        ]

    def _call(self, slice: Any, names: frozenset[str], rows: Any, kinds: Any, batches: Batches) -> Any:
        """The host function of a slice; None where its stages take nothing of the batch."""
        if not names:
            return None
        found = {name: jax.ShapeDtypeStruct((*rows, *kinds[name][0][1:]), kinds[name][1]) for name in sorted(names)}
        function = HostRows(batches, tuple(found))
        specs = dict.fromkeys(found, BATCH_SPEC)
        return pw.host(
            function, slice=slice, result=found, in_specs=(None, BATCH_SPEC), out_specs=specs, limit_s=LIMIT_S
        )

    def starting_at(self, step: int) -> Iterator[Loaded]:
        while True:
            number = np.int32(step)
            arrays = [
                [call(number, places) if call is not None else {} for call in row]
                for row, places in zip(self._calls, self._places, strict=True)
            ]
            yield Loaded(Fed(arrays, self._feed.scales(self._tokens)), self._tokens)
            step += 1
