"""Slices that clients move, as the controller sees it: what lies there, the exchange, and who has to move."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pathways_ray.client.core import ClientCore
from pathways_ray.client.moving import Ask
from pathways_ray.client.suspending import resume
from pathways_ray.client.suspension import Kept, Suspension
from pathways_ray.controller import buffers
from pathways_ray.controller.channel import Carrier
from pathways_ray.controller.events import AnswerCall, CallManager, ClientMessages, Command, Plan, Planned, StreamOpened
from pathways_ray.controller.moves import AGAIN_S
from pathways_ray.controller.planning import answer
from pathways_ray.controller.state import SendIsland
from pathways_ray.controller.tenants import Quota, Tenant
from pathways_ray.ir.plan import Device, PlacedSlice
from pathways_ray.ir.types import ArrayType, SliceType
from pathways_ray.transport.messages import (
    Accepted,
    BuffersLost,
    CreateSlice,
    DrainIsland,
    Drop,
    ExchangeSlices,
    Free,
    Held,
    HeldBuffer,
    HostDown,
    ListHeld,
    Put,
    Refused,
    Register,
    ReleaseSlice,
    RemoveIsland,
    SliceCreated,
    SlicesExchanged,
    Stored,
    Suspend,
    Unregister,
    Vacate,
    encode,
)
from tests.unit.controller.core_harness import CoreHarness, of, reply, sent
from tests.unit.controller.harness import ISLAND_OF_HOST, SLICES
from tests.unit.controller.test_core import FUNCTIONS, graph_of

KIND = ArrayType((4,), "float32")
HERE = SLICES[0]
OTHER_ISLAND = next(island for island in ISLAND_OF_HOST.values() if island != HERE.island)
THERE = PlacedSlice.on(
    msgspec.structs.replace(HERE.mesh, id=77),
    OTHER_ISLAND,
    [Device(next(h for h, i in ISLAND_OF_HOST.items() if i == OTHER_ISLAND), k) for k in range(HERE.mesh.size)],
)


def moving() -> CoreHarness:
    """A session with an array on a slice, and another slice that is to take its place."""
    core = CoreHarness(hosts=True)
    core.open_session()
    core.handle(StreamOpened(1))
    launches = core.core.launches
    launches.add_slice(1, HERE)
    launches.add_slice(1, THERE, instead=HERE.mesh.id)
    buffers.put(launches.tables, launches.sessions[1], Put(5, HERE.mesh.id, KIND, ()))
    return core


def part_of(whole: PlacedSlice, number: int) -> PlacedSlice:
    """A part with all devices of a slice."""
    return whole.on_devices_of(msgspec.structs.replace(whole.mesh, id=number))


def test_an_exchange_gives_each_slice_the_devices_and_the_arrays_of_the_other() -> None:
    core = moving()
    assert reply(core.request(1, ListHeld(1, (HERE.mesh.id,)))) == Held((HeldBuffer(5, HERE.mesh.id, KIND, ()),))
    asked = core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),)))
    (call,) = of(CallManager, asked)
    assert (call.method, call.arguments) == ("exchange_slices", (1, ((HERE.mesh.id, 77),), call.call))
    assert call.call
    found = reply(core.answered(asked, True))
    assert isinstance(found, SlicesExchanged)
    (moved,) = found.slices
    assert (moved.placed.mesh, moved.placed.island, moved.placed.devices) == (HERE.mesh, OTHER_ISLAND, THERE.devices)
    assert moved.slice_tag
    session = core.core.launches.sessions[1]
    assert session.places[77].devices == HERE.devices
    assert session.buffers[5].type.slice == 77, "what lay on the slice is the other one's now"
    assert session.held[77] > 0
    assert not session.held[HERE.mesh.id]


@pytest.mark.parametrize("released", [HERE.mesh.id, THERE.mesh.id])
def test_a_slice_that_is_released_while_it_is_exchanged_goes_after_that(released: int) -> None:
    """
    1. While the resource manager exchanges slices, one of them is released. That waits.
    2. The other slice is where the resource manager has it: on the devices that the one had.
    """
    core = moving()
    session = core.core.launches.sessions[1]
    left = {HERE.mesh.id: (77, HERE), 77: (HERE.mesh.id, THERE)}[released]
    asked = core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),)))
    assert core.request(1, ReleaseSlice(1, released)) == []
    found = core.answered(asked, True)
    (exchanged,) = of(AnswerCall, found)
    assert isinstance(exchanged.reply, SlicesExchanged)
    (call,) = of(CallManager, found)
    assert (call.method, call.arguments) == ("release_slice", (1, released))
    assert {number: placed.devices for number, placed in session.slices.items()} == {left[0]: left[1].devices}
    assert core.core.requests.changing == {}
    assert reply(core.answered(found, True)) == Accepted()


def test_requests_wait_for_an_exchange_that_fails_too() -> None:
    core = moving()
    asked = core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),)))
    again = core.request(1, ExchangeSlices(1, ((77, HERE.mesh.id),)))
    last = core.request(1, ReleaseSlice(1, 77))
    assert again == last == []
    second = core.answered(asked, RuntimeError("of the test"))
    assert isinstance(reply(second), Refused)
    assert [call.method for call in of(CallManager, second)] == ["exchange_slices"]
    third = core.answered(second, False)
    assert isinstance(reply(third), Refused)
    assert [call.method for call in of(CallManager, third)] == ["release_slice"]


def test_an_exchange_that_is_taken_back_leaves_nothing_at_the_resource_manager() -> None:
    """A first slice that had been given back is there again by then: it is given back once more."""
    core = moving()
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((5,))]))
    core.core.launches.remove_slice(1, HERE.mesh.id)
    asked = core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),)))
    buffers.put(core.core.launches.tables, core.core.launches.sessions[1], Put(6, HERE.mesh.id, KIND, ()))
    found = core.answered(asked, True)
    assert isinstance(reply(found), Refused)
    assert [(call.method, call.arguments) for call in of(CallManager, found)] == [("release_slice", (1, HERE.mesh.id))]


def test_arrays_of_a_session_are_told_by_and_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a session may have, told at once, would keep the controller from others."""
    monkeypatch.setattr("pathways_ray.controller.moves.HELD_AT_ONCE", 2)
    core = moving()
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Put(n, HERE.mesh.id, KIND, ()) for n in (9, 3, 7)]))
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Put(6, THERE.mesh.id, KIND, ())]))
    for slices, pages in (
        ((), [[3, 5], [6, 7], [9]]),
        ((HERE.mesh.id,), [[3, 5], [7], [9]]),
        ((THERE.mesh.id,), [[], [6], []]),
    ):
        after = 0
        for number, page in enumerate(pages):
            held = reply(core.request(1, ListHeld(1, slices, after)))
            assert isinstance(held, Held)
            assert [one.number for one in held.buffers] == page
            after = held.more
            assert bool(after) == (number < len(pages) - 1)


