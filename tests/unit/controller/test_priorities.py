"""Launches that pass others at the controller, where they wait for room."""

from __future__ import annotations

from typing import Any

import pytest

from pathways_ray.controller.events import Turn
from pathways_ray.controller.state import Send, SendIsland
from pathways_ray.errors import WireError
from pathways_ray.transport.messages import (
    TO_CONTROLLER,
    IslandLaunch,
    Launch,
    PrioritizedIslandLaunch,
    PrioritizedLaunch,
    encode,
)
from tests.unit.controller.harness import Harness, program_over
from tests.unit.controller.test_decisions import Deciding, branching
from tests.unit.controller.test_turns import say, with_sessions

ACROSS, HERE = 1, 2


def numbers(commands: list[Send]) -> list[tuple[int, int]]:
    """The islands that get launches, and the first of the buffers that these make."""
    found = []
    for command in commands:
        message: Any = command.message if isinstance(command, SendIsland) else None
        if isinstance(message, PrioritizedIslandLaunch):
            message = message.launch
        if isinstance(message, IslandLaunch):
            assert isinstance(command, SendIsland)
            found.append((command.island, message.results))
    return found


class Urgent(Harness):
    def call(self, launch: int, given: tuple[int, ...], results: int, program: int, priority: int = 10) -> list[Send]:
        message = PrioritizedLaunch(launch, program, given, results, priority)
        return self.checked(self.launches.admission.call(self.launches.sessions[1], message))


@pytest.fixture
def front() -> Urgent:
    """A session that may have one launch under way, and has it: number 1 in the sequence."""
    front = Urgent(max_in_flight=1)
    front.register(program_over(1, 2, key=ACROSS), ACROSS)
    front.register(program_over(1, key=HERE), HERE)
    front.put(10)
    assert numbers(front.launch(1, (10,), 20, HERE)) == [(0, 20)]
    return front


def test_launches_over_several_islands_pass_others_before_they_have_a_number(front: Urgent) -> None:
    """So all islands see one order."""
    front.launch(2, (10,), 21, ACROSS)
    front.launch(3, (10,), 22, ACROSS)
    front.call(4, (10,), 23, ACROSS)
    ended = [front.done(0, 1), *(front.done(0, k) + front.done(1, k) for k in (2, 3))]
    assert [numbers(one) for one in ended] == [[(0, first), (1, first)] for first in (23, 21, 22)]


def test_it_does_not_pass_what_it_takes(front: Urgent) -> None:
    front.launch(2, (10,), 21, HERE)
    front.put(11)
    front.launch(3, (10,), 22, HERE)
    front.launch(4, (10,), 23, HERE)
    front.call(5, (11,), 24, HERE)
    front.call(6, (22,), 25, HERE)
    order = []
    for sequence in range(1, 6):
        order += [results for _, results in numbers(front.done(0, sequence))]
    assert order == [21, 24, 22, 25, 23]


def test_an_urgent_launch_passes_one_that_is_undecided_on_its_islands() -> None:
    front = Deciding(branching())
    front.register(program_over(2, key=1 << 30), 7)
    front.launch(1, (11, 12), 20)
    front.launch(2, (12,), 30, program=7)
    assert front.launches.backlog(1) == 2, "it waits behind the one that is undecided, as it is on its islands"
    message = PrioritizedLaunch(3, 7, (12,), 31, 5)
    commands = front.checked(front.launches.admission.call(front.launches.sessions[1], message))
    assert numbers(commands) == [(1, 31)]
    blocked = PrioritizedLaunch(4, 7, (20,), 32, 5)
    assert numbers(front.launches.admission.call(front.launches.sessions[1], blocked)) == [], "it takes its result"


def test_parts_of_a_launch_that_decides_have_its_priority() -> None:
    front = Deciding(branching())
    message = PrioritizedLaunch(1, 1, (11, 12), 20, 5)
    first = front.checked(front.launches.admission.call(front.launches.sessions[1], message))
    (sent,) = [c.message for c in first if isinstance(c, SendIsland)]
    assert isinstance(sent, PrioritizedIslandLaunch)
    assert sent.priority == 5
    further = [c.message for c in front.decided(sent.launch.sequence, 1) if isinstance(c, SendIsland)]
    launches = [m for m in further if isinstance(m, IslandLaunch | PrioritizedIslandLaunch)]
    assert launches
    assert all(isinstance(m, PrioritizedIslandLaunch) for m in launches)


@pytest.mark.parametrize("priority", [101, -101, True, 1.5])
def test_no_other_priorities_are_taken(priority: Any) -> None:
    with pytest.raises(WireError, match="refused"):
        TO_CONTROLLER.decode(encode(PrioritizedLaunch(1, 1, (), 1, priority)))


def test_a_launch_that_may_pass_many_is_more_work() -> None:
    """
    1. 1,000 launches wait, of one that may be under way. Of a batch of urgent ones, each of which looks at them all, a
       turn takes two.
    2. So it does of the plain ones behind these, which look for their place too.
    """
    core = with_sessions(1)
    core.turning = True
    core.core.launches.admission.max_in_flight = 1
    say(core, 1, *[Launch(k, 1, (1,), 100 + k) for k in range(1001)])
    core.turning = False
    backlog = core.core.launches.admission.backlogs[1]
    urgent = [PrioritizedLaunch(2000 + k, 1, (1,), 3000 + k, 100) for k in range(2)]
    say(core, 1, *urgent, *[Launch(4000 + k, 1, (1,), 5000 + k) for k in range(4)])
    waiting = [len(backlog.waiting)]
    for _ in range(2):
        core.handle(Turn())
        waiting.append(len(backlog.waiting))
    assert waiting == [1002, 1004, 1006]
