"""What is wrong in the words of `pw.init` is said before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

import pathways_ray as pw
from pathways_ray.deployment import cluster
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
