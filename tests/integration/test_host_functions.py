"""Python beside the devices on a real cluster: order, values over hosts, errors, limits, and who may."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray import process_log
from pathways_ray.client.api import ClusterSession
from tests.integration.conftest import Cluster, Slices

Equal = Callable[[Any, Any], None]
V = np.arange(8, dtype=np.float32)
SCALAR = jax.ShapeDtypeStruct((), np.float32)


def same(v: Any) -> Any:
    """The type of a result that is like its argument."""
    return jax.ShapeDtypeStruct(v.shape, v.dtype)


def test_a_program_computes_calls_and_goes_on_on_another_island(
    session: ClusterSession, slices: Slices, equal: Equal
) -> None:
    """
    1. Island 0 computes, its host calls Python with the whole array, and island 1 takes what came of it.
    2. The function keeps a count in its process, in the order of launches.
    """
    first = pw.compiled(lambda v: v + 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    last = pw.compiled(lambda v, n: v * 10 + n, slice=slices.b4, in_specs=(P("x"), P()), out_specs=P("x"))
    seen: list[Any] = []

    @pw.host(slice=slices.a4, in_specs=P("x"), out_specs=(P("x"), P()), result=lambda v: (same(v), SCALAR))
    def reverse(v: Any) -> Any:
        seen.append(v)
        return v[::-1], len(seen)

    program = pw.program(lambda v: last(*reverse(first(v))))
    made = [program(V + k) for k in range(5)]
    for k, one in enumerate(made):
        equal(one, (V + k + 1)[::-1] * 10 + np.float32(k + 1))
    assert seen == []
    assert "call reverse on hosts of island 0" in program.lower(V).explain()


def test_called_alone_and_with_nothing(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    load = pw.host(
        lambda: {"tokens": np.arange(4), "mask": [True, False, True, True]},
        slice=slices.a1,
        result={"tokens": jax.ShapeDtypeStruct((4,), "int32"), "mask": jax.ShapeDtypeStruct((4,), bool)},
    )
    batch = load()
    equal(batch["tokens"], np.arange(4, dtype=np.int32))
    equal(batch["mask"], np.array([True, False, True, True]))


def test_a_loop_decides_by_what_python_says(session: ClusterSession, slices: Slices, equal: Equal) -> None:
    """A `while_loop` on one slice whose body asks an environment: the controller decides around it."""
    act = pw.compiled(lambda v: v * 2, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    step = pw.host(
        lambda v: (v + 1, v.max() < 100),
        slice=slices.a4,
        in_specs=P("x"),
        out_specs=(P("x"), P()),
        result=lambda v: (same(v), jax.ShapeDtypeStruct((), bool)),
    )
    program = pw.program(lambda v: pw.while_loop(lambda c: c[1], lambda c: step(act(c[0])), step(v)))
    value, wanted, going = program(V)[0], V, True
    wanted, going = wanted + 1, wanted.max() < 100
    while going:
        going = (wanted * 2).max() < 100
        wanted = wanted * 2 + 1
    equal(value, wanted)


def test_what_is_raised_is_the_outcome_with_line_and_traceback(session: ClusterSession, slices: Slices) -> None:
    def look_up(v: Any) -> Any:
        known: dict[str, Any] = {}
        return known["nothing"] + v

    grade = pw.host(look_up, slice=slices.a1, result=same)
    after = pw.compiled(lambda v: v + 1, slice=slices.b4)
    result = pw.program(lambda v: after(grade(v)))(V)
    said = r"look_up raised KeyError: 'nothing' \(test_host_functions.py:\d+\) \[node look_up, test_host_functions.py:"
    with pytest.raises(pw.errors.HostFunctionError, match=said) as error:
        result.block_until_ready()
    assert any("in look_up" in note for note in error.value.__notes__)


def test_others_compute_while_a_function_runs(
    session: ClusterSession, slices: Slices, equal: Equal, tmp_path: Path
) -> None:
    """
    1. A function waits for a file. Another session computes on the same devices, with a program that nobody has run
       before; and this session computes what does not take the function's result.
    2. Then the file is there.
    """
    sign = tmp_path / "sign"

    def wait_for_sign(v: Any) -> Any:
        while not sign.exists():
            time.sleep(0.01)
        return v + 1

    waits = pw.host(wait_for_sign, slice=slices.a4, result=same)
    compute = pw.compiled(lambda v: v * 3 - 1, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    result = pw.program(lambda v: compute(waits(compute(v))))(V)
    equal(compute(V), V * 3 - 1)
    with pw.connect(session.url, session.token) as other:
        theirs = other.virtual_slice((4,), ("x",), island=0)
        equal(pw.compiled(lambda v: v * 5, slice=theirs, in_specs=P("x"), out_specs=P("x"))(V), V * 5)
    assert not result.is_ready()
    sign.touch()
    equal(result, (V * 3 - 1 + 1) * 3 - 1)


def test_a_function_without_end_is_killed_and_what_it_printed_is_logged(
    session: ClusterSession, slices: Slices, equal: Equal
) -> None:
    def hang(v: Any) -> Any:
        print("I hang on", flush=True)
        time.sleep(1000)

    stuck = pw.host(hang, slice=slices.a4, result=same, limit_s=0.5)
    fine = pw.host(lambda v: v + 1, slice=slices.a4, result=same)
    equal(fine(V), V + 1)
    with pytest.raises(
        pw.errors.HostFunctionTimeout, match=r"hang did not return within 0.5 s; its process was killed"
    ):
        stuck(V).block_until_ready()
    equal(fine(V), V + 1)
    deadline = time.monotonic() + 20
    while "I hang on" not in process_log.read(session.cluster.runtime, f"host {slices.a4.devices[0].split('.')[0]}")[0]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_each_host_of_a_slice_has_its_part(pairs: Cluster, equal: Equal) -> None:
    """Four devices on two hosts: each host's function sees the rows of its two devices, and gives theirs."""
    with pw.connect(pairs.url, pairs.token) as session:
        both = session.virtual_slice((4,), ("x",), island=0)
        there = session.virtual_slice((4,), ("x",), island=1)
        sums = pw.compiled(lambda v: v - v.sum(), slice=both, in_specs=P("x"), out_specs=P("x"))

        @pw.host(slice=both, in_specs=(P("x"), P()), out_specs=(P("x"), P()), result=lambda v, w: (same(v), same(w)))
        def local(v: Any, w: Any) -> Any:
            assert v.shape == (4,)
            assert w.shape == (8,)
            return v - v[0], w + 1

        last = pw.compiled(lambda v, w: v + w, slice=there, in_specs=P("x"), out_specs=P("x"))
        program = pw.program(lambda v: last(*local(sums(v), v)))
        for k in range(3):
            wanted = V - np.repeat(V[::4], 4) + V + 1 + k
            equal(program(V + k), wanted)

        @pw.host(slice=both, in_specs=P("x"), out_specs=P("x"), result=same)
        def half(v: Any) -> Any:
            if v[0] == 0:
                raise ValueError("the first half")
            return v

        with pytest.raises(pw.errors.HostFunctionError, match="the first half"):
            sums(half(V)).block_until_ready(timeout=60)
        equal(sums(half(V + 1)), V + 1 - (V + 1).sum())
