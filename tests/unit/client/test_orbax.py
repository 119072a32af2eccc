"""Checkpoints by Orbax of trees with arrays on slices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import orbax_arrays
from tests.unit.client.local import LocalSession, opened


@pytest.fixture
def session() -> Iterator[LocalSession]:
    found = opened()
    orbax_arrays.register()
    yield found
    found.close()


# A save that is refused leaves Orbax's own tasks behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("trusted", [True, False])
def test_a_state_is_saved_and_restored_onto_slices(session, tmp_path: Path, trusted: bool) -> None:
    """Through the hosts where they may run Python, and else through the client."""
    session.trusted = trusted
    a, b = session.virtual_slice((4,), ("x",)), session.virtual_slice((2,), ("x",))
    w = np.arange(8, dtype=np.float32)
    state = {"w": pw.put(w, a, P("x")), "b": pw.put(jnp.ones(3, jnp.bfloat16), a), "n": np.arange(3), "step": 3}
    checkpoints = ocp.StandardCheckpointer()
    checkpoints.save(tmp_path / "state", state)
    checkpoints.wait_until_finished()
    assert (session.fetched > 0) is not trusted
    for target in (state, jax.tree.map(ocp.utils.to_shape_dtype_struct, state)):
        found = checkpoints.restore(tmp_path / "state", target)
        assert (found["w"].slice, found["w"].sharding.spec, found["b"].dtype) == (a, P("x"), jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(found["w"]), w)
        assert (found["step"], type(found["n"])) == (3, np.ndarray)
    moved = checkpoints.restore(tmp_path / "state", state | pw.like({"w": w}, b, P("x")))
    assert (moved["w"].slice, moved["b"].slice) == (b, a)
    plain = checkpoints.restore(tmp_path / "state")
    np.testing.assert_array_equal(np.asarray(plain["w"]), w)
    with pytest.raises(ValueError, match=r"w has shape \(8,\) in the checkpoint, and is to be restored as \(4,\)"):
        checkpoints.restore(tmp_path / "state", state | pw.like({"w": w[:4]}, b))
    with pytest.raises(pw.errors.UsageError, match=r"k has typed keys, .*save jax.random.key_data of it"):
        checkpoints.save(tmp_path / "keys", {"k": pw.put(jax.random.key(0), a)})
