"""A host that has lost its scheduler and comes back: its own list beside the controller's tables."""

from __future__ import annotations

from typing import Any

from pathways_ray import limits
from pathways_ray.controller.backlog import MAX_DEFERRED_CALLS
from pathways_ray.controller.state import MAX_NAMED, Named, Send
from pathways_ray.transport.messages import (
    Abort,
    BuffersLost,
    Drop,
    DropProgram,
    DropSession,
    Holds,
    HostAddress,
    HostUp,
    IslandLaunch,
    Launch,
    LaunchFailed,
    Peers,
    Stored,
)
from tests.unit.controller.harness import Harness, program_over, to_client, to_island
from tests.unit.helpers import VECTOR

ISLAND, HOST = 1, 2


def without_scheduler(front: Harness) -> list[Send]:
    """The scheduler of island 1 ends, which has host 2 alone."""
    front.launches.tables.now = 10.0
    return front.checked(front.launches.scheduler_lost([front.launches.hosts[HOST]], "its island's scheduler ended"))


def back(front: Harness, *, epoch: int = 1, programs: tuple[int, ...] = (), uploads: Any = (), **held: Any) -> Any:
    """Host 2 comes back. Args: held: the numbers of its buffers, by session, as in `s1`."""
    holds = Holds({int(name[1:]): tuple(numbers) for name, numbers in held.items()}, programs, uploads)
    found = front.launches.host_back(ISLAND, HostUp(HOST, epoch, "t", "d", 2, 1, holds=holds), holds, {})
    return None if found is None else front.checked(found)


def test_a_scheduler_takes_the_launches_with_it_and_no_array() -> None:
    """
    1. Its island has a launch, which fails at once. Its host is away, and no client is told that it is gone.
    2. It comes back with what it had: everybody may use it again, and nothing is lost.
    """
    front = Harness()
    program = front.register(program_over(2), 1)
    front.put(1, slice=2)
    front.launch(1, (1,), 2)
    commands = without_scheduler(front)
    (failed,) = to_client(commands)
    assert isinstance(failed, LaunchFailed)
    assert failed.failure.kind == "HostLost"
    assert not to_client(commands, kind=HostAddress)
    assert HOST not in {peer.host for peer in to_island(commands, 0, Peers)[-1].peers}
    assert front.launches.sessions[1].lives(1)
    commands = back(front, s1=[1], programs=(program.key,))
    assert to_client(commands, kind=BuffersLost) == []
    assert HOST in {peer.host for peer in to_island(commands, 0, Peers)[-1].peers}
    front.ready(program, HOST)
    assert len(to_island(front.launch(2, (1,), 3), ISLAND, IslandLaunch)) == 1


def test_what_nobody_wants_is_taken_from_a_host_that_comes_back() -> None:
    """A result of the failed launch, a buffer that was freed meanwhile, a session that ended, a program that is gone;
    and the failed launch itself."""
    front = Harness()
    program = front.register(program_over(2), 1)
    for buffer in (1, 5):
        front.put(buffer, slice=2)
    front.launch(1, (1,), 2)
    without_scheduler(front)
    front.free(5)
    messages = to_island(back(front, s1=[1, 2, 5], s77=[4], programs=(program.key, 99)), ISLAND)
    assert [m for m in messages if isinstance(m, Drop)] == [Drop(1, (2, 5))]
    assert [m for m in messages if isinstance(m, DropSession)] == [DropSession(77)]
    assert [m for m in messages if isinstance(m, DropProgram)] == [DropProgram(0, 99)]
    (abort,) = [m for m in messages if isinstance(m, Abort)]
    assert abort.launches == ((1, program.key),)


def test_a_host_hears_of_the_oldest_launches_that_failed_with_its_scheduler() -> None:
    """More are under way than its island has at once: the host has the first of them, the others were on their way."""
    front = Harness(max_in_flight=1000)
    program = front.register(program_over(2), 1)
    front.put(1, slice=2)
    for launch in range(1, 601):
        front.launch(launch, (1,), 1 + launch)
    without_scheduler(front)
    (abort,) = to_island(back(front, s1=[1], programs=(program.key,)), ISLAND, Abort)
    assert abort.launches == tuple((sequence, program.key) for sequence in range(1, 601))


def test_what_a_host_has_not_any_more_is_lost_and_the_rest_is_not() -> None:
    front = Harness()
    for buffer in (1, 2):
        front.put(buffer, slice=2)
    front.put(3, slice=1)
    without_scheduler(front)
    (lost,) = to_client(back(front, s1=[1]), kind=BuffersLost)
    assert lost.buffers == (2,)
    assert [front.launches.sessions[1].lives(buffer) for buffer in (1, 2, 3)] == [True, False, True]


def test_a_donation_that_a_launch_may_have_taken_is_lost() -> None:
    front = Harness()
    program = program_over(2)
    program.donated, program.takes_memory = (0,), True
    front.register(program, 1)
    front.put(1, slice=2)
    front.launch(1, (1,), 2)
    (lost,) = to_client(without_scheduler(front), kind=BuffersLost)
    assert lost.buffers == (1,)
    assert to_island(back(front, s1=[1]), ISLAND, Drop) == [Drop(1, (1,))]


