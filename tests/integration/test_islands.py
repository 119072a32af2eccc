"""Islands that come and go on the shared cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import Unschedulable, UsageError

HERE = P("x")


def states(session: ClusterSession) -> dict[int, str]:
    return {island["island"]: island["state"] for island in session.status()["islands"]}


@pytest.mark.timeout(300)
def test_an_island_comes_serves_is_drained_and_goes(session: ClusterSession) -> None:
    """1. An island of another size comes, and gets the next slice, since nothing is on it. 2. A program runs on it and
    on an old one. 3. It has a slice, and cannot be removed. 4. It is drained: it gets no slices, and keeps what it has
    for a while. 5. Its slice goes, and so does it. 6. The next one has another number."""
    before = states(session)
    number = session.add_island(platform="cpu", hosts=1, devices=3)
    assert states(session) == {**before, number: "up"}
    with pw.virtual_slice((3,), ("x",), name="new") as new, pw.virtual_slice((4,), ("x",), island=0) as old:
        assert new.island == number
        double = pw.compiled(lambda v: v * 2, slice=new, in_specs=HERE, out_specs=HERE)
        more = pw.compiled(lambda v: v + 1, slice=old, in_specs=HERE, out_specs=HERE)
        program = pw.program(lambda v: more(double(v)))
        np.testing.assert_array_equal(np.asarray(program(np.arange(12.0))), np.arange(12.0) * 2 + 1)
        with pytest.raises(UsageError, match=rf"island {number} still has 1 slice\(s\): new of session"):
            session.remove_island(number)
        left = session.drain_island(number, deadline_s=0.0)
        assert [one["name"] for one in left] == ["new"]
        assert states(session)[number] == "draining"
        with pytest.raises(Unschedulable, match=f"island {number} with 3 cpu devices on 1 host.s., which is draining"):
            pw.virtual_slice((1,), ("x",), island=number)
        with pw.virtual_slice((1,), ("x",)) as elsewhere:
            assert elsewhere.island != number
        np.testing.assert_array_equal(np.asarray(program(np.ones(12))), np.full(12, 3.0))
    assert session.drain_island(number) == []
    session.remove_island(number)
    assert states(session) == before
    again = session.add_island(platform="cpu")
    assert again > number
    session.remove_island(again)
    assert states(session) == before


def test_what_cannot_be_added_drained_or_removed_says_why(session: ClusterSession) -> None:
    with pytest.raises(UsageError, match="platform must be one of cpu, gpu, tpu or auto, not 'quantum'"):
        session.add_island(platform="quantum")
    with pytest.raises(Unschedulable, match="no Ray node has 2 devices of platform gpu"):
        session.add_island(platform="gpu", devices=2)
    with pytest.raises(UsageError, match="there is no island 77 that could be drained; there are islands 0, 1"):
        session.drain_island(77)
    with pytest.raises(UsageError, match=r"number of seconds from now, not -1\.0"):
        session.drain_island(1, deadline_s=-1)
    assert set(states(session).values()) == {"up"}


@pytest.mark.timeout(180)
def test_changes_that_cannot_be_are_refused_and_lose_nothing(python: Any, tmp_path: Path) -> None:
    """The last island, moves to nowhere, snapshots without a place, suspensions that are unknown or damaged."""
    assert "29 refused" in python.run("refused_changes", str(tmp_path), timeout=170)
