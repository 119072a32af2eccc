"""The addresses that the processes of a runtime serve at."""

from __future__ import annotations

import pytest

from pathways_ray.deployment.options import Options


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
