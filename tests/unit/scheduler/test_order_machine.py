"""Random histories of one island: all hosts see one order, and every launch ends once or is lost with its hosts.

The test plays the controller and the hosts. Several sessions launch programs of this island alone, on two sets of
devices, and programs that run on other islands too; any policy decides between them, also one that likes the youngest.
Hosts complete what they were given in any order, and agree on how it ended or, now and then, do not. When one is lost,
or two disagree, all restart and come back one by one under the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pathways_ray.errors import Failure
from pathways_ray.scheduler.events import Command, Kill, Refuse, ToController, ToHosts
from pathways_ray.scheduler.policies import POLICIES, Candidate, Policy
from pathways_ray.simulation.tables import check_order
from pathways_ray.transport.messages import (
    Account,
    AllowEarly,
    Done,
    Drop,
    DropSession,
    HostDown,
    HostUp,
    IslandLaunch,
    IslandLaunchFailed,
    Program,
)
from tests.unit.scheduler.island import Island, devices
from tests.unit.strategies import repeatable

ANY = st.integers(0, 10**6)
BOOM = Failure("ExecutionError", "boom")
SESSIONS = (1, 2, 3)
LOCAL, ELSEWHERE, CROSSING = 1, 2, 3
PROGRAMS = {LOCAL: ("0.0", False), ELSEWHERE: ("0.1", False), CROSSING: ("0.0", True)}


def youngest(candidate: Candidate, now: float) -> tuple[float, ...]:
    """A policy that starves whom it can."""
    return (-candidate.arrival,)


POLICY = st.sampled_from([*POLICIES.values(), youngest])


def allows_early(command: Command) -> bool:
    """Whether a command says who may hand over calls, which concerns no launch here."""
    return isinstance(command, ToHosts) and isinstance(command.message, AllowEarly)


class OrderMachine(RuleBasedStateMachine):
    @initialize(hosts=st.integers(1, 3), window=st.integers(1, 3), policy=POLICY)
    def start(self, hosts: int, window: int, policy: Policy) -> None:
        self.hosts = list(range(hosts))
        self.island = Island(self.hosts, window, policy)
        for number, (device, cross_island) in PROGRAMS.items():
            self.island.from_controller(Program(number, b"", {}, "p", devices(device), cross_island))
        for session in SESSIONS:
            self.island.from_controller(Account(session, f"t{session % 2}", float(session), session))
        self.epoch = 1
        self.up: set[int] = set()
        self.logs: dict[int, list[IslandLaunch | Drop]] = {}
        self.sent = 0
        self.since_loss: list[IslandLaunch | Drop] = []
        self.open: dict[int, set[int]] = {}
        self.fate: dict[int, bool] = {}
        self.ended: list[int] = []
        self.lost: set[int] = set()

    def apply(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case _ if allows_early(command):
                    pass
                case ToHosts(message):
                    assert isinstance(message, IslandLaunch | Drop | DropSession)
                    for host in self.up:
                        if isinstance(message, IslandLaunch | Drop):
                            self.logs[host].append(message)
                    if isinstance(message, IslandLaunch):
                        assert self.up == set(self.hosts), "dispatched while a host is away"
                case ToController(message):
                    self.on_report(message)
                case Refuse():
                    raise AssertionError("a newer epoch was refused")
                case Kill(host, epoch):
                    assert epoch == self.epoch, f"host {host} killed under an epoch it does not have"

    def on_report(self, message: object) -> None:
        if isinstance(message, Done | IslandLaunchFailed):
            sequences = message.sequences if isinstance(message, Done) else (message.sequence,)
            for sequence in sequences:
                assert sequence not in self.ended, "a second outcome"
                assert sequence not in self.lost, "an outcome of a launch that was lost with its hosts"
                assert self.open.pop(sequence) == set(), "an outcome before every host has given its own"
                assert self.fate[sequence] == isinstance(message, IslandLaunchFailed)
                self.ended.append(sequence)

    # --- the controller -----------------------------------------------------------------------------------------------

    @rule(session=st.sampled_from(SESSIONS), program=st.sampled_from(list(PROGRAMS)))
    def launch(self, session: int, program: int) -> None:
        self.sent += 1
        self.open[self.sent] = set(self.hosts)
        self.send(IslandLaunch(self.sent, session, program, (), 0))

    @rule(session=st.sampled_from(SESSIONS))
    def drop(self, session: int) -> None:
        self.sent += 1
        self.send(Drop(session, (self.sent,)))

    @rule(session=st.sampled_from(SESSIONS))
    def end_session(self, session: int) -> None:
        """Its launches of this island alone that have not left are over at once; cross-island ones go on."""
        left = {m.sequence for log in self.logs.values() for m in log if isinstance(m, IslandLaunch)}
        for message in self.since_loss:
            if (
                isinstance(message, IslandLaunch)
                and message.session == session
                and message.program != CROSSING
                and message.sequence in self.open
                and message.sequence not in left
            ):
                self.open[message.sequence] = set()
                self.fate[message.sequence] = True
        self.since_loss = [m for m in self.since_loss if m.session != session or self.has_left(m, left)]
        self.apply(self.island.from_controller(DropSession(session)))

    def has_left(self, message: IslandLaunch | Drop, left: set[int]) -> bool:
        return isinstance(message, IslandLaunch) and (message.program == CROSSING or message.sequence in left)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        """Hosts that leave others waiting in a launch they have failed make the island restart."""
        commands = [one for one in self.island.tick(self.island.now + seconds) if not allows_early(one)]
        if any(not isinstance(command, Kill) for command in commands):  # of a host that was silent, once more
            assert any(self.fate.get(sequence) and left for sequence, left in self.open.items()), "no reason to"
            self.all_go(lambda: commands)

    def send(self, message: IslandLaunch | Drop) -> None:
        self.since_loss.append(message)
        self.apply(self.island.from_controller(message))

    # --- the hosts ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.given())
    @rule(choices=st.lists(ANY, min_size=1, max_size=4), failed=st.booleans())
    def complete(self, choices: list[int], failed: bool) -> None:
        """One host completes some of what it was given, in any order."""
        host = self.given()[choices[0] % len(self.given())][0]
        mine = [sequence for h, sequence in self.given() if h == host]
        done = []
        for sequence in dict.fromkeys(mine[choice % len(mine)] for choice in choices):
            self.open[sequence].discard(host)
            if self.fate.setdefault(sequence, failed):
                self.apply(self.island.from_host(host, self.epoch, IslandLaunchFailed(sequence, BOOM)))
            else:
                done.append(sequence)
        if done:
            self.apply(self.island.from_host(host, self.epoch, Done(tuple(done))))

    @precondition(lambda self: self.disputable())
    @rule(which=ANY)
    def disagree(self, which: int) -> None:
        """A host contradicts what another one has said of a launch."""
        host, sequence = self.disputable()[which % len(self.disputable())]
        failed = not self.fate[sequence]
        message = IslandLaunchFailed(sequence, BOOM) if failed else Done((sequence,))
        self.all_go(lambda: self.island.from_host(host, self.epoch, message))

    def disputable(self) -> list[tuple[int, int]]:
        return [(host, sequence) for host, sequence in self.given() if sequence in self.fate]

    def given(self) -> list[tuple[int, int]]:
        """(host, launch) pairs that a host has and has not completed."""
        return [
            (host, message.sequence)
            for host in sorted(self.up)
            for message in self.logs[host]
            if isinstance(message, IslandLaunch) and host in self.open.get(message.sequence, ())
        ]

    @precondition(lambda self: self.ended and self.up)
    @rule(which=ANY, behind=st.integers(1, 2))
    def stale_news(self, which: int, behind: int) -> None:
        """What is over, or of an epoch that is over, changes nothing."""
        host = sorted(self.up)[which % len(self.up)]
        before = len(self.ended)
        assert self.island.from_host(host, self.epoch, Done((self.ended[which % len(self.ended)],))) == []
        for sequence in self.open:
            assert self.island.from_host(host, self.epoch - behind, Done((sequence,))) == []
        assert len(self.ended) == before

    @precondition(lambda self: self.up)
    @rule(which=ANY, silent=st.booleans())
    def host_lost(self, which: int, silent: bool) -> None:
        host = sorted(self.up)[which % len(self.up)]
        epoch = self.epoch
        self.all_go(lambda: self.island.core.restart.lose_host(host, epoch, "killed", kill=silent))
        assert self.island.host_lost(host, epoch) == []

    def all_go(self, event: Callable[[], list[Command]]) -> None:
        members = set(self.up)
        self.lost |= set(self.open)
        self.open.clear()
        self.up.clear()
        commands = event()
        downs = [c.message.host for c in commands if isinstance(c, ToController) and isinstance(c.message, HostDown)]
        assert sorted(downs) == sorted(members), "each host that was up is reported, once"
        self.apply(commands)
        self.logs.clear()
        self.since_loss.clear()
        self.epoch += 1

    @precondition(lambda self: len(self.up) < len(self.hosts))
    @rule(which=ANY)
    def host_up(self, which: int) -> None:
        away = [host for host in self.hosts if host not in self.up]
        host = away[which % len(away)]
        self.up.add(host)
        self.logs[host] = []
        self.apply(self.island.host_up(HostUp(host, self.epoch, "t", "d", 2, 1)))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def one_order(self) -> None:
        if not hasattr(self, "island") or len(self.up) < len(self.hosts):
            return
        sent = {host: [as_called(m) for m in log if isinstance(m, IslandLaunch)] for host, log in self.logs.items()}
        runs, *others = sent.values()
        assert all(other == runs for other in others), "two hosts saw different orders"
        launches = [m for m in self.since_loss if isinstance(m, IslandLaunch)]
        for session in SESSIONS:
            mine = [m for m in runs if m.session == session]
            assert mine == [m for m in launches if m.session == session][: len(mine)], "a session's order was not kept"
        cross_island = [m for m in runs if m.program == CROSSING]
        assert cross_island == [m for m in launches if m.program == CROSSING][: len(cross_island)], (
            "cross-island launches reordered"
        )
        outstanding = {m.sequence for m in runs} & set(self.open)
        assert len(outstanding) <= self.island.order.window
        check_order(self.island.order)

    def teardown(self) -> None:
        if not hasattr(self, "island"):
            return
        while len(self.up) < len(self.hosts):
            self.host_up(0)
        while self.given():
            self.complete([0], failed=False)
        assert self.open == {}, "a launch without an outcome"
        assert not self.island.order.waiting
        assert not self.island.order.outstanding


def as_called(launch: IslandLaunch) -> IslandLaunch:
    """A launch as the controller sent it: its place is kept when its session ends, and it is cancelled."""
    return msgspec.structs.replace(launch, cancelled=None)


TestOrder = OrderMachine.TestCase
TestOrder.settings = repeatable(150, stateful_step_count=40)
