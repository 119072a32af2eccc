"""The order check, and the hosts that ignore the island's order, which integration tests use to see that it matters."""

from __future__ import annotations

from types import SimpleNamespace

from pathways_ray.executor.profiling.order_check import OrderReporter
from pathways_ray.executor.run.host_plan import HostPlan
from pathways_ray.transport.messages import Drop, Gang, IslandLaunch, Message, Ordered, Peers, ToHost
from tests.integration.disordered.orders import ignoring_order
from tests.unit.helpers import Sketch


def run(session: int, sequence: int) -> IslandLaunch:
    return IslandLaunch(sequence, session, session, (), 0)


BATCH: list[ToHost] = [Peers(()), run(1, 1), run(2, 2), Drop(1, (5,)), run(1, 3), run(2, 4)]


def test_neighbours_put_sessions_in_different_orders() -> None:
    even, odd = ignoring_order(BATCH, 0), ignoring_order(BATCH, 1)
    assert [m.sequence for m in even if isinstance(m, IslandLaunch)] == [1, 3, 2, 4]
    assert [m.sequence for m in odd if isinstance(m, IslandLaunch)] == [2, 4, 1, 3]


def test_each_session_keeps_its_own_order_and_nothing_is_lost() -> None:
    for place in (0, 1):
        changed = ignoring_order(BATCH, place)
        assert sorted(map(repr, changed)) == sorted(map(repr, BATCH))
        mine = [m for m in changed if getattr(m, "session", 0) == 1]
        assert mine == [run(1, 1), Drop(1, (5,)), run(1, 3)]


def test_launches_of_one_session_stay_as_they_are() -> None:
    batch: list[ToHost] = [run(1, 1), Drop(1, (5,)), run(1, 2)]
    assert ignoring_order(batch, 1) == batch


def test_gangs_are_reported_with_their_hosts_and_nothing_else_is() -> None:
    """Island hosts are 4 and 6. Gang 0 is on both, gang 1 on host 6 only, which is the second: bit 1."""
    sketch = Sketch()
    both, one = sketch.slice("4.0", "6.0"), sketch.slice("6.0")
    first = sketch.call("f", sketch.argument(both), slice=both)
    second = sketch.call("g", sketch.argument(one), slice=one)
    plan = sketch.planned(first, second).plans[0]
    sent: list[Message] = []
    for host in (4, 6):
        reporter = OrderReporter(host, (4, 6), sent.append)
        program = SimpleNamespace(plan=HostPlan(plan, host, multi_host=True))
        reporter.started(run(1, 3))
        for first_step, last_step in ((0, 1), (1, len(program.plan.whole.steps)), (0, 0)):
            reporter.enqueued(run(1, 3), program, first_step, last_step)  # type: ignore[arg-type]
    assert sent == [
        Ordered(4, (Gang(3, 0, 0b11),)),
        Ordered(6, (Gang(3, 0, 0b11),)),
        Ordered(6, (Gang(3, 1, 0b10),)),
    ]
