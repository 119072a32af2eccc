"""Calls that are made for their values alone: which are asked of their host, and what becomes of the others."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import pathways_ray as pw
from pathways_ray.client import asked_calls
from pathways_ray.client.asked_calls import may_be_served
from pathways_ray.client.core import ClientCore
from pathways_ray.client.early import ASKED_AGAIN, MAX_REFUSED
from pathways_ray.client.program import Program
from pathways_ray.client.served import ServedCall, Server, plans_on
from pathways_ray.client.session import Session
from pathways_ray.transport.messages import Prepared
from tests.unit.client.test_early import HOST, KEY, core_of_one

ROWS = np.ones((2, 3), np.float32)


def test_the_host_is_known_while_it_takes_calls_and_the_program_is_there() -> None:
    core = core_of_one()
    assert core.early.server_of(1) == (HOST, KEY)
    assert core.early.server_of(2) is None
    core.early.allowed(HOST, False)
    assert core.early.server_of(1) is None
    core.early.allowed(HOST, True)
    core.early.forget(1)
    assert core.early.server_of(1) is None


def test_a_host_that_leaves_calls_is_asked_now_and_then() -> None:
    """It may be busy for a while. Once it serves one, all are asked for again."""
    early = core_of_one().early
    asked = 0
    for _ in range(MAX_REFUSED + 10 * ASKED_AGAIN):
        if early.server_of(1) is not None:
            asked += 1
            early.served(1, False)
    assert MAX_REFUSED < asked <= MAX_REFUSED + 12
    while early.server_of(1) is None:
        pass
    early.served(1, True)
    assert all(early.server_of(1) is not None for _ in range(3 * ASKED_AGAIN))


def test_a_program_that_lies_on_no_single_host_has_none() -> None:
    core = ClientCore(1, 1024)
    core.early.allowed(HOST, True)
    core.handle(Prepared(1, KEY, -1), 0.0)
    assert core.early.server_of(1) is None


def lowered(program: Any, *args: Any) -> Any:
    return program.alone(args)[0].prepared(args) if hasattr(program, "alone") else program.prepared(args)


def test_programs_whose_results_are_all_that_they_give(session: Any) -> None:
    """Not those that return an argument, donate, give typed keys, or many results."""
    where = session.virtual_slice((1,), ("x",))

    def fits(program: Any, *args: Any) -> bool:
        return may_be_served(lowered(program, *args)._built)

    assert fits(pw.compiled(lambda v: (v + 1, v.sum()), slice=where), ROWS)
    assert fits(pw.program(lambda v: v * 2), ROWS)
    assert not fits(pw.program(lambda v: (v * 2, v)), pw.put(ROWS, where))
    assert not fits(pw.compiled(lambda v: v + 1, slice=where, donate_argnums=0), pw.put(ROWS, where))
    assert not fits(pw.compiled(lambda v: jax.random.split(v), slice=where), jax.random.key(0))
    assert not fits(pw.compiled(lambda v: [v + k for k in range(65)], slice=where), ROWS)


def test_results_that_one_host_has_and_that_are_small(session: Any) -> None:
    one, all_of_them = session.virtual_slice((1,), ("x",)), session.virtual_slice((4,), ("x",))
    program = lowered(pw.compiled(lambda v: v + 1, slice=one), ROWS)
    (host,) = one.placed.hosts
    (plan,) = plans_on(program._built.result_kinds, host) or ()
    assert (plan.nbytes, list(plan.by_host)) == (ROWS.nbytes, [host])
    assert plans_on(program._built.result_kinds, host + 1) is None
    large = lowered(pw.compiled(lambda v: v.repeat(1 << 14), slice=all_of_them), ROWS)
    assert plans_on(large._built.result_kinds, all_of_them.placed.hosts[0]) is None


class Asked:
    """A session whose host serves all that it is asked for, in place of one that is spoken to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: int, values: Any) -> None:
        self.calls: list[ServedCall] = []

        def served(session: Session, program: int, call: ServedCall) -> Any:
            self.calls.append(call)
            return values

        monkeypatch.setattr(Session, "server_of", lambda session, program: Server(host, KEY))
        monkeypatch.setattr(Session, "served", served)


