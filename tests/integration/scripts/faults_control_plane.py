"""A scheduler or the controller, killed or stopped while launches are under way: `KIND:SIGNAL`, one after the other."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession


def strike(kind: str, sign: str) -> None:
    """Sends a signal to the first process of a kind."""
    raylet = next(p for p in psutil.Process().children(recursive=True) if "raylet" in p.name())
    live = [p for p in psutil.process_iter(["ppid", "cmdline"]) if p.info["ppid"] == raylet.pid]
    victims = [p for p in live if f"ray::{kind}" in " ".join(p.info["cmdline"] or [])]
    victims[0].send_signal(getattr(signal, sign))


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


def controller_is_succeeded(session: ClusterSession, program: Callable[..., Any], start: float) -> None:
    """The session ends; the successor of its controller serves at the same url."""
    while not session.closed_because:  # every outcome may have been on its way when it was killed
        assert time.monotonic() - start < 10
        time.sleep(0.01)
    try:
        program(np.zeros(3))
        raise SystemExit("a launch without a controller")
    except (pw.errors.SessionClosed, pw.errors.ControllerLost):
        pass
    while True:
        try:
            with pw.connect(session.url, session.token):
                assert np.asarray(pw.compiled(lambda v: v + 1)(np.zeros(3)))[0] == 1
                break
        except pw.errors.ControllerLost:
            assert time.monotonic() - start < 30
            time.sleep(0.1)


with pw.init(2, 1, 1) as session:
    add = [pw.compiled(lambda v: v + 1, slice=pw.virtual_slice((1,), island=k)) for k in (0, 1)]
    program = pw.program(lambda v: add[1](add[0](v)))
    for fault in sys.argv[1:]:
        kind, sign = fault.split(":")
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
            controller_is_succeeded(session, program, start)
        print(fault, "serving in", time.monotonic() - start)
