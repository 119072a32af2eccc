"""Programs that leave once more, or no more: which functions the controller has of them."""

from __future__ import annotations

from pathways_ray.client.core import ClientCore
from pathways_ray.client.events import Registered
from pathways_ray.client.renewals import Renewals
from pathways_ray.errors import Failure
from pathways_ray.transport import messages as wire
from tests.unit.client.test_coalesce import loop
from tests.unit.helpers import Sketch


def registered(program: int, **functions: bytes) -> Registered:
    sketch = Sketch(f"p{program}")
    where = sketch.slice("0.0")
    return Registered(program, sketch.graph(sketch.call("f", sketch.argument(where), slice=where)), b"g", functions)


def test_functions_are_sent_again_once_no_program_named_them() -> None:
    renewals = Renewals()
    for event in (registered(1, f=b"1", g=b"2"), registered(2, g=b"2")):
        renewals.filled(renewals.registered(event))
    assert renewals.unregistered(1) == wire.Unregister(1, ("f",))
    assert renewals.functions == {"g": b"2"}
    assert renewals.filled(renewals.registered(registered(3, f=b"1", g=b"2"))).functions == {"f": b"1"}
    assert renewals.unregistered(2) == wire.Unregister(2)
    assert renewals.unregistered(2) == wire.Unregister(2)
    assert renewals.unregistered(3) == wire.Unregister(3, ("f", "g"))
    assert (renewals.programs, renewals.functions, renewals.sent, renewals.stale) == ({}, {}, set(), set())


def leaving(core: ClientCore) -> list[wire.Message]:
    """What the queue sends."""
    found: list[wire.Message] = []
    while (commands := core.head(0.0)) is not None:
        found += [command for command in commands if isinstance(command, wire.Message)]
        core.remove_head()
    return found


def test_the_next_registration_says_what_was_dropped() -> None:
    """A destructor may do no more than note it. It leaves behind launches that wait, and another controller, which has
    no program, is told nothing false."""
    core = ClientCore(1, 64)
    core.handle(registered(1, f=b"1"), 0.0)
    leaving(core)
    core.handle(wire.Prepared(1, 7, 0), 0.0)
    core.early.allowed(0, True)
    assert core.early.may_hand(1, 1)
    core.dropped.append(1)
    assert leaving(core) == []
    core.handle(registered(2, f=b"1"), 0.0)
    assert leaving(core) == [wire.Unregister(1), wire.Register(2, b"g", {})]
    assert not core.early.may_hand(1, 1)
    core.dropped.append(2)
    core.renewals.controller_lost()
    core.handle(registered(3, f=b"1"), 0.0)
    assert leaving(core) == [wire.Unregister(2), wire.Register(3, b"g", {"f": b"1"})]
    assert core.renewals.programs.keys() == {3}


def test_a_program_that_was_refused_for_what_may_pass_leaves_with_the_next_launch_and_all_its_functions() -> None:
    """The controller took nothing of it, so other programs that name a function of it send that again too."""
    core = ClientCore(1, 64)
    for event in (registered(1, f=b"1", g=b"2"), registered(2, g=b"2")):
        core.handle(event, 0.0)
    leaving(core)
    refused, full = Failure("GraphError", "it has a cycle"), Failure("QuotaExceeded", "the tenant holds too much")
    for launch, failure, again in ((1, refused, 0), (2, full, 1)):
        assert core.launch(1, (), core.new_buffers(1)) == wire.Launch(launch, 1, (), launch)
        core.handle(wire.LaunchFailed(launch, failure, again=again), 0.0)
    assert core.launch(1, (), core.new_buffers(1)) is None
    assert leaving(core) == [wire.Register(1, b"g", {"f": b"1", "g": b"2"}), wire.Launch(3, 1, (), 3)]
    assert core.launch(2, (), core.new_buffers(1)) == wire.Launch(4, 2, (), 4)
    core.handle(wire.LaunchFailed(4, full, again=77), 0.0)
    assert not core.renewals.stale


def test_launches_that_fail_one_after_the_other_have_their_program_sent_once() -> None:
    """1. The first of three has failed, and the fourth takes the program along. 2. Those before it fail too. 3. So does
    the fourth."""
    core = ClientCore(1, 64)
    core.handle(registered(1, f=b"1"), 0.0)
    leaving(core)
    full = Failure("QuotaExceeded", "the tenant holds too much")
    for _ in range(3):
        core.launch(1, (), core.new_buffers(1))
    for failed in (1, 4):
        core.handle(wire.LaunchFailed(failed, full, again=1), 0.0)
        assert core.launch(1, (), core.new_buffers(1)) is None
        assert [type(message) for message in leaving(core)] == [wire.Register, wire.Launch]
        for before in (2, 3):
            core.handle(wire.LaunchFailed(before, full, again=1), 0.0)
            assert not core.renewals.stale


def test_what_was_composed_of_a_program_is_forgotten_with_it() -> None:
    core = ClientCore(1, 64)
    core.handle(registered(1, f=b"1"), 0.0)
    leaving(core)
    core.coalescer._min_occurrences = 1
    made: list[int] = []
    for first in (1_000, 2_000, 3_000):
        for message in core.composed(loop(first, 64, 1, first - 1)):
            if isinstance(message, wire.Launch):
                core.coalescer.measure((message.launch,), (10,), False)
            elif isinstance(message, wire.Register):
                made.append(message.program)
                core.handle(wire.Prepared(message.program, 7, 0), 0.0)
    assert made
    core.dropped.append(1)
    core.handle(registered(2, f=b"1"), 0.0)
    assert {one.program for one in leaving(core) if isinstance(one, wire.Unregister)} == {1, *made}
    assert not core.early._programs
