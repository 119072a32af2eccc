"""What is wrong in the words of `pw.init` is said before anything starts."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import pathways_ray as pw
from pathways_ray.client import context
from pathways_ray.client.api import ClusterSession
from pathways_ray.client.session import Session
from pathways_ray.deployment import cluster
from pathways_ray.deployment.init import TooFewAccelerators
from pathways_ray.deployment.options import Options
from pathways_ray.errors import AlreadyInitialized, UsageError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"islands": 0}, "islands must be a whole number of at least 1, not 0"),
        ({"devices_per_host": 1.5}, "devices_per_host must be a whole number of at least 1, not 1.5"),
        ({"islands": []}, "a runtime needs at least one island"),
        ({"islands": 10**6}, "hosts are more than the"),
        ({"platform": "abacus"}, "platform must be one of cpu, gpu, tpu or auto, not 'abacus'"),
        ({"islands": 10**12}, "hosts are more than the"),
        ({"launch_limit_s": "60"}, "launch_limit_s must be a positive number of seconds, not '60'"),
        ({"lost_after_s": None}, "lost_after_s must be at least a second, not None"),
        ({"dispatch": "quickly"}, "dispatch must be 'parallel' or 'sequential', not 'quickly'"),
    ],
    ids=str,
)
def test_what_no_runtime_can_be_is_refused_before_ray_starts(
    options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "connect_ray", lambda *_: pytest.fail("Ray starts"))
    with pytest.raises(UsageError, match=says):
        pw.init(**options)


@pytest.mark.parametrize(
    ("options", "gpus", "platform", "warns"),
    [
        ({"devices_per_host": 4}, 1, "cpu", True),
        ({"islands": 2}, 1, "cpu", True),
        ({"islands": [pw.Island(), pw.Island()]}, 1, "cpu", True),
        ({}, 1, "gpu", False),
        ({"islands": 2, "devices_per_host": 2}, 4, "gpu", False),
        ({"devices_per_host": 4}, 0, "cpu", False),
        ({"devices_per_host": 4, "platform": "gpu"}, 1, "gpu", False),
        ({"devices_per_host": 4, "address": "auto"}, 1, "gpu", False),
        ({"islands": [pw.Island("gpu", devices=8)]}, 0, "gpu", False),
        ({"islands": [pw.Island("gpu", devices=8), pw.Island()]}, 1, "gpu", False),
    ],
    ids=str,
)
def test_a_machine_with_too_few_gpus_has_cpu_devices_where_nobody_asked_for_gpus(
    options: dict[str, Any], gpus: int, platform: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"CPU": 8.0, **({"GPU": float(gpus)} if gpus else {})}]

    def start(topology: Any, *_: Any) -> Any:
        raise InterruptedError({island.platform for island in topology(nodes).islands})

    monkeypatch.setattr(cluster, "start", start)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(InterruptedError) as stopped:
            pw.init(**options)
    assert stopped.value.args == ({platform},)
    assert [issubclass(one.category, TooFewAccelerators) for one in caught] == [True] * warns


def test_paths_hold_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes run where Ray was started; and a path may be a `Path`."""
    found: list[Options] = []

    def start(_: Any, __: Any, options: Options, *___: Any) -> Any:
        found.append(options)
        raise InterruptedError

    monkeypatch.setattr(cluster, "start", start)
    monkeypatch.chdir(tmp_path)
    for tenants in ("t.json", Path("t.json")):
        with pytest.raises(InterruptedError):
            pw.init(tenants=cast(str, tenants), tls=("cert.pem", cast(str, Path("key.pem"))))
    here = str(tmp_path)
    assert [(one.tenants, one.tls) for one in found] == [
        (f"{here}/t.json", (f"{here}/cert.pem", f"{here}/key.pem"))
    ] * 2


def test_one_thread_starts_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def start(*_: Any) -> Any:
        begun.set()
        assert go_on.wait(30.0)
        raise InterruptedError

    monkeypatch.setattr(cluster, "start", start)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(pw.init)
        assert begun.wait(30.0)
        with pytest.raises(AlreadyInitialized, match="another thread of this process starts a cluster, or stops one"):
            pw.init()
        go_on.set()
        with pytest.raises(InterruptedError):
            first.result(30.0)
    with pytest.raises(InterruptedError):
        pw.init()


def test_a_cluster_that_another_thread_stops_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pw.init` refuses, rather than start on a Ray that is about to end; `pw.shutdown` waits."""
    stopping, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        stopping.set()
        assert go_on.wait(30.0)

    session: Any = ClusterSession.__new__(ClusterSession)
    session.cluster, session.dashboard = SimpleNamespace(stop=stop, url="u"), None
    monkeypatch.setattr(Session, "close", lambda _: None)
    monkeypatch.setattr(context, "sessions", [session])
    monkeypatch.setattr(cluster, "start", lambda *_: pytest.fail("a cluster starts"))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(pw.shutdown)
        assert stopping.wait(30.0)
        second = pool.submit(pw.shutdown)
        with pytest.raises(AlreadyInitialized, match="another thread of this process starts a cluster, or stops one"):
            pw.init()
        assert not second.done()
        go_on.set()
        first.result(30.0)
        second.result(30.0)
    assert context.sessions == []
