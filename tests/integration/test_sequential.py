"""Options of the cluster that may change speed and nothing else: sequential dispatch, and no fusion.

One script computes the same things on a cluster with the given options; its results must have the same bits on all.
"""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture(scope="module")
def expected(cluster, python) -> dict[str, Any]:
    """What the shared cluster computes: parallel dispatch, fused."""
    return run(python, url=cluster.url, token=cluster.token)


def run(python, **options) -> dict[str, Any]:
    return json.loads(python.run("options_battery", json.dumps(options), timeout=110).splitlines()[-1])


@pytest.mark.timeout(240)  # two runs
@pytest.mark.parametrize(
    "options", [{"dispatch": "sequential"}, pytest.param({"fusion": False}, marks=pytest.mark.long)], ids=str
)
def test_options_do_not_change_a_bit(python, expected, options) -> None:
    found = run(python, **options)
    assert found.pop("dispatch") == options.get("dispatch", "parallel")
    assert found == {name: value for name, value in expected.items() if name != "dispatch"}
    assert found["failures"] == [True, True]
    python.assert_none_left()
