"""Islands of different sizes, links and speeds in one runtime."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import Unschedulable
from tests.integration.conftest import Cluster, Scripts

ISLANDS = [
    {"platform": "cpu", "hosts": 2, "devices": 4, "topology": (2, 4), "torus": True, "generation": "slow"},
    {"platform": "cpu", "devices": 2, "memory": 1 << 28, "generation": "fast"},
]
OPTIONS = {"islands": ISLANDS, "check_order": True}


def busy(session: pw.Session, host: int) -> list[float]:
    """The part of its time for which each device of a host computed lately, as status has it."""
    hosts = [one for island in session.status()["islands"] for one in island["hosts"]]
    return [device["busy"] for one in hosts if one["host"] == host for device in one["devices"]]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_islands_of_different_sizes_and_speeds_are_one_runtime(python: Scripts) -> None:
    """The four devices of each host of the first island share a core, the two of the other island have one.

    1. Slices are sub-grids, and say so. 2. What is asked of devices decides the island. 3. Programs over both islands
    have the values of plain NumPy. 4. What nothing has is refused with what there is. 5. Both hosts of the first island
    have one slice, and one of them computes: the next slice goes to the other.
    """
    cluster = Cluster(python, OPTIONS, PATHWAYS_CPU_CORES="0,0,1")
    with pw.connect(cluster.url, cluster.token) as session:
        grid = session.virtual_slice((2, 2), ("x", "y"), topology=(2, 2))
        row = session.virtual_slice((4,), ("x",), generation="slow")
        small = session.virtual_slice((2,), ("x",), generation="fast", memory=1 << 28)
        assert (grid.island, row.island, small.island) == (0, 0, 1)
        assert {device.partition(".")[0] for device in grid.devices} == {"0"}, "a whole host"
        assert {device.partition(".")[0] for device in row.devices} == {"1"}
        text = grid.explain()
        assert "4 of its devices, in a 2x4 torus" in text
        assert "cost: 4 hops for 4 pairs of neighbours" in text
        assert "hosts and their devices, 1x2" in small.explain()
        ahead = pw.compiled(lambda v: v @ v.T, slice=grid, in_specs=P("x", "y"), out_specs=P("x", "y"))
        along = pw.compiled(lambda v: v + v.sum(), slice=row, in_specs=P("x"), out_specs=P("x"))
        home = pw.compiled(lambda v: v * 2, slice=small, in_specs=P("x"), out_specs=P("x"))
        program = pw.program(lambda v: home(along(ahead(v))))
        for number in range(8):
            v = np.full((8, 8), number, np.float32)
            expected = (v @ v.T + (v @ v.T).sum()) * 2
            np.testing.assert_array_equal(np.asarray(program(v)), expected)
        with pytest.raises(Unschedulable, match=r"island 1 with 2 cpu devices on 1 host\(s\) \(fast, 268435456 bytes"):
            session.virtual_slice((2,), ("x",), generation="fast", memory=1 << 40)
        assert len([share for host in range(3) for share in busy(session, host)]) == 10
        long = pw.compiled(lambda v: jax.lax.fori_loop(0, 20_000, lambda _, x: jnp.tanh(x), v), slice=grid)
        state = pw.put(np.ones((64, 64), np.float32), grid)
        deadline = time.monotonic() + 100
        while (share := min(busy(session, 0))) < 0.2 and time.monotonic() < deadline:
            state = long(state).block_until_ready()
        assert max(busy(session, 1)) < 0.2 <= share
        beside = session.virtual_slice((2,), ("x",), generation="slow")
        assert {device.partition(".")[0] for device in beside.devices} == {"1"}
    cluster.end()
