"""Islands that the operator drains and removes, as the controller sees them."""

from __future__ import annotations

from pathways_ray.controller.events import CallManager
from pathways_ray.controller.tenants import Tenant
from pathways_ray.errors import Failure
from pathways_ray.transport.messages import (
    Accepted,
    DrainIsland,
    Refused,
    RemoveIsland,
    UndrainIsland,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply
from tests.unit.controller.harness import ISLAND_OF_HOST


def test_the_operator_alone_drains_and_removes() -> None:
    core = CoreHarness(hosts=True)
    core.open_session()
    for caller in (Tenant("alice"), 1):
        for request in (DrainIsland(0, 1, 5.0), UndrainIsland(0, 1), RemoveIsland(0, 1)):
            found = reply(core.request(caller, request))
            assert isinstance(found, Refused)
            assert found.failure.kind == "AuthenticationError"
    asked = core.request(None, DrainIsland(0, 1, 5.0))
    assert [(c.method, c.arguments) for c in of(CallManager, asked)] == [("drain_island", (1, 5.0, ""))]
    assert reply(core.answered(asked, encode(Accepted()))) == Accepted()
    assert core.core.requests.changes.moves.draining == {1}
    back = core.request(None, UndrainIsland(0, 1))
    assert [(c.method, c.arguments) for c in of(CallManager, back)] == [("undrain_island", (1,))]
    assert reply(core.answered(back, encode(Accepted()))) == Accepted()
    assert core.core.requests.changes.moves.draining == set(), "its slices need not move any more"


def test_an_island_that_stays_is_not_forgotten() -> None:
    core = CoreHarness(hosts=True)
    asked = core.request(None, RemoveIsland(0, 0))
    refused = Refused(Failure("UsageError", "island 0 is the last one"))
    assert reply(core.answered(asked, encode(refused))) == refused
    assert set(core.core.launches.hosts) == set(ISLAND_OF_HOST)