def test_slices_that_cannot_be_exchanged_say_why() -> None:
    core = moving()
    wide = PlacedSlice.on(SliceType(78, (1,), ("x",)), 0, [Device(0, 0)])
    core.core.launches.add_slice(1, wide)
    for pairs, why in [
        ((), "slices [] are not different ones"),
        (((HERE.mesh.id, HERE.mesh.id),), "are not different ones"),
        (((HERE.mesh.id, 99),), "session 1 has no slice 99"),
        (((HERE.mesh.id, 78),), "has mesh"),
    ]:
        found = reply(core.request(1, ExchangeSlices(1, pairs)))
        assert isinstance(found, Refused)
        assert (found.failure.kind, why in found.failure.message) == ("UsageError", True), found
    session = core.core.launches.sessions[1]
    session.in_flight = 2
    failure = core.core.requests.changes.moves.refusal(session, ((HERE.mesh.id, 77),))
    assert failure is not None
    assert "2 launches of the session are under way" in failure.message


def test_a_suspended_session_has_nothing_and_gets_its_slices_back_by_an_exchange() -> None:
    """1. The resource manager takes its slices back, then the controller frees its arrays. 2. New slices of the same
    meshes take their place, a part with its whole. 3. While something is under way, it is not suspended."""
    core = moving()
    launches = core.core.launches
    session = launches.sessions[1]
    launches.remove_slice(1, 77)
    launches.add_slice(1, PlacedSlice.on(SliceType(80, (1,), ("y",)), HERE.island, HERE.devices[:1]), HERE.mesh.id)
    assert reply(core.request(1, ListHeld(1, ()))) == Held((HeldBuffer(5, HERE.mesh.id, KIND, ()),))
    asked = core.request(1, Suspend(1))
    (call,) = of(CallManager, asked)
    assert (call.method, call.arguments) == ("release_session", (1,))
    found = core.answered(asked, 2)
    assert reply(found) == Accepted()
    assert [m.buffers for m in sent(found) if isinstance(m, Drop)] == [(5,)]
    assert (session.slices, session.buffers, session.suspended, session.device_bytes) == ({}, {}, True, 0)
    core.answered(core.request(None, DrainIsland(0, HERE.island, 60.0)), encode(Accepted()))
    assert not [message for message in sent(core.tick(1.0)) if isinstance(message, Vacate)]

    launches.add_slice(1, THERE)
    launches.add_slice(1, PlacedSlice.on(SliceType(81, (1,), ("y",)), OTHER_ISLAND, THERE.devices[:1]), 77)
    back = reply(core.answered(core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77), (80, 81)))), True))
    assert isinstance(back, SlicesExchanged)
    assert [one.placed.island for one in back.slices] == [OTHER_ISLAND, OTHER_ISLAND]
    assert session.slices[77] == THERE, "the devices that were given back are others' by now"
    launches.remove_slice(1, 77)
    assert (set(session.slices), session.parts, session.suspended) == (
        {HERE.mesh.id, 80},
        {80: HERE.mesh.id},
        False,
    )
    session.in_flight = 1
    failure = core.core.requests.changes.moves.busy(session)
    assert failure is not None
    assert "1 launches of the session are under way" in failure.message


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session has places of 12 slices."""
    monkeypatch.setattr("pathways_ray.limits.MAX_PLACES", 12)
    monkeypatch.setattr("pathways_ray.controller.quotas.MAX_PLACES", 12)


def another(core: CoreHarness, number: int) -> list[Command]:
    """Asks for a slice like `THERE`, which the resource manager makes."""
    asked = core.request(1, CreateSlice(1, THERE.mesh.shape, THERE.mesh.axes, -1, "", ""))
    made = PlacedSlice.on(msgspec.structs.replace(THERE.mesh, id=number), THERE.island, THERE.devices)
    return core.answered(asked, encode(SliceCreated(made, ""))) if of(CallManager, asked) else asked


def come_and_go(core: CoreHarness, first: int, count: int = 30) -> None:
    """Slices are made and given back, one after the other."""
    for number in range(first, first + count):
        assert isinstance(reply(another(core, number)), SliceCreated), number
        core.core.launches.remove_slice(1, number)


def test_released_slices_are_forgotten_once_nothing_names_them(few_places: None) -> None:
    """
    1. Of three released slices, arrays lie on one, a program names another one, and nothing the third.
    2. Any number of slices may be had after them, and the first two are still known.
    3. Once the array is dropped and the program is forgotten, nobody knows these either.
    4. Where all slices are named, no further one is made.
    """
    core = moving()
    core.hold_slices(1)
    core.core.clients.registrar.check = lambda functions: None
    launches = core.core.launches
    session = launches.sessions[1]
    for number in (100, 102):
        another(core, number)
    register = Register(1, graph_of(HERE.mesh.id, 2), FUNCTIONS)
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Put(6, 100, KIND, ()), register]))
    assert session.programs[1].failure is None
    for number in (100, 2, 102):
        launches.remove_slice(1, number)
    come_and_go(core, 200)
    assert session.places.keys() >= {*session.slices, 100, 2}
    assert 102 not in session.places
    for host in launches.hosts.values():
        host.memory = 1 << 30
    assert launches.admission.memory.held([session]), "what it holds is still counted"
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((6,)), Unregister(1)]))
    come_and_go(core, 300)
    assert session.places.keys().isdisjoint({100, 2})
    launches.admission.memory.held([session])
    for number in range(400, 412 - len(session.slices)):
        assert isinstance(reply(another(core, number)), SliceCreated)
    refused = reply(another(core, 499))
    assert isinstance(refused, Refused)
    assert "12 with released ones" in refused.failure.message


def test_slices_of_a_suspended_session_are_known_until_they_come_back(few_places: None) -> None:
    """
    1. It is suspended with two slices. One comes back; then it cannot be resumed after all, again and again.
    2. Both have their meshes all the same, and come back. Those that were made for them are forgotten.
    """
    core = moving()
    session = core.core.launches.sessions[1]
    core.core.launches.remove_slice(1, 77)
    mine = (HERE.mesh.id, 78)
    another(core, 78)
    core.answered(core.request(1, Suspend(1)), 2)
    for number in range(200, 240, 2):
        another(core, number)
        assert isinstance(
            reply(core.answered(core.request(1, ExchangeSlices(1, ((mine[0], number),))), True)), SlicesExchanged
        )
        core.answered(core.request(1, Suspend(1)), 2)
        assert session.suspended
    for one, number in zip(mine, (300, 301), strict=True):
        another(core, number)
        assert isinstance(
            reply(core.answered(core.request(1, ExchangeSlices(1, ((one, number),))), True)), SlicesExchanged
        )
        core.core.launches.remove_slice(1, number)
    assert (set(session.slices), session.away, session.replacing) == (set(mine), {}, {})
    come_and_go(core, 400)
    assert len(session.places) <= 12


def come_back(core: CoreHarness, suspension: Suspension) -> None:
    """Carries out the steps of a client whose session is resumed; nothing is refused."""
    steps, number = resume(ClientCore(1, 100), suspension, (), 0.0), 200
    said: Any = None
    while True:
        try:
            step, said = steps.send(said), None
        except StopIteration:
            return
        if isinstance(step, Ask) and isinstance(step.request, CreateSlice):
            number += 1
            said = reply(another(core, number))
        elif isinstance(step, Ask):
            said = reply(core.answered(core.request(1, step.request), True))
        assert not isinstance(said, Refused), said


@pytest.mark.parametrize("limit", ["devices", "slices"])
def test_a_session_comes_back_within_a_quota_that_has_room_for_its_slices_alone(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each slice that comes back, the one that was made for it is given back before the next one is made."""
    core = moving()
    launches = core.core.launches
    session, client = launches.sessions[1], core.core.clients.known[1]
    if limit == "devices":
        session.tenant = client.tenant = Tenant("alice", quota=Quota(devices=2 * HERE.mesh.size))
    else:
        monkeypatch.setattr("pathways_ray.controller.quotas.MAX_SLICES", 2)
    kept = tuple(Kept(placed.mesh, "", -1, ()) for placed in session.slices.values())
    core.answered(core.request(1, Suspend(1)), 2)
    come_back(core, Suspension(kept, {}))
    assert set(session.slices) == {one.mesh.id for one in kept}
    assert not session.replacing


