"""Processes of the control plane die under load, and what they do not hold goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from jax.sharding import PartitionSpec as P

import pathways_ray as pw
from pathways_ray.client.api import ClusterSession
from tests.integration.islands import remove

X = np.arange(8, dtype=np.float32)


def processes(session: ClusterSession) -> dict[str, int]:
    """The pids of a cluster's actors: what one process has started, by title."""
    starter = psutil.Process(session.status()["islands"][0]["hosts"][0]["pid"]).parent()
    assert starter is not None
    titles = {child.pid: " ".join(child.cmdline()) for child in starter.children()}
    found = [(title, pid) for pid, title in sorted(titles.items()) if title.startswith("ray::") and "IDLE" not in title]
    return {f"{title} {k}": pid for k, (title, pid) in enumerate(found)}


def pids(found: dict[str, int], titles: Sequence[str]) -> list[int]:
    """The pids of some of these processes."""
    return [pid for title, pid in found.items() if any(f"ray::{name}" in title for name in titles)]


@pytest.mark.timeout(120)
def test_the_resource_manager_dies_and_nothing_else_does(
    session: ClusterSession, slices: Any, probe: Callable[[], None]
) -> None:
    """
    1. Twice it gets SIGKILL, while launches over two islands follow each other, each with the result of the one before.
    2. No launch fails, and values have the bits that they have otherwise. No other process ends.
    3. The next slice is there beside those that there were, and goes as it came.
    """
    here = pw.compiled(lambda v: v * 0.5 + 1.0, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(lambda v: v * 0.25 + 3.0, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: there(here(v)), name="goes on")
    kept = pw.put(X, slices.a4, P("x"))
    expected = X
    for _ in range(300):
        expected = (expected * np.float32(0.5) + np.float32(1.0)) * np.float32(0.25) + np.float32(3.0)
    before = processes(session)
    for _ in range(2):
        y: Any = X
        (manager,) = [pid for title, pid in processes(session).items() if "ResourceManager" in title]
        for step in range(300):
            y = program(y)
            if step == 100:
                psutil.Process(manager).kill()
                struck = time.monotonic()
        np.testing.assert_array_equal(np.asarray(y), expected)
        names = {one["slice"]: one["name"] for one in session.status()["slices"]}
        with session.virtual_slice((2,), ("x",), name="after it") as added:
            print(f"slices again after {time.monotonic() - struck:.1f} s")
            now = session.status()["slices"]
            assert {one["slice"]: one["name"] for one in now} == {**names, added.id: "after it"}
            assert added.id > max(names)
            assert np.asarray(pw.compiled(lambda v: v + 1.0, slice=added)(X)).tolist() == (X + 1.0).tolist()
        assert {one["slice"]: one["name"] for one in session.status()["slices"]} == names
        assert [island["state"] for island in session.status()["islands"]] == ["up", "up"]
    np.testing.assert_array_equal(np.asarray(kept), X)
    ended = set(before.values()) - set(processes(session).values())
    assert [title.split()[0] for title, pid in before.items() if pid in ended] == ["ray::ResourceManager"]


@pytest.mark.timeout(180)
def test_a_scheduler_dies_and_its_host_keeps_what_it_holds(session: ClusterSession, slices: Any) -> None:
    """
    1. The scheduler of an island of one host gets SIGKILL, under launches on both islands.
    2. Each of them has its value, or `HostLost`. Arrays stay, and can be looked at meanwhile; the host lives on.
    3. The same program runs again, on the same arrays, without an upload: values have the bits that they had.
    """
    here = pw.compiled(lambda v: v * 0.5 + 1.0, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(lambda v: v * 0.25 + 3.0, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: there(here(v)), name="again")
    kept = [pw.put(X, place, P("x")) for place in (slices.a4, slices.b4)]
    made = here(kept[0]).block_until_ready()
    expected = np.asarray(program(made))
    before = processes(session)
    scheduler = next(pid for title, pid in before.items() if "IslandScheduler" in title)
    launches = [program(made) for _ in range(50)]
    psutil.Process(scheduler).kill()
    struck = time.monotonic()
    for array in kept:
        np.testing.assert_array_equal(np.asarray(array), X)
    np.testing.assert_array_equal(np.asarray(made), X * 0.5 + 1.0)
    lost = 0
    for y in launches:
        try:
            np.testing.assert_array_equal(np.asarray(y), expected)
        except pw.errors.HostLost:
            lost += 1
    again = pw.retry(lambda: program(made), on=pw.errors.HostLost)()
    print(f"{lost} of 50 lost, computing again after {time.monotonic() - struck:.1f} s")
    np.testing.assert_array_equal(np.asarray(again), expected)
    for array in kept:
        np.testing.assert_array_equal(np.asarray(array), X)
    assert set(before.values()) - set(processes(session).values()) == {scheduler}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_scheduler_dies_and_several_hosts_keep_what_they_hold(python: Any) -> None:
    """
    1. Three times a scheduler of an island of two hosts gets SIGKILL, under a chain of launches with collectives, and
       launches that cross islands.
    2. Each of them has its value, or `HostLost`. Arrays stay, and can be looked at meanwhile; both hosts live on.
    3. The same chain runs again, on the same arrays, with the bits that it had; gangs keep one order.
    """
    out = python.run("scheduler_killed", "3", timeout=280)
    print(out)
    assert out.rstrip().endswith("nothing was lost")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("titles", [("Controller",), ("Controller", "ResourceManager")])
def test_the_controller_dies_and_sessions_go_on(session: ClusterSession, slices: Any, titles: tuple[str, ...]) -> None:
    """
    1. It gets SIGKILL under launches on both islands, alone or with the resource manager. Each of these has its value,
       or `ControllerLost`.
    2. Arrays stay, and can be looked at meanwhile. What is called meanwhile has its value.
    3. The same session goes on, with its slices, programs and arrays: a chain of launches has the bits that it had.
    4. No other process ends, and another client's session goes on as well. The next slice has a number of its own.
    """
    here = pw.compiled(lambda v: v * 0.5 + 1.0, slice=slices.a4, in_specs=P("x"), out_specs=P("x"))
    there = pw.compiled(lambda v: v * 0.25 + 3.0, slice=slices.b4, in_specs=P("x"), out_specs=P("x"))
    program = pw.program(lambda v: there(here(v)), name="over the controller")
    program.slice = slices.a4  # it runs in this session, and not in the one that was made last
    large = pw.compiled(lambda v: v.max() > 1.0, slice=slices.b4, in_specs=P("x"))
    decides = pw.program(lambda v: pw.cond(large(v), here, lambda x: x, v))
    decides.slice = slices.a4
    kept = [pw.put(X, place, P("x")) for place in (slices.a4, slices.b4)]
    made = here(kept[0]).block_until_ready()
    once, chain = np.asarray(program(made)), X
    for _ in range(100):
        chain = (chain * np.float32(0.5) + np.float32(1.0)) * np.float32(0.25) + np.float32(3.0)
    with pw.connect(session.url, session.token, name="another") as other:
        elsewhere = other.virtual_slice((2,), ("x",))
        theirs = pw.put(X, elsewhere, P("x"))
        theirs.block_until_ready()
        before = processes(session)
        killed = pids(before, titles)
        there_were = {one["slice"]: one["name"] for one in session.status()["slices"]}
        launches = [program(made) for _ in range(50)]
        launches[0].block_until_ready()
        for pid in killed:
            psutil.Process(pid).kill()
        struck = time.monotonic()
        for array in (*kept, theirs):
            np.testing.assert_array_equal(np.asarray(array), X)
        lost = 0
        for y in launches:
            try:
                np.testing.assert_array_equal(np.asarray(y), once)
            except pw.errors.ControllerLost:
                lost += 1
        again = pw.retry(lambda: program(made), on=pw.errors.ControllerLost)()
        np.testing.assert_array_equal(np.asarray(again), once)
        print(f"{lost} of 50 lost, computing again after {time.monotonic() - struck:.1f} s")
        last: Any = X
        for _ in range(100):
            last = program(last)
        np.testing.assert_array_equal(np.asarray(last), chain)
        np.testing.assert_array_equal(np.asarray(decides(kept[0])), X * 0.5 + 1.0)  # registered since
        for array in (*kept, theirs):
            np.testing.assert_array_equal(np.asarray(array), X)
        double = pw.compiled(lambda v: v * 2.0, slice=elsewhere, in_specs=P("x"), out_specs=P("x"))
        np.testing.assert_array_equal(np.asarray(double(theirs)), X * 2.0)
        assert {one["name"] for one in session.status()["sessions"]} >= {"another"}
        assert {one["slice"]: one["name"] for one in session.status()["slices"]} == there_were
        with session.virtual_slice((2,), ("x",)) as added:
            assert added.id > max(there_were)
    assert set(before.values()) - set(processes(session).values()) == set(killed)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("kept_in", "titles"), [("memory", ("Controller",)), ("directory", ("Controller", "ResourceManager"))]
)
def test_the_controller_dies_and_a_suspended_session_comes_back(
    session: ClusterSession, kept_in: str, titles: tuple[str, ...], tmp_path: Path
) -> None:
    """
    1. A session with a state on a slice and on a part of another one is suspended. The controller gets SIGKILL, alone
       or with the resource manager.
    2. The session is suspended at the successor too, and says so to who uses it. Handles that go meanwhile do not come.
    3. It is resumed: its arrays have the same bits, its functions run, and nothing else of it is on hosts.
    """
    with pw.connect(session.url, session.token, name="suspended") as tenant:
        where = tenant.virtual_slice((2,), ("x",), island=0)
        other = tenant.virtual_slice((4,), ("x",), island=1)
        part = tenant.part_of(other, (1,), (1,), ("y",))
        double = pw.compiled(lambda v: v * 2.0, slice=where, in_specs=P("x"), out_specs=P("x"))
        kept = [pw.put(X, where, P("x")), pw.put(X + 1.0, other, P("x")), pw.put(X + 2.0, part, P("y")), double(X)]
        folder = tmp_path / "suspension" if kept_in == "directory" else None
        tenant.suspend(folder)
        for pid in pids(processes(session), titles):
            psutil.Process(pid).kill()
        kept.pop(1)
        with pytest.raises(pw.errors.SessionSuspended):
            np.asarray(kept[0])

        def entry() -> dict[str, Any]:
            return next(one for one in tenant.status()["sessions"] if one["session"] == tenant.id)

        found = entry()
        assert (found["suspended"], found["buffers"]) == (True, 0)
        tenant.resume()
        for array, expected in zip(kept, (X, X + 2.0, X * 2.0), strict=True):
            np.testing.assert_array_equal(np.asarray(array), expected)
        np.testing.assert_array_equal(np.asarray(double(kept[0])), X * 2.0)
        assert part.devices == other.devices[1:2]
        deadline = time.monotonic() + 20
        while ((found := entry())["suspended"], found["buffers"]) != (False, 3):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_slice_of_an_island_that_is_gone_keeps_no_session_from_coming_back(session: ClusterSession) -> None:
    """
    1. An island is removed under a slice that no other one can hold. Then the controller gets SIGKILL.
    2. The session goes on with its other slice. What lay on the island is lost, and the slice says so when it is used.
    3. An island comes that can hold the slice: it moves there, and its function runs.
    """
    number = session.add_island(platform="cpu", devices=6)
    with pw.connect(session.url, session.token, name="left behind") as tenant:
        small, large = tenant.virtual_slice((2,), ("x",), island=0), tenant.virtual_slice((6,), ("x",))
        assert large.island == number
        double = pw.compiled(lambda v: v * 2.0, slice=large, in_specs=P("x"), out_specs=P("x"))
        kept, gone = pw.put(X, small, P("x")), pw.put(X[:6], large, P("x"))
        np.testing.assert_array_equal(np.asarray(double(gone)), X[:6] * 2.0)
        kept.block_until_ready()
        (controller,) = pids(processes(session), ["Controller"])  # before processes of the island end
        session.drain_island(number, deadline_s=0.0)
        remove(session, number)
        psutil.Process(controller).kill()
        np.testing.assert_array_equal(np.asarray(kept), X)
        with pytest.raises(pw.errors.BufferLost):  # or the launch was on its way to the controller
            pw.retry(lambda: np.asarray(double(gone)), on=pw.errors.ControllerLost)()
        with pytest.raises((pw.errors.HostLost, pw.errors.BufferLost)):
            pw.retry(lambda: double(X[:6]), on=pw.errors.ControllerLost)()
        np.testing.assert_array_equal(np.asarray(pw.compiled(lambda v: v + 1.0, slice=small)(kept)), X + 1.0)
        another = session.add_island(platform="cpu", devices=6)
        deadline = time.monotonic() + 40
        while large.island != another:
            assert time.monotonic() < deadline, large
            time.sleep(0.05)
        np.testing.assert_array_equal(np.asarray(double(X[:6])), X[:6] * 2.0)
    assert session.drain_island(another) == []
    remove(session, another)
