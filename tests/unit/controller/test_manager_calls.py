"""What the controller says to a resource manager that lives, of whose changes it does not know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.events import CallManager, ClientMessages, ManagerAnswered, ManagerKnows, ManagerMissed
from pathways_ray.controller.manager_calls import QUESTION_LIMIT_S, held_by
from pathways_ray.resource_manager.allocation import Inventory
from pathways_ray.resource_manager.choosing import HostRecord
from pathways_ray.resource_manager.core import ManagerCore
from pathways_ray.resource_manager.events import SliceReleased, SliceRequested
from pathways_ray.resource_manager.slice_requests import SliceRequest
from pathways_ray.transport.messages import (
    CreateSlice,
    ExchangeSlices,
    Free,
    HeldSlices,
    Refused,
    ReleaseSlice,
    SliceCreated,
    SlicesExchanged,
    Suspend,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, created, of, reply
from tests.unit.controller.test_moves import HERE, moving

CHANGES = [ExchangeSlices(1, ((HERE.mesh.id, 77),)), Suspend(1)]


def known(core: CoreHarness) -> list[CallManager]:
    """What the resource manager is called for when it answers a report."""
    return of(CallManager, core.handle(ManagerKnows("manager 1")))


def given_up(core: CoreHarness, call: CallManager) -> list[Any]:
    """A question has no answer until it is given up."""
    core.answering = False
    commands: list[Any] = core.handle(ManagerMissed(call))
    while core.now <= QUESTION_LIMIT_S:
        for island in list(core.core.islands.links):
            core.from_island(island)
        commands += core.tick(core.now + 1.0)
    return commands


def check_held(core: CoreHarness, call: CallManager) -> None:
    """A call says what the session has by now."""
    assert call.method == "hold_slices"
    number, found = call.arguments
    assert number == 1
    slices = held_by(core.core.launches.sessions[1])
    assert msgspec.msgpack.decode(found, type=HeldSlices) == HeldSlices(slices, core.core.launches.tables.last_slice)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_that_is_given_up_is_undone_where_it_was_made(change: ExchangeSlices | Suspend) -> None:
    """
    1. Its answer is lost until the client hears that it failed. The controller keeps slices and places.
    2. The resource manager, which may have made it, hears where the slices are, once.
    """
    core = moving()
    before = held_by(core.core.launches.sessions[1])
    (asked,) = of(CallManager, core.request(1, change))
    refused = reply(given_up(core, asked))
    assert isinstance(refused, Refused)
    assert "could not be reached for 60 s" in refused.failure.message
    (call,) = known(core)
    check_held(core, call)
    assert held_by(core.core.launches.sessions[1]) == before
    assert known(core) == []


@pytest.mark.parametrize("change", CHANGES)
def test_where_slices_are_is_not_said_while_a_change_may_have_been_made(change: ExchangeSlices | Suspend) -> None:
    """
    1. A session's change has no answer yet. What is to be said of its slices would undo it: that waits.
    2. Once its answer is lost, it is asked again, behind where the slices are.
    """
    core = moving()
    asked = of(CallManager, core.request(1, change))
    core.handle(ManagerMissed(CallManager("hold_slices", (1, b""))))
    core.handle(ManagerMissed(CallManager("hold_slices", (7, b""))))
    assert [call.arguments[0] for call in known(core)] == [7]
    core.handle(ManagerMissed(asked[0]))
    held, again = known(core)
    check_held(core, held)
    assert again.method == asked[0].method
    assert known(core) == []


def test_where_slices_are_is_not_said_while_one_may_have_been_made() -> None:
    """
    1. A session asks for a slice, which is made. Another session's, which is made later, is answered first.
    2. What the resource manager is to hear of the first session would free its slice: that waits for the answer.
    """
    core = CoreHarness(hosts=True)
    asked = []
    for session in (1, 2):
        core.open_session()
        asked.append(core.request(session, CreateSlice(session, (2,), ("x",), -1, "", "")))
    core.handle(ManagerMissed(CallManager("hold_slices", (1, b""))))
    assert isinstance(reply(core.answered(asked[1], created(1))), SliceCreated)
    assert known(core) == []
    assert isinstance(reply(core.answered(asked[0], created(0))), SliceCreated)
    (call,) = known(core)
    check_held(core, call)
    assert known(core) == []


def test_questions_are_asked_again_in_the_order_in_which_they_were_asked() -> None:
    """In another one a slice would go that has come back, by an exchange behind its release."""
    core = moving()
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((5,))]))
    (release,) = of(CallManager, core.request(1, ReleaseSlice(1, HERE.mesh.id)))
    (exchange,) = of(CallManager, core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),))))
    for call in (exchange, release):
        core.handle(ManagerMissed(call))
    assert [call.method for call in known(core)] == ["hold_slices", "release_slice", "exchange_slices"]


@pytest.mark.parametrize("lost", ["once", "until it is given up"])
def test_a_slice_whose_answer_is_lost_is_not_made_twice_and_not_kept_for_nobody(lost: str) -> None:
    """
    1. A slice is made, and its answer is lost. Asked again, the resource manager answers with the slice that it made.
    2. Where the call is given up, that is given back instead.
    """
    core = CoreHarness(hosts=True)
    core.open_session()
    there = ManagerCore({0: [0]})
    there.inventory.join([HostRecord(0, 0, "cpu", 4, "node", 300)])

    def made(call: CallManager) -> Any:
        session, *wanted, final = call.arguments
        (answer,) = there.handle(SliceRequested(1, session, SliceRequest(*wanted), final), 10.0)
        return answer

    (asked,) = of(CallManager, core.request(1, CreateSlice(1, (4,), ("x",), 0, "", "")))
    first = made(asked).value
    if lost == "once":
        core.handle(ManagerMissed(asked))
        (again,) = known(core)
        assert made(again).value == first
        answered = reply(core.handle(ManagerAnswered(again.call, encode(first))))
        assert isinstance(answered, SliceCreated)
        assert [number for _, number in there.inventory.slices] == [answered.placed.mesh.id]
    else:
        assert isinstance(reply(given_up(core, asked)), Refused)
        (release,) = [call for call in known(core) if call.method == "release_slice"]
        there.handle(SliceReleased(2, *release.arguments), 11.0)
        assert there.inventory.slices == {}
    assert known(core) == []


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("made", [False, True])
def test_an_exchange_that_comes_again_is_made_of_what_the_controller_knows(released: bool, made: bool) -> None:
    """
    1. A slice is given back, and an exchange is to bring it back. The answers of both are lost, and perhaps the calls.
    2. Both come again, in their order. The resource manager has what the controller has once it hears of that.
    """
    core = moving()
    session = core.core.launches.sessions[1]
    there = Inventory()
    there.restore(held_by(session))
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((5,))]))
    (release,) = of(CallManager, core.request(1, ReleaseSlice(1, HERE.mesh.id)))
    (exchange,) = of(CallManager, core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),))))
    assert not released or there.release(*release.arguments)
    assert not made or there.exchange(*exchange.arguments)
    for call in (msgspec.structs.replace(release, call=0), exchange):
        core.handle(ManagerMissed(call))
    for call in known(core):
        if call.method == "hold_slices":
            found = msgspec.msgpack.decode(call.arguments[1], type=HeldSlices)
            there.hold(1, found.slices, found.last_slice)
        else:
            getattr(there, call.method.removesuffix("_slices").removesuffix("_slice"))(*call.arguments)
    assert isinstance(reply(core.handle(ManagerAnswered(exchange.call, True))), SlicesExchanged)
    assert {number: record.placed for (_, number), record in there.slices.items()} == session.slices
    assert session.slices.keys() == {HERE.mesh.id, 77}