@pytest.mark.parametrize("told", [True, False])
def test_what_was_uploaded_and_dropped_before_a_move_goes_from_where_it_lies(told: bool) -> None:
    """
    1. An array is uploaded, and dropped, behind a program that is being planned: both messages wait. Or Ctrl-C came
       before its client told of it.
    2. The slice moves meanwhile, since nothing of the session is under way.
    3. Hosts of the island where it was have the array. They drop it.
    """
    core = moving()
    core.core.clients.registrar.plan_if_cheap = lambda request: None
    core.core.clients.registrar.check = lambda functions: None
    where = {device.host: 1 for device in HERE.devices}
    calls = [Put(6, HERE.mesh.id, KIND, (), where)] if told else []
    register = Register(1, graph_of(HERE.mesh.id), FUNCTIONS)
    waiting = ClientMessages(1, Carrier.STREAM, 10, [register, *calls, Free((6,))])
    (plan,) = of(Plan, core.handle(waiting))
    core.from_island(HERE.island, *(Stored(host, 1, 6, HERE.mesh.id, KIND, ()) for host in where))
    core.answered(core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),))), True)
    found = core.handle(Planned(plan.call, answer(plan.request)))
    assert SendIsland(HERE.island, Drop(1, (6,))) in found
    assert 6 not in core.core.launches.sessions[1].buffers


