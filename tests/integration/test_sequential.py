"""Options of the cluster that may change speed and nothing else: sequential dispatch, and no fusion.

One script computes the same things on a cluster with the given options; its results must have the same bits on all.
"""

from __future__ import annotations

import json
from typing import Any

import pytest


def run(python, training: str, **options) -> dict[str, Any]:
    return json.loads(python.run("options_battery", json.dumps(options), training, timeout=110).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(240)  # two runs
@pytest.mark.parametrize(
    ("options", "training"),
    [
        ({"dispatch": "sequential"}, ""),
        pytest.param({"dispatch": "sequential"}, "training", marks=pytest.mark.long),
        pytest.param({"fusion": False}, "training", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_options_do_not_change_a_bit(python, cluster, options, training) -> None:
    """Against the shared cluster, which has parallel dispatch and fuses."""
    expected = run(python, training, url=cluster.url, token=cluster.token)
    found = run(python, training, **options)
    assert found.pop("dispatch") == options.get("dispatch", "parallel")
    assert found == {name: value for name, value in expected.items() if name != "dispatch"}
    assert found["failures"] == [True, True]
    python.assert_none_left()
