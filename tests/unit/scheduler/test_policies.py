"""What tenants get: an island under load, its devices played by the test."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict

import pytest

from pathways_ray.errors import UsageError
from pathways_ray.ir.plan import Device
from pathways_ray.scheduler.devices import CONTENDED_WINDOW_S
from pathways_ray.scheduler.events import ToController, ToHosts
from pathways_ray.scheduler.plugins import policy_named
from pathways_ray.scheduler.policies import (
    OPERATOR,
    POLICIES,
    Candidate,
    Ledger,
    Policy,
    Usage,
    check_policy,
    fifo,
    priority,
    share,
)
from pathways_ray.simulation.tables import check_order
from pathways_ray.transport.messages import Account, Done, HostUp, IslandLaunch, Program
from tests.drawn import some
from tests.unit.scheduler.island import Island, devices

BOTH = devices("0.0", "0.1")


class Devices:
    """One host whose devices run launches first in, first out, each program for the time it takes.

    Every tenant is session k with program k; all use the same devices unless its program names others.
    """

    def __init__(self, policy: Policy, tenants: dict[int, tuple[float, int]], seconds: dict[int, float]) -> None:
        self.island = Island((0,), 128, policy)
        self.seconds = seconds
        self.now = 0.0
        self.free = 0.0
        self.running: list[tuple[float, int, int]] = []
        self.used: dict[int, float] = defaultdict(float)
        self.started: list[int] = []
        self.sequences = itertools.count(1)
        self.island.host_up(HostUp(0, 1, "t", "d", 2, 1))
        for session, (weight, rank) in tenants.items():
            self.island.from_controller(Account(session, f"tenant {session}", weight, rank))
            self.island.from_controller(Program(session, b"", {}, f"p{session}", BOTH))

    def launch(self, session: int, times: int = 1) -> None:
        for _ in range(times):
            self.do(self.island.from_controller(IslandLaunch(next(self.sequences), session, session, (), 0)))

    def do(self, commands: list) -> None:
        for command in commands:
            if isinstance(command, ToHosts) and isinstance(command.message, IslandLaunch):
                run = command.message
                self.started.append(run.session)
                self.free = max(self.free, self.now) + self.seconds[run.session]
                heapq.heappush(self.running, (self.free, run.sequence, run.session))
            if isinstance(command, ToController) and isinstance(command.message, Done):
                check_order(self.island.order)

    def run(self, until: float, backlogged: tuple[int, ...]) -> None:
        """Time passes; the sessions named always have launches waiting."""
        while self.now < until:
            for session in backlogged:
                queue = self.island.order.sessions.get(session)
                if queue is None or len(queue.items) < 4:
                    self.launch(session, 8)
            self.now, sequence, session = heapq.heappop(self.running)
            self.island.tick(self.now)
            self.used[session] += self.seconds[session]
            device_us = round(self.seconds[session] * 1e6)
            self.do(self.island.from_host(0, 1, Done((sequence,), (device_us,))))

    def shares(self) -> dict[int, float]:
        total = sum(self.used.values())
        return {session: used / total for session, used in sorted(self.used.items())}


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8), (5, 1, 1, 1)])
@pytest.mark.parametrize("lengths", some([(0.0002, 0.001, 0.003, 0.0005), (0.001,) * 4, (0.02, 0.001, 0.0001, 0.005)]))
def test_device_time_follows_weights_whatever_launches_take(
    weights: tuple[int, ...], lengths: tuple[float, ...]
) -> None:
    devices = Devices(share, {k: (w, 0) for k, w in enumerate(weights, 1)}, dict(enumerate(lengths, 1)))
    devices.run(10.0, (1, 2, 3, 4))
    for session, weight in enumerate(weights, 1):
        assert devices.shares()[session] == pytest.approx(weight / sum(weights), rel=0.05)


def test_tenants_take_turns_within_milliseconds() -> None:
    """Of four equal tenants with launches of 1 ms, none runs for more than the window of shared devices at a time."""
    devices = Devices(share, dict.fromkeys((1, 2, 3, 4), (1.0, 0)), dict.fromkeys((1, 2, 3, 4), 0.001))
    devices.run(1.0, (1, 2, 3, 4))
    settled = devices.started[200:]
    assert max(len(list(group)) for _, group in itertools.groupby(settled)) <= CONTENDED_WINDOW_S / 0.001


def test_a_tenant_that_was_away_gets_its_share_and_not_what_it_missed() -> None:
    """
    1. For 5 s tenant 1 is alone.
    2. Then both run for 5 s: half each, though tenant 2 has had nothing so far.
    """
    devices = Devices(share, {1: (1.0, 0), 2: (1.0, 0)}, {1: 0.001, 2: 0.001})
    devices.run(5.0, (1,))
    devices.used.clear()
    devices.run(10.0, (1, 2))
    assert devices.shares() == pytest.approx({1: 0.5, 2: 0.5}, rel=0.05)


def test_sessions_of_one_tenant_share_its_weight() -> None:
    devices = Devices(share, {1: (1.0, 0)}, {1: 0.001, 2: 0.001, 3: 0.001})
    for session in (2, 3):
        devices.island.from_controller(Account(session, "both", 1.0, 0))
        devices.island.from_controller(Program(session, b"", {}, "p", BOTH))
    devices.run(5.0, (1, 2, 3))
    assert devices.shares() == pytest.approx({1: 0.5, 2: 0.25, 3: 0.25}, rel=0.05)


def test_a_newcomer_waits_for_no_more_than_what_the_devices_have() -> None:
    """Alone, a tenant may have 0.2 s of work with the hosts; a newcomer's first launch starts behind that at most."""
    devices = Devices(share, {1: (1.0, 0), 2: (1.0, 0)}, {1: 0.01, 2: 0.01})
    devices.run(2.0, (1,))
    begun = len(devices.started)
    devices.launch(2)
    devices.run(2.4, (1,))
    assert 2 in devices.started[begun : begun + 25]