def test_an_upload_is_dropped_on_no_more_hosts_than_its_slice_has_devices() -> None:
    """Whatever hosts its client names: each of them would have its island do something."""
    core = moving()
    nobody = {1000 + k: 1 for k in range(len(HERE.devices))}
    there = {device.host: 1 for device in THERE.devices}
    put = Put(6, HERE.mesh.id, KIND, (), nobody | there)
    found = core.handle(ClientMessages(1, Carrier.STREAM, 10, [put]))
    assert [command for command in of(SendIsland, found) if isinstance(command.message, Drop)] == [
        SendIsland(HERE.island, Drop(1, (6,)))
    ]


def test_a_session_that_gave_way_takes_no_memory_before_it_is_back() -> None:
    """A hostile one uploads to a slice that it had: the session for which it gave way would wait for ever."""
    core = moving()
    session = core.core.launches.sessions[1]
    assert reply(core.answered(core.request(1, Suspend(1, True)), 0)) == Accepted()
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Put(6, HERE.mesh.id, KIND, ())]))
    refused = session.why_refused(6)
    assert refused is not None
    assert (refused.kind, session.buffers, session.device_bytes) == ("SessionSuspended", {}, 0)
    core.core.launches.add_slice(1, HERE)
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Put(7, HERE.mesh.id, KIND, ())]))
    assert session.buffers.keys() == {7}


