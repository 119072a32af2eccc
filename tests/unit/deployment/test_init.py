"""What is wrong in the words of `pw.init` is said before anything starts."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import pathways_ray as pw
from pathways_ray.deployment import cluster
from pathways_ray.deployment.init import TooFewAccelerators
from pathways_ray.errors import UsageError


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"islands": 0}, "islands must be a whole number of at least 1, not 0"),
        ({"devices_per_host": 1.5}, "devices_per_host must be a whole number of at least 1, not 1.5"),
        ({"islands": []}, "a runtime needs at least one island"),
        ({"islands": 10**6}, "hosts are more than the"),
        ({"platform": "abacus"}, "platform must be one of cpu, gpu, tpu or auto, not 'abacus'"),
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
