"""Calls of clients keep neither the controller nor the resource manager busy: how many, how often, how big."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from pathways_ray import limits
from pathways_ray.controller.changes import is_replacement
from pathways_ray.controller.events import AnswerCall, CallManager, StreamOpened, TenantsRead, Tick
from pathways_ray.controller.status import FRESH_STATUS
from pathways_ray.controller.tenants import Tenant, TenantBook, TokenOwner
from pathways_ray.errors import QuotaExceeded
from pathways_ray.resource_manager.core import MAX_REJOIN_S
from pathways_ray.transport.messages import (
    VERSION,
    CreateSlice,
    NotYet,
    OpenSession,
    Refused,
    SliceCreated,
    Status,
    StatusReply,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, created, of, reply
from tests.unit.controller.harness import SLICES
from tests.unit.controller.test_core import ALICE, BOOK

WANTED = CreateSlice(1, (2,), ("x",), 0, "", "")
ALICE_HEAVY = Tenant("alice", 5.0)


def opened() -> CoreHarness:
    core = CoreHarness(hosts=True)
    core.open_session()
    core.handle(StreamOpened(1))
    return core


def asked(commands: list[Any]) -> list[CallManager]:
    return [c for c in of(CallManager, commands) if c.method == "create_slice"]


def test_calls_of_one_caller_are_limited_before_they_are_read() -> None:
    requests = opened().core.requests.calls
    names = [requests.enter(1) for _ in range(limits.MAX_CALLS)]
    with pytest.raises(QuotaExceeded, match="session 1 has 16 calls without a reply; 16 are allowed"):
        requests.enter(1)
    requests.enter(2)
    requests.enter(TokenOwner(Tenant("alice"), "digest"))
    requests.leave(names[0])
    requests.enter(1)


def test_a_session_asks_for_one_slice_at_a_time() -> None:
    """
    1. Three requests: the resource manager hears of the first one.
    2. Each answer lets the next one go; a refusal and a failure of the manager too.
    """
    core = opened()
    commands = core.request(1, WANTED)
    assert asked(core.request(1, WANTED)) + asked(core.request(1, WANTED)) == []
    commands = core.answered(commands, encode(Refused(reply_failure())))
    assert isinstance(reply(commands), Refused)
    commands = core.answered(asked(commands), RuntimeError("no answer"))
    assert isinstance(reply(commands), Refused)
    commands = core.answered(asked(commands), created(0))
    assert isinstance(reply(commands), SliceCreated)
    assert len(asked(core.request(1, WANTED))) == 1


def reply_failure() -> Any:
    from pathways_ray.errors import Failure

    return Failure("Unschedulable", "no")


def test_a_slice_whose_island_has_not_joined_is_asked_for_again_each_second_until_the_limit() -> None:
    core = opened()
    commands = core.answered(core.request(1, WANTED), encode(NotYet()))
    assert of(AnswerCall, commands) == []
    times = 0
    while not (found := asked(core.tick(core.now + 1.0)))[0].arguments[-1]:
        times += 1
        assert of(AnswerCall, core.answered(found, encode(NotYet()))) == []
    assert times == MAX_REJOIN_S - 1
    assert isinstance(reply(core.answered(found, created(0))), SliceCreated)
    assert asked(core.tick(core.now + 1.0)) == []


def test_a_session_that_ends_while_it_waits_for_a_slice() -> None:
    core = opened()
    core.answered(core.request(1, WANTED), encode(NotYet()))
    core.core.clients.close(1)
    (call,) = asked(core.handle(Tick()))
    commands = core.answered([call], encode(NotYet()))
    assert isinstance(reply(commands), Refused)
    assert core.core.requests.not_yet == []
    assert core.core.requests.slicing == {}


def test_slices_of_a_session_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways_ray.controller.quotas.MAX_SLICES", 3)
    core = opened()
    core.hold_slices(1)
    refused = reply(core.request(1, WANTED))
    assert isinstance(refused, Refused)
    assert "the session holds 4 slices" in refused.failure.message


def test_big_calls_and_shapes_of_many_sizes_are_refused() -> None:
    refused = reply(opened().request(1, WANTED, size=100_000))
    assert isinstance(refused, Refused)
    assert refused.failure.message == "a call of 100000 bytes; the limit is 65536"


def test_status_is_made_anew_a_few_times_a_second_and_then_told_from_memory() -> None:
    """
    1. A tenant asks more often in a second than it may: it is told what it was told before.
    2. A second later it hears the news.
    3. The operator hears them always.
    """
    core = CoreHarness(hosts=True)
    core.handle(TenantsRead(BOOK, "", ""))
    core.open_session(ALICE)
    core.handle(StreamOpened(1))
    told = '{"islands": [], "slices": []}'
    for _ in range(FRESH_STATUS):
        assert isinstance(reply(core.answered(core.request(1, Status(1)), told)), StatusReply)
    core.open_session(ALICE)
    known = reply(core.request(1, Status(1)))
    assert isinstance(known, StatusReply)
    assert len(json.loads(known.text)["sessions"]) == 1
    core.now += 1.0
    fresh = reply(core.answered(core.request(1, Status(1)), told))
    assert isinstance(fresh, StatusReply)
    assert len(json.loads(fresh.text)["sessions"]) == 2
    for _ in range(2 * FRESH_STATUS):
        core.answered(core.request(None, Status(0)), told)


def test_a_slice_that_takes_the_place_of_another_one_is_replaced_by_none() -> None:
    """A chain of them would go on beyond every quota."""
    core = opened()
    core.hold_slices(1)
    session = core.core.launches.sessions[1]
    first = SLICES[0].mesh
    wanted = msgspec.structs.replace(WANTED, shape=first.shape, instead=first.id)
    assert is_replacement(session, wanted)
    core.core.launches.add_slice(1, SLICES[1], instead=first.id)
    assert not is_replacement(session, wanted)
    assert not is_replacement(session, msgspec.structs.replace(wanted, instead=SLICES[1].mesh.id))


@pytest.mark.parametrize("changed", [ALICE_HEAVY, None])
def test_the_table_of_tenants_changes_while_a_call_is_read(changed: Tenant | None) -> None:
    """
    1. Alice shows her token. Before her request has come, her weight changes, or she is removed.
    2. Her session is hers, with the values of now; or there is none. It never counts as the operator's.
    """
    core = CoreHarness(hosts=True)
    core.handle(TenantsRead(BOOK, "", ""))
    ((_, token),) = BOOK.entries
    caller = core.core.requests.caller({"authorization": "alice's token of the test"})
    core.handle(TenantsRead(TenantBook(((changed, token),) if changed is not None else ()), "", ""))
    if changed is not None:
        core.open_session(caller)
        client = core.core.clients.known[1]
        assert (client.tenant, client.token) == (changed, token)
        return
    for request in (OpenSession(VERSION, ""), Status(0)):
        refused = reply(core.request(caller, request))
        assert isinstance(refused, Refused)
        assert refused.failure.kind == "AuthenticationError"
        assert "tenant 'alice' is not in the table of tenants any more" in refused.failure.message
    assert core.core.clients.known == {}