def test_a_session_that_gave_way_may_be_left_to_its_user() -> None:
    """No island can hold its slices: it is not called back any more, though it has been suspended all the while."""
    core = moving()
    session = core.core.launches.sessions[1]
    for gives_way in (True, False):
        assert reply(core.answered(core.request(1, Suspend(1, gives_way)), 0)) == Accepted()
        assert (session.suspended, session.gives_way) == (True, gives_way)


def test_clients_hear_again_and_again_what_has_to_move() -> None:
    core = moving()
    core.answered(core.request(None, DrainIsland(0, HERE.island, 60.0)), encode(Accepted()))
    told = [message for message in sent(core.tick(1.0)) if isinstance(message, Vacate)]
    assert told == [Vacate((HERE.mesh.id,))]
    assert not [message for message in sent(core.tick(2.0)) if isinstance(message, Vacate)]
    assert Vacate((HERE.mesh.id,)) in sent(core.tick(1.0 + AGAIN_S))
    core.core.launches.remove_slice(1, HERE.mesh.id)
    assert not [message for message in sent(core.tick(1.0 + 2 * AGAIN_S)) if isinstance(message, Vacate)]


def test_slices_of_a_lost_island_have_to_move() -> None:
    core = moving()
    moves = core.core.requests.changes.moves
    host = next(host for host, island in ISLAND_OF_HOST.items() if island == HERE.island)
    core.from_island(HERE.island, HostDown(host, 1, "its process ended"))
    assert Vacate((HERE.mesh.id,)) not in sent([*moves.tick(moves.lost_after_s)[0]])
    assert Vacate((HERE.mesh.id,)) in sent([*moves.tick(moves.lost_after_s + AGAIN_S)[0]])


def test_an_island_that_was_removed_is_forgotten_once_its_slices_have_moved() -> None:
    """What lay there is lost at once."""
    core = moving()
    commands = core.answered(core.request(None, RemoveIsland(0, HERE.island)), encode(Accepted()))
    assert reply(commands) == Accepted()
    assert [m.buffers for m in sent(commands) if isinstance(m, BuffersLost)] == [(5,)]
    assert Vacate((HERE.mesh.id,)) in sent(core.tick(1.0))
    there = {host for host, island in ISLAND_OF_HOST.items() if island == HERE.island}
    assert there <= set(core.core.launches.hosts)
    core.answered(core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),))), True)
    core.core.launches.remove_slice(1, 77)
    core.tick(2.0 + AGAIN_S)
    assert there.isdisjoint(core.core.launches.hosts)


