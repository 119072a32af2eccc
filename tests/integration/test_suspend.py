"""Sessions that are suspended and resumed on the shared cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from pathways_ray.errors import SessionSuspended, SuspensionDamaged, UsageError

SPLIT = P("x")


def entry(cluster: ClusterSession, tenant: pw.Session) -> dict[str, Any]:
    """What status says of a session, and the slices that it holds."""
    status = cluster.status()
    (found,) = [one for one in status["sessions"] if one["session"] == tenant.id]
    return found | {"slices": [one["island"] for one in status["slices"] if one["session"] == tenant.id]}


def test_a_suspended_session_holds_no_device_and_goes_on_with_the_same_bits(
    session: ClusterSession, tenant: pw.Session, equal: Callable[[Any, Any], None]
) -> None:
    """
    1. A state goes round on a slice of one island, with gradients from a slice of another one, beside arrays of other
       types and layouts, and on a part of a slice.
    2. The session is suspended: status shows no slice and no buffer of it, and who uses it is told so.
    3. It is resumed where the first island is drained: slices are elsewhere; handles, functions and programs go on.
    4. The values are those of a session that was not suspended.
    """
    number = session.add_island(platform="cpu", devices=2)
    where = tenant.virtual_slice((2,), ("x",), island=number, name="state")
    other = tenant.virtual_slice((4,), ("x",), island=1)
    part = tenant.part_of(where, (1,), (1,), ("y",))
    step = pw.compiled(
        lambda s, g: jnp.sin(s) * 3 + g, slice=where, in_specs=(SPLIT, SPLIT), out_specs=SPLIT, donate_argnums=(0,)
    )
    gain = pw.compiled(lambda v: v * 0.5, slice=other, in_specs=SPLIT, out_specs=SPLIT)
    program = pw.program(lambda s, v: step(s, gain(v)))

    def trained(interrupt: Callable[[], None]) -> np.ndarray[Any, Any]:
        state = pw.put(np.linspace(0, 1, 64, dtype=np.float32), where, SPLIT)
        batch = pw.put(np.linspace(1, 2, 64, dtype=np.float32), other, SPLIT)
        for number in range(6):
            if number == 3:
                interrupt()
            state = program(state, batch)
        return np.asarray(state)

    kept = {
        "whole": pw.put(np.arange(12).reshape(3, 4), where, P()),
        "half": pw.put(jnp.arange(4, dtype=jnp.bfloat16), other, SPLIT),
        "part": pw.put(np.arange(3.0), part, P("y")),
        "none": pw.put(np.zeros((0, 2)), where, P()),
        # Big ones go in files in memory. That of rows goes back as it is.
        "rows": pw.put(np.arange(1 << 17, dtype=np.float32).reshape(512, 256), other, SPLIT),
        "columns": pw.put(np.arange(1 << 17, dtype=np.float32).reshape(256, 512), where, P(None, "x")),
    }
    shift = pw.compiled(lambda v: v + 1, slice=other, in_specs=SPLIT, out_specs=SPLIT, donate_argnums=(0,))
    values = {name: np.asarray(one) for name, one in kept.items()}
    key = pw.put(jax.random.key(7), where, P())
    expected = trained(lambda: None)

    def interrupt() -> None:
        tenant.suspend()
        found = entry(session, tenant)
        assert (found["suspended"], found["buffers"], found["bytes"], found["slices"]) == (True, 0, 0, [])
        for use in (
            lambda: np.asarray(kept["whole"]),
            lambda: kept["whole"] + 1,
            lambda: gain(kept["half"]),
            lambda: pw.put(np.ones(2), where, SPLIT),
            lambda: tenant.virtual_slice((1,)),
            where.move,
            tenant.suspend,
        ):
            with pytest.raises(SessionSuspended, match="call its resume"):
                use()
        assert tenant.status()["islands"]
        kept.pop("none")
        assert session.drain_island(number, deadline_s=0.0) == []
        tenant.resume()
        kept["rows"] = shift(kept["rows"])  # its memory is given away
        tenant.suspend()
        tenant.resume()
        values["rows"] = values["rows"] + 1

    equal(trained(interrupt), expected)
    equal({name: np.asarray(one) for name, one in kept.items()}, {name: values[name] for name in kept})
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    assert (where.island in (0, 1), other.island, part.devices) == (True, 1, where.devices[1:])
    assert not entry(session, tenant)["suspended"]
    with pytest.raises(UsageError, match="the session is not suspended"):
        tenant.resume()
    session.remove_island(number)


def test_a_damaged_suspension_is_refused_and_lost_nothing(
    session: ClusterSession, tenant: pw.Session, tmp_path: Path
) -> None:
    where = tenant.virtual_slice((4,), ("x",), island=0)
    one, other = pw.put(np.arange(8.0), where, SPLIT), pw.put(np.arange(4), where, P())
    with pytest.raises(UsageError, match="is no directory to suspend to"):
        tenant.suspend(tmp_path / "no" / "such")
    assert entry(session, tenant)["buffers"] == 2
    folder = tmp_path / "suspension"
    tenant.suspend(folder)
    (file,) = [file for file in folder.iterdir() if file.stat().st_size == 32]
    before = file.read_bytes()
    file.write_bytes(before[:7] + b"!" + before[8:])
    with pytest.raises(SuspensionDamaged, match="are not those that were written"):
        tenant.resume()
    assert entry(session, tenant)["suspended"]
    with pytest.raises(SuspensionDamaged, match="has no suspension"):
        tenant.resume(tmp_path)
    file.write_bytes(before)
    tenant.resume()
    np.testing.assert_array_equal(np.asarray(one), np.arange(8.0))
    np.testing.assert_array_equal(np.asarray(other), np.arange(4))
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_session_gives_way_to_one_of_a_higher_priority_and_comes_back(python: Any, tmp_path: Path) -> None:
    assert "given way" in python.run("preempt", str(tmp_path / "tenants.json"))


@pytest.mark.long
@pytest.mark.timeout(360)
def test_two_that_do_not_fit_beside_each_other_take_turns_and_none_fails(python: Any, tmp_path: Path) -> None:
    assert "given way" in python.run("preempt", str(tmp_path / "tenants.json"), "turns", timeout=350)
