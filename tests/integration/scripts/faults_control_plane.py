"""A host, a scheduler or the controller, killed or stopped, one after the other: `KIND:SIGNAL`.

Of a host it is looked at what waits for it; a scheduler and the controller go while launches are under way.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession


def strike(kind: str, sign: str) -> None:
    """Sends a signal to the first process of a kind."""
    live = psutil.Process().children(recursive=True)
    next(p for p in live if f"ray::{kind}" in " ".join(p.cmdline())).send_signal(getattr(signal, sign))


def launches_pass_a_lost_host(sign: str) -> None:
    """Launches on one island, called after others that wait for the lost host of another island."""
    ones = [pw.compiled(lambda: jnp.ones(3), slice=pw.virtual_slice((1,), island=k)) for k in (0, 1)]
    twice = pw.compiled(lambda v: 2 * v, slice=ones[0].slice)
    for y in (twice(ones[0]()), ones[1]()):
        np.asarray(y)
    host = pw.islands()[0]["hosts"][0]["pid"]
    starter = psutil.Process(host).parent()
    starter.suspend()  # it would restart the host
    try:
        os.kill(host, getattr(signal, sign))
        while pw.islands()[0]["hosts"][0]["up"]:
            time.sleep(0.01)
        waiting = [ones[0]()]
        waiting.append(twice(waiting[0]))
        for y in [ones[1]() for _ in range(100)]:
            assert np.asarray(y).tolist() == [1, 1, 1]
        print("ready before:", [y.is_ready() for y in waiting])
    finally:
        starter.resume()
    print("ready after:", [float(np.asarray(y)[0]) for y in waiting])


def outcomes(launches: list[Any]) -> set[str]:
    """Names of the errors in which launches ended."""
    names = set()
    for y in launches:
        try:
            y.block_until_ready(timeout=30)
        except pw.errors.WaitTimeout:
            raise
        except pw.errors.PathwaysError as error:
            names.add(type(error).__name__)
    return names


def scheduler_returns(program: Callable[..., Any], start: float) -> None:
    while True:
        try:
            assert np.asarray(program(np.zeros(3)))[0] == 2
            break
        except pw.errors.ExecutionError:
            assert time.monotonic() - start < 30


def controller_is_succeeded(session: ClusterSession, program: Callable[..., Any], held: Any, start: float) -> None:
    """The session goes on with the successor of its controller, with its arrays; a new one serves at the same url."""
    assert np.asarray(held)[0] == 1
    again = pw.retry(lambda: program(held), on=pw.errors.ControllerLost)()
    assert np.asarray(again)[0] == 3
    assert time.monotonic() - start < 30
    assert not session.closed_because
    with pw.connect(session.url, session.token):
        assert np.asarray(pw.compiled(lambda v: v + 1)(np.zeros(3)))[0] == 1


with pw.init(2, 1, 1) as session:
    add = [pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((1,), island=k)) for k in (0, 1)]
    program = pw.program(lambda v: add[1](add[0](v)))
    for fault in sys.argv[1:]:
        kind, sign = fault.split(":")
        if kind == "HostExecutor":
            launches_pass_a_lost_host(sign)
            continue
        assert np.asarray(program(np.zeros(3)))[0] == 2
        held = add[0](np.zeros(3)).block_until_ready()
        launches = [program(held) for _ in range(20)]
        strike(kind, sign)
        start = time.monotonic()
        names = outcomes([*launches, program(held) if kind == "IslandScheduler" else launches[0]])
        print(fault, "known in", time.monotonic() - start, names)
        assert time.monotonic() - start < 10
        if kind == "IslandScheduler":
            scheduler_returns(program, start)
        else:
            controller_is_succeeded(session, program, held, start)
        print(fault, "serving in", time.monotonic() - start)
