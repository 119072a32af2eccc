"""Checkpoints by Orbax of trees with arrays on slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client import checkpoint_leaves, checkpoints_on_hosts, orbax_arrays, shown
from pathways_ray.client.specs import spec_from_user
from pathways_ray.errors import HostFunctionError
from tests.unit.client.local import LocalSession, opened
from tests.unit.helpers import placed


@pytest.fixture
def session() -> Iterator[LocalSession]:
    found = opened()
    orbax_arrays.register()
    yield found
    found.close()


def test_a_checkpoint_is_written_by_calls_that_say_how_much_of_it_is_there(
    session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Of five arrays of 64 bytes, two go with each call: three calls. 2. Orbax waits for them one after the other,
    and `pw.progress()` shows how far they are. 3. So where the client fetches the arrays one by one."""
    monkeypatch.setattr(checkpoints_on_hosts, "PART_BYTES", 128)
    shown_at: list[str] = []

    class Waits:
        why: Any = staticmethod(shown.Work("nothing", 0).why)

        def waiting(self, why: Any) -> Any:
            self.why = why
            return contextlib.nullcontext()

    waits = Waits()
    monkeypatch.setattr(shown, "waits", waits)
    fetch = session.wait

    def wait(record: Any, timeout: float | None = None, there: bool = False) -> None:
        (link,) = waits.why().links
        shown_at.append(f"{link.text} ({link.done:.1f})")
        fetch(record, timeout, there)

    monkeypatch.setattr(session, "wait", wait)
    session.trusted = True
    where = session.virtual_slice((4,), ("x",))
    state = {f"w{k}": pw.put(np.arange(16, dtype=np.float32), where, P("x")) for k in range(5)}
    ocp.PyTreeCheckpointer().save(tmp_path / "hosts", state)
    text = "hosts write a checkpoint"
    assert [line for line in shown_at if line.startswith(text)] == [
        f"{text}: 0 bytes of 320 bytes (0.0)",
        f"{text}: 128 bytes of 320 bytes (0.4)",
        f"{text}: 256 bytes of 320 bytes (0.8)",
    ]
    session.trusted = False
    ocp.PyTreeCheckpointer().save(tmp_path / "client", state)
    assert waits.why().links[0].text == "the arrays of a checkpoint are fetched: 320 bytes of 320 bytes"
    assert list(checkpoints_on_hosts.groups([])) == []
    assert list(checkpoints_on_hosts.groups([500, 1, 1])) == [range(1), range(1, 3)]


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
    save_alone(checkpoints, tmp_path / "w", {"w": state["w"]})
    with pytest.raises(ValueError, match=r"w has shape \(8,\) in the checkpoint, and is to be restored as \(4,\)"):
        checkpoints.restore(tmp_path / "w", pw.like({"w": w[:4]}, b))


