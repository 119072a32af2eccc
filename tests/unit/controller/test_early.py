"""Launches that clients hand to hosts, as the controller sees them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pathways_ray.controller.early import NO_HOST, host_of, withdrawn
from pathways_ray.controller.programs import BufferType, PlannedProgram
from pathways_ray.controller.state import HostState, SendIsland, Tables
from pathways_ray.ir.plan import Device
from pathways_ray.ir.types import ArrayType
from pathways_ray.limits import MAX_EARLY_BYTES, MAX_EARLY_TEMPORARY_BYTES
from pathways_ray.transport.messages import Drop, EarlyLaunch, IslandLaunch, Launch, Program
from tests.unit.controller.harness import Harness, failure_of, program_over, to_island

HOST = 7


HERE = Program(1, b"", {}, devices=(Device(HOST, 0),))


def program(message: Program = HERE, **options: Any) -> PlannedProgram:
    """One with a part on island 3, on host 7 alone."""
    given: dict[str, Any] = {"results": (BufferType(ArrayType((2,), "float32"), 1, (), 8),), "messages": {}}
    given["messages"] = {3: message}
    return PlannedProgram(1, 1, "p", **given | options)


def tables(*hosts: int) -> Tables:
    found = Tables()
    for host in hosts:
        found.hosts[host] = HostState(host, 3, 1, "transfer", "data", 1, 100)
    return found


def test_the_only_host_of_an_island_takes_calls() -> None:
    assert host_of(tables(HOST), program()) == HOST


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(program(takes_memory=True), id="takes memory"),
        pytest.param(program(results=()), id="makes nothing to be told by"),
        pytest.param(program(result_bytes=MAX_EARLY_BYTES + 1), id="makes much"),
        pytest.param(program(temporary_bytes={HOST: MAX_EARLY_TEMPORARY_BYTES + 1}), id="takes much inside"),
        pytest.param(program(msgspec.structs.replace(HERE, calls=True)), id="calls host functions"),
        pytest.param(program(messages={3: HERE, 4: HERE}), id="on two islands"),
    ],
)
def test_calls_of_other_programs_are_only_sent(other: PlannedProgram) -> None:
    assert host_of(tables(HOST), other) == NO_HOST


def test_the_first_of_several_hosts_takes_calls_of_programs_in_which_it_has_a_part() -> None:
    assert host_of(tables(HOST + 1, HOST), program()) == HOST
    assert host_of(tables(HOST - 1, HOST), program()) == NO_HOST


def test_a_launch_that_is_refused_leaves_nothing_where_it_was_handed_to() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    launch = EarlyLaunch(1, 1, (99,), 2)
    commands = front.launches.admission.call(front.launches.sessions[1], launch)
    assert failure_of(commands).kind == "BufferDeleted"
    assert to_island(commands, 0) == [Drop(1, (2,))]


def test_one_that_was_only_sent_takes_nothing_back() -> None:
    session = Harness().launches.sessions[1]
    assert withdrawn(session, program(), Launch(1, 1, (), 2)) == []
    assert withdrawn(session, None, EarlyLaunch(1, 1, (), 2)) == []
    assert withdrawn(session, program(), EarlyLaunch(1, 1, (), 2)) == [SendIsland(3, Drop(1, (2,)))]


def test_what_was_covers_of_calls_that_left_as_one_goes_with_them() -> None:
    session = Harness().launches.sessions[1]
    as_one = EarlyLaunch(9, 1, (), 4, covers=(2, 3, 4))
    assert withdrawn(session, program(), as_one) == [SendIsland(3, Drop(1, (2, 3, 4)))]


def test_hosts_hear_which_calls_left_as_one() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(1)
    launch = EarlyLaunch(9, 1, (1,), 4, covers=(2, 3, 4))
    (sent,) = to_island(front.launches.admission.call(front.launches.sessions[1], launch), 0, IslandLaunch)
    assert sent.covers == (2, 3, 4)
