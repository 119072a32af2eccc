"""Weights that move between two islands, and the share of time in which they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from tests.integration.conftest import Slices

Equal = Callable[[Any, Any], None]


def test_a_sampler_gets_the_weights_of_a_learner_that_donates_them(
    session: ClusterSession, slices: Slices, equal: Equal
) -> None:
    """
    1. The learner updates in place 20 times and pushes each version to another island, in another layout.
    2. Every version that the sampler takes is whole, and no further behind than it may be.
    3. With `max_lag=0` it is the very one that was pushed last.
    """
    update = pw.compiled(
        lambda p: jax.tree.map(lambda v: v + 1, p),
        slice=slices.a4,
        in_specs=P("x"),
        out_specs=P("x"),
        donate_argnums=0,
    )
    same = pw.compiled(lambda p: (p["w"] + p["b"][0]).sum(), slice=slices.b2, in_specs=({"w": P("x"), "b": P()},))
    params = pw.put({"w": np.zeros((8, 2), np.float32), "b": np.zeros(4, np.float32)}, slices.a4, P("x"))
    for max_lag in (2, 0):
        weights = pw.versioned(params, slice=slices.b2, spec={"w": P("x"), "b": P()}, max_lag=max_lag)
        first = float(np.asarray(params["b"])[0])
        taken = []
        for _ in range(20):
            params = update(params)
            weights.push(params)
            found = weights.latest()
            assert 0 <= weights.pushed - found.version <= max_lag
            taken.append((found.version, same(found.tree)))
        for version, total in taken:
            assert float(total) == 16 * 2 * (first + version)
        weights.latest().tree["w"].block_until_ready()
        assert weights.pushed == 20
        del weights, found, taken


def test_versions_end_with_their_session(session: ClusterSession) -> None:
    with pw.connect(session.url, session.token) as other:
        a, b = other.virtual_slice((1,), ("x",), island=0), other.virtual_slice((1,), ("x",), island=1)
        weights = pw.versioned(pw.put(np.zeros(2, np.float32), a), slice=b)
        assert weights.latest().version == 0
    with pytest.raises(pw.errors.SessionClosed, match="all versions are gone: it was shut down"):
        weights.latest()


def test_islands_that_compute_are_busy(session: ClusterSession, slices: Slices) -> None:
    work = pw.compiled(lambda v: jax.lax.fori_loop(0, 200, lambda _, c: c @ v, v), slice=slices.a4)
    v = pw.put(np.eye(64, dtype=np.float32), slices.a4)
    work(v).block_until_ready()
    pw.utilization()
    for _ in range(20):
        work(v).block_until_ready()
    found = pw.utilization()
    assert set(found) == {0, 1}
    assert found[0] > 0
    assert all(0 <= share <= 1 for share in found.values())