def test_a_padded_call_is_asked_of_its_host(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is placed goes by its number, the batch with the call, filled up; the value loses what was filled up."""
    where = session.virtual_slice((1,), ("x",))
    answer = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    w = pw.put(np.ones((3, 2), np.float32), where)
    serve = pw.padded(pw.compiled(lambda w, rows: rows @ w, slice=where), sizes=(4,), in_axes=(None, 0))
    np.testing.assert_array_equal(serve(w, ROWS), ROWS @ np.ones((3, 2)))
    host = Asked(monkeypatch, where.placed.hosts[0], [answer])
    np.testing.assert_array_equal(serve(w, ROWS), answer[:2])
    (call,) = host.calls
    filled = np.concatenate([ROWS, np.zeros_like(ROWS)])
    assert (call.server, call.arguments) == (Server(where.placed.hosts[0], KEY), (w._buffer.id, 0))
    assert call.inline == ((1, filled.tobytes()),)


def test_a_call_that_is_not_served_is_launched(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host leaves it; an argument is under way, or too large to go along; a result is wanted as an array; a call in
    a program."""
    where = session.virtual_slice((1,), ("x",))
    double = pw.padded(pw.compiled(lambda rows: rows * 2, slice=where), sizes=(2, 1 << 15))
    host = Asked(monkeypatch, where.placed.hosts[0], None)
    np.testing.assert_array_equal(double(ROWS), 2 * ROWS)
    assert len(host.calls) == 1
    np.testing.assert_array_equal(double(np.ones((1 << 15, 3), np.float32))[:2], 2 * ROWS)
    kept = pw.padded(pw.compiled(lambda rows: (rows * 2, rows.sum()), slice=where), sizes=(2,), out_axes=(0, None))
    assert type(kept(ROWS)[1]) is pw.Array
    inside = pw.compiled(lambda rows: rows + 1, slice=where)
    np.testing.assert_array_equal(pw.program(lambda rows: inside.ask(rows))(ROWS), ROWS + 1)
    assert len(host.calls) == 1
    late = pw.put(ROWS, where)
    monkeypatch.setattr(asked_calls, "READY", "another state")
    wide = pw.padded(pw.compiled(lambda w, rows: rows * w, slice=where), sizes=(2,), in_axes=(None, 0))
    np.testing.assert_array_equal(wide(late, ROWS), ROWS)
    assert len(host.calls) == 1


def test_a_call_that_is_not_served_is_prepared_once(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = session.virtual_slice((1,), ("x",))
    double = pw.padded(pw.compiled(lambda rows: rows * 2, slice=where), sizes=(2,))
    Asked(monkeypatch, where.placed.hosts[0], None)
    found, prepared = Program._prepared, []
    monkeypatch.setattr(Program, "_prepared", lambda *args: prepared.append(args) or found(*args))
    np.testing.assert_array_equal(double(ROWS), 2 * ROWS)
    assert len(prepared) == 1


def test_a_function_whose_trace_fails_runs_once(session: Any) -> None:
    where = session.virtual_slice((1,), ("x",))
    ran = []

    def wrong(rows: Any) -> Any:
        ran.append(rows)
        return rows @ rows

    serve = pw.padded(pw.compiled(wrong, slice=where), sizes=(2,))
    with pytest.raises(pw.errors.TraceError, match="wrong"):
        serve(ROWS)
    assert len(ran) == 1


def test_an_argument_that_is_deleted_says_so(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    where = session.virtual_slice((1,), ("x",))
    serve = pw.padded(pw.compiled(lambda w, rows: rows * w, slice=where), sizes=(2,), in_axes=(None, 0))
    w = pw.put(ROWS, where)
    serve(w, ROWS)
    w.delete()
    Asked(monkeypatch, where.placed.hosts[0], [ROWS])
    with pytest.raises(pw.errors.BufferDeleted, match="argument w of"):
        serve(w, ROWS)