def test_first_in_first_out_keeps_the_order_of_arrival() -> None:
    devices = Devices(fifo, dict.fromkeys((1, 2, 3), (1.0, 0)), dict.fromkeys((1, 2, 3), 0.001))
    for session in (1, 2, 3, 3, 2, 1, 1, 2) * 20:
        devices.launch(session)
    devices.run(0.159, ())
    assert devices.started == [1, 2, 3, 3, 2, 1, 1, 2] * 20


def test_the_higher_priority_goes_first_and_the_lower_one_does_not_starve() -> None:
    """Levels 0 and 3 and launches of 10 ms: the lower one gets one launch every 3 s or so, not none."""
    devices = Devices(priority, {1: (1.0, 0), 2: (1.0, 3)}, {1: 0.01, 2: 0.01})
    devices.run(30.0, (1, 2))
    lower = devices.started.count(1)
    assert 5 <= lower <= 20
    assert devices.started.count(2) > 100 * lower


def test_devices_do_not_wait_for_others() -> None:
    """A tenant whose devices are full does not hold up one with devices of its own."""
    devices = Devices(share, {1: (1.0, 0)}, {1: 1.0, 2: 0.001})
    devices.island.from_controller(Account(2, "other", 1.0, 0))
    devices.island.from_controller(Program(2, b"", {}, "p", (Device(0, 2),)))
    devices.launch(1, 10)
    devices.launch(2)
    assert devices.started[-1] == 2


def test_what_failed_is_charged_as_estimated_and_the_account_stays_finite() -> None:
    ledger = Ledger()
    ledger.open(1, "t", 2.0)
    usage = ledger.of(1)
    ledger.enter(usage)
    ledger.start(usage, 1.0)
    ledger.settle(usage, 1.0, 3.0)
    ledger.leave(usage)
    assert (usage.virtual, usage.device_seconds, usage.busy, ledger.active) == (1.5, 3.0, 0, 0)
    ledger.close(1)
    assert ledger.usages == {"t": usage}, "what it had is not forgotten with its session"
    ledger.close(2)
    ledger.of(3)
    ledger.close(3)
    assert list(ledger.usages) == ["t"], "a session without a tenant leaves nothing"
    assert ledger.device_seconds() == {"t": 3.0}


def test_the_operators_sessions_count_together_and_are_not_forgotten_with_their_end() -> None:
    ledger = Ledger()
    for session, seconds in ((1, 2.0), (2, 3.0)):
        ledger.settle(ledger.of(session), 0.0, seconds)
    assert ledger.device_seconds() == {OPERATOR: 5.0}
    ledger.close(1)
    assert ledger.device_seconds() == {OPERATOR: 5.0}


def test_a_policy_of_ones_own() -> None:
    """The youngest first: a function of a candidate and the time, named where a policy is asked for."""
    found = policy_named("tests.unit.scheduler.test_policies:youngest")
    ranks = [found(Candidate(Usage("t"), arrival, 0.0), 0.0) for arrival in (1, 2)]
    assert ranks == [(-1,), (-2,)]


def youngest(candidate: Candidate, now: float) -> tuple[float, ...]:
    return (-candidate.arrival,)


@pytest.mark.parametrize("name", ["lottery", "module:", ":function", "a b:c", ""])
def test_a_policy_that_is_none_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UsageError, match="fifo, share, priority"):
        check_policy(name)


def test_a_policy_that_cannot_be_imported_is_refused() -> None:
    with pytest.raises(UsageError, match="nowhere:at_all"):
        policy_named("nowhere:at_all")


@pytest.mark.parametrize("name", ["os:getpid", "sys:maxsize", "builtins:print", "builtins:isinstance"])
def test_what_is_no_policy_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"the policy '{name}' (does not rank a candidate|gives .* for a rank)"):
        policy_named(name)


def test_those_there_are() -> None:
    assert set(POLICIES) == {"fifo", "share", "priority", "preempt"}