def test_an_upload_goes_on_while_the_host_has_no_scheduler() -> None:
    """Its arrival was said to the scheduler that died, or to nobody; the host says it again."""
    front = Harness()
    program = front.register(program_over(2), 1)
    front.put(1, slice=2, arrives=False, epochs={HOST: 1})
    without_scheduler(front)
    assert to_client(front.put(2, slice=2, arrives=False, epochs={HOST: 1})) == []
    uploads = tuple(Stored(HOST, 1, buffer, 2, VECTOR, ()) for buffer in (1, 2))
    commands = back(front, s1=[1, 2], uploads=uploads)
    assert to_client(commands, kind=BuffersLost) == []
    front.ready(program, HOST)
    message = Launch(1, 1, (2,), 3)
    assert len(to_island(front.launches.admission.call(front.launches.sessions[1], message), ISLAND, IslandLaunch)) == 1


def test_an_upload_waits_for_its_turn_while_the_host_has_no_scheduler() -> None:
    """
    1. As many launches are deferred as may be; the client's next upload waits behind them, and arrives on the host.
    2. The host comes back and says so: the upload stays there, and it is whole once it is entered.
    """
    front = Harness(max_in_flight=1000)
    program = front.register(program_over(2), 1)
    front.put(1, slice=2)
    without_scheduler(front)
    for launch in range(1, MAX_DEFERRED_CALLS + 1):
        front.launch(launch, (1,), 100 + launch)
    front.put(2, slice=2, arrives=False, epochs={HOST: 1})
    session = front.launches.sessions[1]
    assert 2 not in session.buffers
    commands = back(front, s1=[1, 2, 3], uploads=(Stored(HOST, 1, 2, 2, VECTOR, ()),))
    assert to_island(commands, ISLAND, Drop) == [Drop(1, (3,))], "nobody uploads that"
    front.ready(program, HOST)
    assert session.lives(2)
    assert session.arriving == {}


def test_a_host_that_is_not_awaited_has_to_begin_anew() -> None:
    front = Harness()
    assert back(front) is None, "it has a scheduler"
    without_scheduler(front)
    assert back(front, epoch=7) is None


def test_a_host_that_begins_anew_or_stays_away_has_lost_its_arrays() -> None:
    for comes in (True, False):
        front = Harness()
        front.put(1, slice=2)
        without_scheduler(front)
        hosts = front.launches.membership
        if comes:
            commands = front.up(HOST, epoch=2)
        else:
            assert hosts.overdue() == []
            front.launches.tables.now += limits.ORPHAN_LIMIT_S + 1.0
            (host,) = hosts.overdue()
            commands = front.checked(hosts.lose(host, "it did not come"))
            assert hosts.overdue() == []
        assert HostAddress(HOST, 1, "") in to_client(commands)
        (lost,) = to_client(commands, kind=BuffersLost)
        assert lost.buffers == (1,)


def test_an_upload_that_its_client_names_later_stays_on_a_host_that_comes_back() -> None:
    """
    1. An upload arrives, and its client's messages wait for another one, of an island whose host is slow.
    2. Its host loses the scheduler and comes back: the upload stays, and is whole once the client names it.
    3. One that was freed before does not stay, whatever the host remembers of it.
    """
    front = Harness()
    front.put(1, slice=2)
    front.free(1)
    without_scheduler(front)
    uploads = tuple(Stored(HOST, 1, buffer, 2, VECTOR, ()) for buffer in (1, 2))
    commands = back(front, s1=[1, 2], uploads=uploads)
    assert to_island(commands, ISLAND, Drop) == [Drop(1, (1,))]
    front.put(2, slice=2, arrives=False, epochs={HOST: 1})
    session = front.launches.sessions[1]
    assert session.lives(2)
    assert 2 not in session.arriving, "it has arrived"


def test_uploads_are_named_in_any_order() -> None:
    """1. Two threads upload, and the one that began later names its array first. 2. The host of the other array, which
    has it, loses its scheduler and comes back: the array is whole once its client names it."""
    front = Harness()
    front.put(2, slice=2)
    without_scheduler(front)
    uploads = tuple(Stored(HOST, 1, buffer, 2, VECTOR, ()) for buffer in (1, 2))
    assert to_island(back(front, s1=[1, 2], uploads=uploads), ISLAND, Drop) == []
    front.put(1, slice=2, arrives=False, epochs={HOST: 1})
    session = front.launches.sessions[1]
    assert session.lives(1)
    assert 1 not in session.arriving, "it has arrived"


def test_an_upload_that_was_dropped_as_unknown_is_lost_once_its_client_names_it() -> None:
    """1. An upload counts as named, since many behind it were, and its host drops it as it comes back. 2. Its client
    names it, and hears that it is lost: who fetches it would wait without end."""
    front = Harness()
    session = front.launches.sessions[1]
    session.named = Named(5)
    front.put(1, slice=2)
    without_scheduler(front)
    uploads = tuple(Stored(HOST, 1, buffer, 2, VECTOR, ()) for buffer in (1, 2))
    assert to_island(back(front, s1=[1, 2], uploads=uploads), ISLAND, Drop) == [Drop(1, (2,))]
    (lost,) = to_client(front.put(2, slice=2, arrives=False, epochs={HOST: 1}), kind=BuffersLost)
    assert (lost.buffers, lost.failure.kind) == ((2,), "BufferLost")
    assert "buffer 2 was dropped from its hosts before" in lost.failure.message
    assert session.lives(1)


def test_old_uploads_count_as_named() -> None:
    named = Named(3)
    for number in range(MAX_NAMED, 0, -1):
        named.add(2 * number)
    assert [number in named for number in (3, 4, 5, 2 * MAX_NAMED, 2 * MAX_NAMED + 1)] == [
        True,
        True,
        False,
        True,
        False,
    ]
    named.add(2 * MAX_NAMED + 1)
    assert len(named.latest) == MAX_NAMED
    assert 2 * MAX_NAMED - 1 in named, "those that were named first are remembered by the highest number"
