"""Functions that are methods, and those that are copied; what users pass for several arrays, and for sizes."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.errors import UsageError
from tests.unit.client.local import LocalSession

V = np.arange(8, dtype=np.float32)


class Model:
    """A user's class, whose methods take it as a static argument."""

    scale = 2

    @pw.padded(sizes=(4, 8), in_axes=(None, 0))
    @pw.compiled(static_argnums=0)
    def serve(self, rows: Any) -> Any:
        return rows * self.scale

    @pw.elastic(snapshot_every=2)
    def step(self, rows: Any) -> Any:
        return rows


def test_padded_and_elastic_functions_are_methods(session: LocalSession) -> None:
    model = Model()
    np.testing.assert_array_equal(model.serve(V[:3]), V[:3] * 2)
    assert isinstance(Model.serve, pw.padded(lambda v: v, sizes=(1,)).__class__)
    assert model.step.__self__ is model
    with pytest.raises(UsageError, match=r"of a method: self"):
        model.step(V)


def test_a_copy_of_a_function_that_was_called_has_traced_nothing(session: LocalSession) -> None:
    a = session.virtual_slice((4,), ("x",))
    traced: list[Any] = []

    def double(v: Any) -> Any:
        traced.append(v.shape)
        return v * 2

    compiled = pw.compiled(double, slice=a)
    for function in (compiled, pw.program(lambda v: compiled(v) + 0), pw.program(double, on_retrace="raise")):
        wanted = np.asarray(function(V))
        count = len(traced)
        other = copy.deepcopy({"f": function, "again": function})
        assert other["f"] is other["again"] is not function
        assert other["f"].__name__ == function.__name__
        np.testing.assert_array_equal(other["f"](V), wanted)
        np.testing.assert_array_equal(function(V), wanted)
        if function is not compiled and function.fun is double:
            assert len(traced) == count + 1
            with pytest.raises(pw.errors.TraceError, match="was traced again"):
                other["f"](V[:4])
    assert copy.deepcopy(compiled).slice is a
    assert copy.copy(a) is copy.deepcopy(a) is a
    sharding = NamedSharding(a.mesh, P("x"))
    assert copy.copy(a.mesh) is copy.deepcopy(a.mesh) is copy.deepcopy(sharding).mesh is a.mesh
    assert copy.deepcopy(sharding) == copy.copy(sharding) == sharding


def test_copies_of_padded_and_elastic_functions_begin_for_themselves(session: LocalSession) -> None:
    a = session.virtual_slice((4,), ("x",))
    for joined in (False, True):
        function = pw.padded(pw.compiled(lambda v: v * 2, slice=a), sizes=(4, 8), join_calls=joined)
        wanted = function(V[:3])
        other = copy.deepcopy({"f": function, "again": function})
        assert other["f"] is other["again"] is not function
        assert other["f"].fun is not function.fun
        assert (repr(other["f"]), other["f"].__name__) == (repr(function), function.__name__)
        for one in (function, other["f"]):
            np.testing.assert_array_equal(one(V[:3]), wanted)
        assert (other["f"]._joined is None) == (not joined)
        assert not joined or other["f"]._joined is not function._joined
        assert copy.copy(function)(V[:3]).shape == (3,)
    step: Any = pw.elastic(pw.compiled(lambda v: v + 1, slice=a), snapshot_every=3)
    step.losses = 2
    step._calls[0] = step._snapshots[0] = step._session = step._lock
    other = copy.deepcopy({"f": step, "again": step})
    made = other["f"]
    assert made is other["again"] is not step
    assert (made.__name__, made._every, made.losses) == (step.__name__, 3, 0)
    assert (made._calls, made._snapshots, made._session) == ({}, {}, None)
    assert made._lock is not step._lock
    assert copy.deepcopy(Model()).step.__func__ is Model.step


def test_one_array_is_not_several(session: LocalSession) -> None:
    """Its entries would be launches, which were waited for."""
    a = session.virtual_slice((4,), ("x",))
    for array in (pw.put(V, a), pw.put(np.float32(1), a)):
        before = len(session.launched)
        with pytest.raises(UsageError, match=r"several pw\.Arrays are waited for, in a list; not pw\.Array"):
            pw.wait(array)
        with pytest.raises(UsageError, match="in a list"):
            next(pw.as_completed(array))
        assert len(session.launched) == before
    assert jax.tree.leaves(pw.wait([pw.put(V, a)])[1]) == []


def test_the_size_of_a_slice_may_be_of_numpy_and_is_whole(session: LocalSession) -> None:
    assert session.virtual_slice(np.int64(2)).shape == (2,)
    assert session.virtual_slice(np.array([2, 2])).shape == (2, 2)
    for wrong in (4.0, np.float32(2), np.array(2), object(), "2x"):
        with pytest.raises(UsageError, match="a slice has whole sizes and axis names"):
            session.virtual_slice(wrong)