def test_a_part_is_exchanged_for_a_part_with_what_both_are_parts_of() -> None:
    """1. A part is not exchanged with its own slice, which would become a part of itself, nor with another one that has
    no parts. 2. With what it is a part of, it is exchanged for a part."""
    core = moving()
    here, there = HERE.mesh.id, THERE.mesh.id
    for number, of_slice in ((88, HERE), (89, THERE)):
        core.core.launches.add_slice(1, part_of(of_slice, number), within=of_slice.mesh.id)
    session = core.core.launches.sessions[1]
    for pairs in (((here, 88),), ((88, here),), ((here, 89),), ((88, there),), ((88, 89),), ((88, 89), (there, here))):
        found = reply(core.request(1, ExchangeSlices(1, pairs)))
        assert isinstance(found, Refused), pairs
        assert "is a part of another one" in found.failure.message
    found = reply(core.answered(core.request(1, ExchangeSlices(1, ((here, there), (88, 89)))), True))
    assert isinstance(found, SlicesExchanged)
    assert session.parts == {88: here, 89: there}


def test_a_part_that_is_not_exchanged_goes_with_its_devices() -> None:
    """Its last handle may have gone. It counts as a part of the slice that has its devices, and is released with it."""
    core = moving()
    here, there = HERE.mesh.id, THERE.mesh.id
    launches = core.core.launches
    session = launches.sessions[1]
    for number, of_slice in ((88, HERE), (89, HERE), (90, THERE), (91, THERE)):
        launches.add_slice(1, part_of(of_slice, number), within=of_slice.mesh.id)
    launches.add_slice(1, part_of(HERE, 92), within=88)
    exchanged = core.answered(core.request(1, ExchangeSlices(1, ((here, there), (89, 90)))), True)
    assert isinstance(reply(exchanged), SlicesExchanged)
    assert session.parts == {88: there, 89: here, 90: there, 91: here, 92: 88}
    launches.remove_slice(1, there)
    assert session.slices.keys() == {here, 89, 91}


@pytest.mark.parametrize("pairs", [((88, 89),), ((88, 89), (HERE.mesh.id, THERE.mesh.id))])
def test_parts_of_one_slice_are_exchanged_with_it_or_alone(pairs: tuple[tuple[int, int], ...]) -> None:
    """They stay parts of the slice that has their devices."""
    core = moving()
    launches = core.core.launches
    for number in (88, 89):
        launches.add_slice(1, part_of(HERE, number), within=HERE.mesh.id)
    assert isinstance(reply(core.answered(core.request(1, ExchangeSlices(1, pairs)), True)), SlicesExchanged)
    assert launches.sessions[1].parts == dict.fromkeys((88, 89), pairs[-1][-1] if len(pairs) > 1 else HERE.mesh.id)


def test_a_part_that_is_released_while_it_moves_comes_back_with_its_slice() -> None:
    """1. It is on the devices that its slice has by then. 2. So is its successor, which goes with either."""
    core = moving()
    here, there = HERE.mesh.id, THERE.mesh.id
    launches = core.core.launches
    for number, of_slice in ((88, HERE), (89, THERE)):
        launches.add_slice(1, part_of(of_slice, number), within=of_slice.mesh.id)
    launches.remove_slice(1, 88)
    exchanged = core.answered(core.request(1, ExchangeSlices(1, ((here, there), (88, 89)))), True)
    assert isinstance(reply(exchanged), SlicesExchanged)
    assert launches.sessions[1].parts == {88: here, 89: here}


@pytest.mark.parametrize("change", ["released", "moved"])
def test_a_part_whose_slice_went_while_it_was_made_is_given_back(change: str) -> None:
    """Its devices would be no slice's but its own, and count for nobody."""
    core = moving()
    session = core.core.launches.sessions[1]
    one = msgspec.structs.replace(HERE.mesh, id=88)
    asked = core.request(1, CreateSlice(1, one.shape, one.axes, -1, "", "", HERE.mesh.id, tuple(range(one.size))))
    if change == "released":
        core.answered(core.request(1, ReleaseSlice(1, HERE.mesh.id)), True)
    else:
        core.answered(core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),))), True)
    found = core.answered(asked, encode(SliceCreated(HERE.on_devices_of(one))))
    refused = reply(found)
    assert isinstance(refused, Refused)
    assert refused.failure.message == "slice 1 was released, or moved, while a part of it was made"
    assert [(call.method, call.arguments) for call in of(CallManager, found)] == [("release_slice", (1, 88))]
    assert (88 in session.slices, session.parts) == (False, {})


