"""The calls of a session that wait: what is looked at again with every event is bounded."""

from __future__ import annotations

from pathways_ray.controller.backlog import MAX_DEFERRED_CALLS, MAX_DEFERRED_NUMBERS
from pathways_ray.transport.messages import Free
from tests.unit.controller.harness import Harness, program_over

ARGUMENTS = 1000


def test_a_buffer_that_is_named_again_and_again_counts_as_often() -> None:
    """Deferred launches of many arguments are few, also where all of these are one buffer."""
    front = Harness()
    front.register(program_over(1, arguments=ARGUMENTS), 1)
    front.put(5, arrives=False)
    backlog = front.launches.admission.backlogs[1]
    for launch in range(MAX_DEFERRED_CALLS):
        front.launch(launch, (5,) * ARGUMENTS, 100 + launch)
    assert len(backlog.deferred) == -(-MAX_DEFERRED_NUMBERS // (ARGUMENTS + 1))
    assert not backlog.may_be_passed
    front.stored(0, 5)
    assert (backlog.size, backlog.named, front.launches.flying(1)) == (0, 0, MAX_DEFERRED_CALLS)


def test_freed_buffers_that_wait_count_as_often_as_they_are_named() -> None:
    front = Harness()
    front.register(program_over(1), 1)
    front.put(5, arrives=False)
    front.launch(1, (5,), 100)
    backlog = front.launches.admission.backlogs[1]
    for _ in range(MAX_DEFERRED_CALLS // 2):
        front.launches.admission.call(front.launches.sessions[1], Free((5,) * 4096))
    assert len(backlog.deferred) == 3