def test_a_folder_of_a_hosts_own_is_not_the_checkpoints(
    session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a shared file system a host may have an older one of that name: values go through the client then."""
    mine, own = tmp_path / "client", tmp_path / "host"

    def looker(digests: dict[str, str]) -> Any:
        looks = checkpoint_leaves.looker(
            {path.replace(mine.as_posix(), own.as_posix()): digest for path, digest in digests.items()}
        )

        def look(given: Any) -> Any:
            try:
                return looks(given)
            except FileNotFoundError as error:
                raise HostFunctionError(str(error)) from None

        return look

    where = session.virtual_slice((4,), ("x",))
    w = np.arange(8, dtype=np.float32)
    checkpoints = ocp.StandardCheckpointer()
    for folder in (own, mine):  # that of the host is of an earlier run, of the same tree
        checkpoints.save(folder / "state", {"w": pw.put(w + (folder is mine), where, P("x"))})
        checkpoints.wait_until_finished()
    assert session.fetched == 0
    state = {"w": pw.put(w, where, P("x"))}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_on_hosts, "looker", looker)
        found = checkpoints.restore(mine / "state", state)
        assert "read_checkpoint" not in [graph.name for graph in session.launched]
        np.testing.assert_array_equal(np.asarray(found["w"]), w + 1)
        fetched = session.fetched
        checkpoints.save(mine / "next", state)
        checkpoints.wait_until_finished()
        assert session.fetched == fetched + 1
    assert not list(tmp_path.rglob(".seen*"))
    found = checkpoints.restore(mine / "state", state)
    assert session.launched[-1].name == "read_checkpoint"
    np.testing.assert_array_equal(np.asarray(found["w"]), w + 1)
    assert not checkpoints_on_hosts.all_see_old((tmp_path / "nowhere").as_posix(), where)


def test_what_lies_in_no_blocks_on_hosts_goes_through_the_client(session, tmp_path: Path) -> None:
    """On two hosts of two devices: a host function takes one block of an array, and other layouts have several."""
    where = session.virtual_slice((2, 2), ("x", "y"))
    where.placed = placed(where.id, ("0.0", "0.1", "1.0", "1.1"), (2, 2))
    specs = {"w": P(("y", "x")), "columns": P(None, ("y", "x")), "v": P("x", "y")}
    assert [checkpoints_on_hosts.in_blocks(where, spec_from_user(one, where.axes)) for one in specs.values()] == [
        False,
        False,
        True,
    ]
    w = np.arange(32, dtype=np.float32).reshape(8, 4)
    state = {name: pw.put(w, where, one) for name, one in specs.items()}
    checkpoints = ocp.StandardCheckpointer()
    checkpoints.save(tmp_path / "state", state)
    checkpoints.wait_until_finished()
    assert session.fetched == 2
    launched = len(session.launched)
    found = checkpoints.restore(tmp_path / "state", state)
    assert len(session.launched[launched:][-1].nodes[-1].inputs) == 1  # hosts read what is in blocks
    for name, one in specs.items():
        assert found[name].sharding.spec == one
        np.testing.assert_array_equal(np.asarray(found[name]), w)


@pytest.mark.parametrize("trusted", [True, False])
def test_typed_keys_are_saved_as_those_of_plain_jax(session, tmp_path: Path, trusted: bool) -> None:
    """Beside other arrays, of this process too; and plain JAX reads them, and the other way round."""
    session.trusted = trusted
    a, b = session.virtual_slice((4,), ("x",)), session.virtual_slice((2,), ("x",))
    one, four = jax.random.key(3), jax.random.split(jax.random.key(5, impl="rbg"), 4)
    state = {"one": pw.put(one, a), "four": pw.put(four, a, P("x")), "here": jax.random.key(7), "v": jnp.ones(3)}
    plain = {"one": one, "four": four, "here": state["here"], "v": state["v"]}
    checkpoints = ocp.StandardCheckpointer()
    for name, saved in (("ours", state), ("plain", plain)):
        checkpoints.save(tmp_path / name, saved)
        checkpoints.wait_until_finished()
        onto = pw.like({"one": one}, b) | pw.like({"four": four}, b, P("x")) | {"here": one, "v": state["v"]}
        for target in (state, plain, onto, None):
            found = checkpoints.restore(tmp_path / name, target)
            for leaf, expected in plain.items():
                if target is not None or name == "plain":  # else what lay on slices comes as NumPy arrays
                    assert found[leaf].dtype == expected.dtype
                np.testing.assert_array_equal(*map(_data, (found[leaf], expected)))
            if target is state or target is onto:
                where = a if target is state else b
                assert (found["four"].slice, found["four"].sharding.spec[0]) == (where, "x")
    save_alone(checkpoints, tmp_path / "one", {"one": state["one"]})
    with pytest.raises(ValueError, match=r"one has key<fry> in the checkpoint, and is to be restored as key<rbg>"):
        checkpoints.restore(tmp_path / "one", pw.like({"one": jax.random.key(0, impl="rbg")}, b))


@pytest.mark.parametrize("trusted", [True, False])
def test_numbers_of_less_than_a_byte_go_through_the_client(session, tmp_path: Path, trusted: bool) -> None:
    """No host function takes them; those beside them go by the hosts as ever, and plain JAX reads and writes the same
    checkpoint."""
    session.trusted = trusted
    where = session.virtual_slice((4,), ("x",))
    plain = {"q": jnp.arange(8, dtype=jnp.int4), "w": jnp.arange(8.0)}
    state = pw.put(plain, where, P("x"))
    checkpoints = ocp.StandardCheckpointer()
    for name, saved in (("all", state), ("plain", plain), ("alone", {"q": state["q"]})):
        checkpoints.save(tmp_path / name, saved)
        checkpoints.wait_until_finished()
        for target in (state, plain):
            found = checkpoints.restore(tmp_path / name, {leaf: target[leaf] for leaf in saved})
            for leaf, value in found.items():
                assert (type(value), value.dtype) == (type(target[leaf]), plain[leaf].dtype)
                np.testing.assert_array_equal(np.asarray(value), np.asarray(plain[leaf]))
    names = [graph.name for graph in session.launched]
    assert ("write_checkpoint" in names, "read_checkpoint" in names) == (trusted, trusted)


@pytest.mark.parametrize("trusted", [True, False])
def test_arrays_of_no_elements_are_refused_as_those_of_plain_jax(session, tmp_path: Path, trusted: bool) -> None:
    """By `save` itself: else it ended with parameters that are missing, once all was written."""
    session.trusted = trusted
    where = session.virtual_slice((4,), ("x",))
    for name, empty in (("plain", jnp.zeros((0, 3))), ("ours", pw.put(np.zeros((0, 3), np.float32), where))):
        with pytest.raises(ValueError, match=r"Cannot save arrays with zero size: .*name=e\b"):
            ocp.StandardCheckpointer().save(tmp_path / name, {"w": pw.put(np.ones(4), where), "e": empty})


def save_alone(checkpoints: ocp.StandardCheckpointer, path: Path, leaf: dict[str, Any]) -> None:
    """Saves a leaf that is to be refused. Beside others, Orbax would close its event loop while these are read, and
    TensorStore complain of that from a thread of its own in whichever test comes next."""
    checkpoints.save(path, leaf)
    checkpoints.wait_until_finished()


def _data(value: Any) -> Any:
    return np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)