def test_a_slice_that_was_given_back_is_not_exchanged_while_arrays_are_left_on_it() -> None:
    """They would be said to lie on the slice that it is exchanged for, which stays on devices of its own."""
    core = moving()
    session = core.core.launches.sessions[1]
    core.core.launches.remove_slice(1, HERE.mesh.id)
    pairs = ((HERE.mesh.id, 77),)
    refused = reply(core.request(1, ExchangeSlices(1, pairs)))
    assert isinstance(refused, Refused)
    assert refused.failure.message.startswith("slices [1] were released, and arrays on them stay where they are")
    assert session.buffers[5].type.slice == HERE.mesh.id
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((5,))]))
    assert isinstance(reply(core.answered(core.request(1, ExchangeSlices(1, pairs)), True)), SlicesExchanged)


def test_a_slice_that_was_given_back_gets_no_devices_of_one_that_is_replaced() -> None:
    """
    1. Slice 77 is to take the place of slice 1, beyond the quota. A slice that was given back is exchanged for neither
       of them, or it could be replaced too, and so on.
    2. Once slice 1 is gone, slice 77 is one as others: it may be exchanged for it, or for another one.
    """
    for back in (HERE.mesh.id, 88):
        core = moving()
        launches = core.core.launches
        session = launches.sessions[1]
        core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((5,))]))
        launches.add_slice(1, msgspec.structs.replace(HERE, mesh=msgspec.structs.replace(HERE.mesh, id=88)))
        launches.remove_slice(1, 88)
        for other in (HERE.mesh.id, 77):
            refused = reply(core.request(1, ExchangeSlices(1, ((88, other),))))
            assert isinstance(refused, Refused)
            assert f"slice {other} is to take the place of another one, or another one its place" in (
                refused.failure.message
            )
        launches.remove_slice(1, HERE.mesh.id)
        assert isinstance(
            reply(core.answered(core.request(1, ExchangeSlices(1, ((back, 77),))), True)), SlicesExchanged
        )
        assert session.replacing == {77: back}
        again = reply(core.request(1, ExchangeSlices(1, ((HERE.mesh.id + 88 - back, 77),))))
        assert isinstance(again, Refused)
        assert "slice 77 is to take the place of another one" in again.failure.message


def test_a_slice_that_was_given_back_takes_no_place_of_a_part_alone() -> None:
    """
    1. It would be a part for the controller, and a slice of its own for the resource manager.
    2. The part's own slice is released: the session has nothing left, so nothing can become a part of itself.
    """
    core = moving()
    launches = core.core.launches
    session = launches.sessions[1]
    launches.add_slice(1, part_of(THERE, 89), within=THERE.mesh.id)
    launches.remove_slice(1, HERE.mesh.id)
    core.handle(ClientMessages(1, Carrier.STREAM, 10, [Free((5,))]))
    found = reply(core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 89),))))
    assert isinstance(found, Refused)
    assert "is a part of another one" in found.failure.message
    launches.remove_slice(1, THERE.mesh.id)
    assert (session.slices, session.parts) == ({}, {})


def test_a_program_that_was_planned_while_its_slice_moved_is_refused() -> None:
    """Its plan is for the devices that the slice had."""
    core = moving()
    core.core.clients.registrar.plan_if_cheap = lambda request: None
    core.core.clients.registrar.check = lambda functions: None
    register = Register(1, graph_of(HERE.mesh.id), FUNCTIONS)
    (plan,) = of(Plan, core.handle(ClientMessages(1, Carrier.STREAM, 10, [register])))
    core.answered(core.request(1, ExchangeSlices(1, ((HERE.mesh.id, 77),))), True)
    core.handle(Planned(plan.call, answer(plan.request)))
    failure = core.core.launches.sessions[1].programs[1].failure
    assert failure is not None
    assert failure.message == "a slice of the program moved while the program was planned; register it again"
