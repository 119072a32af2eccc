"""The view of an island: what is with the hosts, what waits and where, and what hosts say of themselves."""

from __future__ import annotations

from pathways_ray.observe import views
from pathways_ray.scheduler.events import ToController
from pathways_ray.transport.messages import (
    Account,
    Compiling,
    Done,
    Heartbeat,
    HostUp,
    Inspect,
    Inspected,
    IslandLaunch,
    Program,
    Running,
)
from tests.unit.scheduler.island import Island, devices


def island() -> Island:
    """One host with two devices, two tenants with a program each on the same devices; two launches go to the hosts."""
    made = Island([0], 128)
    made.host_up(HostUp(0, 1, "", "", 2, 10))
    for session, tenant in ((1, "alice"), (2, "bob")):
        made.from_controller(Account(session, tenant, 1.0, 0))
        name = f"{tenant}'s"
        made.from_controller(Program(session, b"", {}, name=name, devices=devices("0.0", "0.1"), computations=14))
    return made


def launch(made: Island, sequence: int, session: int) -> None:
    made.from_controller(IslandLaunch(sequence, session, session, (), 0))


def view(made: Island, *sequences: int) -> views.IslandView:
    (command,) = made.from_controller(Inspect(7, sequences))
    assert isinstance(command, ToController)
    message = command.message
    assert isinstance(message, Inspected)
    assert (message.look, message.island) == (7, 0)
    return views.ISLAND_VIEW.decode(message.view)


def test_a_view_has_what_is_with_the_hosts_and_what_waits() -> None:
    """1. Bob's launches fill the devices. 2. Alice's two wait: the first is behind bob's, the second behind both."""
    made = island()
    for sequence in (1, 2, 3):
        launch(made, sequence, 2)
    launch(made, 4, 1)
    launch(made, 5, 1)
    made.now = 2.0
    found = view(made, 4, 5)
    assert [(one.sequence, one.tenant, one.program) for one in found.dispatched] == [
        (1, "bob", "bob's"),
        (2, "bob", "bob's"),
    ]
    assert {one.age_s for one in found.dispatched} == {2.0}
    assert found.dispatched[0].devices == ("0.0", "0.1")
    assert [(queue.tenant, queue.head, queue.launches) for queue in found.queues] == [("bob", 3, 1), ("alice", 4, 2)]
    assert found.places == (views.Place(4, 3, 1), views.Place(5, 4, 1))


def test_a_view_has_what_hosts_say() -> None:
    made = island()
    launch(made, 1, 2)
    made.from_host(0, 1, Compiling(0, 1))
    stands = views.Stopped(1, "AT_BARRIER", (), (5,))
    upload = views.Arriving(1, 3, 40, 64)
    made.now = 4.0
    made.from_host(0, 1, Heartbeat(0, 1.0, (Running(1, 1500),), (), (stands,), (upload,)))
    found = view(made)
    assert found.running == (views.Running(0, 1, 1.5),)
    made.from_host(0, 1, Done((1,)))
    assert view(made).running == (), "also before the next heartbeat"
    assert found.stopped == (views.StoppedOn(0, stands),)
    assert found.uploads == (views.ArrivingAt(0, upload),)
    assert [(one.host, one.program, one.name) for one in found.compiling] == [(0, 1, "alice's")]


def test_absent_hosts_are_named_and_what_they_said_is_forgotten() -> None:
    made = island()
    made.from_host(0, 1, Heartbeat(0, 1.0, (), (), (views.Stopped(1, "AT_BARRIER"),)))
    made.host_lost(0, 1)
    found = view(made)
    assert (found.hosts, found.absent, found.stopped) == ((0,), (0,), ())


def test_a_view_has_the_events_of_the_launches_asked_for() -> None:
    made = island()
    launch(made, 1, 2)
    launch(made, 2, 2)
    made.now = 1.0
    assert view(made).story == ()
    assert view(made, 2).story == ("scheduler 0: 1.000 s before: dispatched session 2 launch 2: bob's",)


def test_a_view_of_many_sessions_is_bounded() -> None:
    made = island()
    launch(made, 1, 2)
    launch(made, 2, 2)
    for session in range(100, 100 + views.MAX_SESSIONS + 5):
        made.from_controller(Account(session, f"t{session}", 1.0, 0))
        made.from_controller(IslandLaunch(session, session, 1, (), 0))
    found = view(made)
    assert len(found.queues) == views.MAX_SESSIONS
