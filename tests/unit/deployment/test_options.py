"""Options that are refused, and the addresses that the processes of a runtime serve at."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.deployment.options import Options
from pathways_ray.errors import UsageError


@pytest.mark.parametrize(
    ("bind", "machines", "found"),
    [
        ("", ["10.0.0.1"], ("127.0.0.1", "127.0.0.1", "127.0.0.1")),
        ("127.0.0.1", ["127.0.0.1"], ("127.0.0.1", "127.0.0.1", "127.0.0.1")),
        ("192.0.2.1", ["10.0.0.1"], ("192.0.2.1", "192.0.2.1", "127.0.0.1")),
        ("10.0.0.1", ["10.0.0.1"], ("10.0.0.1", "", "")),
        ("10.0.0.1", ["10.0.0.1", "10.0.0.2"], ("10.0.0.1", "", "")),
        ("", ["10.0.0.1", "10.0.0.2"], ("", "", "")),
    ],
)
def test_processes_serve_where_machines_that_come_later_reach_them(
    bind: str, machines: list[str], found: tuple[str, str, str]
) -> None:
    """Loopback on one machine, unless the controller is where Ray's nodes reach it: others may join such a Ray."""
    listen = Options(bind=bind, insecure=True).listen(machines)
    assert (listen.front, listen.data, listen.links) == found


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"fusion": "no"}, "fusion must be True or False, not 'no'"),
        ({"check_order": 1}, "check_order must be True or False, not 1"),
        ({"insecure": "false"}, "insecure must be True or False, not 'false'"),
        ({"policy": 3}, "policy must be a text, not 3"),
        ({"bind": 5}, "bind must be a text, not 5"),
        ({"name": None}, "name must be a text, not None"),
    ],
)
def test_values_of_another_kind_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Options(**wrong).check()
