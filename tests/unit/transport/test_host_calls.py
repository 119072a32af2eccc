"""Trees and results of host functions, as their process reads them."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import pytest

from pathways_ray.transport.host_calls import (
    CALL,
    Ended,
    HostCall,
    filled,
    receive,
    receive_array,
    result_array,
    send,
    taken_apart,
)


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize(
    "skeleton", [0, (0, 1), [1, 0], {"a": 0, "b": (1, None)}, Pair(0, [1]), ((), {"x": {}}, 0), None]
)
def test_a_skeleton_that_is_filled_is_taken_apart_again(skeleton: Any) -> None:
    whole = filled(skeleton, ["zero", "one"])
    assert type(whole) is (str if skeleton == 0 else type(skeleton))
    found = taken_apart(skeleton, whole)
    assert found == {k: ["zero", "one"][k] for k in found}


@pytest.mark.parametrize(
    ("skeleton", "value", "text"),
    [
        ((0, 1), (1, 2, 3), "the result is a tuple of 3, and should be a tuple of 2"),
        ((0, 1), 5.0, "the result is a float, and should be a tuple of 2"),
        ({"a": 0}, {"b": 0}, r"the result is a dict of \['b'\], and should be a dict of \['a'\]"),
        ({"a": (0, 1)}, {"a": None}, r"the result\['a'\] is None, and should be a tuple of 2"),
        (None, 1, "the result is a int, and should be None"),
    ],
)
def test_another_tree_is_refused_with_its_place(skeleton: Any, value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        taken_apart(skeleton, value)


def test_trees_of_other_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match="set is no tuple, list or dict"):
        filled({1}, [1])


def test_results_become_arrays_of_their_types_where_nothing_is_lost() -> None:
    found = result_array([0.5, 1.0], ("float32", (2,)), "result 0")
    assert found.dtype == np.float32
    assert result_array(np.int64(3), ("int32", ()), "result 0").dtype == np.int32
    assert result_array(np.ones(2), ("bfloat16", (2,)), "result 0").dtype.name == "bfloat16"
    with pytest.raises(TypeError, match=r"result 0 has shape \(3,\), and should have \(2,\) on this host"):
        result_array(np.ones(3), ("float32", (2,)), "result 0")
    with pytest.raises(TypeError, match="result 1 has dtype float64, which does not become int32"):
        result_array(1.5, ("int32", ()), "result 1")
    with pytest.raises(TypeError, match="result 0 has numbers of int64 that do not fit into int32"):
        result_array([1 << 40], ("int32", (1,)), "result 0")
    for kind, target in (("uint8", "int8"), ("uint32", "int32"), ("uint64", "int64"), ("int8", "int32")):
        most = int(min(np.iinfo(target).max, np.iinfo(kind).max))
        assert result_array(np.array([most], kind), (target, (1,)), "result 0").tolist() == [most]
        assert result_array(np.array([], kind), (target, (0,)), "result 0").dtype == target
        if most < np.iinfo(kind).max:
            with pytest.raises(TypeError, match=f"result 0 has numbers of {kind} that do not fit into {target}"):
                result_array(np.array([most + 1], kind), (target, (1,)), "result 0")
    with pytest.raises(TypeError, match=r"result 0 is a str, and should be an array float32\[8\] on this host"):
        result_array("text", ("float32", (8,)), "result 0")
    with pytest.raises(TypeError, match="result 0 is a masked array with hidden values, which JAX has not; fill it"):
        result_array(np.ma.array([1.0, 2.0], mask=[False, True]), ("float32", (2,)), "result 0")
    shown = result_array(np.ma.array([1.0, 2.0], mask=[False, False]), ("float32", (2,)), "result 0")
    assert (type(shown), shown.tolist()) == (np.ndarray, [1.0, 2.0])


def test_a_call_crosses_the_pipe_with_its_arrays() -> None:
    arrays: list[Any] = [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.zeros((0, 4)), np.array(2.5, np.float32)]
    kinds = tuple((array.dtype.name, array.shape) for array in arrays)
    call = HostCall("f", "d", b"code", kinds, ())
    pipe = io.BytesIO()
    send(pipe, call, arrays)
    pipe.seek(0)
    assert CALL.decode(receive(pipe, 1 << 20)) == call
    for array, kind in zip(arrays, kinds, strict=True):
        np.testing.assert_array_equal(receive_array(pipe, kind), array)
    with pytest.raises(Ended):
        receive(pipe, 1 << 20)


def test_an_array_of_another_size_is_no_array() -> None:
    pipe = io.BytesIO()
    send(pipe, HostCall("f", "d", b"", (), ()), [np.zeros(4, np.float32)])
    pipe.seek(0)
    receive(pipe, 1 << 20)
    with pytest.raises(Ended, match="8 are the limit"):
        receive_array(pipe, ("float32", (2,)))
